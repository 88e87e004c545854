"""Evaluation against a scripted sampler and a fake grader."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
from tiny_models import ScriptedSampler

from grouper.errors import DataError
from grouper.evaluation.evaluate import Measurement, measure
from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.statistics import wilson_interval
from grouper.sampling.base import SampleRequest
from grouper.types import Completion, Grade, Problem, Prompt, SamplingParams, Verdict


class FakeGrader:
    """`=<n>` is an answer; some words stand for what may go wrong."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def submit(self, text: str, reference: str, *, lenient: bool = False) -> Future[Grade]:
        """`~n` is a right answer in the wrong place."""
        if lenient:
            return self._grade(text.replace("~", "="), reference)
        self.calls.append((text, reference))
        return self._grade(text, reference)

    def _grade(self, text: str, reference: str) -> Future[Grade]:
        special = {"slow": Verdict.TIMEOUT, "boom": Verdict.CRASH, "odd": Verdict.UNPARSEABLE}
        if reference == "?" and "=" in text:
            verdict = Verdict.NOT_SCORED
        elif text in special:
            verdict = special[text]
        elif "=" not in text:
            verdict = Verdict.NO_ANSWER
        else:
            same = text.split("=")[1] == reference
            verdict = Verdict.CORRECT if same else Verdict.INCORRECT
        future: Future[Grade] = Future()
        found = text.split("=")[1] if "=" in text else None
        future.set_result(Grade(verdict=verdict, extracted=found, stage="text", reason="fake"))
        return future


class Shuffled:
    """The same completions in another order, as a real engine finishes them."""

    def __init__(self, inner: ScriptedSampler) -> None:
        self.inner = inner
        self.requests: list[SampleRequest] = []

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        self.requests = list(requests)
        done = list(self.inner.sample(requests))
        random.Random(3).shuffle(done)
        yield from done


def make_items(answers: Sequence[str]) -> list[tuple[Problem, Prompt]]:
    return [
        (
            Problem(
                id=f"p/{i}",
                question="q?",
                answer=answer,
                source="p",
                subject="algebra" if i % 2 else "counting",
                level=None,
            ),
            Prompt(problem_id=f"p/{i}", text=f"Q{i}", token_ids=(1, i)),
        )
        for i, answer in enumerate(answers)
    ]


def run(texts: Sequence[str], answers: Sequence[str], *, samples: int = 1) -> EvaluationResult:
    sampler = ScriptedSampler(lambda request, index: texts[index])
    return measure(
        Measurement(
            name="base",
            phase="base",
            step=0,
            split="test",
            items=make_items(answers),
            params=SamplingParams(max_new_tokens=5),
            samples=samples,
            seed=7,
        ),
        sampler,
        FakeGrader(),
    )


def test_every_outcome_is_counted_once_and_apart():
    texts = ["=1", "=9", "no", "nononono", "=1=long", "slow", "boom", "odd", "=1"]
    result = run(texts, ["1", "1", "1", "1", "1", "1", "1", "1", "?"])
    # "=1=long" is cut to "=1=lo" and still has an answer: correct, not truncated.
    assert result.split_counts == {
        "correct": 2,
        "wrong": 3,
        "no_answer": 1,
        "truncated": 1,
        "timeout": 1,
        "crash": 1,
        "not_scored": 0,
    }
    assert result.cut_off == 2 / 9
    # Neither an unreadable reference nor the grader's own failures change what is measured.
    assert result.accuracy == 2 / 9
    assert result.interval == wilson_interval(2, 9)
    assert result.text_alone == (1, 0)


def test_lenient_accuracy_tells_format_from_math():
    result = run(["=1", "=9", "~1", "~9", "no", "slow"], ["1"] * 6)
    assert [item.lenient for item in result.items] == [True, False, True, False, False, False]
    assert (result.accuracy, result.lenient.mean) == (1 / 6, 2 / 6)
    # What is right as asked is right, and is not graded twice; nor is what nobody can read.
    result = run(["=1", "=1"], ["1", "?"])
    assert [item.lenient for item in result.items] == [True, False]
    assert result.lenient.mean == 0.5
    assert replace(result.items[0], lenient=None).correct
    unmeasured = replace(result, items=tuple(replace(i, lenient=None) for i in result.items))
    assert unmeasured.lenient is None


def test_an_unreadable_reference_is_graded_by_text_alone_and_counted_apart():
    result = run(["no", "=?", "=1", "=1", "=4", "=$?$"], ["?", "1", "?"], samples=2)
    assert result.scores == {"p/0": 0.5, "p/1": 1.0, "p/2": 0.5}
    assert result.overall.problems == 3
    assert [item.verdict.value for item in result.items if item.stage == "text alone"] == [
        "correct",
        "incorrect",
        "correct",
    ]
    assert result.text_alone == (2, 2)
    assert result.lenient.mean == result.accuracy
    assert run(["=1"], ["1"]).text_alone == (0, 0)


def test_items_of_older_evaluations_that_were_not_scored_stay_out():
    result = run(["=1", "=1"], ["1", "2"])
    old = [replace(item, verdict=Verdict.NOT_SCORED, lenient=None) for item in result.items]
    assert replace(result, items=(result.items[0], old[1])).scores == {"p/0": 1.0}
    nothing = replace(result, items=tuple(old))
    assert math.isnan(nothing.accuracy)
    assert nothing.pass_at_k == {}


def test_samples_are_averaged_by_problem():
    texts = ["=1", "=0", "=0", "=0", "=2", "=2", "=2", "=2"]
    result = run(texts, ["1", "2"], samples=4)
    assert result.scores == {"p/0": 0.25, "p/1": 1.0}
    assert result.accuracy == 0.625
    assert result.pass_at_k == {1: 0.625, 2: 0.75, 4: 1.0}
    assert [i.sample for i in result.items] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_by_subject_and_level():
    result = run(["=1", "=1", "=1", "=0"], ["1", "1", "1", "1"])
    assert {k: (v.mean, v.problems) for k, v in result.by_subject.items()} == {
        "algebra": (0.5, 2),
        "counting": (1.0, 2),
    }
    assert result.by_subject["algebra"].interval == wilson_interval(1, 2)
    assert result.by_level == {}


@pytest.mark.parametrize("problems", [1, 2, 5])
@pytest.mark.parametrize("samples", [1, 3])
def test_each_item_exactly_once_in_any_finishing_order(problems, samples):
    texts = [f"={i}" for i in range(problems * samples)]
    sampler = Shuffled(ScriptedSampler(lambda request, index: texts[index]))
    grader = FakeGrader()
    seen: list[tuple[int, int]] = []
    result = measure(
        Measurement(
            name="sft",
            phase="sft",
            step=4,
            split="test",
            items=make_items(["0"] * problems),
            params=SamplingParams(),
            samples=samples,
            seed=0,
        ),
        sampler,
        grader,
        progress=lambda done, total: seen.append((done, total)),
    )
    total = problems * samples
    assert [item.completion for item in result.items] == texts
    assert len(grader.calls) == total
    assert seen == [(i + 1, total) for i in range(total)]


def test_draws_depend_on_the_seed_problem_and_sample_alone():
    def keys(name: str, seed: int, answers: Sequence[str]) -> list[int]:
        sampler = Shuffled(ScriptedSampler(lambda request, index: "=1"))
        measure(
            Measurement(
                name=name,
                phase=name,
                step=len(name),
                split="test",
                items=make_items(answers),
                params=SamplingParams(),
                samples=2,
                seed=seed,
            ),
            sampler,
            FakeGrader(),
        )
        return [request.key for request in sampler.requests]

    base = keys("base", 0, ["1", "1"])
    assert keys("grpo", 0, ["1", "1"]) == base
    assert keys("grpo", 0, ["1"]) == base[:2]
    assert keys("base", 1, ["1", "1"]) != base
    assert len(set(base)) == 4


def test_the_card_says_how_to_measure_again():
    result = run(["=1", "=0"], ["1", "1"])
    assert result.card["prompt_of_item_0"] == "Q0"
    assert result.card["sampling"]["max_new_tokens"] == 5
    assert (result.card["grader"], result.card["n"], result.card["k"], result.card["seed"]) == (
        "FakeGrader",
        2,
        1,
        7,
    )


def test_phase_and_split_are_those_it_is_given():
    result = measure(
        Measurement(
            name="mine",
            phase="grpo",
            step=3,
            split="validation",
            items=make_items(["1"]),
            params=SamplingParams(max_new_tokens=5),
            samples=1,
            seed=0,
        ),
        ScriptedSampler(lambda request, index: "=1"),
        FakeGrader(),
    )
    assert (result.name, result.phase, result.split) == ("mine", "grpo", "validation")


def test_a_problem_listed_twice_is_our_mistake_and_found_before_sampling():
    sampler = Shuffled(ScriptedSampler(lambda request, index: "=1"))
    items = make_items(["1", "1"])
    with pytest.raises(AssertionError, match="loading refuses repeated ids"):
        measure(
            Measurement(
                name="base",
                phase="base",
                step=0,
                split="test",
                items=[*items, items[0]],
                params=SamplingParams(),
                samples=1,
                seed=0,
            ),
            sampler,
            FakeGrader(),
        )
    assert sampler.requests == []


def test_no_problems_is_an_error():
    with pytest.raises(DataError, match="no problems"):
        run([], [])


def test_a_result_refuses_the_same_item_twice():
    result = run(["=1"], ["1"])
    with pytest.raises(ValueError, match="twice"):
        replace(result, items=result.items * 2)


class Forgetful:
    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        yield from list(ScriptedSampler(lambda r, i: "=1").sample(requests))[:-1]


def test_a_sampler_that_loses_a_request_is_our_mistake():
    with pytest.raises(AssertionError, match="1 of 2 requests"):
        measure(
            Measurement(
                name="base",
                phase="base",
                step=0,
                split="test",
                items=make_items(["1", "1"]),
                params=SamplingParams(),
                samples=1,
                seed=0,
            ),
            Forgetful(),
            FakeGrader(),
        )
