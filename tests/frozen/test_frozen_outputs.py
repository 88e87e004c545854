"""Help and outputs, word for word as they were recorded: `outputs.py` has the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from frozen import load
from frozen_calls import make_tiny_run
from outputs import ROWS, printed

pytestmark = pytest.mark.slow

RECORDED = load("outputs")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("frozen-outputs") / "run")


def test_every_output_is_recorded() -> None:
    assert list(RECORDED) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_an_output_is_as_it_was(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    row, recorded = ROWS[name], RECORDED[name]
    told = printed(row, tmp_path / "here", request.getfixturevalue("tiny") if row.run else None)
    assert told["err"] == recorded["err"]
    assert told["out"] == recorded["out"]
    assert told["exit code"] == recorded["exit code"]
