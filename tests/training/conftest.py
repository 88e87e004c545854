"""What the tests of this folder have in common."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_states import TinyRun

from grouper.training import validation

honest = validation.measure_policy


def measured(run: Any, policy: Any, **place: Any) -> Any:
    """A tiny run knows what an evaluation finds; any other one is measured."""
    if isinstance(run, TinyRun):
        return run.evaluate(policy, **place)
    return honest(run, policy, **place)


@pytest.fixture(autouse=True)
def tiny_runs_measure_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "measure_policy", measured)
