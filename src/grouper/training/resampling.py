"""Dynamic sampling: groups without a signal are replaced while the others are still drawn.

What a step is made of does not depend on when its groups were finished. Candidates are the problems
of the stream in their order, and rounds say how many of them belong to the step (DAPO, arXiv
2503.14476, section 3.2): the first `count`, then one more for each flat one among them, in at most
`rounds` further rounds. So a candidate is known to belong to the step as soon as enough flat groups
are known, and its rollouts can begin while others are drawn. On a device where more rows cost
little, candidates that will probably be needed begin, too; those that are not needed are dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing

from grouper.grading import Grader
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import AdmittingSampler, Sampler, SampleRequest
from grouper.sampling.sample_and_grade import Drawn, draw_and_grade
from grouper.types import Completion, Grade

# (completions drawn, completions that are wanted by now)
Progress = Callable[[int, int], None]


def drawn_in_rounds(flat: Sequence[float], count: int, rounds: int) -> tuple[float, int]:
    """Return how many candidates belong to a step, and the rounds that replaced flat ones.

    A round draws as many candidates as flat ones were found before, so that the first n of them
    are drawn after `n = count + flat among the first n`.

    Args:
        flat: for each candidate, 1 if its group is flat and 0 if it is mixed; where that is not
            known yet, 0 for what is certain, or the probability for what is expected.
        count: mixed groups that are wanted.
        rounds: at most.

    >>> drawn_in_rounds([0, 1, 1, 0, 1, 0], count=3, rounds=5)
    (6.0, 2)
    >>> drawn_in_rounds([0, 1, 1, 0, 1, 0], count=3, rounds=1)
    (5.0, 1)
    """
    drawn: float = count
    for done in range(rounds):
        more = count + math.fsum(flat[: math.floor(drawn)])
        if more <= drawn:
            return drawn, done
        drawn = more
    return drawn, rounds


class Candidates:
    """The groups that a step may need, and what is known of them.

    Args:
        requests: of all candidates in order, `group_size` each.
        references: the reference answer of each request.
        group_size: completions of a group.
        count: mixed groups that are wanted.
        rounds: of replacement, at most.
        mixed_share: the share of groups that are mixed, as far as is known; candidates that are
            needed by that begin early. None: only those that are certainly needed.
    """

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        references: Sequence[str],
        *,
        group_size: int,
        count: int,
        rounds: int,
        mixed_share: float | None = None,
    ) -> None:
        self.requests = requests
        self.references = references
        self._group_size = group_size
        self._count = count
        self._rounds = rounds
        self._mixed_share = mixed_share
        self._completions: dict[int, Completion] = {}
        self._grades: dict[int, Future[Grade]] = {}
        candidates = len(requests) // group_size
        self._flat: list[bool | None] = [None] * candidates
        """Whether each group is flat; None: not known yet."""
        self._sizes = [0] * candidates
        """Completions of each group so far."""
        self.wait_seconds = 0.0
        """Spent waiting for grades while nothing was drawn."""
        self._ungraded: list[int] = []
        """Groups that are drawn, and wait for grades."""

    @property
    def drawn(self) -> int:
        """The number of completions so far."""
        return len(self._completions)

    def add(self, request: int, completion: Completion, grade: Future[Grade]) -> None:
        """Take the completion of a request, and the grade that will be there."""
        assert request not in self._completions, f"the sampler answered request {request} twice"
        self._completions[request] = completion
        self._grades[request] = grade
        candidate = request // self._group_size
        self._sizes[candidate] += 1
        if self._sizes[candidate] == self._group_size:
            self._ungraded.append(candidate)

    def needed(self) -> tuple[int, int]:
        """Return the candidates that belong to the step for certain, and the rounds so far."""
        self._look()
        flat = [0 if known is None else int(known) for known in self._flat]
        drawn, rounds = drawn_in_rounds(flat, self._count, self._rounds)
        return int(drawn), rounds

    def wanted(self) -> int:
        """Return the candidates to begin by now: those needed, and those expected to be."""
        needed, _ = self.needed()
        if self._mixed_share is None or self.complete():
            return needed
        known = [flat for flat in self._flat if flat is not None]
        # What is known before this step counts as much as one step.
        mixed = self._count * self._mixed_share + known.count(False)
        share = mixed / (self._count + len(known))
        flat = [1 - share if known is None else float(known) for known in self._flat]
        expected, _ = drawn_in_rounds(flat, self._count, self._rounds)
        return min(len(self._flat), max(needed, math.ceil(expected)))

    def admitted(self, *, idle: bool) -> int:
        """Return how many requests may have begun by now.

        Args:
            idle: nothing is drawn meanwhile: wait for grades until one may begin, or none will.
        """
        while idle and not self.complete():
            wanted = self.wanted() * self._group_size
            if wanted > self.drawn:
                return wanted
            started = time.perf_counter()
            self._group(self._ungraded[0])
            self.wait_seconds += time.perf_counter() - started
        return self.wanted() * self._group_size

    def complete(self) -> bool:
        """Tell whether it is known of every needed candidate whether it is flat."""
        needed, _ = self.needed()
        return None not in self._flat[:needed]

    def results(self) -> list[list[Drawn]]:
        """Return completions and grades of the candidates that belong to the step, in order."""
        needed, _ = self.needed()
        return [self._group(candidate) for candidate in range(needed)]

    def _group(self, candidate: int) -> list[Drawn]:
        """Return a whole group; waits for its grades."""
        first = candidate * self._group_size
        return [
            Drawn(self._completions[request], self._grades[request].result())
            for request in range(first, first + self._group_size)
        ]

    def _look(self) -> None:
        """Find out which groups are flat by now.

        Where nothing is drawn early, the grades of a whole group are waited for, which are a matter
        of milliseconds: what is drawn at the same time then never depends on how fast they were,
        and the log-probs of a repeated run are the same to the last bit.
        """
        still = []
        for candidate in self._ungraded:
            first = candidate * self._group_size
            requests = range(first, first + self._group_size)
            graded = all(self._grades[request].done() for request in requests)
            if self._mixed_share is None and not graded:
                started = time.perf_counter()
                self._group(candidate)
                self.wait_seconds += time.perf_counter() - started
                graded = True
            if graded:
                solved = sum(grade.correct for _, grade in self._group(candidate))
                self._flat[candidate] = solved in (0, self._group_size)
            else:
                still.append(candidate)
        self._ungraded = still


def draw_candidates(
    candidates: Candidates,
    *,
    sampler: Sampler,
    grader: Grader,
    processes: ProcessGroup,
    progress: Progress | None = None,
) -> float:
    """Draw candidates until those that belong to the step are known.

    Args:
        candidates: are filled.
        sampler: where it can admit requests while others are drawn, it does; others draw one batch
            after the other.
        grader: grades each completion as it comes in.
        processes: several share the requests of a batch.
        progress: called after each completion.

    Returns:
        The seconds spent on sampling, without the wait for grades.
    """
    if isinstance(sampler, AdmittingSampler) and processes.size == 1:
        return _draw_admitted(candidates, sampler, grader, progress)
    return _draw_batches(candidates, sampler, grader, processes, progress)


def _draw_admitted(
    candidates: Candidates,
    sampler: AdmittingSampler,
    grader: Grader,
    progress: Progress | None,
) -> float:
    started = time.perf_counter()
    drawing = sampler.sample_admitted(candidates.requests, candidates.admitted)
    with closing(drawing):
        for request, completion in drawing:
            grade = grader.submit(completion.text, candidates.references[request])
            candidates.add(request, completion, grade)
            if progress is not None:
                # Once all that are needed are drawn, others may have been begun in vain.
                wanted = max(candidates.drawn, candidates.admitted(idle=False))
                progress(candidates.drawn, wanted)
            if candidates.complete():
                break
    return time.perf_counter() - started - candidates.wait_seconds


def _draw_batches(
    candidates: Candidates,
    sampler: Sampler,
    grader: Grader,
    processes: ProcessGroup,
    progress: Progress | None,
) -> float:
    seconds = 0.0
    while not candidates.complete():
        first = candidates.drawn
        last = candidates.admitted(idle=True)
        shown = None
        if progress is not None:
            shown = _shifted(progress, first)
        drawn, of_batch = draw_and_grade(
            candidates.requests[first:last],
            candidates.references[first:last],
            sampler=sampler,
            grader=grader,
            processes=processes,
            progress=shown,
        )
        for request, (completion, grade) in enumerate(drawn, first):
            candidates.add(request, completion, _ready(grade))
        seconds += of_batch
    return seconds


def _shifted(progress: Progress, first: int) -> Progress:
    return lambda done, total: progress(first + done, first + total)


def _ready(grade: Grade) -> Future[Grade]:
    future = Future[Grade]()
    future.set_result(grade)
    return future
