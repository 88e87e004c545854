"""Dynamic sampling without waiting: the groups of rounds, however they are drawn."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import LetterTokenizer, make_prompt, tiny_model

from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import Admission, SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.training.resampling import Candidates, draw_candidates, drawn_in_rounds
from grouper.types import Completion, FinishReason, Grade, SamplingParams, Verdict

GROUP = 3
PARAMS = SamplingParams(max_new_tokens=20)


def rounds_one_after_the_other(flat: Sequence[bool], count: int, rounds: int) -> tuple[int, int]:
    """What is drawn if each round waits for the one before it: DAPO's loop as it is written."""
    drawn = done = 0
    missing = count
    while missing > 0 and done <= rounds:
        drawn += missing
        done += 1
        missing = count - flat[:drawn].count(False)
    return drawn, done - 1


def text_of(request: int, kind: str) -> str:
    """Right, wrong, or in a mixed group right once."""
    right = kind == "right" or (kind == "mixed" and request % GROUP == 1)
    return f"{request} {'right' if right else 'wrong'}"


def requests_of(kinds: Sequence[str]) -> list[SampleRequest]:
    return [
        SampleRequest(prompt=make_prompt(index // GROUP), params=PARAMS, key=index)
        for index in range(GROUP * len(kinds))
    ]


class SlowGrader:
    """Some grades are there at once, some with the next text, and some when they are needed."""

    def __init__(self, order: random.Random) -> None:
        self._order = order
        self._late: list[LateGrade] = []

    def submit(self, text: str, _: str) -> Future[Grade]:
        for late in self._late:
            late.arrive()
        verdict = Verdict.CORRECT if text.endswith("right") else Verdict.INCORRECT
        grade = LateGrade(Grade(verdict=verdict, extracted=text, stage="text", reason=""))
        if self._order.random() < 0.5:
            grade.arrive()
        self._late.append(grade)
        return grade


class LateGrade(Future[Grade]):
    def __init__(self, grade: Grade) -> None:
        super().__init__()
        self._grade = grade

    def arrive(self) -> None:
        if not self.done():
            self.set_result(self._grade)

    def result(self, timeout: float | None = None) -> Grade:
        self.arrive()
        return super().result(timeout)


class BatchSampler:
    """Answers all requests, in any order."""

    def __init__(self, kinds: Sequence[str], order: random.Random) -> None:
        self._kinds = kinds
        self._order = order
        self.drawn: list[int] = []
        self.batches = 0

    def answer(self, request: SampleRequest) -> Completion:
        self.drawn.append(request.key)
        text = text_of(request.key, self._kinds[request.key // GROUP])
        return Completion(
            token_ids=(1, 2),
            logprobs=(-1.0, -1.0),
            text=text,
            finish_reason=FinishReason.STOP_TOKEN,
            policy_version=0,
        )

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        self.batches += 1
        places = list(range(len(requests)))
        self._order.shuffle(places)
        for place in places:
            yield place, self.answer(requests[place])


class SlotSampler(BatchSampler):
    """Has a few slots, in which any sequence may be the next one to finish."""

    def __init__(self, kinds: Sequence[str], order: random.Random, slots: int) -> None:
        super().__init__(kinds, order)
        self._slots = slots
        self.closed = False

    def sample_admitted(
        self, requests: Sequence[SampleRequest], admitted: Admission
    ) -> Generator[tuple[int, Completion]]:
        live: list[int] = []
        begun = 0
        try:
            while True:
                limit = admitted(idle=not live)
                while begun < limit and len(live) < self._slots:
                    live.append(begun)
                    begun += 1
                if not live:
                    return
                place = live.pop(self._order.randrange(len(live)))
                yield place, self.answer(requests[place])
        finally:
            self.closed = True


def drawn_by(
    sampler: Any, kinds: Sequence[str], grader: Any, mixed_share: float | None, **wanted: int
) -> Candidates:
    requests = requests_of(kinds)
    candidates = Candidates(
        requests,
        [""] * len(requests),
        group_size=GROUP,
        mixed_share=mixed_share,
        **wanted,
    )
    shown: list[tuple[int, int]] = []
    draw_candidates(
        candidates,
        sampler=sampler,
        grader=grader,
        processes=ProcessGroup(),
        progress=lambda done, total: shown.append((done, total)),
    )
    assert [done for done, _ in shown] == list(range(1, len(shown) + 1))
    assert all(done <= total for done, total in shown)
    return candidates


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 5),
    rounds=st.integers(0, 4),
    slots=st.integers(1, 20),
    share=st.one_of(st.none(), st.floats(0.05, 1.0)),
    kinds=st.lists(st.sampled_from(["mixed", "right", "wrong"]), min_size=25, max_size=25),
)
def test_a_step_is_made_of_the_groups_of_rounds_however_they_are_drawn(
    seed: int, count: int, rounds: int, slots: int, share: float | None, kinds: list[str]
) -> None:
    kinds = kinds[: count * (1 + rounds)]
    order = random.Random(seed)
    flat = [kind != "mixed" for kind in kinds]
    expected, done = rounds_one_after_the_other(flat, count, rounds)
    slot_sampler = SlotSampler(kinds, order, slots)
    for sampler in (slot_sampler, BatchSampler(kinds, order)):
        found = drawn_by(sampler, kinds, SlowGrader(order), share, count=count, rounds=rounds)
        assert found.needed() == (expected, done)
        results = found.results()
        assert [[drawn.completion.text for drawn in group] for group in results] == [
            [text_of(GROUP * index + sample, kinds[index]) for sample in range(GROUP)]
            for index in range(expected)
        ]
        if share is None:
            assert sorted(sampler.drawn) == list(range(GROUP * expected)), "nothing in vain"
        if share is None and sampler is not slot_sampler:
            assert sampler.batches == done + 1
    assert slot_sampler.closed


@pytest.mark.parametrize("seed", range(20))
def test_what_is_drawn_together_does_not_depend_on_the_grader(seed: int) -> None:
    """Else log-probs of a repeated run would differ in their last bits."""
    kinds = random.Random(seed).choices(["mixed", "right", "wrong"], k=16)
    drawn = []
    for grader in range(3):
        sampler = SlotSampler(kinds, random.Random(seed), slots=5)
        drawn_by(sampler, kinds, SlowGrader(random.Random(grader)), None, count=4, rounds=3)
        drawn.append(sampler.drawn)
    assert drawn[0] == drawn[1] == drawn[2]


def test_fewer_rounds_are_waited_for_where_flat_groups_are_expected() -> None:
    """Half of the groups are flat, as in the step before: one batch is mostly enough."""
    kinds = ["mixed", "right"] * 16
    batches = []
    for share in (None, 0.5):
        sampler = BatchSampler(kinds, random.Random(0))
        drawn_by(sampler, kinds, SlowGrader(random.Random(0)), share, count=8, rounds=3)
        batches.append(sampler.batches)
    assert batches == [4, 1]


@given(
    flat=st.lists(st.booleans(), min_size=40, max_size=40),
    known=st.lists(st.booleans(), min_size=40, max_size=40),
    count=st.integers(1, 8),
    rounds=st.integers(0, 4),
)
def test_what_is_known_to_be_needed_is_needed(
    flat: list[bool], known: list[bool], count: int, rounds: int
) -> None:
    so_far = [is_flat and is_known for is_flat, is_known in zip(flat, known, strict=True)]
    needed, _ = drawn_in_rounds(so_far, count, rounds)
    at_the_end = drawn_in_rounds(flat, count, rounds)
    assert needed <= at_the_end[0]
    assert at_the_end == rounds_one_after_the_other(flat, count, rounds)


# --- the native sampler --------------------------------------------------------------------------


def make_sampler(policy: Policy, slots: int = 64) -> NativeSampler:
    return NativeSampler(
        SamplingWeights(policy), LetterTokenizer(), stop_token_ids=(2, 5), max_slots=slots
    )


def model_requests(count: int = 24) -> list[SampleRequest]:
    params = SamplingParams(max_new_tokens=20)
    return [
        SampleRequest(
            prompt=make_prompt(i // 4, 3 + i // 4), params=params, key=draw_seed(0, "test", i)
        )
        for i in range(count)
    ]


class ByHand:
    """Admits a few more requests each time it is asked while nothing is drawn."""

    def __init__(self, first: int, more: int, most: int) -> None:
        self.limit = first
        self._more = more
        self._most = most
        self._asked = 0

    def __call__(self, *, idle: bool) -> int:
        self._asked += 1
        if self._asked % 5 == 0 or (idle and self._asked > 1):
            self.limit = min(self._most, self.limit + self._more)
        return self.limit


@pytest.mark.parametrize("slots", [3, 8, 64])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen2"])
def test_requests_that_come_later_are_drawn_as_if_all_came_at_once(family: str, slots: int) -> None:
    policy = Policy(tiny_model(family, scale=1.0))
    at_once = dict(make_sampler(policy).sample(model_requests()))
    later = dict(make_sampler(policy, slots).sample_admitted(model_requests(), ByHand(8, 3, 24)))
    assert sorted(later) == list(range(24))
    for index, completion in at_once.items():
        assert later[index].token_ids == completion.token_ids
        assert later[index].logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_what_is_not_admitted_is_not_drawn() -> None:
    policy = Policy(tiny_model("qwen3"))
    found = dict(make_sampler(policy).sample_admitted(model_requests(), ByHand(8, 0, 24)))
    assert sorted(found) == list(range(8))


def test_a_sampler_that_is_closed_early_goes_on_with_the_next_call() -> None:
    policy = Policy(tiny_model("qwen3", scale=1.0))
    sampler = make_sampler(policy)
    expected = dict(make_sampler(policy).sample(model_requests()))
    drawing = sampler.sample_admitted(model_requests(), ByHand(24, 0, 24))
    next(drawing)
    drawing.close()
    again = dict(sampler.sample(model_requests()))
    assert {i: c.token_ids for i, c in again.items()} == {
        i: c.token_ids for i, c in expected.items()
    }
