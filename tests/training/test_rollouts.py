"""The source of rollouts: what is drawn again, what is kept, and where the budget ends."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ScriptedSampler, make_group

from grouper.config.schema import GRPOConfig
from grouper.models.process_group import ProcessGroup
from grouper.training import rollouts
from grouper.training.collect import RolloutBatch
from grouper.training.curriculum import ProblemStream
from grouper.training.rollouts import StepPlace, collect_step, shuffle_rewards
from grouper.types import (
    RolloutGroup,
)

# --- dynamic sampling: what is drawn again, what is kept, and where the budget ends


KINDS = {"mixed": [True, False], "right": [True, True], "wrong": [False, False]}


class Source:
    """Hands out groups of the kinds given, in order; then mixed ones."""

    def __init__(self, kinds: list[str]) -> None:
        self._kinds = [*kinds]
        self.drawn: list[RolloutGroup] = []
        self.asked: list[int] = []

    def __call__(self, count: int) -> RolloutBatch:
        self.asked.append(count)
        fresh = []
        for _ in range(count):
            kind = self._kinds.pop(0) if self._kinds else "mixed"
            number = len(self.drawn) + len(fresh)
            # Rewards differ everywhere: only correctness may decide.
            fresh.append(make_group(number, [1.0, 0.3], [2, 3], correct=KINDS[kind]))
        self.drawn += fresh
        return RolloutBatch(groups=tuple(fresh), sample_seconds=1.0, grade_seconds=0.5)


def ids(groups: tuple[RolloutGroup, ...]) -> list[str]:
    return [group.problem.id for group in groups]


def run(kinds: list[str], *, wanted: int, rounds: int) -> tuple[Source, RolloutBatch]:
    source, stream = Source(kinds), ProblemStream(size=10, seed=0, phase="grpo")
    place = StepPlace(step=0, total=1, position=0, band=None)
    opened: Any = SimpleNamespace(
        recipe=SimpleNamespace(
            grpo=GRPOConfig(prompts_per_step=wanted, dynamic_sampling_rounds=rounds), seed=0
        ),
        prepared=SimpleNamespace(
            train=range(10),
            rewards=SimpleNamespace(end_step=lambda _: None),
            grader=print,
        ),
        processes=ProcessGroup(),
        display=SimpleNamespace(within=lambda *_: nullcontext()),
        params=None,
        stop=SimpleNamespace(tick=print, raise_if_ended=print),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "collect", lambda drawn, **_: source(len(drawn)))
        found = collect_step(opened, stream, place, ScriptedSampler(lambda *_: ""))
    assert found.position == len(source.drawn)
    return source, found


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
    if any(group.mixed for group in found.replaced):
        assert all(group.mixed for group in found.groups)
    if not all(group.mixed for group in found.groups):
        assert found.rounds == rounds


@pytest.mark.parametrize("solved", [0, 1, 2])
def test_mixed_means_some_right_and_some_wrong(solved: int) -> None:
    group = make_group(0, [0.0, 0.0], [2, 2], correct=[i < solved for i in range(2)])
    assert group.mixed == (solved == 1)


def test_shuffling_deals_out_the_same_rewards_and_keeps_the_texts() -> None:
    groups = (
        make_group(0, [1.0, 0.0, 0.0], [3, 4, 5]),
        make_group(1, [1.0, 1.0, 0.0], [6, 7, 8]),
    )
    dealt = shuffle_rewards(groups, key=3)
    assert dealt == shuffle_rewards(groups, key=3)
    assert len({repr(shuffle_rewards(groups, key=k)) for k in range(8)}) > 4
    for before, after in zip(groups, dealt, strict=True):
        assert [r.completion for r in before.rollouts] == [r.completion for r in after.rollouts]
    totals = [r.reward.total for g in dealt for r in g.rollouts]
    assert sorted(total for total in totals if total is not None) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
