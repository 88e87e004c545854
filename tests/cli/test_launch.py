"""Starting several processes: the arguments they get, and who speaks."""

from __future__ import annotations

import pytest
import torch
from conftest import Grouper

from grouper.cli import launch, train
from grouper.cli.launch import is_follower, let_the_first_speak, require_devices, without_nproc
from grouper.errors import ConfigError


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


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_processes_than_gpus_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_devices(2, device)
    with pytest.raises(ConfigError, match="3 processes were asked for"):
        require_devices(3, device)


def test_processes_may_share_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    require_devices(8, "auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_devices(8, "cpu")


def test_the_command_asks_before_it_starts_any(
    grouper: Grouper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(train, "launch", lambda *_: pytest.fail("processes were started"))
    grouper("run", "demo", "--nproc", "2").refused("2 processes", "has 1", "--nproc 1 or fewer")
