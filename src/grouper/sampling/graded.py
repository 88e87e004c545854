"""Drawing and grading together: each completion is graded while the next ones are drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from grouper.models.process_group import ProcessGroup, SingleProcess, share_of
from grouper.sampling.base import Sampler, SampleRequest
from grouper.types import Completion, Grade, Verdict


class Grader(Protocol):
    """What drawing needs of a grader; grading goes on while the next one is sampled."""

    def submit(self, text: str, reference: str) -> Future[Grade]:
        """Grade a completion's text against a reference answer; never raises."""

    def submit_lenient(self, text: str, reference: str) -> Future[Grade]:
        """The same, with the answer taken from anywhere in the text, in any format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One request, answered and graded."""

    completion: Completion
    grade: Grade
    lenient: bool | None
    """Whether the maths is right regardless of format; None if not requested or not known."""


def draw_and_grade(
    requests: Sequence[SampleRequest],
    references: Sequence[str],
    *,
    sampler: Sampler,
    grader: Grader,
    lenient: bool = False,
    processes: ProcessGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Drawn], float]:
    """Answer every request once and grade every answer once, whatever the number of processes.

    Args:
        requests: what to draw.
        references: the reference answer of each request.
        sampler: draws the completions.
        grader: grades each one as it comes in.
        lenient: also grade what is not correct leniently.
        processes: the processes that split the requests among them.
        progress: called with (completions drawn, completions in all) of this process.

    Returns:
        One per request, in order, on every process; and the seconds this process spent drawing,
        without the wait for the last grades.
    """
    processes = processes or SingleProcess()
    mine = share_of(requests, processes.rank, processes.size)
    started = time.perf_counter()
    drawn: dict[int, tuple[Completion, Future[Grade]]] = {}
    for place, completion in sampler.sample([requests[i] for i in mine]):
        index = mine[place]
        assert index not in drawn, f"the sampler answered request {index} twice"
        drawn[index] = completion, grader.submit(completion.text, references[index])
        if progress is not None:
            progress(len(drawn), len(mine))
    seconds = time.perf_counter() - started
    assert len(drawn) == len(mine), f"the sampler answered {len(drawn)} of {len(mine)} requests"
    graded = [(drawn[i][0], drawn[i][1].result()) for i in mine]
    # What is right as asked, or cannot be graded, is not graded again.
    again = {
        index: grader.submit_lenient(completion.text, references[index])
        for index, (completion, grade) in zip(mine, graded, strict=True)
        if lenient and not grade.correct and grade.verdict is not Verdict.NOT_SCORED
    }

    def known(index: int, grade: Grade) -> bool | None:
        verdict = again[index].result() if index in again else grade
        scored = lenient and verdict.verdict is not Verdict.NOT_SCORED
        return verdict.correct if scored else None

    answered = [
        Drawn(completion=completion, grade=grade, lenient=known(index, grade))
        for index, (completion, grade) in zip(mine, graded, strict=True)
    ]
    return [one for part in processes.gather(answered) for one in part], seconds
