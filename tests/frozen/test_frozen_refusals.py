"""What Grouper refuses, word for word as it was recorded: `refusals.py` has the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from frozen import load
from frozen_calls import make_tiny_run
from refusals import ROWS, refusal

pytestmark = pytest.mark.slow

RECORDED = load("refusals")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("frozen") / "run")


def test_every_row_is_recorded() -> None:
    assert list(RECORDED) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_refusal_is_as_it_was(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    row, recorded = ROWS[name], RECORDED[name]
    told = refusal(row, tmp_path / "here", request.getfixturevalue("tiny") if row.run else None)
    assert told["text"] == recorded["text"]
    assert told["exit code"] == recorded["exit code"]
