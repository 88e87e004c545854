r"""Find the answer that a completion commits to.

`extract` is strict: the answer is where the prompt format's `AnswerContract` says, or there is
none. (`lenient.py` reads an answer in any notation.) It does not look at what an answer means.
Every miss has a reason, and all scans are linear: a megabyte takes milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from grouper.programs.code_blocks import PYTHON_NAMES, blocks_of
from grouper.types import AnswerContract, AnswerKind


class Extraction(NamedTuple):
    """The answer as written, or None and why there is none.

    Example: `Extraction("42", "last <answer>")`, `Extraction(None, "no <answer>")`.
    """

    answer: str | None
    reason: str


def extract(text: str, contract: AnswerContract) -> Extraction:
    r"""The last answer before the first turn marker, where the contract says.

    Reasoning may quote a marker: with tags only those after a complete answer count, and in the
    boxed format those outside `<think>...</think>`, inside which there is no answer either.

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
    turn = first_turn(text, contract.turn_markers, _before_markers(text, contract))
    if contract.kind is AnswerKind.TAG:
        found = _in_tags(turn, contract)
    elif contract.kind is AnswerKind.PATTERN:
        match = re.search(contract.pattern, turn)
        found = Extraction(match and match[1].strip(), "first match" if match else "no match")
    else:
        found = _NOTATIONS[contract.kind](turn)
    return Extraction(None, "the answer is empty") if found.answer == "" else found


def first_turn(text: str, markers: tuple[str, ...], start: int = 0) -> str:
    """The text before the earliest marker from `start` on, where an invented turn begins."""
    found = (text.find(marker, start) for marker in markers)
    return text[: min((at for at in found if at >= 0), default=len(text))]


_THINK = ("<think>", "</think>")


def _before_markers(text: str, contract: AnswerContract) -> int:
    """The index before which turn markers do not count."""
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
        opened = text.find(_THINK[0])
        marked = opened > 0 and len(first_turn(text, contract.turn_markers)) < opened
        return 0 if marked else _reasoned(text, _THINK, "")
    return 0


def _reasoned(text: str, tags: tuple[str, str], answered: str) -> int:
    """Index after the first reasoning; 0 without one, or if `answered` occurs before it."""
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
    """Whether text[start:end] is between the tags; the prompt may have written the first."""
    open_, close = tags
    closed = text.find(close, end)
    if closed < 0 or text.find(open_, end, closed) >= 0:
        return False
    return text.rfind(close, 0, start) <= text.rfind(open_, 0, start)


_BOX_OR_BRACE = re.compile(
    r"\\{1,2}(?:frame|f)?box(?:ed)?(?![A-Za-z])(?:\s*(\{)|[ \t]*)|\\.|[{}]", re.DOTALL
)
_BARE = re.compile(r"[^\s$]+")


def in_box(text: str) -> Extraction:
    r"""The outermost closed box around the last `\boxed` or `\fbox`.

    `\boxed{\boxed{310}, 527}` commits to both.
    """
    text = text.rpartition(_THINK[1])[2]
    if _THINK[0] in text:
        return Extraction(None, f"{_THINK[0]} is not closed")
    last, closed = _boxes(text)
    if last is None:
        return Extraction(None, "no \\boxed{}")
    start = last.end()
    if not last[1]:
        # `\boxed 2` is how some of MATH's own solutions are written.
        bare = _BARE.match(text, start)
        if bare is None:
            return Extraction(None, "nothing after the last \\boxed")
        return Extraction(bare.group().rstrip(".,;"), "last \\boxed, without braces")
    if start not in closed:
        return Extraction(None, "the last \\boxed{ is not closed")
    outer = min(at for at, end in closed.items() if end >= closed[start])
    return Extraction(text[outer : closed[outer]].strip(), "last \\boxed{}")


def _boxes(text: str) -> tuple[re.Match[str] | None, dict[int, int]]:
    """The last box that opens, and where the inside of each closed box begins and ends."""
    first = text.find("box")
    if first < 0:
        return None, {}
    last: re.Match[str] | None = None
    opened: list[int] = []  # where the inside of each open box begins, -1 for other braces
    closed: dict[int, int] = {}
    line = text.rfind("\n", 0, first) + 1  # further back no backslash can matter
    for match in _BOX_OR_BRACE.finditer(text, line):
        token = match.group()
        if "box" in token:
            last = match
        if token[-1] == "{" and token != r"\{":
            opened.append(match.end() if "box" in token else -1)
        elif token == "}" and opened and (start := opened.pop()) >= 0:
            closed[start] = match.start()
    return last, closed


def after_hashes(text: str) -> Extraction:
    """The rest of the line after the last `####`."""
    start = text.rfind("####")
    if start < 0:
        return Extraction(None, "no ####")
    line, _, _ = text[start + 4 :].partition("\n")
    return Extraction(line.strip(), "last ####")


def _last_number(text: str) -> Extraction:
    # Only the end can hold the last number; a longer literal is not an answer anyway.
    tail = text.rstrip()
    last = max(tail.rfind(digit) for digit in _DIGITS)
    numbers = _NUMBER.findall(tail[max(0, last - 200) : last + 5]) if last >= 0 else []
    return Extraction(numbers[-1].strip(), "last number") if numbers else _NO_NUMBER


_NO_NUMBER = Extraction(None, "no number")
_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_DIGITS = f"0123456789{_VULGAR}⁰¹²³⁴⁵⁶⁷⁸⁹"
_EXPONENT = r"(?:\^\s*(?:[-−–]?\d+|\{\s*[-−–]?\d+\s*\})|[⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)"
_FRACTION = (
    r"\\[dt]?frac\s*(?:\{\s*[-−–]?\d+\s*\}\s*\{\s*\d+\s*\}|\d\s*\d|\d\s*\{\d+\}|\{\d+\}\s*\d)"
)
_GAP = r"(?:\\,|\\ |[\u00a0\u2009\u202f ])"
# A sign counts only where it cannot be a minus between two things ("7-5" ends in 5), and an
# exponent or index is not a number by itself ("18 cm^2" ends in 18).
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


def last_program(text: str) -> Extraction:
    r"""The last closed block of Python, which is not the answer yet: what it prints is.

    >>> last_program("So:\n```python\nprint(6 * 7)\n```\n").answer
    'print(6 * 7)'
    >>> last_program("```python\nprint(6").reason
    'the last ```python block is not closed'
    """
    found, left_open = blocks_of(text)
    if left_open in PYTHON_NAMES:
        return Extraction(None, "the last ```python block is not closed")
    programs = [block.text for block in found if block.name in PYTHON_NAMES]
    if not programs:
        return Extraction(None, "no ```python block")
    return Extraction(programs[-1] if programs[-1].strip() else "", "last ```python block")


_NOTATIONS: dict[AnswerKind, Callable[[str], Extraction]] = {
    AnswerKind.BOXED: in_box,
    AnswerKind.HASHES: after_hashes,
    AnswerKind.LAST_NUMBER: _last_number,
    AnswerKind.PROGRAM: last_program,
}
