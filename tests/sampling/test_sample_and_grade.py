"""Drawing and grading together: once each, in order, while sampling goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
from tiny_models import ScriptedSampler, make_prompt

from grouper.sampling.base import SampleRequest
from grouper.sampling.sample_and_grade import draw_and_grade, grade_as_drawn
from grouper.types import Completion, Grade, SamplingParams, Verdict


class Grader:
    """Correct where the text is the reference; leniently also where it holds it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def _told(self, verdict: Verdict) -> Future[Grade]:
        future: Future[Grade] = Future()
        future.set_result(Grade(verdict=verdict, extracted=None, stage=None, reason=""))
        return future

    def submit(self, text: str, reference: str, *, lenient: bool = False) -> Future[Grade]:
        self.asked.append(("lenient" if lenient else "strict", text))
        if lenient:
            return self._told(Verdict.CORRECT if reference in text else Verdict.INCORRECT)
        if reference == "unreadable":
            return self._told(Verdict.NOT_SCORED)
        return self._told(Verdict.CORRECT if text == reference else Verdict.INCORRECT)


def requests(count: int) -> list[SampleRequest]:
    params = SamplingParams(max_new_tokens=64)
    return [SampleRequest(prompt=make_prompt(i), params=params, key=i) for i in range(count)]


class Backwards(ScriptedSampler):
    """Finishes the last request first."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        yield from reversed(list(super().sample(requests)))


def test_answers_come_in_the_order_of_the_requests() -> None:
    grader = Grader()
    seen: list[tuple[int, int]] = []
    drawn, seconds = draw_and_grade(
        requests(3),
        ["0", "x", "2"],
        sampler=Backwards(lambda request, _: str(request.key)),
        grader=grader,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [one.completion.text for one in drawn] == ["0", "1", "2"]
    assert [one.grade.correct for one in drawn] == [True, False, True]
    assert [text for _, text in grader.asked] == ["2", "1", "0"]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert seconds >= 0


def test_only_what_is_wrong_as_asked_is_graded_leniently() -> None:
    grader = Grader()
    drawn = grade_as_drawn(
        requests(4),
        ["0", "1", "9", "unreadable"],
        sampler=Backwards(lambda request, _: ["0", "so 1", "8", "7"][request.key]),
        grader=grader,
    )
    found = {index: (grade.verdict, lenient.verdict) for index, _, grade, lenient in drawn}
    assert {index: strict is Verdict.CORRECT for index, (strict, _) in found.items()} == {
        3: False,
        2: False,
        1: False,
        0: True,
    }
    assert [found[index][1] for index in range(4)] == [
        Verdict.CORRECT,
        Verdict.CORRECT,
        Verdict.INCORRECT,
        Verdict.NOT_SCORED,
    ]
    assert [text for kind, text in grader.asked if kind == "lenient"] == ["8", "so 1"]


def test_a_sampler_that_forgets_a_request_is_found_out() -> None:
    class Forgetful(ScriptedSampler):
        def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
            yield from list(super().sample(requests))[1:]

    with pytest.raises(AssertionError, match="2 of 3"):
        draw_and_grade(requests(3), ["0"] * 3, sampler=Forgetful(lambda *_: "0"), grader=Grader())
    with pytest.raises(AssertionError, match="2 of 3"):
        list(
            grade_as_drawn(
                requests(3), ["0"] * 3, sampler=Forgetful(lambda *_: "0"), grader=Grader()
            )
        )
