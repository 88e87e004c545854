r"""Stage one of grading: find the answer that a completion commits to.

Where it stands is fixed by the prompt format's `AnswerContract`; nothing here knows what the
answer means or whether it is right. Every miss has a named reason. All scans are linear, so a
completion of a megabyte costs milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from grouper.types import AnswerContract, AnswerKind


class Extraction(NamedTuple):
    """The answer as written, or None and why there is none.

    Example: `Extraction("42", "last <answer> tag")`, `Extraction(None, "no <answer> tag")`.
    """

    answer: str | None
    reason: str


def extract(text: str, contract: AnswerContract) -> Extraction:
    r"""The last answer before the first turn marker, as the contract says where.

    Reasoning may quote a marker: with tags only those after a complete answer count, and in the
    boxed format those outside `<think>` and `</think>`, whose inside is no answer either.

    >>> tag = AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")
    >>> extract("<answer>1</answer> no, <answer> 2 </answer>", tag)
    Extraction(answer='2', reason='last <answer>')
    >>> extract("<answer>1", tag)
    Extraction(answer=None, reason='<answer> is not closed')
    >>> extract(r"so \boxed{\frac{1}{2}}", AnswerContract(kind=AnswerKind.BOXED)).answer
    '\\frac{1}{2}'
    >>> extract("9 - 2 = 7\n#### 7", AnswerContract(kind=AnswerKind.HASHES)).answer
    '7'
    """
    turn = first_turn(text, contract.turn_markers)
    if len(turn) < len(text):
        turn = first_turn(text, contract.turn_markers, _unmarked(text, contract))
    found = _FINDERS[contract.kind](turn, contract)
    if found.answer == "":
        return Extraction(None, "the answer is empty")
    return found


def first_turn(text: str, markers: tuple[str, ...], start: int = 0) -> str:
    """The text before the earliest marker from `start` on: then comes an invented conversation."""
    end = len(text)
    for marker in markers:
        at = text.find(marker, start, end)
        if at >= 0:
            end = at
    return text[:end]


_THINK = ("<think>", "</think>")


def _unmarked(text: str, contract: AnswerContract) -> int:
    """How far a text holds no turn marker that counts."""
    if contract.kind is AnswerKind.TAG:
        start = 0
        if contract.reasoning:
            # What opens an answer may begin with the tag that ends the reasoning.
            ended = _reasoned(text, contract.reasoning, contract.close)
            start = max(0, ended - len(contract.reasoning[1]))
        opened = text.find(contract.open, start)
        closed = text.find(contract.close, opened + len(contract.open)) if opened >= 0 else -1
        return closed + len(contract.close) if closed >= 0 else len(text)
    if contract.kind is AnswerKind.BOXED:
        first = min((at for m in contract.turn_markers if (at := text.find(m)) >= 0), default=-1)
        opened = text.find(_THINK[0])
        return 0 if 0 <= first < opened else _reasoned(text, _THINK, "")
    return 0


def _reasoned(text: str, tags: tuple[str, str], answered: str) -> int:
    """Where the first reasoning ends; 0 without one, or where `answered` stands before it."""
    closed = text.find(tags[1])
    if closed < 0:
        return 0
    opened = max(text.rfind(tags[0], 0, closed), 0)
    before = answered and text.find(answered, 0, opened) >= 0
    return 0 if before else closed + len(tags[1])


def _in_tags(text: str, contract: AnswerContract) -> Extraction:
    start = text.rfind(contract.open)
    if start < 0:
        return Extraction(None, f"no {contract.open}")
    start += len(contract.open)
    end = text.find(contract.close, start)
    if end < 0:
        return Extraction(None, f"{contract.open} is not closed")
    if contract.reasoning is not None and _between(text, start, end, contract.reasoning):
        return Extraction(None, f"the last {contract.open} stands inside the reasoning")
    return Extraction(text[start:end].strip(), f"last {contract.open}")


def _between(text: str, start: int, end: int, tags: tuple[str, str]) -> bool:
    """Whether text[start:end] stands between the tags; the prompt may have written the first."""
    open_, close = tags
    closed = text.find(close, end)
    if closed < 0 or text.find(open_, end, closed) >= 0:
        return False
    return text.rfind(close, 0, start) <= text.rfind(open_, 0, start)


_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])(?:\s*(?=\{)|[ \t]*)")
_BARE = re.compile(r"[^\s$]+")


def _last_box(text: str) -> re.Match[str] | None:
    r"""The last `\boxed` or `\fbox`, found from the right without scanning all of them."""
    at = len(text)
    while (at := text.rfind("box", 0, at)) >= 0:
        for back in (1, 2):
            if at >= back and (match := _BOX.match(text, at - back)):
                return match
    return None


def _in_box(text: str, contract: AnswerContract) -> Extraction:  # noqa: ARG001 - one table, one shape
    if "think>" in text:
        text = text[text.rfind(_THINK[1]) + len(_THINK[1]) :] if _THINK[1] in text else text
        if _THINK[0] in text:
            return Extraction(None, f"{_THINK[0]} is not closed")
    match = _last_box(text)
    if match is None:
        return Extraction(None, "no \\boxed{}")
    start = match.end()
    if not text.startswith("{", start):
        # `\boxed 2` is how some of MATH's own solutions are written.
        bare = _BARE.match(text, start)
        if bare is None:
            return Extraction(None, "nothing after the last \\boxed")
        return Extraction(bare.group().rstrip(".,;"), "last \\boxed, without braces")
    end = closing_brace(text, start)
    if end < 0:
        return Extraction(None, "the last \\boxed{ is not closed")
    start, end = _outermost(text, start, end)
    return Extraction(text[start + 1 : end].strip(), "last \\boxed{}")


_BOX_OR_BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)


def _outermost(text: str, start: int, end: int) -> tuple[int, int]:
    r"""Braces of the outermost closed box around the box whose braces stand at `start` and `end`.

    `\boxed{\boxed{310}, 527}` commits to both.
    """
    if text.find("box", 0, start - len(r"\box")) < 0:
        return start, end
    # Where each brace that is open stands, or -1 for one that opens no box.
    opened: list[int] = []
    outermost = start, end
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}":
            at = opened.pop() if opened else -1
            if 0 <= at < start and match.start() > end:
                outermost = at, match.start()
        elif token[-1] == "{" and token != r"\{":
            opened.append(match.end() - 1 if token != "{" else -1)
        if match.start() > end and not opened:
            break
    return outermost


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def closing_brace(text: str, start: int) -> int:
    r"""Index of the brace that closes the one at `start`, or -1; `\{` and `\}` do not count.

    >>> closing_brace(r"{a{b}\}c}", 0)
    8
    """
    depth = 0
    for match in _BRACE.finditer(text, start):
        token = match.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def _after_hashes(text: str, contract: AnswerContract) -> Extraction:  # noqa: ARG001 - one table, one shape
    start = text.rfind("####")
    if start < 0:
        return Extraction(None, "no ####")
    end = text.find("\n", start)
    line = text[start + 4 : end if end >= 0 else len(text)]
    return Extraction(line.strip(), "last ####")


def _last_number(text: str, contract: AnswerContract) -> Extraction:  # noqa: ARG001 - one table, one shape
    # Only the last stretch can hold the last number; a longer literal is no answer anyway.
    tail = text.rstrip()
    last = max(tail.rfind(digit) for digit in _DIGITS)
    if last < 0:
        return Extraction(None, "no number")
    window = tail[max(0, last - 200) : last + 5]
    numbers = [m.group() for m in _NUMBER.finditer(window)]
    if not numbers:
        return Extraction(None, "no number")
    return Extraction(numbers[-1].strip(), "last number")


_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_DIGITS = f"0123456789{_VULGAR}⁰¹²³⁴⁵⁶⁷⁸⁹"
_EXPONENT = r"(?:\^\s*(?:[-−–]?\d+|\{\s*[-−–]?\d+\s*\})|[⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)"
_FRACTION = (
    r"\\[dt]?frac\s*(?:\{\s*[-−–]?\d+\s*\}\s*\{\s*\d+\s*\}|\d\s*\d|\d\s*\{\d+\}|\{\d+\}\s*\d)"
)
_GAP = r"(?:\\,|\\ |[\u00a0\u2009\u202f ])"
# A sign counts only where it cannot be a minus between two things ("7-5" ends in 5), and an
# exponent or index is no number of its own ("18 cm^2" ends in 18).
_NUMBER = re.compile(
    r"(?<![\^_])(?<![\^_]\{)(?<![\d.])(?:(?<![\w.)\]}\\$])[-+−–])?(?:\\?[$€£](?=[-−–]?[\d.]))?"
    r"(?:(?<=[$€£])[-−–])?(?:"
    rf"\d*\s?{_FRACTION}|\d+\s\d+/\d+(?!\d)|(?:\d+\s?)?[{_VULGAR}]"
    r"|(?:\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?!\d)"
    rf"|\d{{1,3}}(?:{_GAP}\d{{3}}){{2,}}(?![\d,./])|\d+)(?:\.\d+)?"
    rf"(?:[eE][-+]?\d+(?!\w)|/\d+|\s?(?:\\times|\\cdot|[×x*·])\s?10{_EXPONENT}|{_EXPONENT})?"
    r"|\.\d+(?:[eE][-+]?\d+(?!\w))?)(?:\s?\\?%)?",
    re.ASCII,
)

_FINDERS: dict[AnswerKind, Callable[[str, AnswerContract], Extraction]] = {
    AnswerKind.TAG: _in_tags,
    AnswerKind.BOXED: _in_box,
    AnswerKind.HASHES: _after_hashes,
    AnswerKind.LAST_NUMBER: _last_number,
}
