"""Starting several processes: the arguments they get, and who speaks."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest
import torch
from cli.conftest import Grouper

from grouper.cli import launch as launching
from grouper.cli import train
from grouper.cli.launch import launch, require_devices
from grouper.cli.main import HEAD_START
from grouper.errors import ConfigError, Interrupted
from grouper.runs.trackers import CLOSING_SECONDS


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
    assert waited == [HEAD_START]


def test_the_others_wait_until_the_first_has_closed_its_trackers() -> None:
    """Else the launcher would end it while it does."""
    assert HEAD_START > 1.5 * CLOSING_SECONDS


def test_ctrl_c_while_an_error_waits_to_be_told(
    grouper: Grouper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    monkeypatch.setenv("RANK", "2")
    found = grouper("run", "dmeo")
    assert (found.code, found.err[:16]) == (2, "[rank 2] error: ")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Interrupted("stopped on request", where="out/demo"), "out/demo: stopped on request.\n"),
        (KeyboardInterrupt(), "Stopped.\n"),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"),
            "another process of this run has ended, or cannot be reached.\n",
        ),
    ],
    ids=["saved", "at once", "left behind"],
)
def test_where_all_are_stopped_the_first_says_so_and_the_others_end_at_once(
    error: BaseException, told: str, grouper: Grouper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(train, "_train", stop)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    for rank, text in enumerate((told, "")):
        monkeypatch.setenv("RANK", str(rank))
        found = grouper("run", "demo", "name=stopped")
        assert (found.code, found.err) == (130, text)


def test_the_first_alone_writes_to_standard_output(
    grouper: Grouper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `torchrun -m grouper eval --json` prints is one document."""
    monkeypatch.setattr("os._exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert grouper("recipes", "formats").out
    monkeypatch.setenv("RANK", "1")
    assert grouper("recipes", "formats").out == ""


def test_a_process_that_was_started_starts_no_more(
    grouper: Grouper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even where `--nproc` is typed after torchrun."""
    monkeypatch.chdir(tmp_path)  # where no demonstration has run
    started: list[list[str]] = []
    trained: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(train, "launch", lambda _, arguments: started.append(arguments) or 0)
    monkeypatch.setattr(train, "_train", lambda recipe, *_, **__: trained.append(recipe.name))
    assert grouper("run", "demo", "--nproc", "2").code == 0
    assert ([[a[0], Path(a[1]).name] for a in started], trained) == ([["run", "demo.yaml"]], [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("os._exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    assert grouper("run", "demo", "--nproc", "2").code == 0
    assert (len(started), trained) == (1, ["demo"])


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_processes_than_gpus_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_devices(2, device)
    with pytest.raises(ConfigError, match="3 processes were requested"):
        require_devices(3, device)


@pytest.mark.parametrize(("there", "most"), [(1, 2), (2, 2), (6, 6)])
@pytest.mark.parametrize(("device", "gpus"), [("auto", 0), ("cpu", 2)])
def test_more_processes_than_processors_are_refused(
    device: str, gpus: int, there: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two may share one, so that several can be tried anywhere."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(launching, "processors", lambda: there)
    require_devices(most, device)
    with pytest.raises(ConfigError, match=f"{most + 1} processes .* Use --nproc {most} or fewer"):
        require_devices(most + 1, device)


def test_the_command_asks_before_it_starts_any(
    grouper: Grouper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(train, "launch", lambda *_: pytest.fail("processes were started"))
    grouper("run", "demo", "--nproc", "2").refused("2 processes", "has 1", "--nproc 1 or fewer")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Launches two processes that run a shell script instead of the command; the exit code."""
    before = [
        (number, signal.getsignal(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    ]
    script = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(text: str) -> int:
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        return launch(2, [])

    yield run
    for number, handler in before:
        signal.signal(number, handler)


def test_a_process_that_was_killed_is_named(
    started: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """It can say nothing itself; where memory runs out, the system kills one."""
    assert started("test $RANK = 0 || kill -9 $$; exec sleep 60") == 128 + signal.SIGKILL
    err = capsys.readouterr().err
    assert "rank 1 of 2 was ended by SIGKILL" in err
    assert "ran out of memory" in err
    assert started("test $RANK = 0 || kill -SEGV $$; exec sleep 60") == 128 + signal.SIGSEGV
    err = capsys.readouterr().err
    assert "rank 1 of 2 was ended by SIGSEGV" in err
    assert "memory" not in err
    assert started("test $RANK = 0 && exit 3; exec sleep 60") == 3
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_signal_is_passed_on_and_a_step_may_take_its_time(
    started: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of the other process, where one has ended."""
    monkeypatch.setattr(launching, "GRACE", 0.1)
    Timer(0.5, signal.raise_signal, [signal.SIGTERM]).start()
    begun = time.monotonic()
    assert started("trap 'sleep $((2 * RANK)); exit 130' TERM; while :; do sleep 0.1; done") == 130
    assert time.monotonic() - begun > 2


@pytest.mark.slow
def test_the_third_signal_ends_what_is_stuck(started: Callable[[str], int]) -> None:
    for seconds in (0.5, 0.8, 1.1):
        Timer(seconds, signal.raise_signal, [signal.SIGINT]).start()
    begun = time.monotonic()
    assert started("trap '' INT; exec sleep 60") == 130
    assert time.monotonic() - begun < 20


@pytest.mark.slow
def test_one_that_fails_after_a_signal_is_not_waited_for(
    started: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit code counts: what was to be saved may not be. All that end well have finished."""
    monkeypatch.setattr(launching, "GRACE", 0.5)
    Timer(0.5, signal.raise_signal, [signal.SIGTERM]).start()
    begun = time.monotonic()
    assert (
        started("test $RANK = 0 && trap 'exit 3' TERM || trap '' TERM; while :; do sleep 0.1; done")
        == 3
    )
    assert time.monotonic() - begun < 20
    Timer(0.5, signal.raise_signal, [signal.SIGTERM]).start()
    assert started("trap 'exit 0' TERM; while :; do sleep 0.1; done") == 0


def test_signals_are_the_callers_again_after_a_launch(started: Callable[[str], int]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert started("exit 0") == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_what_nohup_has_set_stays(started: Callable[[str], int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert started("exit 0") == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
