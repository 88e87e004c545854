r"""The shape of an answer: one value, or a list, set, tuple, interval, matrix or equation.

Shapes are compared here, part by part, with three outcomes: True, False, or None where some part
needs another stage. The same code runs in the trainer (exact parts) and in the worker (symbolic
parts), so a symbolic library only ever sees single expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from grouper.grading.normalise import CONSTANTS, GREEK
from grouper.grading.numbers import (
    TooLargeError,
    Unit,
    is_number,
    read_number,
    split_unit,
    ungrouped,
)

AtomTest = Callable[[str, str], bool | None]
"""(prediction, reference) -> equal, not equal, or not decided here."""


Kind = Literal["atom", "list", "set", "quantity", "tuple", "matrix"]
r"""What an answer is made of, and whether order counts.

    atom      one value, or an equation
    list      1, 2 without brackets, in any order
    set       {1, 2}, in any order
    quantity  2 dollars and 3 cents: one amount, not the list 2, 3
    tuple     (1, 2), and intervals; order and brackets count
    matrix    its rows, each a tuple
"""


class Node(NamedTuple):
    """An answer or a part of one; `text` is an atom's tidy text or a tuple's brackets."""

    kind: Kind
    text: str
    items: tuple[Node, ...] = ()
    label: str = ""
    """The name before a set or tuple: the `A` of `A = (1, 2)`."""


def atoms_of(node: Node) -> Iterator[str]:
    """The single values of a shape, in order."""
    if node.kind == "atom":
        yield node.text
    for item in node.items:
        yield from atoms_of(item)


_MAX_PARTS = 60
# Brackets in brackets; parsing time grows with the depth, and no answer needs as many.
MAX_NESTING = 16
_BRACKETS = r"[()\[\]{}]"


def depths(text: str) -> tuple[int, int]:
    """Return the (lowest, deepest) nesting of brackets.

    The lowest is negative if one closes before it opens.
    """
    depth = 0
    lowest = 0
    deepest = 0
    for match in re.finditer(_BRACKETS, text):
        if match.group() in "([{":
            depth += 1
        else:
            depth -= 1
        lowest = min(lowest, depth)
        deepest = max(deepest, depth)
    return lowest, deepest


def _outside_brackets(separator: str) -> re.Pattern[str]:
    return re.compile(rf"{_BRACKETS}|{separator}", re.ASCII)


_CONJUNCTION = _outside_brackets(r",? (?:and|or) (?=\S)|(?<=[)\]}]) ?(?:and|or) ?(?=[(\[{\\])|[,;]")
EQUALS = _outside_brackets("=")
COLON = _outside_brackets(":")
LISTED = _outside_brackets("[,;]")


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at separators outside brackets: not at the comma of `f(x, y)`."""
    parts = []
    depth = 0
    start = 0
    for match in separator.finditer(text):
        if match.group() in ("(", "[", "{"):
            depth += 1
        elif match.group() in (")", "]", "}"):
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


# --- reading -------------------------------------------------------------------------------------

_OPENERS = ("(", "[", "{", r"\{")
_GROUP_OF_ZERO = re.compile(r"(?<=\d), (?=0\d\d(?!\d))", re.ASCII)
_DECIMAL_COMMA = re.compile(r"([-+]?\d+),(\d+)", re.ASCII)
_PREAMBLE = re.compile(
    r"^(?:(?:so |thus |hence |therefore,? )?(?:the |our |my )?(?:final |correct )?(?:answer|result|"
    r"solution|root|value)s?(?: (?:is|are)(?::| )| ?:)|(?!not |wrong)[a-z]{3,}(?: [a-z]+){0,4}: )",
    re.IGNORECASE,
)
# `a = 1 b = 2`: two equations with nothing between them.
_SPACED = re.compile(
    r"(?<=[\d)\]}]) (?=(?:[A-Za-z]|[A-Z]{2,3}|\\(?!pi ?=)[a-z]+)(?:_(?:\{[^{}]*\}|\w))?"
    r"(?:\([\w, ]*\))? ?=)",
    re.ASCII,
)
_INEQUALITY = re.compile(r"[<>]=?|\\(?:le|ge|lt|gt|ne)(?![A-Za-z])")
_RELATION = re.compile(_INEQUALITY.pattern + "|=")
# A fraction may stand before it.
_MATRIX = re.compile(
    r"(?:(-? ?(?:\\frac ?(?:\d\d|(?:\{(?:[^{}]|\{\w*\})*\} ?){2})|\d+/\d+)) ?(?:\\cdot )?)?"
    r"\\begin ?\{(?:[pbB]?(?:small)?matrix\}|array\}(?: ?\{[clr| ]*\})?)(.*)"
    r"\\end ?\{(?:[pbB]?(?:small)?matrix|array)\}",
    re.DOTALL,
)
_BUILDER = re.compile(
    r"\\\{ ?([A-Za-z]) ?(?:\\in ?\\mathbb ?\{ ?R ?\} ?|\\in ?R )?"
    r"(?:\\mid(?![A-Za-z])|\||:)(.+)\\\}",
    re.ASCII,
)


@lru_cache(maxsize=8192)
def candidates(text: str) -> tuple[Node, ...]:
    r"""Read a tidy text, in several ways where commas are ambiguous; the most likely comes first.

    >>> [node.kind for node in candidates("1,234")]
    ['atom', 'list']
    >>> [item.text for item in candidates("3, \\frac12")[0].items]
    ['3', '\\frac12']
    >>> candidates("(0, 1]")[0].text
    '(]'
    """
    # No member of a list is written `000`: `1, 000` is a thousand, and `1,000` is nothing else.
    text = _GROUP_OF_ZERO.sub(",", _PREAMBLE.sub("", text, count=1)).strip()
    if depths(text)[1] > MAX_NESTING:
        return (Node("atom", text),)
    if "," in text and not text.startswith(_OPENERS):
        plain = ungrouped(text)  # of `x = 1,234`; a number may have commas of other kinds, too
        number = is_number(text)
        has_other_commas = "," in plain or re.search(r"[(\[{][^)\]}]*,", text)
        if number or not has_other_commas:
            readings = (Node("atom", text),) if number else candidates(plain)
            if ",0" in text:
                return readings
            as_list = _listed(split(text, _CONJUNCTION))
            return (*readings, as_list)
    spaced = _SPACED.split(text)
    if 1 < len(spaced) == text.count("="):
        return _listed(spaced), _parse(text)
    parsed = _parse(text)
    decimal = _DECIMAL_COMMA.fullmatch(text)
    if decimal is None:
        return (parsed,)
    return parsed, Node("atom", ".".join(decimal.groups()))


def paired(prediction: str, reference: str) -> Iterator[tuple[Node, Node]]:
    """Yield every reading of one with every reading of the other, but not two unlikely ones.

    `2,6` may mean 2.6, and so may `2,60`, but that does not make them equal. Of `A = 2 h = 6` both
    readings are likely.
    """
    for i, right in enumerate(candidates(reference)):
        for j, left in enumerate(candidates(prediction)):
            if i == 0 or j == 0 or ("=" in left.text and "=" in right.text):
                yield left, right


def _parse(text: str) -> Node:
    text = without_builder(text.strip())
    if " and " in text and not re.search(r"[\d\\]", text) and is_number(text):
        return Node("atom", text)  # `one hundred and one`
    joined = re.split(" or | and ", text)
    are_relations = len(joined) > 1 and all(map(_RELATION.search, joined))
    if are_relations and _INEQUALITY.search(text):
        return Node("atom", text)  # `x < -1 or x > 3` is one region
    # `1,000, 2,000` separates its items with a space; only then are bare commas thousands.
    is_spaced = ", " in text and not text.startswith(_OPENERS)
    listed = ungrouped(text) if is_spaced else text
    parts = [part for part in split(listed, _CONJUNCTION) if part.strip()]
    if len(parts) > 1:
        return _listed(parts)
    return _enclosed(text) or _plus_minus(text) or Node("atom", text)


def without_builder(text: str) -> str:
    r"""Return the condition in a set of real numbers, in terms of `x`; any other text unchanged.

    >>> without_builder(r"\{t \mid t > 0\}")
    'x > 0'
    """
    match = _BUILDER.fullmatch(text)
    if match is None:
        return text
    variable, condition = match.groups()
    if not _INEQUALITY.search(condition) or r"\}" in condition:
        return text
    if variables(condition) == {variable}:
        condition = re.sub(rf"(?<![A-Za-z\\]){variable}(?![A-Za-z])", "x", condition)
    return condition.strip()


def is_unsolved(text: str) -> bool:
    r"""Return whether a tidy text has an inequality without a name alone on one of its sides.

    >>> [is_unsolved(text) for text in ("2x + 4 > 14", "|x-3| < 5", r"1 < x \le 2 or x > 3", "x=2")]
    [True, True, False, False]
    """
    for statement in re.split(r",| or | and |\\cup|\\cap", without_builder(text)):
        sides = [side.strip() for side in _INEQUALITY.split(statement)]
        if len(sides) > 1 and not any(map(is_label, sides)):
            return True
    return False


def _listed(parts: Sequence[str]) -> Node:
    """Make one node of values without brackets around them; one of them is that value."""
    items = _collection("list", "", parts).items
    if len(items) == 1 and len(parts) <= _MAX_PARTS:
        return items[0]
    units = {_unit_of(item.text) for item in items}
    kinds_measured = {unit and unit.kind for unit in units}
    kind: Kind = "quantity" if len(units) > len(kinds_measured) == 1 else "list"
    return Node(kind, "", items)


def _unit_of(text: str) -> Unit | None:
    try:
        number = read_number(text)
    except TooLargeError:
        return None
    return number and number.unit


def _enclosed(text: str) -> Node | None:
    """Read a set, tuple, interval or matrix that is the whole text, or a value in parentheses."""
    label, value = _without_label(text)
    if len(value) < len(text):
        inner = _bracketed(value)
        if inner is not None and inner.kind != "atom":
            return inner._replace(label=label)
    return _bracketed(text)


def _bracketed(text: str) -> Node | None:
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        fraction, content = matrix.groups()
        rows = []
        for row in re.split(r"\\\\(?:\[[^\]]*\])?", content):
            if row.strip():
                cells = tuple(_parse(_times(fraction, cell)) for cell in row.split("&"))
                rows.append(Node("tuple", "()", cells))
        return Node("matrix", "", tuple(rows))
    escaped = text.startswith(r"\{") and text.endswith(r"\}")
    inside = text[2:-2] if escaped else text[1:-1]
    brackets = "{}" if escaped else text[:1] + text[-1:]
    if not re.fullmatch(r"[(\[{][)\]}]", brackets) or depths(inside)[0] < 0:
        return None
    parts = split(inside, _CONJUNCTION)
    if brackets == "{}" and (escaped or len(parts) > 1):
        if not inside.strip() or re.search(r"\||\\mid(?![A-Za-z])|:", inside):
            return None  # empty, or set-builder notation
        return _collection("set", "", parts)
    if len(parts) > 1:
        return _collection("tuple", brackets, parts)
    return _parse(inside) if brackets in ("()", "[]", "{}") else None


def _times(fraction: str | None, cell: str) -> str:
    """Multiply a cell of a matrix with the fraction before the matrix."""
    if not fraction:
        return cell
    left = read_number(fraction)
    right = read_number(cell.strip())
    if left and right and not right.unevaluated:
        return str(left.value * right.value)
    return f"({fraction}) ({cell})"


def _collection(kind: Kind, brackets: str, parts: Sequence[str]) -> Node:
    """Make one node of parts; too many parts to be an answer are kept as one text."""
    if len(parts) > _MAX_PARTS:
        return Node(kind, brackets, (Node("atom", ",".join(parts)),))
    nodes = [_parse(part) for part in parts if part.strip()]
    if kind == "tuple":
        return Node(kind, brackets, tuple(nodes))
    items: list[Node] = []
    for node in nodes:
        # In a list or set `2 \pm i` is two values, and a repeated tuple or set is one member.
        members = node.items if node.kind == "list" else (node,)
        for member in members:
            if member.kind not in ("tuple", "set") or member not in items:
                items.append(member)
    return Node(kind, brackets, tuple(items))


def _plus_minus(text: str) -> Node | None:
    if text.count(r"\pm") != 1:
        return None
    values = []
    for sign in "+-":
        value = re.sub(r"\\pm(?![A-Za-z]) ?", sign, text)
        values.append(Node("atom", value.strip().lstrip("+")))
    return Node("list", "", tuple(values))


# --- comparing -----------------------------------------------------------------------------------

# An atom with one of these may describe a set, so it may equal an interval or a list.
_SET_LIKE = re.compile(
    r"[<>|]|\\\{|\\(?:le|ge|lt|gt|in|cup|cap|setminus|mathbb|mid|ne)(?![A-Za-z])"
)


def compare(prediction: Node, reference: Node, same: AtomTest) -> bool | None:
    """Return whether two shapes hold the same parts; None if a part or the shape is not decided.

    >>> same = lambda p, r: p == r
    >>> compare(candidates("2, 1")[0], candidates("1, 2")[0], same)
    True
    >>> compare(candidates("[1, 2]")[0], candidates("(1, 2)")[0], same)
    False
    """
    kinds = {prediction.kind, reference.kind}
    if kinds == {"atom"}:
        return same(prediction.text, reference.text)
    label = prediction.label
    expected_label = reference.label
    if label and expected_label:
        # `A = (1, 2)` for `B = (1, 2)`; but `P` and `(x, y)` may name the same point.
        are_alike = label.startswith("(") == expected_label.startswith("(")
        if are_alike and not same_label(label, expected_label):
            return False
    if kinds <= {"list", "set"} or kinds == {"quantity"}:
        if _named_apart(prediction) != _named_apart(reference):
            return _in_order(prediction.items, reference.items, same)
        return _any_order(prediction.items, reference.items, same)
    if "atom" in kinds:
        atoms = [node.text for node in (prediction, reference) if node.kind == "atom"]
        return None if all(map(_SET_LIKE.search, atoms)) else False
    if kinds == {"matrix", "tuple"}:
        prediction = _as_tuple(prediction)
        reference = _as_tuple(reference)
    # A list may be a tuple without its parentheses, which an interval needs.
    is_bare = kinds == {"list", "tuple"} and "()" in (prediction.text, reference.text)
    is_alike = prediction.kind == reference.kind and prediction.text == reference.text
    return (is_bare or is_alike) and _in_order(prediction.items, reference.items, same)


_ITEM_LABEL = re.compile(r"(\\?[A-Za-z]+)(?:_\{?\w+\}?)? ?=", re.ASCII)


def _named_apart(node: Node) -> bool:
    """Return whether each value has a name of its own, so that the order of bare values counts.

    It does for `x = 1, y = 2`, and not for the two roots `x_1` and `x_2`.
    """
    labels = set()
    for item in node.items:
        match = _ITEM_LABEL.match(item.text)
        if match:
            labels.add(match[1])
    return len(labels) == len(node.items) > 1


def _as_tuple(node: Node) -> Node:
    """Return a matrix of one row or one column as a tuple."""
    if node.kind == "matrix" and len(node.items) == 1:
        return node.items[0]
    if node.kind == "matrix" and all(len(row.items) == 1 for row in node.items):
        return Node("tuple", "()", tuple(row.items[0] for row in node.items))
    return node


def _in_order(
    predictions: Sequence[Node], references: Sequence[Node], same: AtomTest
) -> bool | None:
    if len(predictions) != len(references):
        return False
    outcomes = [compare(p, r, same) for p, r in zip(predictions, references, strict=True)]
    if False in outcomes:
        return False
    return None if None in outcomes else True


def _any_order(
    predictions: Sequence[Node], references: Sequence[Node], same: AtomTest
) -> bool | None:
    """Match each part with an unused one; equality is transitive, so the first match will do.

    A part without a match must have something that it may still equal.
    """
    if len(predictions) != len(references):
        return False
    unused = list(range(len(references)))
    outcome: bool | None = True
    for prediction in predictions:
        row = [compare(prediction, reference, same) for reference in references]
        match = next((at for at in unused if row[at]), None)
        if match is not None:
            unused.remove(match)
        elif None in row:
            outcome = None
        else:
            return False
    return outcome


# --- labels --------------------------------------------------------------------------------------

_MARKS = re.compile(
    r"\\(?:angle|triangle|overline|widehat|hat|vec|bar|tilde|d?dot|overrightarrow|arc)(?![a-z]) ?"
    r"|_(?:\{[^{}]*\}|\w|\\[A-Za-z]+)|'+|\^\{?(?:\\prime|\\ast|\*)\}?|\^(?:\{-1\}|-1|\{\(\w\)\})"
    r"|\\?\||[{}]",
    re.ASCII,
)
_ARGUMENT = r"(?:\((?:[^()]|\([^()]*\)){1,60}\)|\[[^\[\]]{1,60}\])"
_FUNCTION = r"\\?(?:arc)?(?:sin|cos|tan|cot|sec|csc|det|dim|deg|log|ln)h?"
_LABEL = re.compile(
    rf"(?:{_FUNCTION}(?:\^\d)? ?)?\(?(?:\\?[A-Za-z]+|[A-Za-z ]+)\)?"  # x, AB, \sin A, the area
    rf"|(?:[fghFGHPENn]|\\?[A-Za-z]{{3,}}|\([A-Za-z] ?\\circ ?[A-Za-z]\)) ?{_ARGUMENT}"  # f(x+1)
    r"|\\?[A-Za-z] ?\([\w, ]*\)|\([\\A-Za-z, ]+\)|\[[A-Z]{3,}\]|[A-Za-z]{1,3}/[A-Za-z]{1,3}",
    re.ASCII,
)
_MAX_LABEL = 120


def is_label(text: str) -> bool:
    r"""Return whether a side is a name rather than a value.

    >>> [is_label(t) for t in ("x", "f^{-1}(x)", r"\sin A", "AB:CD", r"\frac{V_1}{V_2}", "a_n")]
    [True, True, True, True, True, True]
    >>> [is_label(t) for t in ("7", r"\pi", "2x", "x+y", r"\sin 30", "x(x+1)", "x^2")]
    [False, False, False, False, False, False, False]
    """
    if not text or len(text) > _MAX_LABEL or text[0].isdigit():
        return False
    parts = split(text, COLON)
    if len(parts) > 1:
        return all(is_label(part.strip()) for part in parts)
    bare = _MARKS.sub("", text).strip()
    if _LABEL.fullmatch(bare) is None:
        return False
    return len(text) == 1 or bool(variables(text))


_UNSAID = re.compile(r"^m ?(?=\(?\\angle)|[\s{}()\\]")
# `AB`, `BA`, `|AB|` and `\overline{AB}` are one length.
_SEGMENT = re.compile(r"(?:overline|\|)?([A-Z]{2})\|?")


def same_label(prediction: str, reference: str) -> bool:
    r"""Return whether two labels are the same, but for typesetting and the `m` of `m\angle A`."""
    return _key(prediction) == _key(reference)


def _key(label: str) -> str:
    bare = _UNSAID.sub("", label)
    segment = _SEGMENT.fullmatch(bare)
    return "".join(sorted(segment[1])) if segment else bare


_NAMED = re.compile(r"([^=:]*?)\s*(=|\\in(?![A-Za-z])|:(?!\d))\s*(.*)", re.DOTALL)


def _without_label(text: str) -> tuple[str, str]:
    """Split a text into its label, if that can contradict another one, and the rest."""
    match = _NAMED.fullmatch(text)
    if match is None:
        return "", text
    label, sign, value = match.groups()
    if not is_label(label.strip()):
        return "", text
    # Any words may stand before a colon; they contradict nothing.
    return "" if sign == ":" else label, value


def variables(text: str) -> set[str]:
    r"""Return the variables in a tidy text: not the letters of a unit or a function.

    >>> sorted(variables(r"2x\theta")), variables(r"2\sqrt{3} cm"), variables("e")
    (['\\theta', 'x'], set(), set())
    """
    if is_number(text):
        return set()
    expression, _ = split_unit(text)
    found = set()
    for name in re.findall(r"\\?[A-Za-z]+", expression):
        if name in CONSTANTS:
            continue
        if name[0] != "\\":
            found.update(name)  # a product of one-letter variables
        if name[1:] in GREEK:
            found.add(name)
    return found


# --- equations -----------------------------------------------------------------------------------


_NO_CHAIN = re.compile(r"[!:]=|" + _INEQUALITY.pattern)


class Chain(NamedTuple):
    """The sides of one answer, `label = value = ... = value`."""

    label: str
    """What the values are equal to by name; may be empty."""
    values: tuple[str, ...]
    """At least one; the last is the answer."""

    @property
    def sides(self) -> tuple[str, ...]:
        """All sides, the label first."""
        return (self.label, *self.values) if self.label else self.values

    @property
    def is_equation(self) -> bool:
        """`2x + 3y = 6`, where neither side is the value of the other."""
        return not self.label and len(self.values) > 1 and any(map(variables, self.values))


@lru_cache(maxsize=8192)
def chain_of(text: str) -> Chain:
    r"""Return the sides of a tidy text, reversed if the label comes last.

    What follows `\approx` is dropped, unless only a label comes before it.

    >>> chain_of(r"k = \frac12 = 0.5")
    Chain(label='k', values=('\\frac12', '0.5'))
    >>> chain_of("5 = x").label, chain_of("7 = 11a+c").label, chain_of("x+1").values
    ('x', '', ('x+1',))
    """
    before, sign, after = text.partition(r"\approx")
    exact = before.strip()
    if sign and exact:
        text = f"{before}={after}" if is_label(exact) else exact
    sides = [side.strip() for side in split(text, EQUALS)]
    if len(sides) == 1 or not (sides[0] and sides[-1]) or _NO_CHAIN.search(text):
        return Chain("", (text,))
    sides = [side for side in sides if side]
    if not is_label(sides[0]) and is_label(sides[-1]):
        sides.reverse()
    if not is_label(sides[0]):
        return Chain("", tuple(sides))
    return Chain(sides[0], tuple(sides[1:]))
