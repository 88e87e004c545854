r"""Lenient extraction: the answer a completion commits to in any known way, not only the asked one.

Strict extraction measures maths and format together; this one leaves the format out, so that a
report can say which of the two a model has learned. It never decides a reward. Nothing is added
up: the first way of answering that is there gives the one answer, and it may be wrong.

    as asked          the contract's own place
    tag left open     the contract's tag without its end, or in other letters
    another tag       <answer>, <solution>, ...
    \boxed{}  ####    the other two notations
    "the answer is"   a sentence that says so
    last number       of the whole text
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from grouper.grading.extraction import Extraction, extract, first_turn
from grouper.types import AnswerContract, AnswerKind


def extract_lenient(text: str, contract: AnswerContract) -> Extraction:
    r"""The answer by any known contract, before the first turn marker, and how it was found.

    >>> xml = AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")
    >>> extract_lenient("<answer>7</answer>", xml)
    Extraction(answer='7', reason='as asked: last <answer>')
    >>> extract_lenient(r"so \boxed{7}. Check: 14/2 = 7", xml)
    Extraction(answer='7', reason='not as asked: last \\boxed{}')
    >>> extract_lenient("The answer is 18. Check: 18/2 = 9", xml)
    Extraction(answer='18', reason='not as asked: "the answer is"')
    >>> extract_lenient("5 + 13 makes 18 apples", xml).reason
    'not as asked: last number'
    >>> extract_lenient("no idea", xml)
    Extraction(answer=None, reason='no <answer>, and no other answer either')
    """
    strict = extract(text, contract)
    if strict.answer is not None:
        inside = _inside_a_sentence(strict.answer)
        return inside or Extraction(strict.answer, f"as asked: {strict.reason}")
    begin = len(text) - len(text.lstrip())
    turn = first_turn(first_turn(text, contract.turn_markers), _NEXT_PROBLEM, begin)
    for find in _WAYS:
        answer, reason = find(turn, contract)
        if answer:
            return Extraction(answer, f"not as asked: {reason}")
    return Extraction(None, f"{strict.reason}, and no other answer either")


_NONE = Extraction(None, "")
_NEXT_PROBLEM = ("\nProblem:", "\nQ:")
"""Where a model goes on to another problem. In a strict reading these may be words of the first."""
_BOXED = AnswerContract(kind=AnswerKind.BOXED)
_HASHES = AnswerContract(kind=AnswerKind.HASHES)
_NUMBER = AnswerContract(kind=AnswerKind.LAST_NUMBER)
_ANSWER_TAGS = ("answer", "final_answer", "solution", "result")
_ANY_TAG = re.compile(r"<\s*(/?)\s*([A-Za-z_]{1,40})\s*>", re.ASCII)
_HALF_A_TAG = re.compile(r"\s*</?[A-Za-z_]*\Z", re.ASCII)
_LONG_TAIL = 4_000
"""Characters after the last open tag that can still be an answer that was cut off."""


def _own_tag(text: str, contract: AnswerContract) -> Extraction:
    """The contract's tags whatever their case; the last may have lost its end to the limit."""
    if contract.kind is not AnswerKind.TAG:
        return _NONE
    # Only ASCII letters are lowered: others may become two, and positions must stay.
    lowered = text.lower() if text.isascii() else text
    start = lowered.rfind(contract.open.lower())
    if start < 0:
        return _NONE
    start += len(contract.open)
    end = lowered.find(contract.close.lower(), start)
    answer = text[start:] if end < 0 else text[start:end]
    answer = _HALF_A_TAG.sub("", answer.strip())
    if not answer or len(answer) > _LONG_TAIL:
        return _NONE
    how = "not closed" if end < 0 else "in other letters"
    return _inside_a_sentence(answer) or Extraction(answer, f"{contract.open} {how}")


def _another_tag(text: str, contract: AnswerContract) -> Extraction:  # noqa: ARG001 - one table, one shape
    """The last closed pair of a tag that usually holds answers."""
    found = _NONE
    name, start = "", -1
    for match in _ANY_TAG.finditer(text):
        tag = match.group(2).lower()
        if tag not in _ANSWER_TAGS:
            continue
        if not match.group(1):
            name, start = tag, match.end()
        elif tag == name and start >= 0 and (answer := text[start : match.start()].strip()):
            found, start = Extraction(answer, f"last <{tag}>"), -1
    return (found.answer and _inside_a_sentence(found.answer)) or found


def _boxed(text: str, contract: AnswerContract) -> Extraction:  # noqa: ARG001 - one table, one shape
    return extract(text, _BOXED)


def _hashes(text: str, contract: AnswerContract) -> Extraction:  # noqa: ARG001 - one table, one shape
    return extract(text, _HASHES)


_SAYS = re.compile(
    r"\b(?:answer|result|total|solution)(?: (?:to|of|for) [^.\n:=]{1,60}?)?(?:\*\*)?"
    r"(?: ?(?:is|are|was|equals|=)\b:?|:)(?:\*\*)?[ \t]*(?:therefore |thus |simply |equal to )?",
    re.IGNORECASE,
)
_CONCLUSION = 20_000
"""Characters from the end in which a sentence still states the result."""
_CLAUSE = re.compile(r"[^\n]*?(?=[.!?;](?:\s|$)|,\s+(?:so|because|since|which|and then)\b|\n|$)")


def _sentence(text: str, contract: AnswerContract) -> Extraction:  # noqa: ARG001 - one table, one shape
    """What the last "the answer is" (or "Answer:") says, to the end of its sentence."""
    text = text[-_CONCLUSION:]
    last = deque(_SAYS.finditer(text), maxlen=1)
    if not last:
        return _NONE
    clause = _CLAUSE.match(text, last[0].end())
    said = clause.group().strip(" *_") if clause is not None else ""
    if not said or len(said) > 200:
        return _NONE
    inside = _inside_a_sentence(said)
    return Extraction(inside.answer if inside else said, '"the answer is"')


def _last_number(text: str, contract: AnswerContract) -> Extraction:  # noqa: ARG001 - one table, one shape
    return extract(text, _NUMBER)


_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z({])", re.ASCII)
_MANY_WORDS = 4


def _inside_a_sentence(answer: str) -> Extraction | None:
    """The answer that a sentence gives, where a whole sentence stands in the answer's place."""
    if len(_WORD.findall(answer)) < _MANY_WORDS:
        return None
    for contract in (_BOXED, _NUMBER):
        found = extract(answer, contract)
        if found.answer:
            return Extraction(found.answer, f"{found.reason} of a sentence")
    return None


_WAYS: tuple[Callable[[str, AnswerContract], Extraction], ...] = (
    _own_tag,
    _another_tag,
    _boxed,
    _hashes,
    _sentence,
    _last_number,
)
