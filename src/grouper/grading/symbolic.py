r"""The symbolic rung, run inside a worker only: Math-Verify reads, high-precision numbers judge.

Symbolic equality tests say yes too easily (`1-1/e` and `1+1/e`, two unrelated equations) and no
too easily (`\sqrt{1/n}` and `1/\sqrt{n}`). So expressions are evaluated at several points, and a
difference or agreement there is final. Math-Verify's own verdict is asked only where numbers
cannot be had.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import sympy
from math_verify import verify

from grouper.grading.choices import chosen_value, value_of_choice
from grouper.grading.equations import Chain, chain_of, compare_chains, has_variable
from grouper.grading.equivalence import Equivalence, same_atoms
from grouper.grading.expressions import UnreadError, expression_of, require_grammar
from grouper.grading.normalise import canonical, tidy, tidy_reference
from grouper.grading.numerals import ROUNDED_FROM, read_number, split_unit
from grouper.grading.numerical import POINTS, RELATIVE, TINY, Rounding, agree, points, value_at
from grouper.grading.rational import TooLargeError
from grouper.grading.regions import is_region, same_regions
from grouper.grading.structure import Kind, Node, compare, paired_readings, readings
from grouper.grading.units import Unit, matched
from grouper.types import Verdict


def judge(prediction: str, reference: str) -> Equivalence:
    r"""The verdict on a pair that the exact rungs passed on.

    >>> judge("1-1/e", "1+1/e").verdict.value
    'incorrect'
    >>> judge(r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}").verdict.value
    'correct'
    """
    left, right = tidy(prediction), tidy_reference(reference)
    chosen = chosen_value(left, right)
    if isinstance(chosen, tuple):
        left, right = chosen
    test = _AtomTest()
    try:
        for left_node, right_node in paired_readings(left, right):
            outcome = compare(left_node, right_node, test)
            if outcome is None:
                outcome = _same_sets(left, right, test)
            if outcome:
                return Equivalence(Verdict.CORRECT, "symbolic", test.reason)
    except TooLargeError:
        return _unread(prediction, "a number too large to write down")
    except RecursionError:
        why = why_unreadable(reference)
        if why is not None:
            return Equivalence(
                Verdict.NOT_SCORED, "symbolic", f"the reference cannot be read: {why}"
            )
        return _unread(prediction, "nested too deeply")
    return test.refusal(left, right)


def _unread(text: str, why: str) -> Equivalence:
    return Equivalence(Verdict.UNPARSEABLE, "symbolic", f"{text[:80]!r}: {why}")


class _AtomTest:
    """Two atoms through all rungs, remembering what could not be read."""

    def __init__(self) -> None:
        self.reason = ""
        self.refused = ""
        self.unread: set[str] = set()

    def __call__(self, prediction: str, reference: str) -> bool | None:
        outcome, reason = same_atoms(prediction, reference)
        if outcome is None:
            try:
                outcome, reason = _same_expressions(prediction, reference)
            except UnreadError as error:
                self.unread.add(error.text)
                return False
        if outcome:
            self.reason = reason
        else:
            self.refused = reason
        return outcome

    def refusal(self, prediction: str, reference: str) -> Equivalence:
        """Not correct: because it differs, or because one side could not be read."""
        for text in sorted(self.unread):
            if text in reference and text not in prediction and not _is_prose(text):
                why = f"the reference cannot be read: {text[:80]!r}"
                return Equivalence(Verdict.NOT_SCORED, "symbolic", why)
        for text in sorted(self.unread):
            if text in prediction:
                return _unread(text, "cannot be read as mathematics")
        return Equivalence(Verdict.INCORRECT, "symbolic", self.refused or "not equal")


def _same_sets(prediction: str, reference: str, test: _AtomTest) -> bool:
    """Shapes that differ on paper: `x > 3` against `(3, oo)`."""
    try:
        same, reason = same_regions(prediction, reference)
    except UnreadError as error:
        test.unread.add(error.text)
        return False
    if same:
        test.reason = reason
    else:
        test.refused = reason
    return same


# --- references --------------------------------------------------------------------------------


def why_unreadable(reference: str) -> str | None:
    """Why a reference cannot be read; None if it can. A matter of its spelling, never of time."""
    text = tidy_reference(reference)
    choice = value_of_choice(text)
    reasons = [_node_problem(node) for node in readings(choice[1] if choice else text)]
    return reasons[0] if all(reasons) else None


def _node_problem(node: Node) -> str | None:
    if node.kind is not Kind.ATOM:
        return next((why for item in node.items if (why := _node_problem(item))), None)
    if read_number(node.text) is not None or _is_prose(node.text):
        return None
    reasons = (_side_problem(value) for value in chain_of(node.text).values)
    return next((why for why in reasons if why), None)


def _side_problem(text: str) -> str | None:
    if read_number(text) is not None or _is_prose(text):
        return None
    try:
        require_grammar(split_unit(text)[0])
    except UnreadError as error:
        return f"{error.text[:80]!r} cannot be read as mathematics"
    return None


_PROSE = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{3,}(?![A-Za-z({^])", re.ASCII)
_CLOCK = re.compile(r"\d{1,2}:\d\d.*|\d{1,2} ?[apAP]\.? ?[mM]\.?|\d+(?:st|nd|rd|th)", re.ASCII)
_FORMULA = re.compile(r"[\\^_=+*<>|{}\[\]]")


def _is_prose(text: str) -> bool:
    """Words, clock times and ordinals: the text rung is all they need."""
    if _CLOCK.fullmatch(text):
        return True
    return bool(_PROSE.search(text)) and not _FORMULA.search(text)


# --- expressions -------------------------------------------------------------------------------


def _same_expressions(prediction: str, reference: str) -> tuple[bool, str]:
    same, reason = compare_chains(
        chain_of(prediction),
        chain_of(reference),
        answer=_same_values,
        side=_same_sides,
        equation=_same_equations,
    )
    return bool(same), reason


def _same_values(prediction: str, reference: str) -> tuple[bool, str]:
    (left, given_unit), (right, asked_unit) = split_unit(prediction), split_unit(reference)
    refused = _left_undone(left, right) or _of_another_kind(left, right)
    if refused:
        return False, refused
    if ":" in right:
        return _same_ratios(left, right)
    return _same_parsed(left, right, _conversion(given_unit, asked_unit))


def _same_sides(prediction: str, reference: str) -> tuple[bool, str]:
    r"""Two values on the way to an answer, where a constant may be rounded: `25\pi = 78.5`.

    A constant is false only beyond doubt: what cannot be read is not, nor `\sin 30 = 0.5`, which
    leaves its degrees unsaid.
    """
    constant = not has_variable(prediction)
    if constant and _CONVENTION.search(prediction):
        return True, "a function whose convention is not said"
    try:
        same, reason = _equal_sides(prediction, reference)
        return same or (constant and _rounds_to(prediction, reference)), reason
    except UnreadError:
        return constant, "a side that cannot be read"


# Degrees or radians, and a logarithm to what base.
_CONVENTION = re.compile(
    r"(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])(?!.*(?:\\circ|\\pi))"
    r"|(?<![A-Za-z])log(?! ?_)"
)


def _rounds_to(constant: str, decimal: str) -> bool:
    """Whether a constant that is no fraction is a decimal to the digits that it shows."""
    shown = read_number(decimal)
    if shown is None or shown.decimals < 1 or read_number(constant) is not None:
        return False
    value = value_at(expression_of(constant), {})
    step = sympy.Rational(1, 10**shown.decimals)
    return value is not None and bool(
        value[1] == 0 and abs(value[0] - sympy.Rational(shown.value)) <= step / 2
    )


def _equal_sides(prediction: str, reference: str) -> tuple[bool, str]:
    (left, given_unit), (right, asked_unit) = split_unit(prediction), split_unit(reference)
    if canonical(left) == canonical(right):
        return True, "same text"
    return _same_parsed(left, right, _conversion(given_unit, asked_unit))


# Letters that name points or vectors, which the parser would multiply.
_GEOMETRY = re.compile(r"\\(?:angle|triangle|odot|parallel|perp|cong|sim)(?![A-Za-z])")
_VECTOR = re.compile(r"\\(?:vec|overrightarrow)(?![A-Za-z])")


def _of_another_kind(prediction: str, reference: str) -> str | None:
    """Why two texts must not be compared as numbers, though the parser reads both."""
    if prediction == reference:
        return None
    both = f"{prediction} {reference}"
    if _INDEXED_NUMBER.search(both):
        return "a number in a base that cannot be read"
    if _GEOMETRY.search(both):
        return "names of figures are compared as text"
    if _VECTOR.search(both) and (r"\times" in prediction) != (r"\times" in reference):
        return "another product of vectors"
    if ":" in prediction and ":" not in reference:
        return "a ratio where none is asked"
    return None


def _same_parsed(prediction: str, reference: str, factor: Fraction) -> tuple[bool, str]:
    """Two texts without names and units, as expressions; the first is multiplied by `factor`."""
    number = read_number(reference)
    given = expression_of(prediction)
    cut = number is not None and number.open
    expected = sympy.Rational(number.value) if number and cut else expression_of(reference)
    if is_region(expected) or is_region(given):
        return same_regions(prediction, reference)
    if factor != 1:
        given = given * sympy.Rational(factor)
    rounding = Rounding(number.decimals, number.open) if number is not None else None
    agreed = agree(given, expected, rounding)
    if agreed is not None:
        return agreed, "the same values" if agreed else "different values"
    yes = _says_yes(given, expected)
    return yes, f"{'' if yes else 'not '}equal for Math-Verify; no numbers to check it with"


def _same_ratios(prediction: str, reference: str) -> tuple[bool, str]:
    r"""`1:\sqrt2` against another ratio, or a ratio of two against its quotient."""
    asked = [part.strip() for part in reference.split(":")]
    given = [part.strip() for part in prediction.split(":")]
    if not (all(asked) and all(given)):
        return False, "a ratio that cannot be read"
    if len(given) == 1 and len(asked) == 2:
        return _same_parsed(given[0], rf"\frac{{{asked[0]}}}{{{asked[1]}}}", Fraction(1))
    if len(given) != len(asked):
        return False, "a ratio of another number of parts"
    if any(number and number.value == 0 for number in map(read_number, (*given, *asked))):
        return False, "a ratio with a zero"  # or a full hour
    for mine, theirs in zip(given[1:], asked[1:], strict=True):
        same, reason = _same_parsed(
            rf"\frac{{{mine}}}{{{given[0]}}}", rf"\frac{{{theirs}}}{{{asked[0]}}}", Fraction(1)
        )
        if not same:
            return False, reason
    return True, "equal ratios"


def _conversion(given: Unit | None, asked: Unit | None) -> Fraction:
    """From the given unit to the one asked; units of other kinds were refused before."""
    units = matched(given, asked) if given and asked else None
    if units is None:
        return Fraction(1)
    return units[0].in_base(Fraction(1)) / units[1].in_base(Fraction(1))


def _says_yes(prediction: Any, reference: Any) -> bool:
    """Math-Verify's own verdict; its yes on infinities is worthless (`oo - 1` is `oo`)."""
    if prediction.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return bool(prediction == reference)
    return bool(verify(reference, prediction, timeout_seconds=None))


# The parser drops the base of `204_{six}`.
_INDEXED_NUMBER = re.compile(r"(?<![A-Za-z_\\\d{])\d+ ?_", re.ASCII)


# What problems ask to be worked out; giving it back is no answer.
_QUESTION = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim|gcd|lcm|max|min|lfloor|lceil|floor|ceil|b?mod|pmod|det)"
    r"(?![A-Za-z])|(?<![A-Za-z\\])(?:gcd|lcm|max|min|floor|ceil|mod|det)(?![A-Za-z])|\\frac ?\{d\}"
)
_FUNCTION = re.compile(
    r"(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![A-Za-z])|(?<![A-Za-z])(?:log|ln|lg|exp)"
    r"(?![A-Za-z])"
)
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[a-df-hj-zA-Z](?![A-Za-z])")
_ARITHMETIC = re.compile(r"[\w)}\]!] ?[-+]|\\(?:times|cdot|div|pm|mp)(?![A-Za-z])|\*(?!\*)|\)\(")


def _left_undone(prediction: str, reference: str) -> str | None:
    r"""Why a right value is not yet an answer: `\sum_{k=1}^{10} k` for 55, `12+7+0\pi` for 19."""
    if _QUESTION.search(prediction) and not _QUESTION.search(reference):
        return "a sum, integral, limit or the like is left to be worked out"
    asked = read_number(reference)
    if asked is None or asked.decimals >= ROUNDED_FROM or prediction == reference:
        return None
    if _VARIABLE.search(prediction):
        return "a number is asked, and a variable is given"
    if _FUNCTION.search(prediction) or _ARITHMETIC.search(prediction):
        return "a number is asked, and arithmetic is left to be done"
    return None


def _same_equations(prediction: Chain, reference: Chain) -> tuple[bool, str]:
    """Whether two equations have the same sides, or (of two) sides in constant proportion."""
    given, expected = prediction.sides, reference.sides
    if len(given) != len(expected):
        return False, "an equation of another number of sides"
    for turned in (given, given[::-1]):
        if all(_equal_sides(a, b)[0] for a, b in zip(turned, expected, strict=True)):
            return True, "the same sides"
    if len(given) > 2:
        return False, "other sides"
    return _in_proportion(*map(expression_of, (*given, *expected)))


def _in_proportion(*sides: Any) -> tuple[bool, str]:
    """Two equations are one when their differences of sides are in constant proportion."""
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False, "equations that cannot be compared"
    left, right = sides[0] - sides[1], sides[2] - sides[3]
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if left.free_symbols != right.free_symbols or len(symbols) > len(POINTS[0]):
        return False, "equations in other variables"
    ratios = []
    for point in points(symbols):
        a, b = value_at(left, point), value_at(right, point)
        if a is None or b is None or a[1] != 0 or b[1] != 0 or abs(b[0]) < TINY:
            continue
        ratios.append(a[0] / b[0])
    if len(ratios) < 3 or abs(ratios[0]) < TINY:
        return False, "equations that could not be compared at enough points"
    same = all(abs(ratio - ratios[0]) <= RELATIVE * abs(ratios[0]) for ratio in ratios)
    return same, "the same equation" if same else "different equations"
