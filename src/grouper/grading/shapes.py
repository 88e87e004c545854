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
    """(lowest, deepest) nesting of brackets; lowest is negative if one closes before it opens."""
    depth = lowest = deepest = 0
    for match in re.finditer(_BRACKETS, text):
        depth += 1 if match.group() in "([{" else -1
        lowest, deepest = min(lowest, depth), max(deepest, depth)
    return lowest, deepest


def _outside_brackets(separator: str) -> re.Pattern[str]:
    return re.compile(rf"{_BRACKETS}|{separator}", re.ASCII)


_CONJUNCTION = _outside_brackets(r",? (?:and|or) (?=\S)|(?<=[)\]}]) ?(?:and|or) ?(?=[(\[{\\])|[,;]")
EQUALS = _outside_brackets("=")
COLON = _outside_brackets(":")
LISTED = _outside_brackets("[,;]")


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts between separators outside brackets: not the comma of `f(x, y)`."""
    parts = []
    depth = start = 0
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
    r"""The ways to read a tidy text, most likely first; more than one where commas are ambiguous.

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
        if number or not ("," in plain or re.search(r"[(\[{][^)\]}]*,", text)):
            readings = (Node("atom", text),) if number else candidates(plain)
            return readings if ",0" in text else (*readings, _listed(split(text, _CONJUNCTION)))
    spaced = _SPACED.split(text)
    if 1 < len(spaced) == text.count("="):
        return _listed(spaced), _parse(text)
    decimal = _DECIMAL_COMMA.fullmatch(text)
    return (_parse(text), *([Node("atom", ".".join(decimal.groups()))] if decimal else []))


def paired(prediction: str, reference: str) -> Iterator[tuple[Node, Node]]:
    """Every reading of one with every reading of the other, but not two unlikely ones.

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
    if _INEQUALITY.search(text) and len(joined) > 1 and all(map(_RELATION.search, joined)):
        return Node("atom", text)  # `x < -1 or x > 3` is one region
    # `1,000, 2,000` separates its items with a space; only then are bare commas thousands.
    spaced = ", " in text and not text.startswith(_OPENERS)
    parts = [p for p in split(ungrouped(text) if spaced else text, _CONJUNCTION) if p.strip()]
    if len(parts) > 1:
        return _listed(parts)
    return _enclosed(text) or _plus_minus(text) or Node("atom", text)


def without_builder(text: str) -> str:
    r"""The condition in a set of real numbers, in terms of `x`; any other text unchanged.

    >>> without_builder(r"\{t \mid t > 0\}")
    'x > 0'
    """
    match = _BUILDER.fullmatch(text)
    if match is None or not _INEQUALITY.search(match[2]) or r"\}" in match[2]:
        return text
    renamed = re.sub(rf"(?<![A-Za-z\\]){match[1]}(?![A-Za-z])", "x", match[2]).strip()
    return renamed if variables(match[2]) == {match[1]} else match[2].strip()


def is_unsolved(text: str) -> bool:
    r"""Whether a tidy text has an inequality without a name alone on one of its sides.

    >>> [is_unsolved(text) for text in ("2x + 4 > 14", "|x-3| < 5", r"1 < x \le 2 or x > 3", "x=2")]
    [True, True, False, False]
    """
    statements = re.split(r",| or | and |\\cup|\\cap", without_builder(text))
    chains = [[side.strip() for side in _INEQUALITY.split(part)] for part in statements]
    return any(sides[1:] and not any(map(is_label, sides)) for sides in chains)


def _listed(parts: Sequence[str]) -> Node:
    """Values without brackets around them; one of them is that value."""
    items = _collection("list", "", parts).items
    units = {_unit_of(item.text) for item in items}
    measured = {unit and unit.kind for unit in units}
    kind: Kind = "quantity" if len(units) > len(measured) == 1 else "list"
    one = len(items) == 1 and len(parts) <= _MAX_PARTS
    return items[0] if one else Node(kind, "", items)


def _unit_of(text: str) -> Unit | None:
    try:
        number = read_number(text)
    except TooLargeError:
        return None
    return number and number.unit


def _enclosed(text: str) -> Node | None:
    """A set, tuple, interval or matrix that is the whole text, or a value in parentheses."""
    label, value = _without_label(text)
    if len(value) < len(text):
        inner = _bracketed(value)
        if inner is not None and inner.kind != "atom":
            return inner._replace(label=label)
    return _bracketed(text)


def _bracketed(text: str) -> Node | None:
    if matrix := _MATRIX.fullmatch(text):
        rows = filter(str.strip, re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2]))
        cells = (tuple(_parse(_times(matrix[1], c)) for c in row.split("&")) for row in rows)
        return Node("matrix", "", tuple(Node("tuple", "()", row) for row in cells))
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
    """A cell of a matrix, times the fraction before the matrix."""
    left, right = read_number(fraction or ""), read_number(cell.strip())
    if left and right and not right.unevaluated:
        return str(left.value * right.value)
    return f"({fraction}) ({cell})" if fraction else cell


def _collection(kind: Kind, brackets: str, parts: Sequence[str]) -> Node:
    """The parts as one node; too many parts to be an answer are kept as one text."""
    if len(parts) > _MAX_PARTS:
        return Node(kind, brackets, (Node("atom", ",".join(parts)),))
    items: list[Node] = []
    for node in (_parse(part) for part in parts if part.strip()):
        # In a list or set `2 \pm i` is two values, and a repeated tuple or set is one member.
        for item in node.items if node.kind == "list" and kind != "tuple" else (node,):
            if kind == "tuple" or item.kind not in ("tuple", "set") or item not in items:
                items.append(item)
    return Node(kind, brackets, tuple(items))


def _plus_minus(text: str) -> Node | None:
    if text.count(r"\pm") != 1:
        return None
    sides = (re.sub(r"\\pm(?![A-Za-z]) ?", sign, text).strip().lstrip("+") for sign in "+-")
    return Node("list", "", tuple(Node("atom", side) for side in sides))


# --- comparing -----------------------------------------------------------------------------------

# An atom with one of these may describe a set, so it may equal an interval or a list.
_SET_LIKE = re.compile(
    r"[<>|]|\\\{|\\(?:le|ge|lt|gt|in|cup|cap|setminus|mathbb|mid|ne)(?![A-Za-z])"
)


def compare(prediction: Node, reference: Node, same: AtomTest) -> bool | None:
    """Whether two shapes hold the same parts; None where a part or the shape is not decided.

    >>> same = lambda p, r: p == r
    >>> compare(candidates("2, 1")[0], candidates("1, 2")[0], same)
    True
    >>> compare(candidates("[1, 2]")[0], candidates("(1, 2)")[0], same)
    False
    """
    kinds = {prediction.kind, reference.kind}
    if kinds == {"atom"}:
        return same(prediction.text, reference.text)
    labels = prediction.label, reference.label
    # `A = (1, 2)` for `B = (1, 2)`; but `P` and `(x, y)` may name the same point.
    alike = labels[0].startswith("(") == labels[1].startswith("(")
    if all(labels) and alike and not same_label(*labels):
        return False
    if kinds <= {"list", "set"} or kinds == {"quantity"}:
        if _named_apart(prediction) != _named_apart(reference):
            return _in_order(prediction.items, reference.items, same)
        return _any_order(prediction.items, reference.items, same)
    if "atom" in kinds:
        atoms = [node.text for node in (prediction, reference) if node.kind == "atom"]
        return None if all(map(_SET_LIKE.search, atoms)) else False
    if kinds == {"matrix", "tuple"}:
        prediction, reference = _as_tuple(prediction), _as_tuple(reference)
    # A list may be a tuple without its parentheses, which an interval needs.
    bare = kinds == {"list", "tuple"} and "()" in (prediction.text, reference.text)
    alike = (prediction.kind, prediction.text) == (reference.kind, reference.text)
    return (bare or alike) and _in_order(prediction.items, reference.items, same)


_ITEM_LABEL = re.compile(r"(\\?[A-Za-z]+)(?:_\{?\w+\}?)? ?=", re.ASCII)


def _named_apart(node: Node) -> bool:
    """`x = 1, y = 2`, where the order of bare values counts; not the two roots `x_1` and `x_2`."""
    labels = {match[1] for item in node.items if (match := _ITEM_LABEL.match(item.text))}
    return len(labels) == len(node.items) > 1


def _as_tuple(node: Node) -> Node:
    """A matrix of one row or one column as a tuple."""
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
    return False if False in outcomes else None if None in outcomes else True


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
    r"""Whether a side is a name rather than a value.

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
    named = _LABEL.fullmatch(_MARKS.sub("", text).strip())
    return named is not None and (bool(variables(text)) or len(text) == 1)


_UNSAID = re.compile(r"^m ?(?=\(?\\angle)|[\s{}()\\]")
# `AB`, `BA`, `|AB|` and `\overline{AB}` are one length.
_SEGMENT = re.compile(r"(?:overline|\|)?([A-Z]{2})\|?")


def same_label(prediction: str, reference: str) -> bool:
    r"""Whether two labels are the same, but for typesetting and the `m` of `m\angle A`."""
    return _key(prediction) == _key(reference)


def _key(label: str) -> str:
    bare = _UNSAID.sub("", label)
    segment = _SEGMENT.fullmatch(bare)
    return "".join(sorted(segment[1])) if segment else bare


_NAMED = re.compile(r"([^=:]*?)\s*(=|\\in(?![A-Za-z])|:(?!\d))\s*(.*)", re.DOTALL)


def _without_label(text: str) -> tuple[str, str]:
    """The label at the start of a text, if it can contradict another one, and the rest."""
    match = _NAMED.fullmatch(text)
    if match is None or not is_label(match[1].strip()):
        return "", text
    # Any words may stand before a colon; they contradict nothing.
    return match[1] if match[2] != ":" else "", match[3]


def variables(text: str) -> set[str]:
    r"""The variables in a tidy text: not the letters of a unit or a function.

    >>> sorted(variables(r"2x\theta")), variables(r"2\sqrt{3} cm"), variables("e")
    (['\\theta', 'x'], set(), set())
    """
    if is_number(text):
        return set()
    names = {*re.findall(r"\\?[A-Za-z]+", split_unit(text)[0])} - CONSTANTS
    letters = {letter for name in names if name[0] != "\\" for letter in name}
    return letters | {name for name in names if name[1:] in GREEK}


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
        """All of them, the label first."""
        return (self.label, *self.values) if self.label else self.values

    @property
    def is_equation(self) -> bool:
        """`2x + 3y = 6`, where neither side is the value of the other."""
        return not self.label and len(self.values) > 1 and any(map(variables, self.values))


@lru_cache(maxsize=8192)
def chain_of(text: str) -> Chain:
    r"""The sides of a tidy text, reversed if the label comes last.

    What follows `\approx` is dropped, unless only a label comes before it.

    >>> chain_of(r"k = \frac12 = 0.5")
    Chain(label='k', values=('\\frac12', '0.5'))
    >>> chain_of("5 = x").label, chain_of("7 = 11a+c").label, chain_of("x+1").values
    ('x', '', ('x+1',))
    """
    before, sign, after = text.partition(r"\approx")
    if sign and before.strip():
        text = f"{before}={after}" if is_label(before.strip()) else before.strip()
    sides = [side.strip() for side in split(text, EQUALS)]
    if len(sides) == 1 or not (sides[0] and sides[-1]) or _NO_CHAIN.search(text):
        return Chain("", (text,))
    sides = [side for side in sides if side]
    if not is_label(sides[0]) and is_label(sides[-1]):
        sides.reverse()
    return Chain(sides[0], tuple(sides[1:])) if is_label(sides[0]) else Chain("", tuple(sides))
