r"""Find the answer that a completion commits to.

`extract` is strict: the answer is where the prompt format's `AnswerContract` says, or there is
none. `extract_lenient` accepts an answer in any known notation, so that a report can separate what
a model knows from how well it follows the format; it never decides a reward. Neither looks at what
an answer means. Every miss has a reason, and all scans are linear: a megabyte takes milliseconds.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

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
    turn = _first_turn(text, contract.turn_markers, _before_markers(text, contract))
    if contract.kind is AnswerKind.TAG:
        found = _in_tags(turn, contract)
    elif contract.kind is AnswerKind.PATTERN:
        match = re.search(contract.pattern, turn)
        found = Extraction(match and match[1].strip(), "first match" if match else "no match")
    else:
        found = _NOTATIONS[contract.kind](turn)
    return Extraction(None, "the answer is empty") if found.answer == "" else found


def _first_turn(text: str, markers: tuple[str, ...], start: int = 0) -> str:
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
        marked = opened > 0 and len(_first_turn(text, contract.turn_markers)) < opened
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


_BOX_OR_BRACE = re.compile(r"\\{1,2}f?box(?:ed)?(?![A-Za-z])(?:\s*(\{)|[ \t]*)|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s$]+")


def _in_box(text: str) -> Extraction:
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
    last: re.Match[str] | None = None
    opened: list[int] = []  # where the inside of each open box begins, -1 for other braces
    closed: dict[int, int] = {}
    first = text.find("box")
    line = text.rfind("\n", 0, max(first, 0)) + 1  # further back no backslash can matter
    for match in _BOX_OR_BRACE.finditer(text, line) if first >= 0 else ():
        token = match.group()
        if "box" in token:
            last = match
        if token[-1] == "{" and token != r"\{":
            opened.append(match.end() if "box" in token else -1)
        elif token == "}" and opened and (start := opened.pop()) >= 0:
            closed[start] = match.start()
    return last, closed


def _after_hashes(text: str) -> Extraction:
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

_NOTATIONS: dict[AnswerKind, Callable[[str], Extraction]] = {
    AnswerKind.BOXED: _in_box,
    AnswerKind.HASHES: _after_hashes,
    AnswerKind.LAST_NUMBER: _last_number,
}


# --- lenient -------------------------------------------------------------------------------------


def extract_lenient(text: str, contract: AnswerContract) -> Extraction:
    r"""The answer by the contract, or in a tag, `\boxed{}`, `####`, a sentence, or the last number.

    The first of these that is found is the answer, right or wrong.

    >>> xml = AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")
    >>> extract_lenient("<answer>7</answer>", xml)
    Extraction(answer='7', reason='in the format: last <answer>')
    >>> extract_lenient(r"so \boxed{7}. Check: 14/2 = 7", xml)
    Extraction(answer='7', reason='not in the format: last \\boxed{}')
    >>> extract_lenient("The answer is 18. Check: 18/2 = 9", xml)
    Extraction(answer='18', reason='not in the format: "the answer is"')
    >>> extract_lenient("no idea", xml)
    Extraction(answer=None, reason='no <answer>, and no other answer either')
    """
    if contract.flexible:
        turn = _first_turn(text, contract.turn_markers)
        last = deque(re.finditer(contract.flexible, turn), maxlen=1)
        return Extraction(last[0].group(), "last match") if last else Extraction(None, "no match")
    strict = extract(text, contract)
    if strict.answer is not None:
        inside = _inside_a_sentence(strict.answer)
        return inside or Extraction(strict.answer, f"in the format: {strict.reason}")
    begin = len(text) - len(text.lstrip())
    turn = _first_turn(_first_turn(text, contract.turn_markers), _NEXT_PROBLEM, begin)
    found = _in_answer_tag(turn, contract)
    for find in (_in_box, _after_hashes, _sentence, _last_number):
        found = found if found.answer else find(turn)
    if not found.answer:
        return Extraction(None, f"{strict.reason}, and no other answer either")
    return Extraction(found.answer, f"not in the format: {found.reason}")


# Where a model moves on to another problem. Strictly, these may be words of the first.
_NEXT_PROBLEM = ("\nProblem:", "\nQ:")
_NONE = Extraction(None, "")
_ANSWER_TAGS = ("answer", "final_answer", "solution", "result")
_TAG = re.compile(r"<\s*(/?)\s*([A-Za-z_]{1,40})\s*>", re.ASCII)
_HALF_A_TAG = re.compile(r"\s*</?[A-Za-z_]*\Z", re.ASCII)
# Characters after the last open tag that can still be an answer that was cut off.
_LONG_TAIL = 4_000


def _in_answer_tag(text: str, contract: AnswerContract) -> Extraction:
    """The last closed answer tag, in any case; the contract's own may be left open."""
    own = [name for _, name in _TAG.findall(contract.open.lower())][-1:]
    found, name, start = _NONE, "", -1
    for match in _TAG.finditer(text):
        tag = match[2].lower()
        if tag not in _ANSWER_TAGS and tag not in own:
            continue
        if not match[1]:
            name, start = tag, match.end()
        elif tag == name and start >= 0:
            answer = text[start : match.start()].strip()
            found, start = Extraction(answer, f"last <{tag}>") if answer else found, -1
    rest = _HALF_A_TAG.sub("", text[start:].strip()) if start >= 0 and name in own else ""
    if 0 < len(rest) <= _LONG_TAIL:
        found = Extraction(rest, f"<{name}> not closed")
    return (found.answer and _inside_a_sentence(found.answer)) or found


_SAYS = re.compile(
    r"\b(?:answer|result|total|solution)(?: (?:to|of|for) [^.\n:=]{1,60}?)?(?:\*\*)?"
    r"(?: ?(?:is|are|was|equals|=)\b:?|:)(?:\*\*)?[ \t]*(?:therefore |thus |simply |equal to )?",
    re.IGNORECASE,
)
# Characters from the end in which a sentence still states the result.
_CONCLUSION = 20_000
_CLAUSE = re.compile(r"[^\n]*?(?=[.!?;](?:\s|$)|,\s+(?:so|because|since|which|and then)\b|\n|$)")


def _sentence(text: str) -> Extraction:
    """What the last "the answer is" (or "Answer:") says, to the end of its sentence."""
    text = text[-_CONCLUSION:]
    last = deque(_SAYS.finditer(text), maxlen=1)
    clause = _CLAUSE.match(text, last[0].end()) if last else None
    stated = clause.group().strip(" *_") if clause is not None else ""
    if not stated or len(stated) > 200:
        return _NONE
    inside = _inside_a_sentence(stated)
    return Extraction(inside.answer if inside else stated, '"the answer is"')


_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z({])", re.ASCII)
_MANY_WORDS = 4


def _inside_a_sentence(answer: str) -> Extraction | None:
    """The answer in a sentence, if the text is a whole sentence rather than an answer."""
    if len(_WORD.findall(answer)) < _MANY_WORDS:
        return None
    found = next((way for find in (_in_box, _last_number) if (way := find(answer)).answer), None)
    return found and Extraction(found.answer, f"{found.reason} of a sentence")
