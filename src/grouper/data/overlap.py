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
    """A held-out problem that training has seen.

    Example: `Overlap(held_out_id="math/test/3", trained_id="big/train/9", same_question=True)`.
    """

    held_out_id: str
    trained_id: str
    same_question: bool
    """Equal but for case, punctuation and spaces; else only a run of words is shared."""


def find_overlap(
    trained: Sequence[Problem],
    held_out: Sequence[Problem],
) -> tuple[Overlap, ...]:
    """The held-out problems whose question, or a run of words of it, is in `trained`.

    At most one overlap per held-out problem; an equal question takes precedence over a shared run.
    Generated problems share their sentences by design: of those only equal questions count.

    >>> def problem(id, question):
    ...     return Problem(id=id, question=question, answer="1", source="a")
    >>> find_overlap([problem("train/0", "What is 2 + 2?")], [problem("test/0", "what is 2+2")])
    (Overlap(held_out_id='test/0', trained_id='train/0', same_question=True),)
    """
    asked = [(problem, _parts(problem)) for problem in held_out]
    # What is looked for -> the first trained problem that has it. All runs of a large training set
    # would fill gigabytes.
    known = dict.fromkeys((part for _, parts in asked for part in parts), "")
    for problem in trained if known else ():
        for part in filter(known.__contains__, _parts(problem)):
            known[part] = known[part] or problem.id
    found = []
    for problem, parts in asked:
        same = bool(known[parts[0]])
        trained_id = next(filter(None, map(known.get, parts)), None)
        if trained_id is not None:
            leak = Overlap(held_out_id=problem.id, trained_id=trained_id, same_question=same)
            found.append(leak)
    return tuple(found)


# Signs count as words, those of Unicode too, and so do the brackets of numbers: 8-(4-2) is not
# 8-4-2, nor 5! 5, |-5| -5, .5 5, or f'(x) f(x).
_WORD = re.compile(
    r"[^\W_]+|[-+*/^=<>|\xac\xb1\xb7\xd7\xf7\u2032\u2190-\u22ff\u2308-\u230b]"
    r"|\((?=[\d(-])|(?<=[\d)])[)!%]|(?<!\d)\.(?=\d)|'(?='*\()"
)


def question_words(text: str) -> str:
    """A question without case and punctuation, its words a space apart: what makes two the same.

    As one text: the words by themselves would take ten times the memory.
    """
    return " ".join(_WORD.findall(text.lower().replace("\N{MINUS SIGN}", "-")))


def _parts(problem: Problem) -> list[str | tuple[str, ...]]:
    """A question as a whole, then its runs of words, unless it was generated."""
    whole = question_words(problem.question)
    generated = problem.source in GENERATED and "steps" in problem.columns
    words = [] if generated else whole.split()
    return [whole, *zip(*(words[start:] for start in range(RUN_LENGTH)), strict=False)]
