"""Leaks between training and held-out problems (contaminated problem sets)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from grouper.data.generated import GENERATED
from grouper.types import Problem

# Consecutive words that two independent questions hardly ever share; the usual choice.
RUN_LENGTH = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A held-out problem whose question is in the training problems as well.

    Example: `Overlap(held_out_id="math/test/3", trained_id="big/train/9", same_question=True)`.
    """

    held_out_id: str
    trained_id: str
    same_question: bool
    """True: equal except for case, punctuation and spaces. False: only a run of words is shared."""


def find_overlap(
    trained: Sequence[Problem],
    held_out: Sequence[Problem],
) -> tuple[Overlap, ...]:
    """Find the held-out problems whose question, or a run of words of it, is in `trained`.

    At most one overlap per held-out problem; an equal question takes precedence over a shared run.
    Generated problems share their sentences by design: only their equal questions count.

    >>> def problem(id, question):
    ...     return Problem(id=id, question=question, answer="1", source="a")
    >>> find_overlap([problem("train/0", "What is 2 + 2?")], [problem("test/0", "what is 2+2")])
    (Overlap(held_out_id='test/0', trained_id='train/0', same_question=True),)
    """
    if not held_out:
        return ()
    held_out_keys = [_keys(problem) for problem in held_out]
    # Key of a held-out problem -> the first trained problem that has it, or "". Only these keys
    # are kept, because all runs of a large training set would fill gigabytes.
    trained_ids: dict[_Key, str] = {}
    for keys in held_out_keys:
        trained_ids.update(dict.fromkeys(keys, ""))
    for problem in trained:
        for key in _keys(problem):
            if trained_ids.get(key) == "":
                trained_ids[key] = problem.id

    overlaps = []
    for problem, keys in zip(held_out, held_out_keys, strict=True):
        question, *_ = keys
        matches = [trained_ids[key] for key in keys if trained_ids[key]]
        if matches:
            overlaps.append(
                Overlap(
                    held_out_id=problem.id,
                    trained_id=matches[0],
                    same_question=bool(trained_ids[question]),
                )
            )
    return tuple(overlaps)


# Signs count as words, those of Unicode too, and so do the brackets of numbers: 8-(4-2) is not
# 8-4-2, nor 5! 5, |-5| -5, .5 5, or f'(x) f(x).
_WORD = re.compile(
    r"[^\W_]+|[-+*/^=<>|\xac\xb1\xb7\xd7\xf7\u2032\u2190-\u22ff\u2308-\u230b]"
    r"|\((?=[\d(-])|(?<=[\d)])[)!%]|(?<!\d)\.(?=\d)|'(?='*\()"
)


def question_words(text: str) -> str:
    """Return a question without case and punctuation, equal for two that count as the same.

    The words are one text, a space apart: a list of them would take ten times the memory.
    """
    lowered = text.lower().replace("\N{MINUS SIGN}", "-")
    return " ".join(_WORD.findall(lowered))


_Key = str | tuple[str, ...]
"""A whole question, or a run of words."""


def _keys(problem: Problem) -> list[_Key]:
    """List the question as a whole, then its runs of words, unless it was generated."""
    question = question_words(problem.question)
    keys: list[_Key] = [question]
    is_generated = problem.source in GENERATED and "steps" in problem.columns
    if not is_generated:
        words = question.split()
        tails = [words[start:] for start in range(RUN_LENGTH)]
        keys += zip(*tails, strict=False)
    return keys
