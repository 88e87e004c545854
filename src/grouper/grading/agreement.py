"""Our verdicts beside Math-Verify's own, pair by pair: where they differ, somebody is wrong.

As a program (`python -P -m grouper.grading.agreement PARENT_PID MEMORY_MB`) it is a worker that
asks Math-Verify alone, behind the same hard deadline as our own workers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grouper.config.schema import GradingConfig
from grouper.grading.equivalence import Equivalence
from grouper.grading.pool import Grader, WorkerPool
from grouper.types import AnswerContract, Grade, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One completion, judged twice."""

    reference: str
    ours: Grade
    theirs: Verdict
    """`CORRECT`, `INCORRECT`, `TIMEOUT`, `CRASH`, or `UNPARSEABLE` where it raised."""
    why: str
    """What Math-Verify read, or why it has no verdict."""

    @property
    def agree(self) -> bool:
        return self.ours.correct == (self.theirs is Verdict.CORRECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """All pairs that both could be asked about, and how many had no answer to compare."""

    compared: tuple[Compared, ...]
    left_out: int
    """Completions without an answer, or with a reference nobody can read."""

    @property
    def disagreements(self) -> tuple[Compared, ...]:
        return tuple(pair for pair in self.compared if not pair.agree)

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """(our verdict, theirs) -> how many, the most frequent first."""
        pairs = Counter((pair.ours.verdict.value, pair.theirs.value) for pair in self.compared)
        return dict(pairs.most_common())


def compare_with_math_verify(
    texts: Sequence[str],
    references: Sequence[str],
    contract: AnswerContract,
    settings: GradingConfig,
) -> Agreement:
    """Grade completions, and let Math-Verify compare the same extracted answers.

    Raises:
        ValueError: not one reference a text.
        GradingError: Math-Verify is not installed.
    """
    pool = WorkerPool(settings, 1, "grouper.grading.agreement")
    try:
        with Grader(contract, settings) as grader:
            grades = grader.grade(texts, references)
        asked = [
            (reference, grade, pool.submit(grade.extracted, reference))
            for reference, grade in zip(references, grades, strict=True)
            if grade.extracted is not None and grade.verdict is not Verdict.NOT_SCORED
        ]
        compared = tuple(
            Compared(
                reference=reference,
                ours=grade,
                theirs=future.result().verdict,
                why=future.result().reason,
            )
            for reference, grade, future in asked
        )
    finally:
        pool.close()
    return Agreement(compared=compared, left_out=len(texts) - len(compared))


def _answer(request: dict[str, Any]) -> Equivalence:
    from math_verify import parse, verify

    read = [
        parse(f"${request[side]}$", parsing_timeout=None) for side in ("reference", "prediction")
    ]
    same = verify(*read, timeout_seconds=None)
    verdict = Verdict.CORRECT if same else Verdict.INCORRECT
    return Equivalence(verdict, "", f"read {read[1][:1]} against {read[0][:1]}"[:300])


if __name__ == "__main__":
    import logging

    from grouper.grading.symbolic import serve

    logging.disable(logging.CRITICAL)  # it warns that its time-outs are off; ours is outside
    sys.exit(serve(sys.argv[1:], _answer))
