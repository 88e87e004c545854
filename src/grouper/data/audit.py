"""Contents and errors of a problem set, examined before anything is trained on it.

    ProblemSet --audit--> Audit (unreadable references, repeated questions, histograms)

`find_overlap` finds leaks between sets; `quarantine_rows` lists all findings, a row each.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grouper.data.overlap import Overlap, question_words
from grouper.data.problems import ProblemSet
from grouper.grading import grade
from grouper.grading.answers import read
from grouper.grading.numbers import Number, TooLargeError, read_number
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
    """The findings of `audit` in one problem set."""

    problems: ProblemSet
    repeated: tuple[Repeated, ...]
    answer_types: Mapping[str, int]
    """Type -> number of answers: integers, fractions, ..., the most frequent first."""
    question_lengths: Mapping[str, int]
    """Problems by words of the question: `1-10`, `11-20`, ..."""
    solution_lengths: Mapping[str, int]
    """Worked solutions by their words, in the same ranges; empty where there are none."""

    @property
    def contradictions(self) -> tuple[Repeated, ...]:
        return tuple(repeated for repeated in self.repeated if repeated.contradicts)


def audit(problems: ProblemSet) -> Audit:
    """Examine a problem set; rows that could not become problems are listed in it already.

    >>> from grouper.data import load_problems
    >>> from grouper.config.schema import SourceConfig
    >>> few = load_problems(SourceConfig(source="arithmetic", limit=20), seed=0)
    >>> found = audit(few)
    >>> found.answer_types, found.repeated
    ({'integer': 20}, ())
    """
    answer_types = Counter(answer_type(problem.answer) for problem in problems.problems)
    questions = [problem.question for problem in problems.problems]
    solutions = [problem.solution for problem in problems.problems if problem.solution]
    return Audit(
        problems=problems,
        repeated=tuple(_repeated(problems.problems)),
        answer_types=dict(answer_types.most_common()),
        question_lengths=_histogram([len(question.split()) for question in questions]),
        solution_lengths=_histogram([len(solution.split()) for solution in solutions]),
    )


def _repeated(problems: Sequence[Problem]) -> Iterator[Repeated]:
    """Yield the questions that several problems share."""
    by_question: dict[str, list[Problem]] = {}
    for problem in problems:
        # Multiple-choice options are part of the question, so only punctuation is dropped.
        by_question.setdefault(question_words(problem.question), []).append(problem)
    for same_question in by_question.values():
        if len(same_question) > 1:
            answers = [problem.answer for problem in same_question]
            yield Repeated(
                problem_ids=tuple(problem.id for problem in same_question),
                answers=tuple(_different(answers)),
            )


def _different(answers: Sequence[str]) -> list[str]:
    """Return the answers that no earlier one equals; `1/2` and `0.5` are one answer."""
    different: list[str] = []
    for answer in answers:
        if not any(_are_equal(answer, earlier) for earlier in different):
            different.append(answer)
    return different


def _are_equal(answer: str, reference: str) -> bool:
    if answer == reference:
        return True
    return grade(f"<answer>{answer}</answer>", reference, _TAG).correct


_WORDS = re.compile(r"[A-Za-z]{3,}", re.ASCII)


# Words of statements. Values such as `no real solution` or `all numbers but 2` have none.
_STATING = re.compile(
    r"\b(?:he|she|it|we|they|is|are|was|were|has|have|had|will|would|can|could|does|did|gets?|needs?"
    r"|because|therefore)\b",
    re.IGNORECASE,
)
# With so many words a text is a sentence, whatever its verb is.
_SENTENCE_WORDS = 7


def is_sentence(answer: str) -> bool:
    r"""Tell whether a reference is prose that states something, and not an answer.

    Prose is compared word by word, so a completion that answers with the value alone is wrong.

    >>> is_sentence("He has 5 apples, and she has 3"), is_sentence("It is 16")
    (True, True)
    >>> is_sentence(r"\text{no real solution}"), is_sentence("1, 2"), is_sentence("x = 2 or x = 3")
    (False, False, False)
    """
    words = re.findall(r"[A-Za-z]{2,}", _without_commands(answer), re.ASCII)
    if len(words) >= _SENTENCE_WORDS:
        return True
    return len(words) >= 2 and _STATING.search(" ".join(words)) is not None


def _without_commands(text: str) -> str:
    """Replace LaTeX commands with spaces."""
    return re.sub(r"\\[A-Za-z]+", " ", text)


def answer_type(answer: str) -> str:
    r"""Classify a reference answer.

    >>> [answer_type(a) for a in ("-12", "1,000", "3.5", r"\frac12", "7 cm", "40%")]
    ['integer', 'integer', 'decimal', 'fraction', 'quantity', 'percent']
    >>> [answer_type(a) for a in ("(1, 2)", "[1, 2)", "1, 2", r"2\sqrt{3}", "x=5", "x=y", "blue")]
    ['tuple', 'interval', 'list', 'expression', 'integer', 'equation', 'text']
    >>> answer_type("He has 5 apples, and she has 3")
    'prose'
    """
    if is_sentence(answer):
        return "prose"
    statement = read(answer).statement
    node = statement.readings[0]
    if node.kind == "tuple":
        return "tuple" if node.text == "()" else "interval"
    if node.kind != "atom":
        return node.kind
    _, equals, value = node.text.rpartition("=")
    try:
        number = read_number(value.strip())
    except TooLargeError:
        return "integer"  # a power too large to write down
    if number is not None:
        return _number_type(number)
    return _other_type(statement.text, is_equation=bool(equals))


def _number_type(number: Number) -> str:
    """Classify an answer that is a number."""
    if number.percent:
        return "percent"
    if number.unit is not None:
        return "quantity"
    if number.decimals > 0:
        return "decimal"
    return "integer" if number.value.denominator == 1 else "fraction"


def _other_type(answer: str, *, is_equation: bool) -> str:
    """Classify an answer that is no number, list or tuple."""
    if r"\cup" in answer:
        return "interval"
    if re.fullmatch(r"\(?[A-J]\)?", answer):
        return "choice"
    if is_equation:
        return "equation"
    return "text" if _WORDS.search(_without_commands(answer)) else "expression"


def _histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Count the lengths in each range of `LENGTHS`, with zeros between the first and the last.

    >>> _histogram([3, 10, 35])
    {'1-10': 2, '11-20': 0, '21-40': 1}
    """
    lower_edges = [0, *LENGTHS[:-1]]
    names = [f"{low + 1}-{high}" for low, high in zip(lower_edges, LENGTHS, strict=True)]
    names.append(f"over {LENGTHS[-1]}")
    counts = Counter(bisect.bisect_left(LENGTHS, length) for length in lengths)
    if not counts:
        return {}
    positions = range(min(counts), max(counts) + 1)
    return {names[position]: counts[position] for position in positions}


def quarantine_rows(
    audits: Sequence[Audit], leaks: Sequence[Overlap] = ()
) -> Iterator[dict[str, Any]]:
    """Yield one row per finding: the problem to leave out, and the reason."""
    for audited in audits:
        name = audited.problems.name
        for row in audited.problems.quarantined:
            yield {"set": name, "row": row.row, "id": None, "reason": row.reason}
        for repeated in audited.contradictions:
            answers = " and ".join(map(repr, repeated.answers))
            reason = f"the same question has the answers {answers}"
            for problem_id in repeated.problem_ids:
                yield {"set": name, "row": None, "id": problem_id, "reason": reason}
    for leak in leaks:
        shared = "the same question" if leak.same_question else "a run of words"
        reason = f"held out, but {shared} is in {leak.trained_id}"
        yield {"set": None, "row": None, "id": leak.held_out_id, "reason": reason}
