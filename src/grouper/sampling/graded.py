"""Sampling and grading together: completions are graded while the next ones are sampled."""

from __future__ import annotations

import itertools
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
    """The completion of one request and its grade."""

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
    """Sample one completion per request and grade it once, whatever the number of processes.

    Args:
        requests: the completions to sample.
        references: the reference answer of each request.
        sampler: samples the completions.
        grader: grades each one as it comes in.
        processes: the processes that split the requests among them.
        progress: called with (completions sampled, completions in all) of this process.

    Returns:
        One result per request, in order, on every process; and the seconds this process spent
        sampling, without the wait for the last grades.
    """
    processes = processes or ProcessGroup()
    mine = share_of(requests, processes.rank, processes.size)
    started = time.perf_counter()
    completions: dict[int, Completion] = {}
    grades: dict[int, Future[Grade]] = {}
    for place, completion in sampler.sample([requests[index] for index in mine]):
        index = mine[place]
        assert index not in completions, f"the sampler answered request {index} twice"
        completions[index] = completion
        grades[index] = grader.submit(completion.text, references[index])
        if progress is not None:
            progress(len(completions), len(mine))
    seconds = time.perf_counter() - started
    count = len(completions)
    assert count == len(mine), f"the sampler answered {count} of {len(mine)} requests"
    results = []
    for index in mine:
        grade = grades[index].result()
        results.append(Drawn(completions[index], grade))
    shares = processes.gather(results)
    return list(itertools.chain.from_iterable(shares)), seconds


# Completions that wait for a grade at one time: a slow grader slows sampling down, and the memory
# for completions stays bounded.
_WAITING = 1_000


def grade_as_drawn(
    requests: Sequence[SampleRequest],
    references: Sequence[str],
    *,
    sampler: Sampler,
    grader: Grader,
) -> Iterator[tuple[int, Completion, Grade, Grade]]:
    """Sample one completion per request, and yield each as soon as it is graded.

    Args:
        requests: the completions to sample.
        references: the reference answer of each request.
        sampler: samples the completions.
        grader: grades each one as it comes in.

    Yields:
        The index of the request, its completion, its grade, and its lenient grade. The lenient
        grade is the same one if that is correct, or if the reference cannot be read.
    """
    # Two queues in the order of sampling: for the first grade, and for the lenient one after it.
    waiting: deque[tuple[int, Completion, Future[Grade]]] = deque()
    waiting_lenient: deque[tuple[int, Completion, Grade, Future[Grade]]] = deque()

    def graded(limit: int) -> Iterator[tuple[int, Completion, Grade, Grade]]:
        """Yield results that are ready, and wait for more until at most `limit` are queued."""
        while waiting and (len(waiting) > limit or waiting[0][2].done()):
            index, completion, future = waiting.popleft()
            grade = future.result()
            if not grade.correct and grade.verdict is not Verdict.NOT_SCORED:
                future = grader.submit(completion.text, references[index], lenient=True)
            waiting_lenient.append((index, completion, grade, future))
        while waiting_lenient and (len(waiting_lenient) > limit or waiting_lenient[0][3].done()):
            index, completion, grade, future = waiting_lenient.popleft()
            yield index, completion, grade, future.result()

    answered: set[int] = set()
    for index, completion in sampler.sample(requests):
        assert index not in answered, f"the sampler answered request {index} twice"
        answered.add(index)
        future = grader.submit(completion.text, references[index])
        waiting.append((index, completion, future))
        yield from graded(_WAITING)
    count = len(answered)
    assert count == len(requests), f"the sampler answered {count} of {len(requests)} requests"
    yield from graded(0)
