"""Starting several processes: the arguments they get, and who speaks."""

from __future__ import annotations

import pytest

from grouper.cli import launch
from grouper.cli.launch import is_follower, let_the_first_speak, without_nproc


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        (["run", "demo", "--nproc", "4"], ["run", "demo"]),
        (["run", "--nproc=4", "demo", "seed=1"], ["run", "demo", "seed=1"]),
        (["run", "demo"], ["run", "demo"]),
    ],
)
def test_the_processes_are_not_told_to_start_more(given: list[str], passed_on: list[str]) -> None:
    assert without_nproc(given) == passed_on


def test_the_first_speaks_at_once_and_the_others_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    monkeypatch.delenv("RANK", raising=False)
    assert let_the_first_speak() == ""
    assert waited == []
    monkeypatch.setenv("RANK", "2")
    assert is_follower()
    assert let_the_first_speak() == "[rank 2] "
    assert waited == [launch.HEAD_START]
