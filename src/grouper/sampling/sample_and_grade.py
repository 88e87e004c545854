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
    completions: dict[int, Completion] = {}
    grades: dict[int, Future[Grade]] = {}
    started = time.perf_counter()
    my_requests = [requests[index] for index in mine]
    for place, completion in sampler.sample(my_requests):
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


class _Pending(NamedTuple):
    """A completion that waits for a grade."""

    request: int
    """The index of its request."""
    completion: Completion
    future: Future[Grade]
    """The grade that it waits for: the strict one, then the lenient one."""
    strict: Grade | None = None
    """The strict grade, once it is there."""


def _is_due(queue: deque[_Pending], limit: int) -> bool:
    """Tell whether the first grade is ready, or has to be waited for since the queue is full."""
    if not queue:
        return False
    return len(queue) > limit or queue[0].future.done()


def needs_lenient_grade(grade: Grade) -> bool:
    """Tell whether a completion is graded in other formats as well, after this strict grade.

    If it is right, it is right in any; and a reference that cannot be read settles nothing.
    """
    return not grade.correct and grade.verdict is not Verdict.NOT_SCORED


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
    waiting: deque[_Pending] = deque()
    waiting_lenient: deque[_Pending] = deque()

    def graded(limit: int) -> Iterator[tuple[int, Completion, Grade, Grade]]:
        """Yield results that are ready, and wait for more until at most `limit` are queued."""
        while _is_due(waiting, limit):
            index, completion, future, _ = waiting.popleft()
            grade = future.result()
            if needs_lenient_grade(grade):
                reference = references[index]
                future = grader.submit(completion.text, reference, lenient=True)
            waiting_lenient.append(_Pending(index, completion, future, grade))
        while _is_due(waiting_lenient, limit):
            pending = waiting_lenient.popleft()
            assert pending.strict is not None
            lenient = pending.future.result()
            yield pending.request, pending.completion, pending.strict, lenient

    answered: set[int] = set()
    for index, completion in sampler.sample(requests):
        assert index not in answered, f"the sampler answered request {index} twice"
        answered.add(index)
        future = grader.submit(completion.text, references[index])
        waiting.append(_Pending(index, completion, future))
        yield from graded(_WAITING)
    count = len(answered)
    assert count == len(requests), f"the sampler answered {count} of {len(requests)} requests"
    yield from graded(0)
