r"""The shape of an answer: one value, or a list, set, tuple, interval, union or matrix of values.

Shapes are compared here, part by part, with three outcomes: True, False, or None where some part
needs another rung. The same code runs in the trainer (exact parts) and in the worker (symbolic
parts), so a symbolic library only ever sees single expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from grouper.grading.number_words import read_words
from grouper.grading.quantities import read_compound

AtomTest = Callable[[str, str], bool | None]
"""(prediction, reference) -> equal, not equal, or not decided here."""


class Kind(Enum):
    """What an answer is made of, and whether order counts."""

    ATOM = "atom"
    LIST = "list"  # 1, 2 (no brackets): any order
    SET = "set"  # {1, 2}: any order
    TUPLE = "tuple"  # (1, 2), and intervals: order and brackets count
    UNION = "union"  # parts joined by \cup: any order
    MATRIX = "matrix"  # its rows, each a tuple


class Node(NamedTuple):
    """An answer or a part of one; `text` is an atom's tidy text or a tuple's brackets."""

    kind: Kind
    text: str
    items: tuple[Node, ...] = ()
    name: str = ""
    """What a list, set or tuple is said of: the `x` of `x = 1, 2`."""


_MAX_PARTS = 60
_THOUSANDS = re.compile(
    r"\\?\$?[-+]?\\?\$?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|[1-9]\d{0,2}(?:\.\d{3})+,\d+)(?: ?[a-z% ]*)",
    re.ASCII,
)
_DECIMAL_COMMA = re.compile(r"([-+]?\d+),(\d+)", re.ASCII)
_GROUPED = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:,\d{3})+(?!,?\d)", re.ASCII)
_OPENERS = {"(": 1, "[": 1, "{": 1}
_CLOSERS = {")": 1, "]": 1, "}": 1}
_CONJUNCTION = re.compile(
    r",? (?:and|or) (?=\S)|(?<=[)\]}]) ?(?:and|or) ?(?=[(\[{\\])|\\cup(?![A-Za-z])|[,;]", re.ASCII
)
_NAME = re.compile(
    r"\s*(?:\\(?:vec|overrightarrow|overline|hat|widehat|bar) ?\{? ?[A-Za-z]+ ?\}?"
    r"|\\?[A-Za-z]+(?:_\{?\w+\}?|'|\([A-Za-z, ]*\))*|\([A-Za-z, ]+\)|[A-Za-z ]+)\s*"
    r"(?:=|\\in(?![A-Za-z])|:(?!\d))\s*",
    re.ASCII,
)
_UNSAID = re.compile(r"[\s{}]")
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{4,}")
_PREAMBLE = re.compile(
    r"(?:so |thus |hence |therefore,? )?(?:the )?(?:final )?(?:answer|result|solution)s? "
    r"(?:is|are)(?::| )",
    re.IGNORECASE,
)
# `a = 1 b = 2`: two equations with nothing between them.
_SPACED = re.compile(
    r"(?<=[\d)\]}]) (?=(?:[A-Za-z]|[A-Z]{2,3}|\\(?!pi ?=)[a-z]+)(?:_(?:\{[^{}]*\}|\w))?"
    r"(?:\([\w, ]*\))? ?=)",
    re.ASCII,
)
# An atom with one of these may describe a set, so it may equal an interval or a list.
_SET_LIKE = re.compile(
    r"[<>|]|\\\{|\\(?:le|ge|lt|gt|in|cup|cap|setminus|mathbb|mid|ne)(?![A-Za-z])"
)
_MATRIX = re.compile(
    r"\\begin ?\{[pbB]?(?:small)?matrix\}(.*)\\end ?\{[pbB]?(?:small)?matrix\}"
    r"|\\begin ?\{array\}(?: ?\{[clr| ]*\})?(.*)\\end ?\{array\}",
    re.DOTALL,
)


@lru_cache(maxsize=8192)
def readings(text: str) -> tuple[Node, ...]:
    r"""The ways to read a tidy text, most likely first; more than one where commas are ambiguous.

    >>> [node.kind.value for node in readings("1,234")]
    ['atom', 'list']
    >>> [item.text for item in readings("x = 3, \\frac12")[0].items]
    ['3', '\\frac12']
    >>> readings("(0, 1]")[0].text
    '(]'
    """
    text = _PREAMBLE.sub("", text, count=1).strip() if "s" in text else text
    if "," in text and _THOUSANDS.fullmatch(text):
        parts = _listed(_split(text)[0])
        return Node(Kind.ATOM, text), parts
    if read_compound(text) is not None or read_words(text) is not None:
        return (Node(Kind.ATOM, text),)  # "two and a half" is no list
    if text.count("=") > 1 and len(spaced := _SPACED.split(text)) == text.count("="):
        return _listed(spaced), _parse(text, 0)
    node = _parse(text, 0)
    decimal = _DECIMAL_COMMA.fullmatch(text)
    if decimal:
        return node, Node(Kind.ATOM, ".".join(decimal.groups()))
    return (node,)


def paired_readings(prediction: str, reference: str) -> Iterator[tuple[Node, Node]]:
    """Every reading of one with every reading of the other, but not two unlikely ones.

    `2,6` may be meant as 2.6, and so may `2,60`; that both are is no reason to call them equal.
    Of `A = 2 h = 6` either reading may be meant, by both.
    """
    for i, right in enumerate(readings(reference)):
        for j, left in enumerate(readings(prediction)):
            if i == 0 or j == 0 or ("=" in left.text and "=" in right.text):
                yield left, right


def _parse(text: str, depth: int) -> Node:
    text = without_builder(text.strip())
    if depth > 8:
        return Node(Kind.ATOM, text)
    if relations := _relations(text, depth):
        return relations
    parts, unions = _split(_without_thousands(text))
    if len(parts) > 1:
        return _listed(parts, depth)
    if unions:
        return Node(Kind.UNION, "", tuple(_parse(part, depth + 1) for part in unions))
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(matrix.group(1) or matrix.group(2) or "", depth)
    return _enclosed(text, depth) or _plus_minus(text) or Node(Kind.ATOM, text)


_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?![A-Za-z])")
_RELATION = re.compile(_INEQUALITY.pattern + "|=")
_OR = re.compile(r",? or (?=\S)")
_AND = re.compile(r",? and (?=\S)")


def _relations(text: str, depth: int) -> Node | None:
    """`x < -1 or x > 3` is a union; what is joined by `and` is one region."""
    if not _INEQUALITY.search(text) or (" or " not in text and " and " not in text):
        return None
    for joint in (_OR, _AND):
        parts = joint.split(text)
        if len(parts) > 1 and all(map(_RELATION.search, parts)):
            if joint is _AND:
                return Node(Kind.ATOM, text)
            return Node(Kind.UNION, "", tuple(_parse(part, depth + 1) for part in parts))
    return None


_BUILDER = re.compile(
    r"\\\{ ?([A-Za-z]) ?(?:\\in ?\\mathbb ?\{ ?R ?\} ?|\\in ?R )?"
    r"(?:\\mid(?![A-Za-z])|\||:)(.+)\\\}",
    re.ASCII,
)
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", re.ASCII)


def without_builder(text: str) -> str:
    r"""What a set of real numbers asks of its members, said of `x`; any other text as it is.

    >>> without_builder(r"\{t \mid t > 0\}")
    'x > 0'
    """
    match = _BUILDER.fullmatch(text)
    if match is None or not _closes_at_end(text, 2) or not _INEQUALITY.search(match[2]):
        return text
    letter = re.compile(rf"(?<![A-Za-z\\]){match[1]}(?![A-Za-z])", re.ASCII)
    alone = _VARIABLE.search(letter.sub("", match[2])) is None
    return (letter.sub("x", match[2]) if alone else match[2]).strip()


def _without_thousands(text: str) -> str:
    """`1,000, 2,000` separates its items with a space; only then are bare commas thousands."""
    if ", " in text and not _inside_brackets(text):
        return _GROUPED.sub(lambda m: m.group().replace(",", ""), text)
    return text


def _inside_brackets(text: str) -> bool:
    return text[:1] in _OPENERS or text[:2] == "\\{"


def _split(text: str) -> tuple[list[str], list[str]]:
    r"""(parts at top-level commas, `and`, `or`; parts at top-level `\cup`)."""
    if not _CONJUNCTION.search(text):
        return [text], []
    lists: list[str] = []
    unions: list[str] = []
    depth = start = union_start = at = 0
    while at < len(text):
        character = text[at]
        if character == "\\" and text[at + 1 : at + 2] in ("{", "}"):
            depth += 1 if text[at + 1] == "{" else -1
            at += 2
            continue
        depth += (character in _OPENERS) - (character in _CLOSERS)
        match = _CONJUNCTION.match(text, at) if depth == 0 else None
        if match is None:
            at += 1
        elif match.group() == r"\cup":
            unions.append(text[union_start:at])
            at = union_start = match.end()
        else:
            lists.append(text[start:at])
            at = start = match.end()
    lists.append(text[start:])
    if unions:
        unions.append(text[union_start:])
    return [part for part in lists if part.strip()], unions


def _listed(parts: Sequence[str], depth: int = 0) -> Node:
    if len(parts) > _MAX_PARTS:
        return Node(Kind.LIST, "", (Node(Kind.ATOM, ",".join(parts)),))
    first, *rest = parts
    name = ""
    if "=" in first and not any("=" in part for part in rest):
        name, first = _without_name(first)  # `x = 1, 2` names the list
    nodes = [_parse(part, depth + 1) for part in (first, *rest)]
    # A part such as `2 \pm i` is two values of this list.
    opened = [node.items if node.kind is Kind.LIST else (node,) for node in nodes]
    items = _once(tuple(item for items in opened for item in items))
    return Node(Kind.LIST, "", items, name) if len(items) > 1 else items[0]


def _without_name(text: str) -> tuple[str, str]:
    """The name that a text begins with, as far as names can differ, and what is said of it."""
    match = _NAME.match(text)
    if match is None:
        return "", text
    name, sign = match.group().strip(), match.group().strip()[-1]
    bare = _UNSAID.sub("", name.removesuffix(r"\in").rstrip("=:"))
    # A colon stands after any words, and of words there are many.
    counts = sign != ":" and _WORD.search(bare) is None
    return bare if counts else "", text[match.end() :]


def _once(items: tuple[Node, ...]) -> tuple[Node, ...]:
    """A tuple or set that is said again in a list is still one member of it."""
    kinds = (Kind.TUPLE, Kind.SET)
    return tuple(
        item for at, item in enumerate(items) if item.kind not in kinds or item not in items[:at]
    )


def _matrix(body: str, depth: int) -> Node:
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", body) if row.strip()]
    cells = [
        Node(Kind.TUPLE, "()", tuple(_parse(cell, depth + 1) for cell in row.split("&")))
        for row in rows
    ]
    return Node(Kind.MATRIX, "", tuple(cells))


def _enclosed(text: str, depth: int) -> Node | None:
    """A set, tuple or interval whose brackets hold the whole text, or a value in parentheses."""
    name, said = _without_name(text)
    if len(said) < len(text) and said[:1] in ("(", "[", "\\"):
        inner = _bracketed(said, depth)
        if inner is not None and inner.kind is not Kind.ATOM:
            return inner._replace(name=name)
    return _bracketed(text, depth)


def _bracketed(text: str, depth: int) -> Node | None:
    if text.startswith("\\{") and text.endswith("\\}") and _closes_at_end(text, 2):
        return _set(text[2:-2], depth)
    if not _in_brackets(text):
        return None
    brackets, inside = text[0] + text[-1], text[1:-1]
    parts, _ = _split(inside)
    if brackets == "{}" and len(parts) > 1:
        return _set(inside, depth)
    if len(parts) == 1 and brackets in ("()", "[]", "{}"):
        return _parse(inside, depth + 1)
    return _collection(Kind.TUPLE, brackets, inside, depth) if len(parts) > 1 else None


def _in_brackets(text: str) -> bool:
    """Whether the text's first and last characters are a pair; `(0, 1]` is one too."""
    return text[:1] in _OPENERS and text[-1:] in _CLOSERS and _closes_at_end(text, 1)


def _set(inside: str, depth: int) -> Node | None:
    if not inside.strip() or re.search(r"\||\\mid(?![A-Za-z])|:", inside):
        return None  # empty, or set-builder notation
    return _collection(Kind.SET, "", inside, depth)


def _collection(kind: Kind, brackets: str, inside: str, depth: int) -> Node:
    """The parts; more than an answer can have are left in one piece, equal only to its like."""
    parts, _ = _split(inside)
    if len(parts) > _MAX_PARTS:
        return Node(kind, brackets, (Node(Kind.ATOM, inside),))
    return Node(kind, brackets, tuple(_parse(part, depth + 1) for part in parts))


def _closes_at_end(text: str, start: int) -> bool:
    """Whether the bracket that opens the text is closed by its last character and not before."""
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] in _OPENERS) - (text[at] in _CLOSERS)
        if depth == 0:
            return at == len(text) - 1
    return False


def _plus_minus(text: str) -> Node | None:
    if text.count(r"\pm") != 1:
        return None
    name = _NAME.match(text)
    if name and "=" in name.group():
        text = text[name.end() :]
    signs = (re.sub(r"\\pm(?![A-Za-z]) ?", sign, text) for sign in "+-")
    return Node(Kind.LIST, "", tuple(Node(Kind.ATOM, side.strip().lstrip("+")) for side in signs))


def compare(prediction: Node, reference: Node, same: AtomTest) -> bool | None:
    """Whether two shapes hold the same parts; None where a part or the shape is not decided.

    >>> same = lambda p, r: p == r
    >>> compare(readings("2, 1")[0], readings("1, 2")[0], same)
    True
    >>> compare(readings("[1, 2]")[0], readings("(1, 2)")[0], same)
    False
    """
    if _other_name(prediction.name, reference.name):
        return False
    return _compare_kinds(prediction, reference, same)


def _compare_kinds(prediction: Node, reference: Node, same: AtomTest) -> bool | None:
    kinds = {prediction.kind, reference.kind}
    if kinds == {Kind.ATOM}:
        return same(prediction.text, reference.text)
    if Kind.ATOM in kinds:
        atom = prediction if prediction.kind is Kind.ATOM else reference
        return None if _SET_LIKE.search(atom.text) else False
    if kinds <= {Kind.LIST, Kind.SET} or kinds == {Kind.UNION}:
        if _named_apart(prediction) != _named_apart(reference):
            return _in_order(prediction.items, reference.items, same)
        return _any_order(prediction.items, reference.items, same)
    if Kind.UNION in kinds:
        return None
    return _compare_ordered(prediction, reference, same)


def _other_name(prediction: str, reference: str) -> bool:
    """`A = (1, 2)` where `B` is asked; a point may be said of `P` and of `(x, y)`."""
    alike = prediction.startswith("(") == reference.startswith("(")
    return bool(prediction and reference and alike and prediction != reference)


_ITEM_NAME = re.compile(r"(\\?[A-Za-z]+)(?:_\{?\w+\}?)? ?=", re.ASCII)


def _named_apart(node: Node) -> bool:
    """`x = 1, y = 2`, where the order of bare values counts; not the two roots `x_1` and `x_2`."""
    names = [_ITEM_NAME.match(item.text) for item in node.items]
    found = {name.group(1) for name in names if name is not None}
    return len(found) == len(node.items) > 1


def _compare_ordered(prediction: Node, reference: Node, same: AtomTest) -> bool | None:
    """Tuples, intervals and matrices; a list may be a tuple without its parentheses."""
    kinds = {prediction.kind, reference.kind}
    if len(kinds) == 1:
        same_brackets = prediction.text == reference.text
        return same_brackets and _in_order(prediction.items, reference.items, same)
    if kinds == {Kind.LIST, Kind.TUPLE}:
        # An interval's brackets cannot be left out.
        round_ones = prediction.text + reference.text == "()"
        return round_ones and _in_order(prediction.items, reference.items, same)
    return Kind.MATRIX in kinds and _vector(prediction, reference, same)


def _in_order(
    predictions: Sequence[Node], references: Sequence[Node], same: AtomTest
) -> bool | None:
    if len(predictions) != len(references):
        return False
    decided: bool | None = True
    for prediction, reference in zip(predictions, references, strict=True):
        outcome = compare(prediction, reference, same)
        if outcome is False:
            return False
        if outcome is None:
            decided = None
    return decided


def _any_order(
    predictions: Sequence[Node], references: Sequence[Node], same: AtomTest
) -> bool | None:
    """Match each part with an unused one; equality is transitive, so the first match will do.

    What is left over on either side must have something on the other that it may still equal.
    """
    if len(predictions) != len(references):
        return False
    unused = list(references)
    undecided: list[Node] = []
    for prediction in predictions:
        outcomes = [compare(prediction, reference, same) for reference in unused]
        if True in outcomes:
            unused.pop(outcomes.index(True))
        else:
            undecided.append(prediction)
    left = [[compare(p, r, same) for r in unused] for p in undecided]
    possible = all(None in row for row in left) and all(
        None in column for column in zip(*left, strict=True)
    )
    return None if undecided and possible else not undecided


def _vector(prediction: Node, reference: Node, same: AtomTest) -> bool | None:
    """A row or column matrix against a tuple with round brackets."""
    matrix, other = (
        (prediction, reference) if prediction.kind is Kind.MATRIX else (reference, prediction)
    )
    if other.kind is not Kind.TUPLE or other.text != "()":
        return False
    if len(matrix.items) == 1:
        cells = matrix.items[0].items
    elif all(len(row.items) == 1 for row in matrix.items):
        cells = tuple(row.items[0] for row in matrix.items)
    else:
        return False
    if matrix is prediction:
        return _in_order(cells, other.items, same)
    return _in_order(other.items, cells, same)
