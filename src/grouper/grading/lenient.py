r"""Find what a completion says without its format: the lenient reading, which decides no reward.

`extract_lenient` separates what a model knows from how well it follows the format. It tries the
contract first, then any other notation (a tag, `\boxed{}`, `####`), then prose (`conclusion.py`).
It never looks at a reference, and all scans are linear.
"""

from __future__ import annotations

import re
from collections import deque

from grouper.grading.conclusion import find_conclusion
from grouper.grading.extract import Extraction, after_hashes, extract, first_turn, in_box
from grouper.types import AnswerContract, AnswerKind


def extract_lenient(text: str, contract: AnswerContract) -> Extraction:
    r"""Find the answer by the contract, in a tag, `\boxed{}`, `####`, a sentence or the last value.

    The first of these that is found is the answer, right or wrong.

    >>> from grouper.types import AnswerKind
    >>> xml = AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")
    >>> extract_lenient("<answer>7</answer>", xml)
    Extraction(answer='7', reason='in the format: last <answer>')
    >>> extract_lenient(r"so \boxed{7}. Check: 14/2 = 7", xml)
    Extraction(answer='7', reason='not in the format: last \\boxed{}')
    >>> extract_lenient("The answer is 18. Check: 18/2 = 9", xml)
    Extraction(answer='18', reason='not in the format: "the answer is"')
    >>> extract_lenient(r"So the length is \(2\sqrt{3}\).", xml)
    Extraction(answer='\\(2\\sqrt{3}\\)', reason='not in the format: last formula')
    >>> extract_lenient("no idea", xml)
    Extraction(answer=None, reason='no <answer>, and no other answer either')
    """
    if contract.flexible:
        turn = first_turn(text, contract.turn_markers)
        last = deque(re.finditer(contract.flexible, turn), maxlen=1)
        return Extraction(last[0].group(), "last match") if last else Extraction(None, "no match")
    strict = extract(text, contract)
    # A program is not an answer: the grader has run it, and it printed none.
    is_program = contract.kind is AnswerKind.PROGRAM
    if strict.answer is not None and not is_program:
        inside = inside_a_sentence(strict.answer)
        return inside or Extraction(strict.answer, f"in the format: {strict.reason}")
    begin = len(text) - len(text.lstrip())
    turn = first_turn(first_turn(text, contract.turn_markers), _NEXT_PROBLEM, begin)
    if is_program:
        turn = turn.partition("```")[0]
    found = _in_answer_tag(turn, contract)
    for find in (in_box, after_hashes, find_conclusion):
        if not found.answer:
            found = find(turn)
    if not found.answer:
        return Extraction(None, f"{strict.reason}, and no other answer either")
    return Extraction(found.answer, f"not in the format: {found.reason}")


# Where a model moves on to another problem. Strictly, these may be words of the first.
_NEXT_PROBLEM = ("\nProblem:", "\nQ:")
_NONE = Extraction(None, "")


# --- tags ----------------------------------------------------------------------------------------

_ANSWER_TAGS = ("answer", "final_answer", "solution", "result")
_TAG = re.compile(r"<\s*(/?)\s*([A-Za-z_]{1,40})\s*>", re.ASCII)
_HALF_A_TAG = re.compile(r"\s*</?[A-Za-z_]*\Z", re.ASCII)
# Characters after the last open tag that can still be an answer that was cut off.
_LONG_TAIL = 4_000


def _in_answer_tag(text: str, contract: AnswerContract) -> Extraction:
    """Find the last closed answer tag, in any case; the contract's own may be left open."""
    own = [name for _, name in _TAG.findall(contract.open.lower())][-1:]
    found = _NONE
    name = ""
    start = -1
    for match in _TAG.finditer(text):
        tag = match[2].lower()
        if tag not in _ANSWER_TAGS and tag not in own:
            continue
        if not match[1]:
            name, start = tag, match.end()
        elif tag == name and start >= 0:
            answer = text[start : match.start()].strip()
            start = -1
            if answer:
                found = Extraction(answer, f"last <{tag}>")
    rest = _HALF_A_TAG.sub("", text[start:].strip()) if start >= 0 and name in own else ""
    if 0 < len(rest) <= _LONG_TAIL:
        found = Extraction(rest, f"<{name}> not closed")
    return (found.answer and inside_a_sentence(found.answer)) or found


_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z({])", re.ASCII)
_MANY_WORDS = 4


def inside_a_sentence(answer: str, *, words: int = _MANY_WORDS) -> Extraction | None:
    """Find the answer in a sentence, if the text is a whole sentence rather than an answer.

    Args:
        answer: the text.
        words: of how many on it is a sentence.
    """
    if len(_WORD.findall(answer)) < words:
        return None
    found = in_box(answer)
    if not found.answer:
        found = find_conclusion(answer)
    return Extraction(found.answer, f"{found.reason} of a sentence") if found.answer else None
