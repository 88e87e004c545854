"""A tracker that fails, hangs or is slow costs the run nothing, and is told of once."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from grouper.runs.sinks import Step
from grouper.runs.trackers import Background, close_all
from grouper.types import StepReport, Tally


def step(number: int) -> Step:
    tallies = {"loss": Tally.of([float(number)])}
    report = StepReport(phase="sft", step=number, tallies=tallies, status="learning")
    return Step(report=report, rewards={})


class Kept:
    """Keeps what it is given; `gate` holds it up until it is set."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self.closed = False
        self.gate = gate

    def step(self, step: Step) -> None:
        if self.gate is not None:
            self.gate.wait(30)
        self.steps.append(step.report.step)

    def evaluation(self, result: object) -> None: ...

    def close(self) -> None:
        self.closed = True


class Broken(Kept):
    def step(self, step: Step) -> None:
        super().step(step)
        raise SystemExit(f"no {step.report.step}")


def test_records_arrive_in_order_and_the_sink_is_closed():
    kept = Kept()
    tracker = Background("kept", lambda: kept)
    for number in range(20):
        tracker.put(step(number))
    close_all([tracker])
    assert (kept.steps, kept.closed) == (list(range(20)), True)


def test_what_a_sink_raises_is_told_once_and_it_is_asked_again(caplog):
    broken = Broken()
    tracker = Background("broken", lambda: broken)
    for number in (1, 2, 3):
        tracker.put(step(number))
    close_all([tracker])
    assert broken.steps == [1, 2, 3]
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    (once,) = [text for text in told if "the run goes on anyway" in text]
    assert once.endswith("(reported once): SystemExit: no 1")
    assert "failed 3 times in all" in told[-1]


def test_a_sink_that_cannot_be_made_is_told_and_nothing_waits_for_it(caplog):
    def build():
        raise RuntimeError("no such server")

    tracker = Background("lost", build)
    tracker.put(step(1))
    close_all([tracker], seconds=10)
    assert "no such server" in caplog.text
    assert "left behind" not in caplog.text


def test_a_sink_that_hangs_neither_holds_up_the_run_nor_its_end(caplog):
    gate = threading.Event()
    kept = Kept(gate)
    tracker = Background("slow", lambda: kept, capacity=3)
    for number in range(50):
        tracker.put(step(number))  # a bounded queue that blocked would never come back
    started = time.monotonic()
    close_all([tracker], seconds=0.1)
    assert time.monotonic() - started < 5
    assert caplog.text.count("is too slow") == 1
    assert "left behind" in caplog.text
    gate.set()
    tracker.wait(10)
    assert kept.closed
    assert len(kept.steps) < 5


def test_all_of_them_share_one_time_limit():
    gate = threading.Event()
    trackers = [Background(str(n), lambda: Kept(gate)) for n in range(4)]
    for tracker in trackers:
        tracker.put(step(1))
    started = time.monotonic()
    close_all(trackers, seconds=0.2)
    assert time.monotonic() - started < 0.7
    gate.set()


@pytest.fixture(autouse=True)
def _everything_is_heard(caplog):
    caplog.set_level(logging.INFO, logger="grouper")
