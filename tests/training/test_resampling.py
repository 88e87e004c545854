"""Dynamic sampling: what is drawn again, what is kept, and where the budget ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_group

from grouper.training.resampling import Resampled, is_mixed, resample
from grouper.training.rollouts import Collected
from grouper.types import RolloutGroup

KINDS = {"mixed": [True, False], "right": [True, True], "wrong": [False, False]}


class Source:
    """Hands out groups of the kinds given, in order; then mixed ones."""

    def __init__(self, kinds: list[str]) -> None:
        self._kinds = [*kinds]
        self.drawn: list[RolloutGroup] = []
        self.asked: list[int] = []

    def __call__(self, count: int) -> Collected:
        self.asked.append(count)
        fresh = []
        for _ in range(count):
            kind = self._kinds.pop(0) if self._kinds else "mixed"
            number = len(self.drawn) + len(fresh)
            # Rewards differ everywhere: only correctness may decide.
            fresh.append(make_group(number, [1.0, 0.3], [2, 3], correct=KINDS[kind]))
        self.drawn += fresh
        return Collected(groups=tuple(fresh), sample_seconds=1.0, grade_seconds=0.5)


def ids(groups: tuple[RolloutGroup, ...]) -> list[str]:
    return [group.problem.id for group in groups]


def run(kinds: list[str], *, wanted: int, rounds: int) -> tuple[Source, Resampled]:
    source = Source(kinds)
    return source, resample(source, wanted=wanted, rounds=rounds)


def test_flat_groups_are_replaced_by_correctness() -> None:
    source, found = run(["mixed", "right", "wrong", "mixed", "wrong"], wanted=3, rounds=5)
    assert source.asked == [3, 2, 1]
    assert ids(found.groups) == ["p/0", "p/3", "p/5"]
    assert ids(found.replaced) == ["p/1", "p/2", "p/4"]
    assert found.rounds == 2
    assert (found.sample_seconds, found.grade_seconds) == (3.0, 1.5)


def test_without_a_budget_nothing_is_drawn_again() -> None:
    source, found = run(["wrong"] * 3, wanted=3, rounds=0)
    assert source.asked == [3]
    assert ids(found.groups) == ["p/0", "p/1", "p/2"]
    assert found.replaced == ()


def test_at_the_end_of_the_budget_the_first_flat_groups_fill_up() -> None:
    _, found = run(["wrong", "mixed", "right", "wrong"], wanted=3, rounds=1)
    assert ids(found.groups) == ["p/0", "p/1", "p/4"]
    assert ids(found.replaced) == ["p/2", "p/3"]


@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=20),
    wanted=st.integers(1, 6),
    rounds=st.integers(0, 4),
)
def test_every_group_drawn_is_kept_or_replaced(kinds: list[str], wanted: int, rounds: int) -> None:
    source, found = run(kinds, wanted=wanted, rounds=rounds)
    assert len(found.groups) == wanted
    assert len(source.asked) == found.rounds + 1 <= rounds + 1
    assert sorted(ids(found.groups) + ids(found.replaced)) == sorted(ids(tuple(source.drawn)))
    # A mixed group is only left out when there are more than enough of them.
    if any(map(is_mixed, found.replaced)):
        assert all(map(is_mixed, found.groups))
    if not all(map(is_mixed, found.groups)):
        assert found.rounds == rounds


@pytest.mark.parametrize("solved", [0, 1, 2])
def test_mixed_means_some_right_and_some_wrong(solved: int) -> None:
    group = make_group(0, [0.0, 0.0], [2, 2], correct=[i < solved for i in range(2)])
    assert is_mixed(group) == (solved == 1)
