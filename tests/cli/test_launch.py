"""Starting several processes: the arguments they get, and who speaks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from conftest import Grouper

from grouper.cli import train
from grouper.cli.train import require_devices
from grouper.errors import ConfigError


def test_the_first_speaks_at_once_and_the_others_after_it(
    grouper: Grouper, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.delenv("RANK", raising=False)
    assert grouper("run", "dmeo").err.startswith("error: ")
    assert waited == []
    monkeypatch.setenv("RANK", "2")
    assert grouper("run", "dmeo").err.startswith("[rank 2] error: ")
    assert waited == [3.0]


def test_a_process_that_was_started_starts_no_more(
    grouper: Grouper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has the same arguments as the command that was typed, `--nproc` among them."""
    monkeypatch.chdir(tmp_path)  # where no demonstration has run
    started: list[list[str]] = []
    trained: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(train, "launch", lambda _, arguments: started.append(arguments) or 0)
    monkeypatch.setattr(train, "_train", lambda recipe, *_, **__: trained.append(recipe.name))
    assert grouper("run", "demo", "--nproc", "2").code == 0
    assert (started, trained) == ([["run", "demo", "--nproc", "2"]], [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("os._exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    assert grouper("run", "demo", "--nproc", "2").code == 0
    assert (len(started), trained) == (1, ["demo"])


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
    grouper: Grouper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(train, "launch", lambda *_: pytest.fail("processes were started"))
    grouper("run", "demo", "--nproc", "2").refused("2 processes", "has 1", "--nproc 1 or fewer")
