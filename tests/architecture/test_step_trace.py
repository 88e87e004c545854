"""How many places must be opened to follow one GRPO step: the files and functions that it enters.

One fixed measure: the demonstration's third GRPO step, in the main thread, from call to return.
Sampling, kernels, grading, rewards and the record of a run are rooms of their own to a reader and
are not counted, but for the number of all files. Lists and numbers only get shorter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from codebase import SOURCE, TOP
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper import load_recipe, prepare, train
from grouper.training import phases
from grouper.training.checkpoint import TrainState
from grouper.training.grpo import grpo_step
from grouper.training.run import Run

# `files.py` is how the record is written: nothing else of a step goes through it.
OTHER_ROOMS = ("sampling", "kernels", "grading", "rewards", "runs", "files.py")
FILES = [
    "algorithms/advantages.py",
    "algorithms/batching.py",
    "algorithms/losses.py",
    "algorithms/weighting.py",
    "config/schema.py",
    "models/attention.py",
    "models/policy.py",
    "models/process_group.py",
    "models/token_scores.py",
    "training/checkpoint.py",
    "training/curriculum.py",
    "training/grpo.py",
    "training/metrics.py",
    "training/optimizers.py",
    "training/parallel.py",
    "training/run.py",
    "training/update.py",
    "types.py",
]
FUNCTIONS = 100
# With the other rooms.
ALL_FILES = 45


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> set[CodeType]:
    """The functions of the package that the third step enters, but for comprehensions."""
    folder = tmp_path_factory.mktemp("traced")
    write_problems(folder)
    recipe = load_recipe("demo", [*TINY_RUN, *data_from(str(folder)), "grpo.steps=3"]).override(
        name="run", output_dir=str(folder)
    )
    found = set[CodeType]()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            found.add(frame.f_code)

    def traced(open_run: Run, state: TrainState) -> Any:
        third = state.step == 2
        sys.setprofile(watch if third else None)
        try:
            return grpo_step(open_run, state)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch, prepare(recipe) as setup:
        patch.setattr(phases, "grpo_step", traced)
        train(setup)
    return {code for code in found if Path(code.co_filename).is_relative_to(SOURCE / TOP)}


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(SOURCE / TOP))


def _counts(code: CodeType) -> bool:
    return Path(_file(code)).parts[0] not in OTHER_ROOMS


def test_these_files_are_entered_and_no_others(entered: set[CodeType]) -> None:
    assert sorted({_file(code) for code in filter(_counts, entered)} - {*FILES}) == []
    assert len(FILES) <= 18


def test_few_functions_are_entered(entered: set[CodeType]) -> None:
    names = sorted(f"{Path(c.co_filename).stem}.{c.co_qualname}" for c in filter(_counts, entered))
    assert len(names) <= FUNCTIONS, names


def test_few_files_are_entered_with_the_other_rooms(entered: set[CodeType]) -> None:
    files = sorted(set(map(_file, entered)))
    assert len(files) <= ALL_FILES, files
