"""What a problem set contains, and what is wrong with it, before anything is trained on it.

    ProblemSet --audit--> Audit (unreadable references, repeated questions, histograms)

`find_overlap` finds leaks between sets; `quarantine_rows` lists everything, one row per finding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grouper.data.overlap import Overlap, question_words
from grouper.data.problems import ProblemSet
from grouper.grading import grade
from grouper.grading.normalise import tidy
from grouper.grading.numbers import TooLargeError, read_number
from grouper.grading.shapes import candidates
from grouper.types import AnswerContract, AnswerKind, Problem

_TAG = AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")
LENGTHS = (10, 20, 40, 80, 160, 320)
"""Upper edges of the histogram of words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A question that several problems share."""

    problem_ids: tuple[str, ...]
    answers: tuple[str, ...]
    """The different answers, as the grader tells them apart; more than one is a contradiction."""

    @property
    def contradicts(self) -> bool:
        return len(self.answers) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What `audit` found in one problem set."""

    problems: ProblemSet
    repeated: tuple[Repeated, ...]
    answer_types: Mapping[str, int]
    """How many answers are integers, fractions, expressions, ..., the most frequent first."""
    question_lengths: Mapping[str, int]
    """Problems by words of the question: `1-10`, `11-20`, ..."""
    solution_lengths: Mapping[str, int]
    """The same for worked solutions; empty where there are none."""

    @property
    def contradictions(self) -> tuple[Repeated, ...]:
        return tuple(found for found in self.repeated if found.contradicts)


def audit(problems: ProblemSet) -> Audit:
    """Examine a problem set; rows that could not become problems are listed in it already.

    >>> from grouper.data import load_problems
    >>> from grouper.config.schema import SourceConfig
    >>> few = load_problems(SourceConfig(source="arithmetic", limit=20), seed=0)
    >>> found = audit(few)
    >>> found.answer_types, found.repeated
    ({'integer': 20}, ())
    """
    solutions = [p.solution for p in problems.problems if p.solution]
    return Audit(
        problems=problems,
        repeated=tuple(_repeated(problems.problems)),
        answer_types=dict(Counter(answer_type(p.answer) for p in problems.problems).most_common()),
        question_lengths=_histogram([len(p.question.split()) for p in problems.problems]),
        solution_lengths=_histogram([len(solution.split()) for solution in solutions]),
    )


def _repeated(problems: Sequence[Problem]) -> Iterator[Repeated]:
    by_question: dict[str, list[Problem]] = {}
    for problem in problems:
        # Multiple-choice options are part of the question, so only punctuation is dropped.
        by_question.setdefault(question_words(problem.question), []).append(problem)
    for same in by_question.values():
        if len(same) > 1:
            yield Repeated(
                problem_ids=tuple(problem.id for problem in same),
                answers=tuple(_different([problem.answer for problem in same])),
            )


def _different(answers: Sequence[str]) -> list[str]:
    """The answers that no earlier one equals; `1/2` and `0.5` are one answer."""
    found: list[str] = []
    for answer in answers:
        given = f"<answer>{answer}</answer>"
        if not any(answer == known or grade(given, known, _TAG).correct for known in found):
            found.append(answer)
    return found


_WORDS = re.compile(r"[A-Za-z]{3,}", re.ASCII)


# Words of statements. Values such as `no real solution` or `all numbers but 2` have none of them.
_STATING = re.compile(
    r"\b(?:he|she|it|we|they|is|are|was|were|has|have|had|will|would|can|could|does|did|gets?|needs?"
    r"|because|therefore)\b",
    re.IGNORECASE,
)
# With so many words a text is a sentence, whatever its verb is.
_SENTENCE_WORDS = 7


def is_sentence(answer: str) -> bool:
    r"""Whether a reference is prose that states something, and not an answer.

    A completion is scored against it word by word, so one that answers with the value is wrong.

    >>> is_sentence("He has 5 apples, and she has 3"), is_sentence("It is 16")
    (True, True)
    >>> is_sentence(r"\text{no real solution}"), is_sentence("1, 2"), is_sentence("x = 2 or x = 3")
    (False, False, False)
    """
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", answer), re.ASCII)
    states = _STATING.search(" ".join(words)) is not None
    return len(words) >= _SENTENCE_WORDS or (states and len(words) >= 2)


def answer_type(answer: str) -> str:
    r"""What kind of answer a reference is.

    >>> [answer_type(a) for a in ("-12", "1,000", "3.5", r"\frac12", "7 cm", "40%")]
    ['integer', 'integer', 'decimal', 'fraction', 'quantity', 'percent']
    >>> [answer_type(a) for a in ("(1, 2)", "[1, 2)", "1, 2", r"2\sqrt{3}", "x=5", "x=y", "blue")]
    ['tuple', 'interval', 'list', 'expression', 'integer', 'equation', 'text']
    >>> answer_type("He has 5 apples, and she has 3")
    'prose'
    """
    if is_sentence(answer):
        return "prose"
    tidied = tidy(answer)
    node = candidates(tidied)[0]
    if node.kind == "tuple":
        return "tuple" if node.text == "()" else "interval"
    if node.kind != "atom":
        return node.kind
    _, equals, value = node.text.rpartition("=")
    try:
        number = read_number(value.strip())
    except TooLargeError:
        return "integer"  # a power too large to write down
    if number is None:
        plain = re.sub(r"\\[A-Za-z]+", " ", tidied)
        kinds = {
            "interval": r"\cup" in tidied,
            "choice": re.fullmatch(r"\(?[A-J]\)?", tidied),
            "equation": equals,
            "text": _WORDS.search(plain),
            "expression": True,
        }
    else:
        kinds = {
            "percent": number.percent,
            "quantity": number.unit is not None,
            "decimal": number.decimals > 0,
            "integer": number.value.denominator == 1,
            "fraction": True,
        }
    return next(name for name, holds in kinds.items() if holds)


def _histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Counts by range of `LENGTHS`, in order, none left out between the first and the last.

    >>> _histogram([3, 10, 35])
    {'1-10': 2, '11-20': 0, '21-40': 1}
    """
    edges = [0, *LENGTHS]
    names = [f"{low + 1}-{high}" for low, high in zip(edges, LENGTHS, strict=False)]
    names.append(f"over {LENGTHS[-1]}")
    counts = Counter(sum(length > edge for edge in LENGTHS) for length in lengths)
    if not counts:
        return {}
    return {names[i]: counts[i] for i in range(min(counts), max(counts) + 1)}


def quarantine_rows(
    audits: Sequence[Audit], leaks: Sequence[Overlap] = ()
) -> Iterator[dict[str, Any]]:
    """One row per finding: what to leave out, and why."""
    for found in audits:
        for row in found.problems.quarantined:
            yield {"set": found.problems.name, "row": row.row, "id": None, "reason": row.reason}
        for repeated in found.contradictions:
            shown = " and ".join(map(repr, repeated.answers))
            for problem_id in repeated.problem_ids:
                reason = f"the same question has the answers {shown}"
                yield {"set": found.problems.name, "row": None, "id": problem_id, "reason": reason}
    for leak in leaks:
        what = "the same question" if leak.same_question else "a run of words"
        reason = f"held out, but {what} is in {leak.trained_id}"
        yield {"set": None, "row": None, "id": leak.held_out_id, "reason": reason}
