"""The number of processes changes nothing: gradients, whole runs, what is graded and measured."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from grouper.advice.plan import ModelMemory
from grouper.advice.tracing import pretended_processes
from grouper.algorithms.batching import Rows
from grouper.config.schema import ModelConfig, OptimizerConfig
from grouper.models.device import DTYPES
from grouper.models.loading import weightless_policy
from grouper.runs.lock import is_running
from grouper.sampling.kv_cache import CacheSize

GANG = Path(__file__).parent / "gang.py"

SMALL = [
    "model.new.hidden_size=32",
    "model.new.intermediate_size=64",
    "data.sft.options.count=40",
    "data.train.options.count=12",
    "data.validation.options.count=5",
    "data.test.options.count=7",
    # Muon works in bf16 and Adam divides by the gradient's size: both would blow float noise up.
    "sft.optimizer.name=adamw",
    "sft.optimizer.eps=1.0e-3",
    "grpo.optimizer.eps=1.0e-3",
    "sft.steps=4",
    "sft.evaluate_every=2",
    "grpo.steps=3",
    "grpo.evaluate_every=2",
    "grpo.checkpoint_every=2",
    "grpo.prompts_per_step=5",
    "grpo.group_size=4",
    "grpo.beta=0.05",
    "grpo.updates_per_batch=2",
    "grpo.allow_truncation=true",
    "grpo.require_correct_in_group=false",
    "grpo.tokens_per_micro_batch=200",
    "sampling.max_new_tokens=12",
    "grading.symbolic=false",
    "rewards=[{name: 'odd.py:odd'}]",
]
ODD = """
def odd(*, completion_ids, **kwargs):
    return [float(len(ids) + sum(ids) % 3) for ids in completion_ids]
"""


class Gang:
    """A process that has imported everything and forks those that a test asks for."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, folder: Path, job: str, size: int, *arguments: str) -> Any:
        """What each process has found, by rank."""
        process = self._process or subprocess.Popen(
            [sys.executable, str(GANG)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._process = None
        assert process.stdin is not None
        assert process.stdout is not None
        order = {"job": job, "size": size, "arguments": arguments, "folder": str(folder)}
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            log = (folder / "gang.log").read_text()
            print(log)  # pytest shows it with the test that fails
            assert answer, log
            for end in ("Timeout (0:01:40)", "Fatal Python error"):
                before, found, stacks = log.partition(end)
                assert not found, f"{before[-1000:]}{found}{stacks[:4000]}"
        except BaseException:
            process.kill()
            process.communicate()
            raise
        self._process = process  # only one that has answered is asked again
        return json.loads(answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="module")
def started() -> Iterator[Gang]:
    gang = Gang()
    yield gang
    gang.close()


@pytest.fixture
def gang(started: Gang, tmp_path: Path) -> Callable[..., Any]:
    """Asks for a job in the folder of the test."""
    return partial(started.ask, tmp_path)


@pytest.mark.slow  # 10 s each
@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_is_that_of_one_process(gang: Callable[..., Any], size: int) -> None:
    """T11, T16: DDP and FSDP2, full and LoRA, fewer slices than processes and more."""
    by_rank = gang("gradients", size)
    assert len(by_rank) == size
    for worst in by_rank:
        assert len(worst) == 16
        assert max(worst.values()) < 1e-12, worst


@pytest.mark.slow  # 10 s
def test_a_step_of_three_streams_is_that_of_one_process(gang: Callable[..., Any]) -> None:
    """Rewards, worked solutions and two teachers; every process holds the teachers whole."""
    for worst in gang("taught_gradients", 2):
        assert len(worst) == 8
        assert max(worst.values()) < 1e-12, worst


@pytest.mark.slow  # 4 s
def test_no_process_keeps_a_whole_gradient_between_slices(gang: Callable[..., Any]) -> None:
    """V3: they stayed whole on every process until the last slice."""
    by_rank = gang("sharded_gradients", 2)
    for notes in by_rank:
        before, *after = notes
        assert before["gradients"] == 0
        assert len(after) == 3, "slices of a process"
        for note in after:
            assert note["gradients"] == note["sharded"] == 25
            assert note["whole"] == 0
    for first, second in zip(*by_rank, strict=True):
        if first["gradients"]:
            assert first["elements"] + second["elements"] == first["of"]


@pytest.mark.slow  # 25 s
def test_half_precision_is_that_of_autocast_on_one_process(gang: Callable[..., Any]) -> None:
    """Linear weights are rounded before they are gathered; all gradients are summed in float32.

    Slice by slice the gradients are the same to the last bit, so what may be left is the order of a
    sum in float32. Measured: 0; in other slices on one process 3e-3 to 1e-2.
    """
    for answers in gang("rounded_gradients", 2):
        assert len(answers) == 16
        for name, answer in answers.items():
            assert answer["gap"] < 1e-6, name
            assert set(answer["summed"]) == {"float32"}, name
            half = sum(count for dtype, count in answer["gathered"].items() if "16" in dtype)
            assert half > 0.6 * sum(answer["gathered"].values()), name


@pytest.mark.slow  # 3 s each
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_gradient_that_overflows_on_one_process_is_computed_again_on_all(
    gang: Callable[..., Any], engine: str
) -> None:
    for found in gang("overflow", 2, engine):
        assert found["applied"]
        assert found["events"] == ["overflow: gradients at a loss scale of 65536"]
        assert found["scale"] == 2**15
        assert found["gap"] < 1e-6, "of a weight; measured: 1.5e-8"


@pytest.mark.slow  # 3 s
def test_master_weights_are_split_and_stepped_as_on_one_process(
    gang: Callable[..., Any], tmp_path: Path
) -> None:
    for found in gang("master_weights", 2, str(tmp_path)):
        assert found["masters"] == found["weights"] == 25
        assert found["gap"] < 1e-6, "measured: 0"
        assert found["rounded"] == 0.0
        assert found["read again"]


WEIGHTY = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 4000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""5 million parameters, which take more memory than the activations of the rows."""

PLANNED: dict[str, dict[str, Any]] = {
    "float32": {"model": {}, "copy": None},
    "one slice": {"model": {}, "copy": None, "slices": 1},
    "checkpointed": {"model": {"gradient_checkpointing": True}, "copy": None},
    "rounded": {"model": {"compute_dtype": "bfloat16"}, "copy": "bfloat16"},
    "bfloat16": {"model": {"dtype": "bfloat16"}, "copy": None},
    "lora": {"model": {"dtype": "bfloat16", "lora": {"rank": 8}}, "copy": "bfloat16"},
}


def planned(engine: str, size: int, case: dict[str, Any]) -> dict[str, int]:
    """Bytes that a process is planned to hold, by what is measured."""
    config = ModelConfig(path="x", **case["model"])
    policy = weightless_policy(config, AutoConfig.for_model(**case["shape"]))
    copied = None if case["copy"] is None else DTYPES[case["copy"]]
    is_split = engine == "fsdp"
    with pretended_processes(size if is_split else 1) as processes:
        memory = ModelMemory(
            config, policy, "cpu", copied, processes=processes, copied_whole=is_split
        )
        optimizer = OptimizerConfig()
        accumulated = case["slices"] > 1
        update = memory.update("update", Rows(**case["rows"]), optimizer, accumulated=accumulated)
        # The shortest of all prompts, so that only the refreshed copy is temporary.
        least = CacheSize(1, 1, 1, 1)
        sample = memory.sampling("sample", least, together=1, optimizer=update.optimizer)
    between = sample.weights + sample.optimizer + sample.sampling_copy
    return {
        "load": memory.loading.peak,
        "update": update.peak,
        "between": between,
        "refresh": between + memory._gathered,
    }


@pytest.mark.slow  # 10 to 30 s each
@pytest.mark.parametrize(
    ("engine", "size", "name"),
    [
        *((engine, size, "float32") for engine in ("ddp", "fsdp") for size in (2, 4)),
        ("fsdp", 4, "one slice"),
        *(("fsdp", 2, name) for name in ("checkpointed", "rounded", "bfloat16", "lora")),
    ],
)
def test_each_process_holds_what_is_planned(
    gang: Callable[..., Any], engine: str, size: int, name: str
) -> None:
    """Tensors alone: loaded, at the peak of an update, between steps, and refreshing the copy."""
    case = {"slices": 2, **PLANNED[name], "shape": WEIGHTY}
    case["rows"] = {"prompt": 64, "completion": 64, "count": 2, "per_prompt": 2}
    by_rank = gang("held", size, engine, json.dumps(case))
    expected = planned(engine, size, case)
    for part, count in expected.items():
        held = max(answer[part] for answer in by_rank)
        print(f"{part}: planned {count / 2**20:.2f} MiB, held {held / 2**20:.2f} MiB")
        assert count == pytest.approx(held, rel=0.1), part


@pytest.mark.slow  # 2 s
def test_weights_that_are_split_stay_on_the_device_of_the_run(gang: Callable[..., Any]) -> None:
    """With device=cpu beside a GPU, which FSDP would choose."""
    assert gang("on_the_cpu", 2) == [["cpu"], ["cpu"]]


ALL = "10000"
"""More tokens than the step has: the last process has a single slice."""


@pytest.mark.slow  # 4 s each
@pytest.mark.parametrize(
    ("at", "budget", "apart"),
    [("0", "30", []), ("1", "30", []), ("0", ALL, []), ("0", ALL, ["apart"])],
    ids=["first", "second", "only", "rehearsal"],
)
def test_memory_that_runs_out_on_one_process_is_split_on_all(
    gang: Callable[..., Any], at: str, budget: str, apart: list[str]
) -> None:
    """All cut the step alike and start it again, and the gradient stays that of one process."""
    by_rank = gang("shortage", 2, "ddp", at, budget, *apart)
    assert len({found["limit"] for found in by_rank}) == 1
    assert 0 < by_rank[0]["limit"] < int(budget)
    assert min(found["forwards"] for found in by_rank) > 2
    if not apart:  # else every process has its own part of the gradient
        assert max(found["gap"] for found in by_rank) < 1e-12


@pytest.mark.slow  # 4 s each
def test_memory_that_runs_out_while_others_wait_ends_all_with_advice(
    gang: Callable[..., Any],
) -> None:
    first, last = gang("shortage", 2, "fsdp", "0", ALL)
    assert "while other processes waited" in last["told"]
    assert "tokens_per_micro_batch" in last["told"]
    assert first["exit"] != 0


@pytest.mark.slow  # 4 s
def test_a_process_that_runs_out_of_memory_while_sampling_holds_up_no_other(
    gang: Callable[..., Any],
) -> None:
    """It draws its share in fewer slots; what all have in the end is what one would draw."""
    first, last = gang("short_sampling", 2)
    assert first == {"same": True, "slots": 256}
    assert last == {"same": True, "slots": 1}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_everything_is_drawn_and_graded_exactly_once(gang: Callable[..., Any], size: int) -> None:
    """T31: also where there is less to do than there are processes."""
    for by_rank in gang("sharing", size).values():
        assert all(found["right"] for found in by_rank)
        assert sum(found["graded"] for found in by_rank) == by_rank[0]["total"]


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def texts(path: Path) -> dict[str, list[str]]:
    """What every rollout and evaluation file says."""
    return {
        str(file.relative_to(path)): [
            json.loads(line)["completion"] for line in gzip.open(file, "rt", encoding="utf-8")
        ]
        for file in sorted(path.rglob("*.jsonl.gz"))
    }


def same_run(one: Path, other: Path) -> None:
    """The same completions, the same metrics and weights within float noise."""
    assert texts(one) == texts(other)
    ours, theirs = metrics(one), metrics(other)
    assert [(m["phase"], m["step"], m["status"]) for m in ours] == [
        (m["phase"], m["step"], m["status"]) for m in theirs
    ]
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.keys() == yours.keys()
        for name, value in mine.items():
            # The name of a run is part of its recipe's hash.
            skipped = ("time", "elapsed_s", "memory", "host", "recipe_hash")
            if name.split(".")[0] not in skipped:
                same = isinstance(value, str | list | None)
                expected = yours[name] if same else pytest.approx(yours[name], rel=1e-3, abs=1e-5)
                assert value == expected, name
    found = saved(other)
    for name, value in saved(one).items():
        gap = float((found[name] - value).abs().max())
        assert gap < 1e-4, f"{name} differs by {gap}"


def saved(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a run, in one piece: weights, and the moments of its checkpoints."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for file in sorted(path.rglob("*.safetensors")):
        for name, value in load_file(file).items():
            pieces.setdefault(f"{file.parent.relative_to(path)} {name}", []).append(value)
    return {name: torch.cat(p) if len(p) > 1 else p[0] for name, p in pieces.items()}


@pytest.mark.slow  # 60 s: seven short runs
@pytest.mark.parametrize("model", [[], ["model.lora={rank: 4}"]], ids=["full", "lora"])
def test_whole_runs_are_the_same(
    gang: Callable[..., Any], model: list[str], tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(ODD)

    def run(name: str, *more: str) -> list[str]:
        return ["run", "demo", *SMALL, *model, "output_dir=out", f"name={name}", "-q", *more]

    plan = [
        (1, run("one")),
        (2, run("two")),
        (2, run("split", "parallel=fsdp")),
        (4, run("four", "parallel=fsdp" if model else "parallel=ddp")),
        # A run of one process goes on in two, and one of two in one.
        (1, run("wider", "--skip-grpo")),
        (2, run("wider", "--resume", "parallel=fsdp")),
    ]
    codes = gang("runs", 1, json.dumps(plan))
    assert codes == [[{"exit": 0}] * size for size, _ in plan]
    one = tmp_path / "out" / "one"
    assert any(m["status"] == "learning" for m in metrics(one) if m["phase"] == "grpo")
    for name in ("two", "split", "four", "wider"):
        same_run(one, tmp_path / "out" / name)
    assert _files(one) == _files(tmp_path / "out" / "two")


def _files(path: Path) -> list[str]:
    return sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())


@pytest.mark.slow  # 20 s
def test_an_optimizer_state_is_bit_for_bit_the_same_for_any_number_of_processes(
    gang: Callable[..., Any], tmp_path: Path
) -> None:
    """Whoever wrote it, whoever reads it; and nobody reads rows of weights that others hold."""
    found = gang("states", 1, str(tmp_path), json.dumps([(1, 5), (5, 2), (2, 1)]))
    state = found["saved"]["1"][0]
    assert len(state) > 40
    assert all(by_rank == [state] * int(size) for size, by_rank in found["saved"].items())
    for names, by_rank in found["loaded"].items():
        split = len(by_rank) > 1
        for loaded in by_rank:
            assert loaded["state"] == state, names
            assert len(loaded["rows"]) == split * loaded["moments"], names
            assert all(ours == held for ours, held in loaded["rows"].values()), names
    assert {ours for ours, _ in found["loaded"]["1 by 5"][4]["rows"].values()} >= {0}
    written = {n: [f.read_bytes() for f in (tmp_path / n).iterdir()] for n in ("1", "5")}
    assert written["5"] == written["1"]


@pytest.mark.slow  # 4 s
def test_a_full_disk_is_refused_on_all_and_the_next_save_is_whole(
    gang: Callable[..., Any], tmp_path: Path
) -> None:
    by_rank = gang("full_disk", 2, str(tmp_path), "0")
    for found in by_rank:
        assert "nothing more can be written" in found["refused"]
        assert found["refused"].startswith(f"{tmp_path}/grpo/checkpoint-1: ")
        assert found["left"] == []
        assert found["damage"] is None


@pytest.mark.slow  # 20 s
def test_split_optimizer_state_is_read_by_any_number_of_processes(
    gang: Callable[..., Any], tmp_path: Path
) -> None:
    """One process goes on from what two have written."""
    (tmp_path / "odd.py").write_text(ODD)
    run = ["run", "demo", *SMALL, "output_dir=out", "-q"]
    plan = [(1, [*run, "name=one"]), (2, [*run, "name=split", "parallel=fsdp"])]
    assert gang("runs", 1, json.dumps(plan))[1] == [{"exit": 0}] * 2
    split = tmp_path / "out" / "split"
    # As if it had been killed after the checkpoint of step 2.
    shutil.rmtree(split / "grpo" / "final")
    shutil.rmtree(split / "grpo" / "checkpoint-3")
    plan = [(1, [*run, "name=split", "--resume"])]
    assert gang("runs", 1, json.dumps(plan)) == [[{"exit": 0}]]
    assert "Resuming grpo at step 2" in (split / "training.log").read_text()
    same_run(tmp_path / "out" / "one", split)


@pytest.mark.slow  # 25 s
def test_a_killed_run_of_two_goes_on_as_if_nothing_had_happened(
    gang: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    run = ["run", "demo", *SMALL, "grpo.steps=7", "output_dir=out", "-q"]
    assert gang("runs", 1, json.dumps([(2, [*run, "name=whole"])])) == [[{"exit": 0}] * 2]
    killed = tmp_path / "out" / "killed"
    launcher = subprocess.Popen(
        [sys.executable, "-m", "grouper", *run, "name=killed", "--nproc", "2"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    checkpoint = killed / "grpo" / "checkpoint-2" / "trainer_state.json"
    while time.monotonic() < deadline and not checkpoint.exists():
        time.sleep(0.05)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    # The processes end with their launcher.
    while time.monotonic() < deadline and is_running(killed):
        time.sleep(0.05)
    assert not (killed / "grpo" / "final").exists(), "the kill came too late"
    again = [(2, [*run, "name=killed", "--resume"])]
    assert gang("runs", 1, json.dumps(again)) == [[{"exit": 0}] * 2]
    assert "Resuming grpo at step" in (killed / "training.log").read_text()
    same_run(tmp_path / "out" / "whole", killed)


@pytest.mark.slow
def test_a_rank_that_raises_ends_all_within_seconds(tmp_path: Path) -> None:
    """One process alone fails; the others are waiting for it in a gradient."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import grouper.training.update as u\n"
        "    def boom(*a, **k):\n"
        "        raise RuntimeError('rank one has had enough')\n"
        "    u.accumulate_gradient = boom\n"
    )
    (tmp_path / "odd.py").write_text(ODD)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "grouper", "run", "demo", *SMALL, "output_dir=out", "--nproc", "2"],
        capture_output=True,
        check=False,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=120,
    )
    assert done.returncode != 0
    assert "rank one has had enough" in done.stderr
    assert "Traceback" in done.stderr
    # Starting took most of it; a process that waits would have waited for half an hour.
    assert time.monotonic() - started < 60


@pytest.mark.slow  # 5 s
def test_where_another_process_is_gone_the_first_says_so_in_one_line(
    gang: Callable[..., Any], tmp_path: Path
) -> None:
    """By what gloo really says; why it is gone, that one or the launcher reports."""
    gone = (
        "import os\n"
        "if os.environ['RANK'] == '1':\n"
        "    import grouper.training.update as u\n"
        "    u.accumulate_gradient = lambda *_, **__: os._exit(9)\n"
    )
    (tmp_path / "odd.py").write_text(f"{gone}{ODD}")
    plan = [(2, ["run", "demo", *SMALL, "output_dir=out", "-q"])]
    assert gang("runs", 1, json.dumps(plan)) == [[{"exit": 130}, {"exit": 9}]]
    log = (tmp_path / "gang.log").read_text()
    assert "another process of this run has ended, or cannot be reached." in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_mistake_of_the_user_is_one_paragraph(tmp_path: Path) -> None:
    """Every process finds it, one tells it."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "grouper",
            "run",
            "demo",
            *SMALL,
            "output_dir=out",
            "--nproc",
            "2",
            "rewards=[{name: 'missing.py:nothing'}]",
        ],
        capture_output=True,
        check=False,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.count("there is no file missing.py") == 1, done.stderr


@pytest.mark.slow
def test_a_mistake_that_only_the_first_finds_is_one_paragraph_and_no_new_start(
    tmp_path: Path,
) -> None:
    """The folder is rank 0's business; the others are told, and nothing is started again."""
    (tmp_path / "odd.py").write_text(ODD)
    command = [sys.executable, "-m", "grouper", "run", "demo", *SMALL, "output_dir=out"]
    (tmp_path / "out" / "demo").mkdir(parents=True)
    (tmp_path / "out" / "demo" / "thesis.txt").write_text("not a run")
    done = subprocess.run(
        [*command, "--nproc", "2"],
        capture_output=True,
        check=False,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("not a run of Grouper") == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is only told on Linux")
def test_a_killed_launcher_takes_its_processes_with_it(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    arguments = [
        *SMALL, "output_dir=out", "grpo.steps=5000", "grpo.evaluate_every=0",
        "grpo.checkpoint_every=0",
    ]  # fmt: skip
    run = subprocess.Popen(
        [sys.executable, "-m", "grouper", "run", "demo", *arguments, "--nproc", "2"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    file = tmp_path / "out" / "demo" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (file.exists() and '"grpo"' in file.read_text()):
        time.sleep(0.2)
    run.kill()
    run.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not list(
        (tmp_path / "out" / "demo" / "grpo").glob("checkpoint-*")
    ):
        time.sleep(0.2)
    assert list((tmp_path / "out" / "demo" / "grpo").glob("checkpoint-*")), "not saved"
    time.sleep(1.0)
    lines = len(file.read_text().splitlines())
    time.sleep(1.0)
    assert len(file.read_text().splitlines()) == lines, "it trains on"


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_ends(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "random.py").write_text("raise SystemExit('not the one that is meant')")
    run = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "grouper",
            "run",
            "demo",
            *SMALL,
            "output_dir=out",
            "--nproc",
            "2",
            "grpo.steps=5000",
            "grpo.evaluate_every=0",
            "grpo.checkpoint_every=0",
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics_file = tmp_path / "out" / "demo" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (
        metrics_file.exists() and '"grpo"' in metrics_file.read_text()
    ):
        time.sleep(0.2)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in errors
    assert errors.count("stopped on request") == 1, errors
    # Its warnings, too, are told by one process alone.
    assert errors.count("of the samples end by themselves after SFT") == 1, errors
    assert list((tmp_path / "out" / "demo" / "grpo").glob("checkpoint-*")), errors


@pytest.mark.slow  # 5 s
def test_ctrl_c_ends_a_process_that_waits_for_another_to_start(tmp_path: Path) -> None:
    """That one may have been ended by it, and would be waited for half an hour."""
    (tmp_path / "odd.py").write_text(ODD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    first = subprocess.Popen(
        [sys.executable, "-m", "grouper", "run", "demo", *SMALL, "output_dir=out"],
        cwd=tmp_path,
        env={**os.environ, **meeting, "RANK": "0", "LOCAL_RANK": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    with socket.socket() as other:
        while time.monotonic() < deadline and other.connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=30)
    assert first.returncode == 130, errors
    assert errors.endswith("Stopped.\n"), errors
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_machines_meet_by_torchruns_rendezvous(tmp_path: Path) -> None:
    """Two launchers with an address of their own each, as on two hosts."""
    (tmp_path / "odd.py").write_text(ODD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    machines = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--nproc-per-node",
                "1",
                "--node-rank",
                str(node),
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                str(port),
                "--local-addr",
                f"127.0.0.{node + 1}",
                "-m",
                "grouper",
                "run",
                "demo",
                *SMALL,
                "output_dir=out",
                "-q",
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    for machine in machines:
        _, errors = machine.communicate(timeout=120)
        assert machine.returncode == 0, errors
    run = tmp_path / "out" / "demo"
    assert (run / "grpo" / "final" / "model.safetensors").exists()
    assert (run / "report.html").exists()
    assert (run / "curves.png").exists()
