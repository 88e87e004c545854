"""Drawing and grading together: each completion is graded while the next ones are drawn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from grouper.grading import Grader
from grouper.models.process_group import ProcessGroup, share_of
from grouper.sampling.base import Sampler, SampleRequest
from grouper.types import Completion, Grade, Verdict


class Drawn(NamedTuple):
    """One request, answered and graded."""

    completion: Completion
    grade: Grade


def draw_and_grade(
    requests: Sequence[SampleRequest],
    references: Sequence[str],
    *,
    sampler: Sampler,
    grader: Grader,
    processes: ProcessGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Drawn], float]:
    """Answer every request once and grade every answer once, whatever the number of processes.

    Args:
        requests: what to draw.
        references: the reference answer of each request.
        sampler: draws the completions.
        grader: grades each one as it comes in.
        processes: the processes that split the requests among them.
        progress: called with (completions drawn, completions in all) of this process.

    Returns:
        One per request, in order, on every process; and the seconds this process spent drawing,
        without the wait for the last grades.
    """
    processes = processes or ProcessGroup()
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
    answered = [Drawn(completion=drawn[i][0], grade=drawn[i][1].result()) for i in mine]
    return [one for part in processes.gather(answered) for one in part], seconds


# Completions whose grades are waited for at one time: a slow grader holds up drawing, not memory.
_WAITING = 1_000


def grade_as_drawn(
    requests: Sequence[SampleRequest],
    references: Sequence[str],
    *,
    sampler: Sampler,
    grader: Grader,
) -> Iterator[tuple[int, Completion, Grade, Grade]]:
    """Answer every request, and give each answer away as soon as it is graded.

    Args:
        requests: what to draw.
        references: the reference answer of each request.
        sampler: draws the completions.
        grader: grades each one as it comes in.

    Yields:
        The index of the request, its completion, its grade, and its lenient grade: the same one
        where that is correct, or the reference cannot be read.
    """
    waiting: deque[tuple[int, Completion, Future[Grade]]] = deque()
    again: deque[tuple[int, Completion, Grade, Future[Grade]]] = deque()

    def graded(most: int) -> Iterator[tuple[int, Completion, Grade, Grade]]:
        while waiting and (len(waiting) > most or waiting[0][2].done()):
            index, completion, future = waiting.popleft()
            grade = future.result()
            if not grade.correct and grade.verdict is not Verdict.NOT_SCORED:
                future = grader.submit(completion.text, references[index], lenient=True)
            again.append((index, completion, grade, future))
        while again and (len(again) > most or again[0][3].done()):
            index, completion, grade, future = again.popleft()
            yield index, completion, grade, future.result()

    seen: set[int] = set()
    for index, completion in sampler.sample(requests):
        assert index not in seen, f"the sampler answered request {index} twice"
        seen.add(index)
        waiting.append((index, completion, grader.submit(completion.text, references[index])))
        yield from graded(_WAITING)
    assert len(seen) == len(requests), (
        f"the sampler answered {len(seen)} of {len(requests)} requests"
    )
    yield from graded(0)
