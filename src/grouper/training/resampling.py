"""Dynamic sampling: groups without a signal are replaced while the others are still drawn.

What a step is made of does not depend on when its groups were finished. Candidates are the problems
of the stream in their order, and rounds say how many of them belong to the step (DAPO, arXiv
2503.14476, section 3.2): the first `count`, then one more for each flat one among them, in at most
`rounds` further rounds. So a candidate is known to belong to the step as soon as enough flat groups
are known, and its rollouts can begin while others are drawn. On a device where more rows cost
little, candidates that will probably be needed begin, too; those that are not needed are dropped.

A sampler that is to be one step ahead begins the next candidates wherever a slot becomes free. The
problems of the next step are the ones after those of this step, so whatever has begun is needed:
here if a flat group is replaced by it, or else in the next step, which goes on with it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing

from grouper.grading import Grader
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import AdmittingSampler, PartialCompletion, Sampler, SampleRequest
from grouper.sampling.sample_and_grade import Drawn, draw_and_grade
from grouper.training.begun import BegunSample
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
        ahead: candidates that may begin early after those that are needed, for the next step.
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
        ahead: int = 0,
    ) -> None:
        self.requests = requests
        self.references = references
        self._group_size = group_size
        self._count = count
        self._rounds = rounds
        self._mixed_share = mixed_share
        self._ahead = ahead
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
        self._partial: Mapping[int, PartialCompletion] = {}
        """What has been sampled of requests that have no completion, when the drawing ended."""

    def unanswered(self) -> list[int]:
        """Return the requests that have no completion, in order."""
        return [number for number in range(len(self.requests)) if number not in self._completions]

    def progress(self) -> tuple[int, int]:
        """Return the completions so far of the candidates that are wanted, and those in all."""
        wanted = self.wanted()
        return sum(self._sizes[:wanted]), wanted * self._group_size

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

    def admitted(self, *, idle: bool) -> int | None:
        """Return how many requests may have begun by now; None: the step has all it needs.

        Args:
            idle: nothing is drawn meanwhile: wait for grades until one may begin, or none will.
        """
        while idle and not self.complete():
            wanted = self.wanted()
            if min(self._sizes[:wanted]) < self._group_size:
                if self._ahead:
                    return max(wanted * self._group_size, self._filling_slots(wanted))
                return wanted * self._group_size
            started = time.perf_counter()
            self._group(self._ungraded[0])
            self.wait_seconds += time.perf_counter() - started
        if self.complete():
            return None
        return min(len(self.requests), (self.wanted() + self._ahead) * self._group_size)

    def _filling_slots(self, wanted: int) -> int:
        """Return how many requests may begin at first.

        They are as many as in a step that nothing has begun of, since the sampler makes slots for
        the first ones: of a step that has begun in the one before, few may be left.

        Args:
            wanted: candidates of the step.
        """
        limit = (wanted + self._ahead) * self._group_size
        open_requests = [number for number in self.unanswered() if number < limit]
        first_ones = open_requests[: self._count * self._group_size]
        return first_ones[-1] + 1

    def complete(self) -> bool:
        """Tell whether all is known of what belongs to the step."""
        if self._rounds == 0:
            # Nothing is replaced, whatever the grades are.
            return min(self._sizes[: self._count]) == self._group_size
        needed, _ = self.needed()
        return None not in self._flat[:needed]

    def results(self) -> list[list[Drawn]]:
        """Return completions and grades of the candidates that belong to the step, in order."""
        needed, _ = self.needed()
        return [self._group(candidate) for candidate in range(needed)]

    def end(self, unfinished: Mapping[int, PartialCompletion]) -> None:
        """Take what was being drawn, by request, when the step had all it needed."""
        self._partial = unfinished

    def begun(self) -> list[list[BegunSample]]:
        """Return the candidates that have begun for the next step: the state of each request."""
        needed, _ = self.needed()
        numbers = [*self._completions, *self._partial]
        last = max(numbers) // self._group_size
        candidates = range(needed, last + 1 if self._ahead else needed)
        return [self._begun_group(candidate) for candidate in candidates]

    def _begun_group(self, candidate: int) -> list[BegunSample]:
        first = candidate * self._group_size
        samples = []
        for number in range(first, first + self._group_size):
            request = self.requests[number]
            sample = BegunSample(
                key=request.key,
                completion=self._completions.get(number),
                partial=self._partial.get(number, request.partial),
            )
            samples.append(sample)
        return samples

    def _group(self, candidate: int) -> list[Drawn]:
        """Return a whole group; waits for its grades."""
        first = candidate * self._group_size
        return [
            Drawn(self._completions[request], self._grades[request].result())
            for request in range(first, first + self._group_size)
        ]

    def _look(self) -> None:
        """Find out which groups are flat by now.

        Where flat groups are replaced and nothing is drawn early, the grades of a whole group are
        waited for, which are a matter of milliseconds: what is drawn at the same time then never
        depends on how fast they were, and the log-probs of a repeated run are the same to the last
        bit.
        """
        waits = self._rounds > 0 and self._mixed_share is None
        still = []
        for candidate in self._ungraded:
            first = candidate * self._group_size
            requests = range(first, first + self._group_size)
            graded = all(self._grades[request].done() for request in requests)
            if waits and not graded:
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
    numbers = candidates.unanswered()
    requests = [candidates.requests[number] for number in numbers]

    def admitted(*, idle: bool) -> int | None:
        limit = candidates.admitted(idle=idle)
        return None if limit is None else bisect_left(numbers, limit)

    drawing = sampler.sample_admitted(requests, admitted)
    with closing(drawing):
        for place, completion in drawing:
            number = numbers[place]
            grade = grader.submit(completion.text, candidates.references[number])
            candidates.add(number, completion, grade)
            if progress is not None:
                progress(*candidates.progress())
    candidates.end({numbers[place]: partial for place, partial in sampler.unfinished.items()})
    return time.perf_counter() - started - candidates.wait_seconds


def _draw_batches(
    candidates: Candidates,
    sampler: Sampler,
    grader: Grader,
    processes: ProcessGroup,
    progress: Progress | None,
) -> float:
    seconds = 0.0
    while True:
        limit = candidates.admitted(idle=True)
        if limit is None:
            return seconds
        numbers = [number for number in candidates.unanswered() if number < limit]
        shown = None
        if progress is not None:
            shown = _shifted(progress, limit - len(numbers))
        drawn, of_batch = draw_and_grade(
            [candidates.requests[number] for number in numbers],
            [candidates.references[number] for number in numbers],
            sampler=sampler,
            grader=grader,
            processes=processes,
            progress=shown,
        )
        for number, (completion, grade) in zip(numbers, drawn, strict=True):
            candidates.add(number, completion, _ready(grade))
        seconds += of_batch


def _shifted(progress: Progress, before: int) -> Progress:
    return lambda done, total: progress(before + done, before + total)


def _ready(grade: Grade) -> Future[Grade]:
    future = Future[Grade]()
    future.set_result(grade)
    return future
