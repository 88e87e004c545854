"""Validation problems taken out of the training problems, never shared with them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from grouper.data.overlap import question_words
from grouper.data.problem_set import ProblemSet, subset_of
from grouper.errors import DataError


def hold_out(whole: ProblemSet, share: float, *, seed: int) -> tuple[ProblemSet, ProblemSet]:
    """(train, validation): about `share` of the problems held out, the same for equal seeds.

    Problems that ask the same question stay together, on one side. Which side a question is on
    depends on the seed and its words alone, so the order of the set plays no part.

    Raises:
        DataError: one side would be empty.

    >>> from grouper.types import Problem
    >>> many = tuple(
    ...     Problem(id=str(i), question=f"{i}+{i}?", answer=str(2 * i), source="a")
    ...     for i in range(50)
    ... )
    >>> train, held = hold_out(
    ...     ProblemSet(name="a", problems=many, fingerprint=""), 0.1, seed=0
    ... )
    >>> len(train), len(held)
    (45, 5)
    """
    words = [question_words(problem.question) for problem in whole.problems]
    rows: dict[tuple[str, ...], int] = {}
    for question in words:
        rows[question] = rows.get(question, 0) + 1
    wanted, chosen, count = round(share * len(whole)), set(), 0
    for question in sorted(rows, key=lambda question: _rank(seed, question)):
        if count >= wanted:
            break
        chosen.add(question)
        count += rows[question]
    sides: tuple[list[int], list[int]] = ([], [])
    for place, question in enumerate(words):
        sides[question in chosen].append(place)
    if not all(sides):
        raise DataError(
            f"{share:g} of {len(whole)} problems leaves one side empty",
            where="data.validation_share",
            fix="Use more problems or another share.",
        )
    train, held = ([whole.problems[place] for place in side] for side in sides)
    return (
        subset_of(whole, train, note=f"validation_share: {len(held):,} problems are held out."),
        subset_of(
            replace(whole, notes=(), quarantined=()),  # told of the other side
            held,
            note=f"held out of {whole.name}: {len(held):,} of {len(whole):,} problems.",
            name=f"{whole.name} (held out)",
        ),
    )


def without(trained: ProblemSet, held_out: ProblemSet) -> ProblemSet:
    """The problems of `trained` whose question is not held out.

    Raises:
        DataError: none is left.
    """
    known = {question_words(problem.question) for problem in held_out.problems}
    kept = [p for p in trained.problems if question_words(p.question) not in known]
    if len(kept) == len(trained):
        return trained
    if not kept:
        raise DataError(
            "every problem of it is held out for validation",
            where=trained.name,
            fix="Lower data.validation_share.",
        )
    gone = len(trained) - len(kept)
    return subset_of(trained, kept, note=f"validation_share: {gone:,} held-out rows left out.")


def _rank(seed: int, question: tuple[str, ...]) -> bytes:
    return hashlib.sha256(f"grouper/validation/{seed}/{' '.join(question)}".encode()).digest()
