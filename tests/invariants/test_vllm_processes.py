"""Several training processes and vLLM's servers: the number of processes changes nothing.

With fake servers, and where GROUPER_VLLM=1 with the real one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_processes import ODD, SMALL, _files, gang, metrics, same_run, started, texts  # noqa: F401 - fixtures

from grouper import load_recipe, prepare
from grouper.sampling.vllm.sampler import write_shape
from grouper.sampling.vllm.worker import SECRET

SAMPLING = Path(__file__).resolve().parents[1] / "sampling"
sys.path.insert(0, str(SAMPLING))

from fake_vllm import PASSWORD, FakeServer, FakeVllm

pytestmark = pytest.mark.slow

REAL = os.environ.get("GROUPER_VLLM") == "1"
VLLM = ["sampling.engine=vllm", "sampling.vllm.mode=server"]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    """Two for rollouts, and one for validation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SECRET, PASSWORD)
    Path("odd.py").write_text(ODD)
    with prepare(load_recipe("demo", SMALL)) as setup:
        model = setup.model.model
        name = write_shape(tmp_path, model.config, setup.tokenizer)
        made = [FakeServer(FakeVllm(model, setup.tokenizer), name) for _ in range(3)]
    yield made
    for server in made:
        server.close()


def run(name: str, *more: str) -> list[str]:
    return ["run", "demo", *SMALL, *VLLM, "output_dir=out", f"name={name}", "-q", *more]


def at(*servers: FakeServer) -> str:
    return json.dumps([server.url for server in servers])


def launch(*more: str, processes: int = 2, limit: float = 200) -> subprocess.CompletedProcess[str]:
    """A run of several processes as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "grouper", *run("two", *more), "--nproc", str(processes)],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": f".:{os.environ.get('PYTHONPATH', '')}"},
        timeout=limit,
    )


LORA = "model.lora={rank: 4}"


@pytest.mark.parametrize(
    "model", [[], [LORA], [LORA, "sampling.dtype=same"]], ids=["full", "merged", "adapter"]
)
def test_whole_runs_are_the_same(
    model: list[str],
    served: list[FakeServer],
    gang: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    own = [*model, f"sampling.vllm.servers={at(*served[:2])}"]
    counts = []
    for size, name, more in ((1, "one", []), (2, "two", []), (2, "split", ["parallel=fsdp"])):
        plan = json.dumps([(size, run(name, *own, *more))])
        assert gang("runs", 1, plan) == [[{"exit": 0}] * size]
        counts.append([dict(server.calls) for server in served[:2]])
        for server in served:
            server.calls.clear()
    out = Path("out")
    assert any(m["status"] == "learning" for m in metrics(out / "one") if m["phase"] == "grpo")
    for name in ("two", "split"):
        same_run(out / "one", out / name)
    assert _files(out / "one") == _files(out / "two")
    one, two, split = counts
    for path in ("/update_weights", "/reset_prefix_cache", "/finish_weight_update"):
        assert [c[path] for c in one] == [c[path] for c in two], path
        # With fsdp GRPO has a sampler of its own, whose first push is one more.
        assert {c[path] - d[path] for c, d in zip(split, one, strict=True)} <= {0, 1}, path
    drawn = [sum(calls["/v1/completions"] for calls in found) for found in counts]
    assert drawn[0] == drawn[1], "every completion and every fixed prompt once"
    assert drawn[2] - drawn[0] in (0, 2 * 2)


def test_what_runs_beside_training_is_the_same(
    served: list[FakeServer],
    gang: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    """Validation and the next rollouts are drawn by rank 0, and known to all."""
    beside = [
        f"sampling.vllm.servers={at(*served[:2])}",
        f"evaluation.servers={at(served[2])}",
        "grpo.max_staleness=1",
        "grpo.updates_per_batch=1",
    ]
    plan = [
        (1, run("one", *beside)),
        (2, run("two", *beside)),
        (2, run("split", *beside, "parallel=fsdp")),
    ]
    codes = gang("runs", 1, json.dumps(plan))
    assert codes == [[{"exit": 0}] * size for size, _ in plan]
    for name in ("two", "split"):
        same_run(Path("out/one"), Path("out") / name)
    assert not any("validation-failed" in str(row) for row in metrics(Path("out/two")))
    # As if it had been killed after a checkpoint, which has the rollouts of the next step.
    split = Path("out/split/grpo")
    assert (split / "checkpoint-2" / "ahead.json").exists()
    shutil.rmtree(split / "final")
    shutil.rmtree(split / "checkpoint-3")
    again = [(2, run("split", *beside, "parallel=fsdp", "--resume"))]
    assert gang("runs", 1, json.dumps(again)) == [[{"exit": 0}] * 2]
    assert texts(Path("out/one")) == texts(Path("out/split"))


def test_a_validation_that_fails_is_reported_by_all(
    served: list[FakeServer],
    gang: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    served[2].calls.clear()
    plain = served[2].answer
    served[2].answer = lambda path, body: (  # type: ignore[method-assign]
        {"weight_version": "of another run"} if path == "/weight_info" else plain(path, body)
    )
    servers = [f"sampling.vllm.servers={at(*served[:2])}", f"evaluation.servers={at(served[2])}"]
    assert gang("runs", 1, json.dumps([(2, run("two", *servers))])) == [[{"exit": 0}] * 2]
    assert "did not acknowledge" in str(metrics(Path("out/two")))


def test_stale_weights_end_all_with_one_paragraph(served: list[FakeServer]) -> None:
    def push(weights: Any, tag: str, temperature: float, *_: Any) -> None:
        served[1].engine._temperature = temperature

    served[1].engine.push = push  # type: ignore[method-assign]
    done = launch(f"sampling.vllm.servers={at(*served[:2])}")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("its weights are different") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_whose_server_fails_ends_all_within_seconds(served: list[FakeServer]) -> None:
    Path("sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from grouper.errors import ModelError\n"
        "    from grouper.sampling.vllm.server import ServerEngine\n"
        "    def answers(self, asks):\n"
        "        raise ModelError('only rank one sees this')\n"
        "    ServerEngine.answers = answers\n"
    )
    before = time.monotonic()
    done = launch(f"sampling.vllm.servers={at(*served[:2])}", limit=100)
    assert done.returncode != 0
    assert "[rank 1] error: only rank one sees this" in done.stderr
    assert time.monotonic() - before < 60


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["fake", *(["real"] if REAL else [])])
def test_servers_of_the_run_are_started_once(
    kind: str, parallel: str, served: list[FakeServer]
) -> None:
    """And end with it; torchrun's variables do not reach them."""
    if kind == "fake":
        Path("sitecustomize.py").write_text(
            "import os, sys\n"
            "import grouper.advice.recipe_checks\n"
            "from grouper.sampling import factory\n"
            "from grouper.sampling.vllm import server as vllm_server\n"
            "grouper.advice.recipe_checks.require_vllm = lambda: '0.32.0'\n"
            "factory.require_vllm = lambda: '0.32.0'\n"
            "real = vllm_server.server_command\n"
            "def command(folder, name, arguments, *, host, port):\n"
            "    with open('starts', 'a') as file:\n"
            "        file.write(os.environ['RANK'])\n"
            "    _, environment = real(folder, name, arguments, host=host, port=port)\n"
            f"    script = {str(SAMPLING / 'fake_vllm.py')!r}\n"
            "    return [sys.executable, script, str(folder), name, str(port)], environment\n"
            "vllm_server.server_command = command\n"
        )
    head = ["model.new.hidden_size=128"] if kind == "real" else []
    done = launch(f"parallel={parallel}", *head, limit=280)
    assert done.returncode == 0, done.stderr
    rows = [m for m in metrics(Path("out/two")) if m["phase"] == "grpo"]
    assert len(rows) == 3
    assert max(m["sampler_push_gap"] for m in rows) < 1e-5
    if kind == "fake":
        assert Path("starts").read_text() == "0"
