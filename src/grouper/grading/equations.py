r"""Equations as answers: `x = 5`, `k = \frac12 = 0.5`, `C(h) = 4h + 4`, `2x + 3y = 6`.

An equation is a chain of sides. A first (or last) side that is no value itself is its label, and
the other sides are values: a label may be left out, and must not be another one. Every side of an
answer is compared, not only the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from grouper.grading.extraction import closing_brace
from grouper.grading.normalise import canonical
from grouper.grading.numerals import read_number, split_unit

SideTest = Callable[[str, str], tuple[bool | None, str]]
"""(side of the answer, side of the reference) -> equal, not equal or not decided here; why."""
EquationTest = Callable[["Chain", "Chain"], tuple[bool | None, str]]


class Chain(NamedTuple):
    """The sides of one answer."""

    label: str
    """What the values are said of; empty where nothing is."""
    values: tuple[str, ...]
    """At least one; the last is the answer."""

    @property
    def sides(self) -> tuple[str, ...]:
        """All of them, the label first."""
        return (self.label, *self.values) if self.label else self.values


_INEQUALITY = re.compile(r"[!:]=|[<>]|\\(?:le|ge|ne|lt|gt)(?![A-Za-z])")
_APPROXIMATELY = r"\approx"


def chain_of(text: str) -> Chain:
    r"""The sides of a tidy text, turned round where the label stands last.

    What follows `\approx` is left out, unless only a label stands before it.

    >>> chain_of(r"k = \frac12 = 0.5")
    Chain(label='k', values=('\\frac12', '0.5'))
    >>> chain_of("5 = x").label, chain_of("7 = 11a+c").label, chain_of("x+1").values
    ('x', '', ('x+1',))
    """
    before, sign, after = text.partition(_APPROXIMATELY)
    if sign and before.strip():
        if not is_label(before.strip()):
            return chain_of(before.strip())
        text = f"{before}={after}"
    if "=" not in text or _INEQUALITY.search(text):
        return Chain("", (text,))
    first, *rest = (side.strip() for side in _outside_brackets(text, "="))
    if not (rest and first and rest[-1]):
        return Chain("", (text,))
    sides = [first, *filter(None, rest)]
    if not is_label(first) and is_label(sides[-1]):
        sides.reverse()
    if is_label(sides[0]):
        return Chain(sides[0], tuple(sides[1:]))
    return Chain("", tuple(sides))


def _outside_brackets(text: str, separator: str) -> list[str]:
    r"""The parts between separators that stand in no brackets: not the one of `\sum_{k=1}`."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


# --- labels --------------------------------------------------------------------------------------

_INDEX = r"(?:_(?:\{[^{}]*\}|\w|\\[A-Za-z]+)|'+|\^\{?(?:\\prime|\\ast|\*)\}?)"
_ORDER = r"(?:\^(?:\{-1\}|-1|\{\(\w\)\}))"
_ANY_ARGUMENT = r"(?:\((?:[^()]|\([^()]*\)){1,60}\)|\[[^\[\]]{1,60}\])"
_DECORATED = r"\\(?:angle|triangle|overline|widehat|hat|vec|bar|tilde|dot|ddot|overrightarrow|arc)"
_FUNCTION = r"\\?(?:arc)?(?:sin|cos|tan|cot|sec|csc|det|dim|deg|log|ln)h?"
_LABEL = re.compile(
    rf"\\?[A-Za-z]+(?:{_INDEX}|\([\w, ]*\))*"  # x, AB, a_n, y', f(x), V_{1}
    rf"|\\?[A-Za-z]{_INDEX}*{_ORDER}(?: ?\([\w, ]*\))"  # f^{-1}(x)
    rf"|[A-Z]{_INDEX}*\^(?:\{{-1\}}|-1)"  # an inverse matrix
    rf"|(?:[fghFGHPENn]|\\?[A-Za-z]{{3,}}){_INDEX}*{_ORDER}? ?{_ANY_ARGUMENT}"  # P(A | B), f(x+1)
    rf"|\([A-Za-z] ?\\circ ?[A-Za-z]\) ?{_ANY_ARGUMENT}"
    rf"|m? ?\(?{_DECORATED} ?\{{? ?[A-Za-z]+ ?\}}?{_INDEX}*\)?"  # m\angle A, \overline{AB}
    rf"|{_FUNCTION}(?:\^\{{?\d\}}?)?(?:_\{{?\w+\}}?)? ?\(?(?:\\angle )?\\?[A-Za-z]+{_INDEX}*\)?"
    r"|\|?[A-Za-z]{1,3}\|?|\\?\|[A-Za-z]{1,3}_?\{?\w?\}?\\?\||\([A-Za-z,]+\)|\[[A-Z]{3,}\]"
    r"|[A-Za-z ]+(?:\\(?:angle|triangle) ?)?[A-Za-z ]*|[A-Za-z]{1,3}/[A-Za-z]{1,3}",
    re.ASCII,
)
_MAX_LABEL = 120


def is_label(text: str) -> bool:
    r"""Whether a side names something and is no value itself.

    >>> [is_label(t) for t in ("x", "f^{-1}(x)", r"\sin A", "AB:CD", r"\frac{V_1}{V_2}", "a_n")]
    [True, True, True, True, True, True]
    >>> [is_label(t) for t in ("7", r"\pi", "2x", "x+y", r"\sin 30", "x(x+1)", "x^2")]
    [False, False, False, False, False, False, False]
    """
    if not text or len(text) > _MAX_LABEL or text[0].isdigit():
        return False
    parts = _outside_brackets(text, ":")
    if len(parts) > 1:
        return all(is_label(part.strip()) for part in parts)
    if text.startswith(r"\frac"):
        return all(map(is_label, _quotient(text)))
    if _LABEL.fullmatch(text) is None or read_number(text) is not None:
        return False
    return has_variable(text) or len(text) == 1


def _quotient(text: str) -> tuple[str, str]:
    r"""Both parts of a text that is one `\frac{}{}`; two empty ones of any other."""
    start = len(r"\frac")
    middle = closing_brace(text, start) if text[start : start + 1] == "{" else -1
    end = closing_brace(text, middle + 1) if text[middle + 1 : middle + 2] == "{" else -1
    if middle < 0 or end != len(text) - 1:
        return "", ""
    return text[start + 1 : middle].strip(), text[middle + 2 : end].strip()


_SEGMENT = re.compile(r"(?:\\overline|\|)?([A-Z]{2})\|?")
"""`AB`, `BA`, `|AB|` and `\\overline{AB}` are one length."""
_UNSAID = re.compile(r"^m ?(?=\(?\\angle)|[\s{}()]")


def _key(label: str) -> str:
    r"""What makes a label another one: neither spaces, braces nor the `m` of `m\angle A`."""
    bare = _UNSAID.sub("", label)
    segment = _SEGMENT.fullmatch(bare)
    return "".join(sorted(segment[1])) if segment else bare


def same_label(prediction: str, reference: str) -> bool:
    """Whether two labels are one."""
    return _key(prediction) == _key(reference)


_CONSTANT = re.compile(
    r"\\(?!(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|kappa|lambda|mu|nu"
    r"|xi|rho|sigma|tau|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Phi|Psi|Omega|ell)"
    r"(?![A-Za-z]))[A-Za-z]+"
    r"|(?<![A-Za-z])(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)|sqrt|pi|ln|log|exp|infinity|[ei])"
    r"(?![A-Za-z])"
)
_LETTER = re.compile(r"\\[A-Za-z]+|[^\W\d_]")


def has_variable(text: str) -> bool:
    r"""Whether a tidy text has letters that stand for something: not those of a unit or a function.

    >>> [has_variable(text) for text in ("2x", r"\theta", r"2\sqrt{3} cm", "e")]
    [True, True, False, False]
    """
    return bool(_variables(text))


def _variables(text: str) -> set[str]:
    """The letters and Greek letters of a tidy text that are no part of a function's name."""
    if read_number(text) is not None:
        return set()
    return set(_LETTER.findall(_CONSTANT.sub(" ", split_unit(text)[0])))


# --- comparing -----------------------------------------------------------------------------------


def compare_chains(
    prediction: Chain,
    reference: Chain,
    *,
    answer: SideTest,
    side: SideTest,
    equation: EquationTest,
) -> tuple[bool | None, str]:
    """Whether an answer states what the reference does, and why; None where a test passes on.

    Args:
        prediction: the answer's sides.
        reference: the reference's.
        answer: compares the answer's last value with the reference's; work left undone is wrong.
        side: compares a value on the way with another one; work left undone is the way.
        equation: compares two equations that cannot be compared value by value.
    """
    bare = len(prediction.sides) == 1
    if _is_equation(reference):
        if bare:
            return False, "the reference is an equation, the answer is not"
        return equation(prediction, reference)
    if reference.label and not bare:
        if prediction.label and not same_label(prediction.label, reference.label):
            if _otherwise_said(prediction, reference):
                return False, f"{prediction.label} is given, {reference.label} is asked"
            return equation(prediction, reference)
        if not prediction.label and any(map(has_variable, prediction.values)):
            return equation(prediction, reference)
    return _compare_values(prediction, reference, answer, side)


def _is_equation(chain: Chain) -> bool:
    """`2x + 3y = 6`, where neither side is the value of the other."""
    return not chain.label and len(chain.values) > 1 and any(map(has_variable, chain.values))


_UNKNOWN = re.compile(r"\\?[A-Za-z](?:_(?:\{\w+\}|\w))?|\\(?!angle|triangle)[a-z]+", re.ASCII)


def _otherwise_said(prediction: Chain, reference: Chain) -> bool:
    """Whether two labels that differ settle it: `y = 2x` may be `x = y/2`, `f(x) = 2x` may not."""
    if not (_UNKNOWN.fullmatch(prediction.label) and _UNKNOWN.fullmatch(reference.label)):
        return True
    left, right = prediction.values[-1], reference.values[-1]
    both = read_number(left) is not None and read_number(right) is not None
    return both or canonical(left) == canonical(right)


def _compare_values(
    prediction: Chain, reference: Chain, answer: SideTest, side: SideTest
) -> tuple[bool | None, str]:
    outcome, reason = answer(prediction.values[-1], reference.values[-1])
    if outcome is False:
        return False, reason
    for value in prediction.values[:-1]:
        stated = _is_stated(value, prediction, reference, side)
        if stated is False:
            return False, "the equation given is false"
        if stated is None:
            outcome = None
    return outcome, reason if outcome else ""


def _is_stated(value: str, prediction: Chain, reference: Chain, side: SideTest) -> bool | None:
    """Whether a value on the way to the answer agrees with what is known.

    A formula in letters that the reference's value has not (`A = bh = 6`) can only be checked
    where the reference gives a formula, too.
    """
    letters = _variables(value)
    if not letters <= _variables(reference.values[-1]) and not any(
        map(has_variable, reference.values[:-1])
    ):
        return True
    known = reference.values if letters else (*reference.values, prediction.values[-1])
    outcomes = {side(value, other)[0] for other in known}
    return True if True in outcomes else None if None in outcomes else False
