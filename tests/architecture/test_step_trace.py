"""Which files one GRPO step enters: printed, so that a reader knows what to open.

One fixed measure: the demonstration's third GRPO step, in the main thread, from call to return.
The page, the update and the mathematics must be among the files that are printed; a step that went
around one of them would not be the step that they describe.
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
from grouper.training import pipeline
from grouper.training.observe import take_step
from grouper.training.run import Run
from grouper.training.state import TrainState

STEP = {
    "algorithms/advantages.py",
    "algorithms/batching.py",
    "algorithms/losses.py",
    "algorithms/weighting.py",
    "models/policy.py",
    "training/grpo.py",
    "training/update.py",
    "types.py",
}
"""Files without which it would not be a GRPO step."""


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
        third = state.phase == "grpo" and state.step == 2
        sys.setprofile(watch if third else None)
        try:
            return take_step(open_run, state)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch, prepare(recipe) as setup:
        patch.setattr(pipeline, "take_step", traced)
        train(setup)
    return {code for code in found if Path(code.co_filename).is_relative_to(SOURCE / TOP)}


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(SOURCE / TOP))


def test_the_step_enters_the_files_that_describe_it(
    entered: set[CodeType], capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(set(map(_file, entered)))
    with capsys.disabled():
        print("\nA GRPO step enters: " + ", ".join(files))
    assert set(files) >= STEP
