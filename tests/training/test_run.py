"""A session looks at every model that the run will load before anything is trained or measured."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_models import tiny_model
from transformers import AutoTokenizer

from grouper.api import prepare, train
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, Interrupted, ModelError
from grouper.evaluation import evaluate as evaluating
from grouper.evaluation.items import PartialEvaluation
from grouper.evaluation.result import EvaluationResult
from grouper.grading import Grader
from grouper.models.process_group import ProcessGroup
from grouper.models.quiet import quiet
from grouper.rewards import RewardStack
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress
from grouper.sampling.native import NativeSampler
from grouper.sampling.step_ahead import require_step_ahead
from grouper.training import run as running
from grouper.training.measure import measure_policy
from grouper.training.run import (
    Run,
    _as_trained,
    check_models,
    require_shareable,
)


@pytest.fixture
def recipe(lora_run: Path, tmp_path: Path) -> Recipe:
    """SFT of the run's base again, GRPO from what the run has handed over."""
    return load_recipe(lora_run / "recipe.yaml").override(
        f"model={{path: {lora_run / 'base'}}}",
        f"grpo.start_from={lora_run.parent / 'handed-over'}",
        f"output_dir={tmp_path}",
        "name=again",
        "save_path=null",
    )


def refused(recipe: Recipe, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        Run(recipe, Progress(quiet=True))
    assert caught.value.where == "grpo.start_from"
    assert not (Path(recipe.output_dir) / recipe.name).exists()


def test_an_adapter_of_another_base_is_refused_at_the_start(recipe: Recipe, tmp_path: Path) -> None:
    with quiet():
        tiny_model().save_pretrained(tmp_path / "other")
    other = recipe.override(f"model.path={tmp_path / 'other'}")
    refused(other, "was trained on .* which is another model than")
    # What is not loaded is not looked at.
    check_models(other.override(skip_grpo=True), tmp_path, resume=False)


def test_another_tokenizer_is_refused_at_the_start(recipe: Recipe, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(str(recipe.grpo.start_from), start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.add_tokens(["<one-more>"])
    tokenizer.save_pretrained(start)
    refused(recipe.override(f"grpo.start_from={start}"), "would read other tokens")


def test_a_run_whose_model_cannot_be_loaded_leaves_nothing(recipe: Recipe, tmp_path: Path) -> None:
    """Its folder stood in the way of the corrected command, as a run of another recipe."""
    broken = tmp_path / "broken"
    shutil.copytree(str(recipe.model.path), broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    wrong = recipe.override(f"model.path={broken}", "grpo.start_from=null")
    with pytest.raises(ModelError, match="cannot be loaded"):
        train(wrong, display=Progress(quiet=True))
    assert not wrong.run_folder.exists()
    with Run(wrong.override("seed=5"), Progress(quiet=True)) as run:  # the folder is free
        assert run.path == wrong.run_folder


def test_a_run_that_was_stopped_before_its_first_step_leaves_what_it_measured(
    recipe: Recipe,
) -> None:
    plain = recipe.override("grpo.start_from=null", "evaluation.max_new_tokens=2")

    def stopped(*, measured: bool) -> None:
        with Run(plain, Progress(quiet=True)) as run:
            if measured:
                measure_policy(run, run.prepared.model, phase="base", step=0, split="test")
            raise Interrupted("stopped on request")

    for measured in (False, True):
        with pytest.raises(Interrupted):
            stopped(measured=measured)
        assert plain.run_folder.exists() is measured
    with Run(plain.override("grpo.steps=1"), Progress(quiet=True)) as run:
        assert run.folder.read_evaluation("base") is not None
    with pytest.raises(ZeroDivisionError), Run(plain, Progress(quiet=True), overwrite=True):
        raise ZeroDivisionError
    assert (plain.run_folder / "training.log").exists(), "of a fault of ours the log is kept"


def test_an_evaluation_of_a_run_goes_on_where_it_was_killed(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began again: 14 minutes of a large model were lost with the process."""
    plain = recipe.override("grpo.start_from=null", "evaluation.max_new_tokens=2")
    written: list[int] = []
    honest = PartialEvaluation.write

    def write(self: PartialEvaluation, rank: int, place: int, *others: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(place)
        honest(self, rank, place, *others)

    def measured(one: Recipe) -> EvaluationResult:
        with Run(one, Progress(quiet=True), resume=True) as run:
            return measure_policy(run, run.prepared.model, phase="base", step=0, split="test")

    whole = measured(plain.override("name=whole"))
    monkeypatch.setattr(PartialEvaluation, "write", write)
    with pytest.raises(KeyboardInterrupt):
        measured(plain)
    assert len(written) == 2
    written[:] = [-1] * 10
    assert tuple(measured(plain).items) == tuple(whole.items)
    assert len(written) == 10 + len(whole.items) - 2
    assert not [*plain.run_folder.glob("evaluations/.*")]


def test_a_run_that_goes_on_needs_its_start_no_more(recipe: Recipe, lora_run: Path) -> None:
    gone = recipe.override("grpo.start_from=./gone")
    check_models(gone, lora_run, resume=True)  # its GRPO is finished
    for run, resume in ((lora_run, False), (lora_run / "none", True)):
        with pytest.raises(ModelError, match="there is no folder"):
            check_models(gone, run, resume=resume)
    with pytest.raises(ModelError, match="there is no folder"):  # the reference
        check_models(gone.override("grpo.beta=0.1"), lora_run, resume=True)


def test_a_run_ends_without_asking_processes_that_may_have_ended(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 asked all of them what its folder holds, and a slow one ended with an error."""
    recipe = recipe.override("skip_grpo=true", "sft.steps=1")

    def ask(*_: Any) -> None:
        raise AssertionError("the other processes may have ended")

    with Run(recipe, Progress(quiet=True)) as opened:
        train(opened)
        vars(opened.folder).pop("_signatures", None)  # as where nothing has read it yet
        for question in ("on_rank0", "gather"):
            monkeypatch.setattr(opened.processes, question, ask)
    ended = RunFolder(opened.path).read_end()
    assert ended is not None
    assert ended.state == "finished"


def test_what_takes_long_in_a_large_set_is_shown(recipe: Recipe) -> None:
    out = io.StringIO()
    with Run(recipe, Progress(console=Console(file=out, width=160, force_terminal=True))):
        assert "reading the data" in out.getvalue()
        assert "preparing the problems" in out.getvalue()


def test_a_demonstration_cannot_steer_the_terminal(recipe: Recipe, tmp_path: Path) -> None:
    row = {"question": "Pick \x1b[2J 1.", "answer": "1", "solution": "\x07 one"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    rows = f"{{source: file, path: {tmp_path}/rows.jsonl}}"
    with prepare(recipe.override(f"data.sft={rows}", "skip_grpo=true")) as prepared:
        shown = _as_trained(prepared).plain
    assert "Pick \\x1b[2J 1." in shown
    assert ">>><reasoning>\\x07 one</reasoning><answer>1</answer>" in shown


def test_an_evaluation_gives_the_samplers_memory_back(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it needed of the cache may be far more than what steps do."""
    released: list[NativeSampler] = []

    def release(self: NativeSampler) -> None:
        released.append(self)

    monkeypatch.setattr(NativeSampler, "release", release)
    plain = recipe.override("grpo.start_from=null", "evaluation.max_new_tokens=2")
    with Run(plain, Progress(quiet=True)) as run:
        policy = run.prepared.model
        measure_policy(run, policy, phase="base", step=0, split="test")
        assert released == [run.models.sampler(policy)]


@pytest.mark.slow
def test_a_time_budget_fixes_the_validation_problems_of_the_whole_run(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = recipe.override(
        "grpo.start_from=null", "evaluation.max_new_tokens=2", "evaluation.validation_minutes=1e-9"
    )
    monkeypatch.setattr(evaluating, "_FIRST_WAVE", 3)
    with Run(plain, Progress(quiet=True)) as run:
        policy = run.prepared.model
        looks = [
            measure_policy(run, policy, phase="sft", step=step, split="validation")
            for step in (0, 2)
        ]
        chosen = [[item.problem_id for item in look.items] for look in looks]
        assert len(chosen[0]) == 3 < len(run.prepared.validation)
        assert chosen[1] == chosen[0]
        whole = measure_policy(run, policy, phase="base", step=0, split="test")
        assert len(whole.items) == len(run.prepared.test)
        # Resumed with other data.
        run.prepared.validation = run.prepared.test
        look = measure_policy(run, policy, phase="sft", step=4, split="validation")
        assert look.problems <= {(problem.id, problem.answer) for problem, _ in run.prepared.test}


@pytest.mark.slow
@pytest.mark.parametrize("opened", ["session", "setup"])
def test_what_is_refused_late_leaves_nothing_running(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: str
) -> None:
    """T12: neither grading processes nor the lock, whatever went wrong."""

    class UnforeseenError(Exception):
        pass

    def fail(self: RewardStack, **_: object) -> None:
        raise UnforeseenError

    closed: list[Grader] = []
    honest = Grader.close

    def close(self: Grader) -> None:
        closed.append(self)
        honest(self)

    monkeypatch.setattr(RewardStack, "check", fail)
    monkeypatch.setattr(Grader, "close", close)
    plain = recipe.override("grpo.start_from=null")
    with pytest.raises(UnforeseenError):
        Run(plain, Progress(quiet=True)) if opened == "session" else prepare(plain)
    # A session has started its grading processes by then, a preparation has not.
    assert len(closed) == (1 if opened == "session" else 0)
    assert not (tmp_path / "again").exists()
    monkeypatch.undo()
    with Run(plain, Progress(quiet=True)):
        """The lock is free."""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        # Each would draw its share of other problems, and the gradient would be nobody's.
        (
            lambda value: {**value, "train": "b"} if isinstance(value, dict) else value,
            r"^torchrun: processes differ from the first one: train \S+ -> b",
        ),
        # The other one ended in a traceback, at the latest once a phase was over.
        (
            lambda value: value is not True and value,
            r"^output_dir: not every process sees .*/demo, the run",
        ),
    ],
)
def test_a_machine_with_other_files_or_another_disk_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Callable[[Any], Any], message: str
) -> None:
    class Two(ProcessGroup):
        size = 2

        def gather(self, value: Any) -> list[Any]:
            return [value, other(value)]

    monkeypatch.setattr(running, "join_processes", Two)
    with pytest.raises(ConfigError, match=message):
        Run(load_recipe("demo").override(f"output_dir={tmp_path}"), Progress(quiet=True))
    assert not any(tmp_path.iterdir())


def test_the_native_sampler_is_one_step_ahead_in_one_process_only() -> None:
    recipe = load_recipe("demo").override("grpo.max_staleness=1")
    with pytest.raises(ConfigError, match=r"^grpo.max_staleness: .* the run has 2 processes"):
        require_step_ahead(recipe, 2)
    require_step_ahead(recipe, 1)
    require_step_ahead(recipe.override("skip_grpo=true"), 2)
    turns = recipe.override("prompt.format=python-tool")
    with pytest.raises(ConfigError, match="completions have turns"):
        require_step_ahead(turns, 1)
    server = "sampling.vllm.mode=server"
    require_step_ahead(turns.override("sampling.engine=vllm", server), 1)


def test_what_cannot_be_split_is_refused_before_anything_is_loaded() -> None:
    """Both ended in a traceback: of the first step, and where the sampler's copy was made."""
    recipe = load_recipe("demo").override("parallel=fsdp", "sft.optimizer.name=adamw_8bit")
    with pytest.raises(ConfigError, match=r"^sft.optimizer.name: weights in 4 bits and the state"):
        require_shareable(recipe, 2)
    require_shareable(recipe.override("parallel=ddp"), 2)
    require_shareable(recipe.override("skip_sft=true"), 2)
    four = recipe.override("skip_sft=true", "model.quantization=4bit", "model.lora={rank: 4}")
    with pytest.raises(ConfigError, match=r"^model.quantization: "):
        require_shareable(four, 2)
