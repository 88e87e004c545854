r"""The values of a sentence, and which of them it states: 90 of "she eats 90 carrots in 6 days".

`values_in` finds numbers, formulas and lists of them, with what stands around each; `choose_value`
picks one by the grammar of the sentence: what stands behind the verb, rather than behind a
preposition; `written` is its text, of an equation that works something out the last side.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from grouper.grading.answers import MAX_ANSWER
from grouper.grading.brackets import EQUALS, split
from grouper.grading.chains import is_label
from grouper.grading.normalize import GREEK, tidy
from grouper.grading.numbers import TooLargeError, find_unit, ungrouped
from grouper.grading.sentences import MATHS, Prose, Span


class SentenceValue(NamedTuple):
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
# What a number or formula that is written without dollars consists of.
_MATH_PIECES = (
    rf"\\(?:text[a-z]{{0,6}}|mbox|mathrm|operatorname)\s{{0,3}}\{{[^{{}}\n{MATHS}]{{0,200}}\}}",
    r"\\[A-Za-z]+",  # \sqrt
    rf"\\[^A-Za-z\n{MATHS}]",  # \%
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[a-z]{1,3}(?![A-Za-z]))?",  # 1,234.5 and 5cm
    r"\.\d+",
    rf"[{_VULGAR}]",
    rf"(?:{_FUNCTION})(?![A-Za-z])",
    r"[A-Z]{2,4}(?=\s*=)",  # AB = 5
    r"(?![aAI][ \t]+[A-Za-z]{2})[A-Za-z](?![A-Za-z'’])",  # a letter, but not "a pen" or "I have"
    r"[-+*/^_=<>≤≥≠≈±×·÷√π∞°%!|$€£(){}\[\]∪∩−–²³¹⁰⁴-⁹]",
    r"(?<=[\w}]):(?=[\w\\])",  # 3:4
)
# The pieces that a sentence consists of, every character in one of them.
_PIECE = re.compile(
    rf"(?P<formula>{MATHS}+)"
    r"|(?P<arrow>=>|->|[→⇒⟹])"
    r"|(?P<ordinal>\d+(?:st|nd|rd|th)(?![A-Za-z])|\d+(?:\.\d+)?-(?=[A-Za-z]{2}))"
    rf"|(?P<math>{'|'.join(_MATH_PIECES)})"
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


def values_in(prose: Prose, start: int, end: int) -> list[SentenceValue]:
    """Return the values of a sentence in order, lists joined and known units added."""
    runs = deque(_runs(prose, start, end), maxlen=_MANY_VALUES)
    singles = (value for run in runs for value in _described(prose, start, *run))
    values: list[SentenceValue] = []
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


# What a piece adds to the number of open brackets.
_DEPTH = {"(": 1, "[": 1, "{": 1, r"\{": 1, ")": -1, "]": -1, "}": -1, r"\}": -1}


def _runs(prose: Prose, start: int, end: int) -> Iterator[tuple[int, int]]:
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
        if kind == "math":
            if run < 0:
                run = match.start()
                depth = 0
            depth += _DEPTH.get(match[0], 0)
        elif run >= 0 and kind != "gap" and not (kind == "comma" and depth > 0):
            yield run, match.start()
            run = -1
    if run >= 0:
        yield run, end


_LEADING = re.compile(r"^(?:[ \t,;:=*)\]}/^_!|%+≈·×&']|\.(?!\d))+")
_TRAILING = " \t,;:=*([{/^_|+-−–<>.'≈·×&\\"


def _described(prose: Prose, sentence: int, start: int, end: int) -> Iterator[SentenceValue]:
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
        leading = raw.removesuffix(inner)
        follows_equals = "=" in leading or "≈" in leading
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
    yield SentenceValue(
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


def _joins(masked: str, left: SentenceValue, right: SentenceValue) -> bool:
    """Whether two neighbors are members of one list, or parts of one quantity."""
    gap = masked[left.end : right.start]
    if not _BETWEEN.fullmatch(gap) or "\n" in gap.strip(" "):
        return False
    if left.is_aside or left.is_name or right.is_name or not gap.strip():
        quantity = (
            not gap.strip() and masked[left.end - 1].isalpha() and masked[right.end - 1].isalpha()
        )
        return quantity and not left.is_aside and left.end > left.start
    return not (left.is_chain or right.is_chain or right.follows_equals)


# --- the value that a sentence states -------------------------------------------------------------

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


def choose_value(
    prose: Prose, start: int, end: int, values: list[SentenceValue]
) -> SentenceValue | None:
    """Choose the value that a sentence states, as far as its grammar shows; None if it has none.

    That is the first value after the last verb that has one, and not after a preposition or in
    parentheses; without such a verb, the last of several, or the only one.
    """
    masked = prose.masked
    unnamed = [value for value in values if not value.is_name]
    if not unnamed:
        named = [value for value in values if _is_named(masked, start, value)]
        return named[-1] if named else None
    parentheses = [match.span() for match in _IN_WORDS.finditer(masked, start, end)]
    candidates = [value for value in unnamed if not _is_inside(value, parentheses)] or unnamed
    preamble = _PREAMBLE.match(masked, start, end)
    begin = preamble.end() if preamble else start
    primary = [value for value in candidates if not value.is_aside]
    verb_ends = [match.end() for match in _VERB.finditer(masked, begin, end)]
    verb_ends += [value.start for value in primary if value.follows_equals or value.is_chain]
    verb_ends.sort()
    if not primary:  # `In 3 weeks it falls to 5 degrees`
        behind = [value for value in candidates if verb_ends and value.start >= verb_ends[0]]
        return behind[0] if behind else candidates[-1]
    stated = _of_main_clause(masked, begin, end, primary)
    if len(stated) > 1 and _is_subject(masked, begin, stated[0]):
        stated = stated[1:]
    # Behind each verb, up to the next one or the end.
    for verb_end, limit in reversed([*pairwise([*verb_ends, end])]):
        behind = [value for value in stated if verb_end <= value.start < limit]
        if len(behind) > 1 and _RECIPIENT.fullmatch(masked, behind[0].end, behind[1].start):
            return behind[1]
        if behind:
            return behind[0]
    return stated[0]


def _is_inside(value: SentenceValue, spans: list[Span]) -> bool:
    return any(begin < value.start < end for begin, end in spans)


def _of_main_clause(
    masked: str, begin: int, end: int, values: list[SentenceValue]
) -> list[SentenceValue]:
    """Leave out the values of a subordinate clause: `because`, `after selling 5 of them`.

    One that works the value out counts: `the number of ways, which is 3 * 2 = 6`.
    """
    if _RELATIVE.search(masked, begin, values[0].start):
        return values
    clause = _SUBORDINATE.search(masked, values[0].end, end)
    if clause is None:
        return values
    computes = "which" in clause[0]
    return [
        value for value in values if value.start < clause.start() or (computes and value.is_chain)
    ]


# `It takes 6 workers 3 hours`.
_RECIPIENT = re.compile(r"\s+[A-Za-z]+\s+")


def _is_subject(masked: str, begin: int, value: SentenceValue) -> bool:
    """Whether a value begins its clause: the first of `5 boxes hold 60 eggs`."""
    return not value.is_chain and not masked[begin : value.start].strip(" \t\n,*")


_LEADS_TO_NAME = ("answer", "option", "choice", "hence", "thus", "so", "therefore", " to", " at")


def _is_named(masked: str, start: int, name: SentenceValue) -> bool:
    """Whether a name stands alone, or right behind a verb: `the winner is $A$`."""
    before = masked[max(start, name.start - 40) : name.start].rstrip(" \t\n\"'")
    if not before or before.lower().endswith(_LEADS_TO_NAME):
        return True
    verbs = deque(_VERB.finditer(before), maxlen=1)
    return bool(verbs) and verbs[0].end() == len(before)


# --- the text of a value --------------------------------------------------------------------------

_ARROW = re.compile(r"\\(?:implies|Rightarrow|Longrightarrow|therefore|iff)(?![A-Za-z])|⇒|∴")
_SEVERAL = re.compile(r"\\q?quad|\\(?:text|mbox)\s*\{\s*(?:,?\s*(?:and|or))\b")
_ALIGNED = re.compile(r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|split)\*?\}")
_UNEQUAL = re.compile(r"[<>≤≥≠!:]=?|\\(?:le|ge|lt|gt|ne|leq|geq|neq)(?![A-Za-z])")


def written(prose: Prose, value: SentenceValue) -> str:
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
