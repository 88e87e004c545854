"""The source of rollouts: what is drawn again, what is kept, and where the budget ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ScriptedSampler, make_group, make_prompt

from grouper.config.schema import GRPOConfig, PromptConfig, RewardConfig
from grouper.models.process_group import ProcessGroup
from grouper.prompts import make_format
from grouper.rewards import build_rewards
from grouper.sampling.base import SampleRequest
from grouper.training.collect import RolloutBatch
from grouper.training.curriculum import ProblemStream
from grouper.training.rollouts import StepPlace, collect_step, shuffle_rewards
from grouper.types import (
    Completion,
    Grade,
    Problem,
    RolloutGroup,
    SamplingParams,
    Verdict,
)

# --- dynamic sampling: what is drawn again, what is kept, and where the budget ends


KINDS = {"mixed": "01", "right": "11", "wrong": "00"}
STREAM = ProblemStream(size=100, seed=0, phase="grpo")
ORDER = [index for index, _ in itertools.islice(STREAM.each(0), 100)]


class Source:
    """Draws groups of the kinds given, in the order of the stream; then mixed ones."""

    def __init__(self, kinds: list[str]) -> None:
        self._kinds = kinds
        self.asked: list[int] = []
        """Groups of each batch."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        self.asked.append(len(requests) // 2)
        return ScriptedSampler(self._answer).sample(requests)

    def _answer(self, request: SampleRequest, index: int) -> str:
        number = ORDER.index(int(request.prompt.problem_id.removeprefix("p/")))
        kind = self._kinds[number] if number < len(self._kinds) else "mixed"
        return KINDS[kind][index % 2]


class Grader:
    def submit(self, text: str, reference: str) -> Future[Grade]:
        graded: Future[Grade] = Future()
        verdict = Verdict.CORRECT if text == reference else Verdict.INCORRECT
        graded.set_result(Grade(verdict=verdict, extracted=text, stage="text", reason=""))
        return graded


def ids(groups: tuple[RolloutGroup, ...]) -> list[int]:
    """The place of each group's problem in the stream."""
    return [ORDER.index(int(group.problem.id.removeprefix("p/"))) for group in groups]


def run(kinds: list[str], *, wanted: int, rounds: int) -> tuple[Source, RolloutBatch]:
    source = Source(kinds)
    place = StepPlace(step=0, total=1, position=0, band=None)
    problems = [
        (Problem(id=f"p/{n}", question="q", answer="1", source="s"), make_prompt(n))
        for n in range(100)
    ]
    opened: Any = SimpleNamespace(
        recipe=SimpleNamespace(
            grpo=GRPOConfig(prompts_per_step=wanted, dynamic_sampling_rounds=rounds, group_size=2),
            seed=0,
        ),
        prepared=SimpleNamespace(
            train=problems,
            rewards=build_rewards([RewardConfig(name="correctness")], make_format(PromptConfig())),
            grader=Grader(),
        ),
        processes=ProcessGroup(),
        display=SimpleNamespace(within=lambda *_: nullcontext()),
        params=SamplingParams(max_new_tokens=20),
        stop=SimpleNamespace(tick=lambda *_: None, raise_if_ended=print),
    )
    found = collect_step(opened, STREAM, place, source)
    assert found.position == sum(source.asked)
    return source, found


def test_flat_groups_are_replaced_by_correctness() -> None:
    source, found = run(["mixed", "right", "wrong", "mixed", "wrong"], wanted=3, rounds=5)
    assert source.asked == [3, 2, 1]
    assert ids(found.groups) == [0, 3, 5]
    assert ids(found.replaced) == [1, 2, 4]
    assert found.rounds == 2


def test_without_a_budget_nothing_is_drawn_again() -> None:
    source, found = run(["wrong"] * 3, wanted=3, rounds=0)
    assert source.asked == [3]
    assert ids(found.groups) == [0, 1, 2]
    assert found.replaced == ()


def test_at_the_end_of_the_budget_the_first_flat_groups_fill_up() -> None:
    _, found = run(["wrong", "mixed", "right", "wrong"], wanted=3, rounds=1)
    assert ids(found.groups) == [0, 1, 4]
    assert ids(found.replaced) == [2, 3]


@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=20),
    wanted=st.integers(1, 6),
    rounds=st.integers(0, 4),
)
def test_every_group_drawn_is_kept_or_replaced(kinds: list[str], wanted: int, rounds: int) -> None:
    source, found = run(kinds, wanted=wanted, rounds=rounds)
    assert len(found.groups) == wanted
    assert len(source.asked) == found.rounds + 1 <= rounds + 1
    assert sorted(ids(found.groups) + ids(found.replaced)) == list(range(sum(source.asked)))
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
