r"""Find what a completion says without its format: the lenient reading, which decides no reward.

`extract_lenient` separates what a model knows from how well it follows the format. It tries the
contract first, then any other notation (a tag, `\boxed{}`, `####`), then prose: the last "the
answer is", else the last sentence that holds a value. `value_in` picks the value of a sentence:
what stands behind the verb, rather than a number in "in 6 days"; a formula is taken whole, or from
its last equals sign on. It never looks at a reference, and all scans are linear.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from grouper.grading.equivalence import MAX_ANSWER
from grouper.grading.extract import Extraction, after_hashes, extract, first_turn, in_box
from grouper.grading.normalise import GREEK, tidy
from grouper.grading.numbers import TooLargeError, find_unit, ungrouped
from grouper.grading.shapes import EQUALS, is_label, split
from grouper.types import AnswerContract


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
    if strict.answer is not None:
        inside = _inside_a_sentence(strict.answer)
        return inside or Extraction(strict.answer, f"in the format: {strict.reason}")
    begin = len(text) - len(text.lstrip())
    turn = first_turn(first_turn(text, contract.turn_markers), _NEXT_PROBLEM, begin)
    found = _in_answer_tag(turn, contract)
    for find in (in_box, after_hashes, _in_prose):
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


_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z({])", re.ASCII)
_MANY_WORDS = 4


def _inside_a_sentence(answer: str) -> Extraction | None:
    """Find the answer in a sentence, if the text is a whole sentence rather than an answer."""
    if len(_WORD.findall(answer)) < _MANY_WORDS:
        return None
    found = in_box(answer)
    if not found.answer:
        found = _in_prose(answer)
    return Extraction(found.answer, f"{found.reason} of a sentence") if found.answer else None


# --- prose: formulas and sentences ---------------------------------------------------------------

# Characters from the end in which prose still states the result.
_CONCLUSION = 20_000
# Stands for a character of a formula, so that no full stop or word inside ends or begins anything.
_MATHS = "\ue000"
_FORMULA = re.compile(
    r"\\\[(?P<brackets>[^\ue000]{1,2000}?)\\\]|\\\((?P<parentheses>[^\ue000]{1,1000}?)\\\)"
    r"|(?<!\\)\$\$(?P<display>[^$]{1,2000})\$\$"
    r"|\\begin\{(?P<name>align|equation|gather|aligned)\*?\}(?P<block>(?:[^\\]|\\(?!begin\{(?:al|eq|ga))){1,2000}?)"
    r"\\end\{(?P=name)\*?\}"
    # As Pandoc reads it: the dollars of "$5 and $6" are money.
    r"|(?<![\\$])\$(?P<tight>(?![\s$])[^$\n]{0,300}?[^\s$\\])\$(?![\d$])"
    # With spaces inside there may be no words, which are a sentence between two amounts.
    r"|(?<![\\$])\$(?P<spaced>(?:\\(?:text\w*|mbox|begin|end|operatorname|mathrm)\{[^{}$]{0,60}\}"
    r"|\\[A-Za-z]+|\\.|[^$\nA-Za-z\\]|(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])){1,300})\$(?![\d$])",
    re.DOTALL,
)
_EMPHASIS = re.compile(
    r"(?<![\w)}])\*\*+|\*\*+(?![\w(\\])|(?<!\S)\*(?=\S)|(?<=\S)\*(?=[\s.,;:!?)]|$)"
    r"|(?<!\w)__|__(?!\w)|`+|^[ \t]*#+[ \t]|^[ \t]*>[ \t]|[✅✓✔]",
    re.MULTILINE,
)
_MARKER = re.compile(r"^[ \t]*(?:(\d{1,2})[.)]|[-•])[ \t]+(?=\S)", re.MULTILINE)


class _Prose(NamedTuple):
    """A text, and the same with formulas and emphasis masked, character by character."""

    text: str
    masked: str
    formulas: dict[int, re.Match[str]]
    """Where each formula begins."""


def _prose(text: str) -> _Prose:
    formulas = {match.start(): match for match in _FORMULA.finditer(text)}
    pieces = []
    start = 0
    for match in formulas.values():
        pieces += [text[start : match.start()].replace(_MATHS, " "), _MATHS * len(match[0])]
        start = match.end()
    masked = "".join([*pieces, text[start:].replace(_MATHS, " ")])
    masked = _EMPHASIS.sub(lambda mark: " " * len(mark[0]), masked)
    numbered = {int(match[1]) for match in _MARKER.finditer(masked) if match[1]}

    def unmarked(match: re.Match[str]) -> str:
        """A bullet, or the number of a list that has a neighbour, as blanks."""
        alone = match[1] and not {int(match[1]) - 1, int(match[1]) + 1} & numbered
        return match[0] if alone else " " * len(match[0])

    return _Prose(text, _MARKER.sub(unmarked, masked), formulas)


_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!e\.g)(?<!i\.e)[.?;](?=\s|$)|!(?=\s*\Z|\s*\n|\s+[A-Z])|\n\s*"
)
# How a line ends that goes on: in a colon, a comma or a verb, or as the heading of an answer.
_GOES_ON = re.compile(
    r"(?:[:,=]|\b(?:is|are|be|get|have|equals|of)|^\s*(?:the )?(?:final |correct )?answer)\s*\Z",
    re.IGNORECASE | re.MULTILINE,
)


def _sentences(prose: _Prose) -> list[tuple[int, int]]:
    """Return where each sentence begins and ends, in order; what follows a colon belongs to it."""
    spans = []
    start = 0
    for match in _END.finditer(prose.masked):
        if match[0][0] == "\n" and _is_wrapped(prose.masked, max(start, match.start() - 40), match):
            continue
        if prose.masked[start : match.start()].strip():
            spans.append((start, match.start()))
        start = match.end()
    if prose.masked[start:].strip():
        spans.append((start, len(prose.masked)))
    return spans


def _is_wrapped(masked: str, start: int, line_break: re.Match[str]) -> bool:
    """Whether a sentence goes on after the end of a line: in a formula, or in small letters."""
    before = masked[start : line_break.start()].rstrip()
    after = masked[line_break.end() : line_break.end() + 2]
    if not before or before[-1] in ".!?;":
        return False
    if _GOES_ON.search(before):
        return True
    # A small letter alone is a variable, and begins an equation.
    words = len(after) == 2 and after.isalpha() and after.islower()
    return before[-1] != _MATHS and (after[:1] == _MATHS or words)


# --- prose: the sentence that states the result ---------------------------------------------------

_SAYS = re.compile(
    r"\banswers?(?: (?:to|of|for) [^.\n:=]{1,60}?)?[ \t]{0,6}"
    r"(?:(?:is|are|was|equals)\b[ \t]*:?|=|:|(?<=answer)[ \t]*(?=\n))\s*"
    r"(?:(?:therefore|thus|simply|equal to)\s+)?",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"\W*(?:therefore|thus|hence|so|consequently|in conclusion|in total|finally|altogether"
    r"|this (?:means|gives)|we conclude)\b",
    re.IGNORECASE,
)
_CHECKS = re.compile(
    r"\W*(?:(?:let(?:'|’)?s|let us|to|we can|now we|double)[ -])?(?:check|verif|note)\w*",
    re.IGNORECASE,
)
# Of a result, rather than of candidates: `Check each number: ...` is work.
_CHECKS_RESULT = re.compile(
    r"\W*(?:(?:(?:let(?:'|’)?s|let us|to|we can|now we|double)[ -])?(?:check(?:ing)?|verif\w*|note)"
    r"[ \t]*(?:[:,]|\*|\n|by|with|at|in|back|our|the (?:answer|result|solution)|[a-z] ?=))",
    re.IGNORECASE,
)
_ASIDE = re.compile(
    r"(?:\s*\([A-Za-z]{2}|\W*(?:i hope|let me know|feel free|please|thank|if you (?:have|need|want)"
    r"|this (?:confirms|matches|checks|includes|is because|agrees)|explanation|confidence)\b)",
    re.IGNORECASE,
)
# Words of a clause that can still be an answer of words: `no solution`, `Evelyn`.
_FEW_WORDS = 3
_MAX_CLAUSE = 200


def _in_prose(text: str) -> Extraction:
    """Find what the last "the answer is" says, or the last sentence that holds a value.

    A later "therefore" or "so" that holds a value counts more than an earlier "the answer is".
    """
    text = text[-_CONCLUSION:]
    prose = _prose(text)
    sentences = _sentences(prose)
    said = deque(_SAYS.finditer(prose.masked), maxlen=1)
    told: _Value | None = None
    told_at = -1
    if said:
        told_at, told = _clause(prose, sentences, said[0].end())
    if said and told and _is_guess(prose.masked, said[0].start()):
        told = None
    last = _last_value(prose, sentences, told_at, found=told is not None)
    if last is not None:
        how = "last number" if last.is_number else "last formula"
        return Extraction(_written(prose, last), how)
    return Extraction(_written(prose, told), '"the answer is"') if told else _NONE


_GUESS = re.compile(
    r"\b(?:at first|might|may|seems?|looks like|guess|suppose|assume|if|would be|not)\b[^.!?\n]*\Z",
    re.IGNORECASE,
)


def _is_guess(masked: str, start: int) -> bool:
    """Whether what comes before "the answer is" makes it a guess: `one might think that`."""
    return _GUESS.search(masked, max(0, start - 80), start) is not None


def _clause(
    prose: _Prose, sentences: list[tuple[int, int]], start: int
) -> tuple[int, _Value | None]:
    """Return which sentence says the answer from `start` on, and its value or few words."""
    for at, (first, end) in enumerate(sentences):
        if end <= start:
            continue
        begin = max(first, start)
        stated = prose.masked[begin:end].strip(" *_:\n")
        if not stated:
            continue  # the clause is on the next line
        if _NEGATED.match(stated) or _VAGUE.match(stated):
            return at, None
        values = _values(prose, begin, end)
        if values and _begins(prose.masked, begin, values[0]):
            return at, values[0]
        if len(stated) > _MAX_CLAUSE:
            return at, None
        value = _chosen(prose, begin, end, values)
        if value is None and len(stated.split()) <= _FEW_WORDS:
            offset = begin + prose.masked[begin:end].index(stated)
            value = _Value(offset, offset + len(stated.rstrip(".!?;: ")))
        return at, value
    return -1, None


def _begins(masked: str, begin: int, value: _Value) -> bool:
    """Whether a clause begins with a value, and not with arithmetic in words: `5 times 3`."""
    before = masked[begin : value.start].strip(" *_:\n(\"'")
    return not before and _OPERATION.match(masked, value.end) is None


_NEGATED = re.compile(r"(?:not|no longer|never|wrong)\b", re.IGNORECASE)
_OPERATION = re.compile(r"\s*(?:times|plus|minus|divided|multiplied)\b", re.IGNORECASE)
_VAGUE = re.compile(
    r"(?:un(?:clear|known)|as follows|as|clear\w*|obvious|simple|correct|wrong|right|given|found"
    r"|(?:the )?same|easy|hard|different)\b(?!:)",
    re.IGNORECASE,
)


def _last_value(
    prose: _Prose, sentences: list[tuple[int, int]], told_at: int, *, found: bool
) -> _Value | None:
    """Return the value of the last sentence that has one; of a check only if there is no other.

    With an answer `found` in sentence `told_at`, only a conclusion after it can replace it.
    """
    results: list[tuple[int, int]] = []
    checks: list[tuple[int, int]] = []
    concluded = checking = False
    for at, (start, end) in enumerate(sentences):
        sentence = prose.masked[start:end]
        if _CONCLUDES.match(sentence) or at == told_at:
            concluded, checking = True, False
        elif _CHECKS.match(sentence):
            checking = concluded or bool(results and _CHECKS_RESULT.match(sentence))
        if _ASIDE.match(sentence) or (found and at <= told_at):
            continue
        (checks if checking else results).append((start, end))
    if found and not any(_concludes(prose, *span) for span in results):
        return None
    for start, end in (*reversed(results), *reversed([] if found else checks)):
        value = _chosen(prose, start, end, _values(prose, start, end))
        if value is not None:
            return value
    return None


def _concludes(prose: _Prose, start: int, end: int) -> bool:
    """Whether a sentence begins with "therefore" or the like, and holds a value."""
    if not _CONCLUDES.match(prose.masked[start:end]):
        return False
    return _chosen(prose, start, end, _values(prose, start, end)) is not None


# --- prose: the values of a sentence --------------------------------------------------------------


class _Value(NamedTuple):
    """A number, a formula or a list of them in a sentence."""

    start: int
    end: int
    is_number: bool = False
    """It is a number without a formula around it."""
    is_name: bool = False
    """It names something: `x`, `ABC`."""
    is_aside: bool = False
    """It stands after "in", "the" or the like: `in 6 days`, `the 5 friends`."""
    follows_equals: bool = False
    """An equals sign stands before it, and words before that."""
    is_list: bool = False
    is_chain: bool = False
    """It is an equation that works something out: `3 + 5 = 8`, `x = 6/2 = 3`."""


_FUNCTION = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|sqrt|pi"
_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_PIECE = re.compile(
    rf"(?P<formula>{_MATHS}+)"
    r"|(?P<arrow>=>|->|[→⇒⟹])"
    r"|(?P<ordinal>\d+(?:st|nd|rd|th)(?![A-Za-z])|\d+(?:\.\d+)?-(?=[A-Za-z]{2}))"
    rf"|(?P<maths>\\(?:text[a-z]{{0,6}}|mbox|mathrm|operatorname)\s{{0,3}}\{{[^{{}}\n{_MATHS}]{{0,200}}\}}"
    rf"|\\[A-Za-z]+|\\[^A-Za-z\n{_MATHS}]"
    rf"|(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?(?:[a-z]{{1,3}}(?![A-Za-z]))?|\.\d+|[{_VULGAR}]"
    rf"|(?:{_FUNCTION})(?![A-Za-z])|[A-Z]{{2,4}}(?=\s*=)"
    r"|(?![aAI][ \t]+[A-Za-z]{2})[A-Za-z](?![A-Za-z'’])"
    r"|[-+*/^_=<>≤≥≠≈±×·÷√π∞°%!|$€£(){}\[\]∪∩−–²³¹⁰⁴-⁹]|(?<=[\w}]):(?=[\w\\]))"
    r"|(?P<comma>[,&])|(?P<word>[^\W\d_][\w'’]*)|(?P<gap>[ \t]+)|(?P<other>.)",
    re.DOTALL,
)
_HOLDS_VALUE = re.compile(
    rf"[\d{_VULGAR}π∞√]|\\(?!text|mbox|mathrm|quad|operatorname)[A-Za-z]"
    r"|[A-Za-z)\]}]\s*[=^+*/<>≤≥-]\s*\S"
)
_DIGIT_OR_WORDS = re.compile(r"\d|\A\s*\\(?:text\w*|mbox)\s*\{[^{}]*\}\W*\Z")
_CHOICE = re.compile(r"\(?[A-J]\)?")
_PLAIN_NUMBER = re.compile(r"[-+−–]?[$€£]?\s?[-−–]?[\d.,]+(?:/\d+)?\s?\\?%?")


# Values of one sentence, from its end, that are looked at.
_MANY_VALUES = 200


def _values(prose: _Prose, start: int, end: int) -> list[_Value]:
    """Return the values of a sentence in order, lists joined and known units added."""
    runs = deque(_runs(prose, start, end), maxlen=_MANY_VALUES)
    singles = (value for run in runs for value in _described(prose, start, *run))
    values: list[_Value] = []
    for value in singles:
        if values and _joins(prose.masked, values[-1], value):
            values[-1] = values[-1]._replace(end=value.end, is_number=False, is_list=True)
            continue
        after_aside = bool(values) and values[-1].is_aside
        if after_aside and _ALONGSIDE.fullmatch(prose.masked, values[-1].end, value.start):
            values.append(value._replace(is_aside=True))
        else:
            values.append(value)
    return values


def _runs(prose: _Prose, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where each formula, or row of mathematical signs outside of one, begins and ends."""
    run = -1
    depth = 0
    for match in _PIECE.finditer(prose.masked, start, end):
        kind = match.lastgroup
        if kind == "formula":
            if run >= 0:
                yield run, match.start()
            at = match.start()
            while at < match.end():  # of several formulas side by side
                yield at, prose.formulas[at].end()
                at = prose.formulas[at].end()
            run = -1
            continue
        if kind == "maths":
            if run < 0:
                run, depth = match.start(), 0
            piece = match[0]
            depth += (piece in ("(", "[", "{", r"\{")) - (piece in (")", "]", "}", r"\}"))
        elif run >= 0 and kind != "gap" and not (kind == "comma" and depth > 0):
            yield run, match.start()
            run = -1
    if run >= 0:
        yield run, end


_LEADING = re.compile(r"^(?:[ \t,;:=*)\]}/^_!|%+≈·×&']|\.(?!\d))+")
_TRAILING = " \t,;:=*([{/^_|+-−–<>.'≈·×&\\"


def _described(prose: _Prose, sentence: int, start: int, end: int) -> Iterator[_Value]:
    """Yield the value in a formula or a run, if there is one, with what stands before it."""
    if end - start > MAX_ANSWER:
        return
    formula = prose.formulas.get(start)
    follows_equals = False
    if formula is not None:
        inner = formula[formula.lastgroup or 0]
        is_number = False
    else:
        raw = prose.masked[start:end]
        inner = _LEADING.sub("", raw)
        follows_equals = "=" in raw[: len(raw) - len(inner)] or "≈" in raw[: len(raw) - len(inner)]
        inner = _balanced(inner.rstrip(_TRAILING))
        start = prose.masked.index(inner, start)
        end = start + len(inner)
        is_number = _PLAIN_NUMBER.fullmatch(inner) is not None
    choice = formula is None and _CHOICE.fullmatch(inner)
    if not inner or (formula is None and not choice and not _HOLDS_VALUE.search(inner)):
        return
    if re.fullmatch(r"(?:\\[^A-Za-z]|\\(?:quad|qquad|ldots|dots|cdots)|\s)*", inner):
        return
    if is_number or any(character.isdigit() for character in inner[-3:]) or formula:
        end = _with_unit(prose.masked, end)
    before = prose.masked[max(sentence, start - 60) : start]
    sides = split(inner, EQUALS)
    yield _Value(
        start,
        end,
        is_number,
        is_name=bool(choice) or (not _DIGIT_OR_WORDS.search(inner) and _is_name(tidy(inner))),
        is_aside=bool(_ASIDE_BEFORE.search(before)) and not _RESULT_BEFORE.search(before),
        follows_equals=follows_equals,
        is_chain=len(sides) > 2 or (len(sides) == 2 and not _is_name(tidy(sides[0]))),
    )


def _balanced(run: str) -> str:
    """Return a run without brackets at its ends that nothing closes or opens.

    >>> _balanced("((1, 2)"), _balanced("3) + 4"), _balanced("[2, 5)")
    ('(1, 2)', '3', '[2, 5)')
    """
    opened: list[int] = []
    for at, character in enumerate(run):
        if character in "([{":
            opened.append(at)
        elif character in ")]}":
            if not opened:
                return run[:at].rstrip(_TRAILING)
            opened.pop()
    leading = 0
    while leading < len(opened) and opened[leading] == leading:
        leading += 1
    end = opened[leading] if leading < len(opened) else len(run)
    return run[leading:end].strip(_TRAILING if leading < len(opened) else " ")


_SCALE = re.compile(
    r"[ \t-]?(?:hundred|thousand|million|billion|trillion|percent|per cent)\b", re.IGNORECASE
)
_UNIT = re.compile(
    r"[ \t-]?((?:(?:square|cubic|sq\.?|cu\.?)[ \t])?(?!in\b)[A-Za-z°]{1,12}"
    r"(?:(?:[ \t]per[ \t]|/)[A-Za-z]{1,10})?(?:\^\{?[23]\}?|²|³)?)(?![A-Za-z])"
)


def _with_unit(masked: str, end: int) -> int:
    """Return the end of a value with a scale or known unit behind it: `5 million`, `3 hours`."""
    if scale := _SCALE.match(masked, end):
        end = scale.end()
    unit = _UNIT.match(masked, end)
    while unit and find_unit(unit[1]) is None:
        shorter = re.match(r".*(?=[ \t/])", unit[0], re.DOTALL)
        if not shorter or not shorter[0].strip():
            return end
        unit = _UNIT.match(masked[: end + len(shorter[0])], end)
    return unit.end() if unit else end


# `between 9 and 0`, `the 5 boys and 6 girls`
_ALONGSIDE = re.compile(r"\s*(?:[A-Za-z]+\s+){0,2}(?:,\s*)?(?:and|or|&|,)\s*", re.IGNORECASE)
_BETWEEN = re.compile(r"\s*(?:[,;]\s*)?(?:\\?(?:and|or|&))?\s*", re.IGNORECASE)


def _joins(masked: str, left: _Value, right: _Value) -> bool:
    """Whether two neighbours are members of one list, or parts of one quantity."""
    gap = masked[left.end : right.start]
    if not _BETWEEN.fullmatch(gap) or "\n" in gap.strip(" "):
        return False
    if left.is_aside or left.is_name or right.is_name or not gap.strip():
        quantity = (
            not gap.strip() and masked[left.end - 1].isalpha() and masked[right.end - 1].isalpha()
        )
        return quantity and not left.is_aside and left.end > left.start
    return not (left.is_chain or right.is_chain or right.follows_equals)


# --- prose: the value that a sentence states ------------------------------------------------------

_ADVERBS = r"(?:exactly |only |just |about |approximately |roughly |nearly |(?:a )?total of )*"
_ASIDE_BEFORE = re.compile(
    r"(?:\b(?:in|for|after|before|of|per|over|on|at|by|from|within|during|with|without|among"
    r"|between|every|each|all|the|these|those|his|her|their|its|our|my|your|than|as|first|last"
    r"|next|day|week|month|year|step|case|question|problem|part|equation|since|because|when|if"
    r"|where|given|let|until|not|times|another|other|remaining|through|above|below|under|using"
    r"|both|except|substituting|multiply|divide|add|subtract|from[ \t]+\S{1,20}[ \t]+to)"
    rf"|n't)[ \t(]+{_ADVERBS}\(?$",
    re.IGNORECASE,
)
_RESULT_BEFORE = re.compile(
    r"(?<!\bat )(?<!\bat a )(?<!\bwith a )(?<!\bfor a )(?<!\bat an )(?<!\bwith an )"
    r"\b(?:(?:total|average|mean|median|amount|sum|maximum|minimum|value|probability|distance|area"
    r"|volume|perimeter|length|profit|cost|price|number|balance|age|weight|height|speed|rate|ratio"
    r"|product|difference|remainder|result|answer|score|mode|range|salary|bill|fee) of"
    r"|(?:result\w*|end\w*|left) (?:up )?(?:in|with))[ \t]*(?:the )?$",
    re.IGNORECASE,
)
_VERB = re.compile(
    r"\b(?:(?:reduc|simplif|amount|com|add|equal|evaluat|lead|round|convert)\w* (?:up )?to"
    r"|is|are|was|were|(?:will|would|must|should|can) be|equals?|becomes?|became|gives?|gave"
    r"|yields?|has|have|had|makes?|made|totals?|gets?|got|contains?|needs?|costs?|takes?|leaves"
    r"|earns?|earned|spends?|spent|saves?|saved|pays?|paid|sells?|sold|receives?|received"
    r"|giving|yielding|leaving|totaling|making|(?:result\w*|end\w*) (?:up )?(?:in|with))\b"
    r"|:|=>|->|[→⇒⟹]|,?\s(?:so|thus|therefore|hence|then)\b",
    re.IGNORECASE,
)
_PREAMBLE = re.compile(
    r"\W*(?:(?:therefore|thus|hence|so|finally|now|then|consequently|in conclusion),?\s+)?"
    r"(?:(?:(?:we|i|you)\s+(?:can\s+)?(?:find|conclude|see|know|get|have|say|note|obtain)"
    r"|this\s+(?:means|gives|shows))(?:\s+that)?)?",
    re.IGNORECASE,
)
_RELATIVE = re.compile(r"\b(?:that|which|who|whose|where|if|when)\b", re.IGNORECASE)
_SUBORDINATE = re.compile(
    r"(?:,\s*|\s)(?:which(?! (?:leave|give|equal|mean|make|bring|result|total|add|come|round)s)"
    r"|because|since|where|in order|if|when|who|while|whereas|compared|rather|instead|including"
    r"|before|once|until|unless|although|though|but not|and (?:is|are)|after [a-z]+ing)\b",
    re.IGNORECASE,
)
_IN_WORDS = re.compile(r"\([^()]*[A-Za-z]{3,}[^()]*\)")


def _chosen(prose: _Prose, start: int, end: int, values: list[_Value]) -> _Value | None:
    """Choose the value that a sentence states, as far as its grammar shows; None if it has none.

    That is the first value after the last verb that has one, and not after a preposition or in
    parentheses; without such a verb, the last of several, or the only one.
    """
    masked = prose.masked
    parentheses = [m.span() for m in _IN_WORDS.finditer(masked, start, end)]
    outside = [
        v for v in values if not any(a < v.start < b for a, b in parentheses) and not v.is_name
    ] or [v for v in values if not v.is_name]
    if not outside:
        return next((v for v in reversed(values) if _is_named(masked, start, v)), None)
    primary = [v for v in outside if not v.is_aside]
    opening = _PREAMBLE.match(masked, start, end)
    begin = opening.end() if opening else start
    verbs = [m.end() for m in _VERB.finditer(masked, begin, end)]
    verbs += [v.start for v in primary if v.follows_equals or v.is_chain]
    verbs.sort()
    if not primary:  # `In 3 weeks it falls to 5 degrees`
        return next((v for v in outside if verbs and v.start >= verbs[0]), outside[-1])
    stated = primary
    if not _RELATIVE.search(masked, begin, stated[0].start):
        subordinate = _SUBORDINATE.search(masked, stated[0].end, end)
        if subordinate:
            computes = "which" in subordinate[0]  # `the number of ways, which is 3 * 2 = 6`
            stated = [
                v for v in stated if v.start < subordinate.start() or (computes and v.is_chain)
            ]
    if len(stated) > 1 and _is_subject(masked, begin, stated[0]):
        stated = stated[1:]
    for at in reversed(range(len(verbs))):
        limit = verbs[at + 1] if at + 1 < len(verbs) else end
        behind = [v for v in stated if verbs[at] <= v.start < limit]
        if len(behind) > 1 and _RECIPIENT.fullmatch(masked, behind[0].end, behind[1].start):
            return behind[1]
        if behind:
            return behind[0]
    return stated[0]


# `It takes 6 workers 3 hours`.
_RECIPIENT = re.compile(r"\s+[A-Za-z]+\s+")


def _is_subject(masked: str, begin: int, value: _Value) -> bool:
    """Whether a value begins its clause: the first of `5 boxes hold 60 eggs`."""
    return not value.is_chain and not masked[begin : value.start].strip(" \t\n,*")


_LEADS_TO_NAME = ("answer", "option", "choice", "hence", "thus", "so", "therefore", " to", " at")


def _is_named(masked: str, start: int, name: _Value) -> bool:
    """Whether a name stands alone, or right behind a verb: `the winner is $A$`."""
    before = masked[max(start, name.start - 40) : name.start].rstrip(" \t\n\"'")
    if not before or before.lower().endswith(_LEADS_TO_NAME):
        return True
    verbs = deque(_VERB.finditer(before), maxlen=1)
    return bool(verbs) and verbs[0].end() == len(before)


# --- prose: what is written of a value ------------------------------------------------------------

_ARROW = re.compile(r"\\(?:implies|Rightarrow|Longrightarrow|therefore|iff)(?![A-Za-z])|⇒|∴")
_SEVERAL = re.compile(r"\\q?quad|\\(?:text|mbox)\s*\{\s*(?:,?\s*(?:and|or))\b")
_ALIGNED = re.compile(r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|split)\*?\}")
_UNEQUAL = re.compile(r"[<>≤≥≠!:]=?|\\(?:le|ge|lt|gt|ne|leq|geq|neq)(?![A-Za-z])")


def _written(prose: _Prose, value: _Value) -> str:
    """Return the text of a value: all of it, or the last side of its equation."""
    whole = prose.text[value.start : value.end]
    formula = prose.formulas.get(value.start)
    text = formula[formula.lastgroup or 0] if formula else whole
    side = text if value.is_list else _last_side(text)
    return (side if side is not text else whole).strip(" \t\n*_`")


def _is_name(text: str) -> bool:
    """Whether a tidy text is a label; a number too large to write down is none."""
    try:
        return is_label(text)
    except TooLargeError:
        return False


def _last_side(text: str) -> str:
    r"""Return the last side of an equation that states a value, else the same text.

    >>> _last_side("48 + 24 = 72"), _last_side("x = 3, y = 5"), _last_side("x^2 + y^2 = 4y")
    (' 72', 'x = 3, y = 5', 'x^2 + y^2 = 4y')
    >>> _last_side(r"\begin{aligned} x &= 1 + 2 \\ &= 3 \end{aligned}")
    ' 3'
    """
    arrows = list(_ARROW.finditer(text))
    if arrows and text[arrows[-1].end() :].strip():
        text = text[arrows[-1].end() :]
    body = _ALIGNED.sub(lambda match: " " * len(match[0]), text).replace("&", " ")
    sides = split(body, EQUALS)
    if len(sides) < 2 or _UNEQUAL.search(body) or _SEVERAL.search(body):
        return text
    if len(split(ungrouped(body.replace("{,}", "")), _COMMA)) > 1:
        return text
    first, last = tidy(sides[0]), tidy(sides[-1])
    if not last or not first:
        return text if not last else _from_end(text, sides[-1])
    if _is_name(last) and not _is_name(first):
        return text[: len(sides[0])] if len(sides) == 2 else text
    if len(sides) == 2 and not _is_name(first):
        in_letters = _VARIABLE.search(last) or (last == "0" and _VARIABLE.search(first))
        if in_letters:
            return text  # the equation itself is the answer
    return _from_end(text, sides[-1])


def _from_end(text: str, side: str) -> str:
    start = len(text) - len(side)
    end = len(side.rstrip())
    return text[start : start + end]


# A letter that is no constant, or a Greek one; nothing in the words of a unit.
_VARIABLE = re.compile(
    rf"(?<![A-Za-z\\])(?![eip](?![A-Za-z]))[A-Za-z](?![A-Za-z])|\\(?:{'|'.join(GREEK)})(?![A-Za-z])"
)
_COMMA = re.compile(r"[()\[\]{}]|,")
