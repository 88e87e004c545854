r"""The shape of an answer: one value, or a list, set, tuple, interval, matrix or equation.

Shapes are compared here, part by part, with three outcomes: True, False, or None where some part
needs another stage. The same code runs in the trainer (exact parts) and in the worker (symbolic
parts), so a symbolic library only ever sees single expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grouper.grading.brackets import CONJUNCTION, MAX_NESTING, depths, split
from grouper.grading.chains import Chain, chain_of, is_label, same_label
from grouper.grading.lazy import once
from grouper.grading.numbers import TooLargeError, Unit, is_number, read_number, ungrouped
from grouper.grading.patterns import PATTERNS
from grouper.grading.values import variables

ChainTest = Callable[[Chain, Chain], bool | None]
"""(answer, reference) -> equal, not equal, or not decided here."""


Kind = Literal["atom", "list", "set", "quantity", "tuple", "matrix"]
r"""What an answer is made of, and whether order counts.

    atom      one value, or an equation
    list      1, 2 without brackets, in any order
    set       {1, 2}, in any order
    quantity  2 dollars and 3 cents: one amount, not the list 2, 3
    tuple     (1, 2), and intervals; order and brackets count
    matrix    its rows, each a tuple
"""


_SET_LIKE = PATTERNS["set-like"]
_ITEM_LABEL = PATTERNS["item label"]


@dataclass(frozen=True)
class Node:
    """An answer or a part of one; `text` is an atom's tidy text or a tuple's brackets."""

    kind: Kind
    text: str
    items: tuple[Node, ...] = ()
    label: str = ""
    """The name before a set or tuple: the `A` of `A = (1, 2)`."""

    @once
    def chain(self) -> Chain:
        """The equal sides of an atom."""
        return chain_of(self.text)

    @once
    def chains(self) -> tuple[Chain, ...]:
        """The chains of all atoms in a shape, in order."""
        if self.kind == "atom":
            return (self.chain,)
        chains: list[Chain] = []
        for item in self.items:
            chains += item.chains
        return tuple(chains)

    @once
    def is_set_like(self) -> bool:
        """Whether an atom may describe a set: an inequality, a union."""
        return _SET_LIKE.search(self.text) is not None

    @once
    def names_each_item(self) -> bool:
        """Whether each value has a name of its own, so that the order of bare values counts.

        It has in `x = 1, y = 2`, and not with the two roots `x_1` and `x_2`.
        """
        labels = set()
        for item in self.items:
            match = _ITEM_LABEL.match(item.text)
            if match:
                labels.add(match[1])
        return len(labels) == len(self.items) > 1

    @once
    def as_tuple(self) -> Node:
        """A matrix of one row or one column as a tuple; any other shape itself."""
        if self.kind == "matrix" and len(self.items) == 1:
            return self.items[0]
        if self.kind == "matrix" and all(len(row.items) == 1 for row in self.items):
            return Node("tuple", "()", tuple(row.items[0] for row in self.items))
        return self


# --- reading -------------------------------------------------------------------------------------

_OPENERS = ("(", "[", "{", r"\{")
_MAX_PARTS = 60

_GROUP_OF_ZERO = PATTERNS["group of zero"]
_DECIMAL_COMMA = PATTERNS["decimal comma"]
_COMMA_IN_BRACKETS = PATTERNS["comma in brackets"]
_PREAMBLE = PATTERNS["preamble"]
_SPACED_EQUATIONS = PATTERNS["spaced equations"]
_AND_OR = PATTERNS["and or"]
_DIGIT_OR_BACKSLASH = PATTERNS["digit or backslash"]
_INEQUALITY = PATTERNS["inequality"]
_RELATION = PATTERNS["relation"]
_REGION_JOINT = PATTERNS["region joint"]
_NAMED = PATTERNS["named"]
_MATRIX = PATTERNS["matrix"]
_END_OF_ROW = PATTERNS["end of row"]
_PAIR_OF_BRACKETS = PATTERNS["pair of brackets"]
_BUILDER = PATTERNS["builder"]
_BUILDER_BAR = PATTERNS["builder bar"]
_PLUS_OR_MINUS = PATTERNS["plus or minus"]


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
        has_other_commas = "," in plain or _COMMA_IN_BRACKETS.search(text)
        if number or not has_other_commas:
            readings = (Node("atom", text),) if number else candidates(plain)
            if ",0" in text:
                return readings
            as_list = _listed(split(text, CONJUNCTION))
            return (*readings, as_list)
    spaced = _SPACED_EQUATIONS.split(text)
    if 1 < len(spaced) == text.count("="):
        return _listed(spaced), _parse(text)
    parsed = _parse(text)
    decimal = _DECIMAL_COMMA.fullmatch(text)
    if decimal is None:
        return (parsed,)
    return parsed, Node("atom", ".".join(decimal.groups()))


def pair_readings(
    readings: Sequence[Node], reference_readings: Sequence[Node]
) -> Iterator[tuple[Node, Node]]:
    """Yield every reading of an answer with every one of the reference, but not two unlikely ones.

    `2,6` may mean 2.6, and so may `2,60`, but that does not make them equal. Of `A = 2 h = 6` both
    readings are likely.
    """
    for i, right in enumerate(reference_readings):
        for j, left in enumerate(readings):
            if i == 0 or j == 0 or ("=" in left.text and "=" in right.text):
                yield left, right


def _parse(text: str) -> Node:
    text = without_builder(text.strip())
    if " and " in text and not _DIGIT_OR_BACKSLASH.search(text) and is_number(text):
        return Node("atom", text)  # `one hundred and one`
    joined = _AND_OR.split(text)
    are_relations = len(joined) > 1 and all(map(_RELATION.search, joined))
    if are_relations and _INEQUALITY.search(text):
        return Node("atom", text)  # `x < -1 or x > 3` is one region
    # `1,000, 2,000` separates its items with a space; only then are bare commas thousands.
    is_spaced = ", " in text and not text.startswith(_OPENERS)
    listed = ungrouped(text) if is_spaced else text
    parts = [part for part in split(listed, CONJUNCTION) if part.strip()]
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
        # The variable alone, and not as a letter of a command.
        condition = re.sub(rf"(?<![A-Za-z\\]){variable}(?![A-Za-z])", "x", condition)
    return condition.strip()


def is_unsolved(text: str) -> bool:
    r"""Return whether a tidy text has an inequality without a name alone on one of its sides.

    >>> [is_unsolved(text) for text in ("2x + 4 > 14", "|x-3| < 5", r"1 < x \le 2 or x > 3", "x=2")]
    [True, True, False, False]
    """
    for statement in _REGION_JOINT.split(without_builder(text)):
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
            return replace(inner, label=label)
    return _bracketed(text)


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


def _bracketed(text: str) -> Node | None:
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        fraction, content = matrix.groups()
        rows = []
        for row in _END_OF_ROW.split(content):
            if row.strip():
                cells = tuple(_parse(_times(fraction, cell)) for cell in row.split("&"))
                rows.append(Node("tuple", "()", cells))
        return Node("matrix", "", tuple(rows))
    escaped = text.startswith(r"\{") and text.endswith(r"\}")
    inside = text[2:-2] if escaped else text[1:-1]
    brackets = "{}" if escaped else text[:1] + text[-1:]
    if not _PAIR_OF_BRACKETS.fullmatch(brackets) or depths(inside)[0] < 0:
        return None
    parts = split(inside, CONJUNCTION)
    if brackets == "{}" and (escaped or len(parts) > 1):
        if not inside.strip() or _BUILDER_BAR.search(inside):
            return None  # empty, or set-builder notation
        return _collection("set", "", parts)
    if len(parts) > 1:
        return _collection("tuple", brackets, parts)
    return _parse(inside) if brackets in ("()", "[]", "{}") else None


def _times(fraction: str | None, cell: str) -> str:
    """Multiply a cell of a matrix with the fraction before the matrix."""
    if not fraction:
        return cell
    product = f"({fraction}) ({cell})"
    try:
        left = read_number(fraction)
        right = read_number(cell.strip())
    except TooLargeError:
        # The product is read as a value of its own, which says the same.
        return product
    if left and right and not right.unevaluated:
        return str(left.value * right.value)
    return product


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
        value = _PLUS_OR_MINUS.sub(sign, text)
        values.append(Node("atom", value.strip().lstrip("+")))
    return Node("list", "", tuple(values))


# --- comparing -----------------------------------------------------------------------------------


def compare(answer: Node, reference: Node, same: ChainTest) -> bool | None:
    """Return whether two shapes hold the same parts; None if a part or the shape is not decided.

    >>> same = lambda chain, other: chain == other
    >>> compare(candidates("2, 1")[0], candidates("1, 2")[0], same)
    True
    >>> compare(candidates("[1, 2]")[0], candidates("(1, 2)")[0], same)
    False
    """
    kinds = {answer.kind, reference.kind}
    if kinds == {"atom"}:
        return same(answer.chain, reference.chain)
    if _are_named_differently(answer, reference):
        return False
    if kinds <= {"list", "set"} or kinds == {"quantity"}:
        is_ordered = answer.names_each_item != reference.names_each_item
        compare_items = _in_order if is_ordered else _any_order
        return compare_items(answer.items, reference.items, same)
    if "atom" in kinds:
        atoms = [node for node in (answer, reference) if node.kind == "atom"]
        return None if all(atom.is_set_like for atom in atoms) else False
    if kinds == {"matrix", "tuple"}:
        answer = answer.as_tuple
        reference = reference.as_tuple
    # A list may be a tuple without its parentheses, which an interval needs.
    is_bare = kinds == {"list", "tuple"} and "()" in (answer.text, reference.text)
    is_alike = answer.kind == reference.kind and answer.text == reference.text
    return (is_bare or is_alike) and _in_order(answer.items, reference.items, same)


def _are_named_differently(answer: Node, reference: Node) -> bool:
    """Whether labels contradict: `A = (1, 2)` for `B = (1, 2)`."""
    label = answer.label
    expected_label = reference.label
    if not label or not expected_label:
        return False
    # `P` and `(x, y)` may name the same point.
    are_alike = label.startswith("(") == expected_label.startswith("(")
    return are_alike and not same_label(label, expected_label)


def _in_order(answers: Sequence[Node], references: Sequence[Node], same: ChainTest) -> bool | None:
    if len(answers) != len(references):
        return False
    outcomes = [compare(a, r, same) for a, r in zip(answers, references, strict=True)]
    if False in outcomes:
        return False
    return None if None in outcomes else True


def _any_order(answers: Sequence[Node], references: Sequence[Node], same: ChainTest) -> bool | None:
    """Match each part with an unused one; equality is transitive, so the first match will do.

    A part without a match must have something that it may still equal.
    """
    if len(answers) != len(references):
        return False
    unused = list(range(len(references)))
    outcome: bool | None = True
    for answer in answers:
        row = [compare(answer, reference, same) for reference in references]
        match = next((at for at in unused if row[at]), None)
        if match is not None:
            unused.remove(match)
        elif None in row:
            outcome = None
        else:
            return False
    return outcome
