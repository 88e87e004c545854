"""Dynamic sampling without waiting: the groups of rounds, however they are drawn."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import LetterTokenizer, make_prompt, tiny_model

from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import Admission, PartialCompletion, SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.training.begun import BegunSample
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


def partial_of(request: SampleRequest) -> PartialCompletion:
    """The same with one more token."""
    tokens = (*range(request.count_before), request.count_before)
    zeros = (0.0,) * len(tokens)
    return PartialCompletion(token_ids=tokens, logprobs=zeros, entropies=zeros, policy_version=0)


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
        self.unfinished: dict[int, PartialCompletion] = {}

    def sample_admitted(
        self, requests: Sequence[SampleRequest], admitted: Admission
    ) -> Generator[tuple[int, Completion]]:
        live: list[int] = []
        begun = 0
        while (limit := admitted(idle=not live)) is not None:
            while begun < limit and len(live) < self._slots:
                live.append(begun)
                begun += 1
            if not live:
                break
            place = live.pop(self._order.randrange(len(live)))
            yield place, self.answer(requests[place])
        self.unfinished = {place: partial_of(requests[place]) for place in live}


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
    assert all(done <= total for done, total in shown)
    if mixed_share is None:
        assert [done for done, _ in shown] == list(range(1, len(shown) + 1))
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


# --- one step ahead ------------------------------------------------------------------------------


def steps_ahead(
    kinds: Sequence[str], steps: int, slots: int, order: random.Random, **wanted: int
) -> list[list[int]]:
    """Draw steps one after the other, each with what the one before has begun.

    Returns:
        The keys of the requests of each step.
    """
    fresh = requests_of(kinds)
    most = wanted["count"] * (1 + wanted["rounds"])
    start = 0
    begun: list[list[BegunSample]] = []
    found = []
    for step in range(steps):
        ahead = wanted["count"] if step + 1 < steps else 0
        requests = fresh[start : start + GROUP * (most + ahead)]
        samples = [sample for group in begun for sample in group]
        assert [sample.key for sample in samples] == [
            request.key for request in requests[: len(samples)]
        ]
        requests = [
            replace(request, partial=sample.partial)
            for request, sample in zip(requests, samples, strict=False)
        ] + requests[len(samples) :]
        candidates = Candidates(
            requests, [""] * len(requests), group_size=GROUP, ahead=ahead, **wanted
        )
        grader: Any = SlowGrader(order)
        for number, sample in enumerate(samples):
            assert sample.completion is None or sample.partial is None
            if sample.completion is not None:
                grade = grader.submit(sample.completion.text, "")
                candidates.add(number, sample.completion, grade)
        sampler: Any = SlotSampler(kinds, order, slots)
        draw_candidates(candidates, sampler=sampler, grader=grader, processes=ProcessGroup())
        needed, _ = candidates.needed()
        results = [drawn.completion.text for group in candidates.results() for drawn in group]
        keys = [int(text.split()[0]) for text in results]
        assert len(keys) == needed * GROUP
        found.append(keys)
        begun = candidates.begun()
        assert len(begun) <= ahead
        start += needed * GROUP
    return found


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 4),
    rounds=st.integers(0, 3),
    slots=st.integers(1, 30),
    kinds=st.lists(st.sampled_from(["mixed", "right", "wrong"]), min_size=80, max_size=80),
)
def test_one_step_ahead_the_steps_are_the_same(
    seed: int, count: int, rounds: int, slots: int, kinds: list[str]
) -> None:
    """Whatever has begun early, each group belongs to the step that it would have belonged to."""
    order = random.Random(seed)
    wanted = {"count": count, "rounds": rounds}
    found = steps_ahead(kinds, 4, slots, order, **wanted)
    start = 0
    for keys in found:
        flat = [kind != "mixed" for kind in kinds[start : start + count * (1 + rounds)]]
        needed, _ = rounds_one_after_the_other(flat, count, rounds)
        assert keys == list(range(GROUP * start, GROUP * (start + needed)))
        start += needed


def test_free_slots_are_filled_with_the_next_step() -> None:
    kinds = ["mixed"] * 80
    sampler = SlotSampler(kinds, random.Random(0), 12)
    requests = requests_of(kinds[:8])
    candidates = Candidates(requests, [""] * 24, group_size=GROUP, count=4, rounds=0, ahead=4)
    grader: Any = SlowGrader(random.Random(0))
    draw_candidates(candidates, sampler=sampler, grader=grader, processes=ProcessGroup())
    assert sampler.unfinished, "its slots are in use until the step has all it needs"
    begun = [sample for group in candidates.begun() for sample in group]
    completions = [sample.completion for sample in begun if sample.completion is not None]
    partials = [sample.partial for sample in begun if sample.partial is not None]
    assert len(completions) + len(partials) == 12
    assert partials == list(sampler.unfinished.values())


def ended_after(asked: int) -> Any:
    """Admits everything, and ends the sampling when it is asked so many times."""
    calls = itertools.count()

    def admitted(*, idle: bool) -> int | None:
        del idle
        return 24 if next(calls) < asked else None

    return admitted


@pytest.mark.parametrize("params", [{}, {"stop": ("ab", "x")}, {"min_new_tokens": 9}])
@pytest.mark.parametrize(("slots", "asked"), [(64, 2), (64, 8), (7, 16)])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen2"])
def test_what_was_unfinished_goes_on_as_if_it_had_never_stopped(
    family: str, slots: int, asked: int, params: dict[str, Any]
) -> None:
    policy = Policy(tiny_model(family, scale=1.0))
    requests = [
        replace(request, params=replace(request.params, **params)) for request in model_requests()
    ]
    whole = dict(make_sampler(policy).sample(requests))
    sampler = make_sampler(policy, slots)
    first = dict(sampler.sample_admitted(requests, ended_after(asked)))
    assert sampler.unfinished
    assert not first.keys() & sampler.unfinished.keys()
    rest = [index for index in range(24) if index not in first]
    policy.version = 5
    continued = [replace(requests[i], partial=sampler.unfinished.get(i)) for i in rest]
    second = dict(make_sampler(policy).sample(continued))
    assert not sampler.unfinished.keys() - set(rest)
    for place, completion in second.items():
        index = rest[place]
        assert completion.token_ids == whole[index].token_ids
        assert completion.text == whole[index].text
        assert completion.finish_reason is whole[index].finish_reason
        assert completion.logprobs == pytest.approx(whole[index].logprobs, abs=1e-5)
        assert completion.entropies == pytest.approx(whole[index].entropies, abs=1e-5)
        partial = sampler.unfinished.get(index)
        assert completion.policy_version == (5 if partial is None else 0)
        if partial is not None:
            count = len(partial.token_ids)
            assert completion.logprobs[:count] == partial.logprobs


@torch.no_grad()
def test_new_weights_go_on_with_what_old_ones_have_written() -> None:
    """The log-probs of each part are those of its own weights, over the whole text before it."""
    policy = Policy(tiny_model("qwen3", scale=1.0))
    old = copy.deepcopy(policy)
    requests = model_requests()
    sampler = make_sampler(policy)
    dict(sampler.sample_admitted(requests, ended_after(6)))
    for parameter in policy.parameters():
        parameter.mul_(1.05)
    index, partial = max(sampler.unfinished.items(), key=lambda item: len(item[1].token_ids))
    request = replace(requests[index], partial=partial)
    (found,) = dict(make_sampler(policy).sample([request])).values()
    count = len(partial.token_ids)
    assert found.token_ids[:count] == partial.token_ids
    assert len(found.token_ids) > count
    for weights, part in ((old, slice(0, count)), (policy, slice(count, None))):
        ids = torch.tensor([[*request.prompt.token_ids, *found.token_ids]])
        logits = weights.model(ids).logits[0, len(request.prompt.token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        assert found.logprobs[part] == pytest.approx(expected[part].tolist(), abs=1e-4)
