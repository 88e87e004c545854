"""When failures are too many."""

from __future__ import annotations

import json

import pytest

from grouper.rewards.failures import FailureRate


@pytest.mark.parametrize(
    ("limit", "stops_at"), [(0.0, 1), (0.05, 2), (0.1, 3), (0.5, 11), (0.9, 19)]
)
def test_always_failing(limit: float, stops_at: int) -> None:
    rate = FailureRate(limit)
    answers = [rate.add(failed=True) for _ in range(stops_at)]
    assert answers == [False] * (stops_at - 1) + [True]
    assert rate.failures == rate.groups == stops_at


def test_a_rare_failure_never_stops_and_a_burst_does() -> None:
    rate = FailureRate(0.1)
    assert not any(rate.add(failed=i % 20 == 0) for i in range(2_000))
    assert any(rate.add(failed=True) for _ in range(10))


def test_one_is_never() -> None:
    rate = FailureRate(1.0)
    assert not any(rate.add(failed=True) for _ in range(500))


def test_a_rate_goes_on_from_its_state() -> None:
    history = [i % 11 == 0 for i in range(150)] + [True] * 9
    for cut in (0, 5, 150, 152):
        whole, before, after = FailureRate(0.1), FailureRate(0.1), FailureRate(0.1)
        expected = [whole.add(failed=failed) for failed in history]
        got = [before.add(failed=failed) for failed in history[:cut]]
        after.load_state(json.loads(json.dumps(before.state())))
        got += [after.add(failed=failed) for failed in history[cut:]]
        assert got == expected
        assert (after.failures, after.groups) == (whole.failures, whole.groups)
    assert any(expected)
