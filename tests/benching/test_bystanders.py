"""Cores that others keep busy, read from a made-up /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grouper.benching import bystanders
from grouper.benching.bystanders import Bystanders

TICKS = 100
US, CHILD, STRANGER = os.getpid(), 900_001, 900_002


class Machine:
    """Two cores of ours and one that we may not run on; seconds are written as they are used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used = dict.fromkeys((US, CHILD, STRANGER), 0.0)
        self._parents = {US: 1, CHILD: US, STRANGER: 1}
        self.use({}, elsewhere=0.0)

    def use(self, seconds: dict[int, float], *, elsewhere: float) -> None:
        for pid, used in seconds.items():
            self._used[pid] += used
        for pid, used in self._used.items():
            (self._folder / str(pid)).mkdir(exist_ok=True)
            # state, ppid, nine more, then user, system, and those of children that ended
            fields = ["R", str(self._parents[pid]), *["0"] * 9, str(int(used * TICKS)), *["0"] * 9]
            # A name of brackets, a blank, and a byte that is no UTF-8.
            line = f"{pid} (a (b) \udcff) {' '.join(fields)}\n"
            (self._folder / str(pid) / "stat").write_bytes(line.encode(errors="surrogateescape"))
        busy = int(sum(self._used.values()) * TICKS)
        lines = [
            f"cpu {busy} 0 0 99999 0 0 0 0 0 0",
            f"cpu0 {busy} 0 0 5555 0 0 0 0 7777 0",
            "cpu1 0 0 0 5555 33 0 0 0 0 0",
            f"cpu2 {int(elsewhere * TICKS)} 0 0 0 0 0 0 0 0 0",
            "intr 1 2 3",
        ]
        (self._folder / "stat").write_text("\n".join(lines) + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(bystanders, "_PROC", tmp_path)
    monkeypatch.setattr(bystanders, "_ticks", lambda: TICKS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(bystanders.time, "monotonic", lambda: next(clock))
    return Machine(tmp_path)


def test_we_and_our_children_are_not_others(machine: Machine) -> None:
    with Bystanders() as others:
        machine.use({US: 3.0, CHILD: 2.0, STRANGER: 1.0}, elsewhere=4.0)
    assert others.cores == pytest.approx(1.0 / 4.0)


def test_nobody_else(machine: Machine) -> None:
    with Bystanders() as others:
        machine.use({US: 4.0}, elsewhere=0.0)
    assert others.cores == 0.0


def test_where_the_system_does_not_tell_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bystanders, "_PROC", tmp_path / "none")
    with Bystanders() as others:
        pass
    assert others.cores is None
