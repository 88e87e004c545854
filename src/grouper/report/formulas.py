r"""LaTeX in texts of a model, converted to MathML, which browsers draw without a script.

A formula becomes a tree of names and texts, never markup: the page's script makes elements of it.
Only the elements and attributes of the tables below come through, so that a hostile formula
(`\href{javascript:...}`, `\style`, `\rule` of a kilometer) is no more than text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grouper.printable import printable

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

# A braced group with two further levels of braces inside.
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
FORMULA = (
    r"\$\$[^$]+\$\$|\\\[[\s\S]+?\\\]|\\\([\s\S]+?\\\)|"
    # As Pandoc reads it: `$5 and $3` are amounts of money.
    r"(?<![\\$\w])\$(?=[^\s$])[^$\n]*?[^\s$\\]\$(?![\d$])|"
    rf"\\boxed(?!\{{\s*\}}){_BRACED}"
)
r"""Formulas between `$$`, `$`, `\[` or `\(`, and boxes outside of them.

Python and JavaScript read it alike.
"""

# Characters of the longest formula that is converted.
LONGEST = 600
# Elements around the innermost one: JSON and browsers have limits of their own.
DEEPEST = 60
# Bytes of all formulas of a page together.
FORMULA_BYTES = 300_000

# fmt: off
_ELEMENTS = frozenset((
    "math", "menclose", "mfrac", "mi", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow",
    "ms", "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr",
    "munder", "munderover",
))
# fmt: on
_ATTRIBUTES = frozenset(
    ("accent", "display", "displaystyle", "notation", "scriptlevel", "stretchy")
)
_DELIMITERS = ("$$", "$", r"\[", r"\(")

Tree = list[Any]
"""Name of an element, then its attributes (a dict, if any), then its text or its children."""


def formula_tree(formula: str) -> Tree | None:
    r"""Convert a formula with its delimiters; None if it cannot be converted.

    >>> formula_tree(r"$\frac{1}{2}$")
    ['math', ['mrow', ['mfrac', ['mrow', ['mn', '1']], ['mrow', ['mn', '2']]]]]
    >>> formula_tree(r"$\frac$") is None
    True
    """
    from latex2mathml.converter import convert_to_element

    latex = formula
    is_block = formula.startswith(("$$", r"\["))
    for delimiter in _DELIMITERS:
        if formula.startswith(delimiter):
            latex = formula[len(delimiter) : -len(delimiter)]
            break
    if len(latex) > LONGEST:
        return None
    # The converter knows the environment outside of a formula, which looks alike.
    latex = latex.replace("{aligned}", "{align*}")
    try:
        tree = _tree(convert_to_element(latex))
    except Exception:  # noqa: BLE001 - a model may write anything, which then stays text
        return None
    if is_block:
        tree.insert(1, {"display": "block"})
    return tree


class _UnknownError(Exception):
    """An element or a command that is not converted."""


def _tree(element: Element, depth: int = 0) -> Tree:
    """Convert an element; raises `_UnknownError` for what a page should not show."""
    if depth > DEEPEST:
        raise _UnknownError("nested too deeply")
    name = element.tag.rpartition("}")[2]
    # An unknown command is left as it was written, and so is the mark of a column.
    text = printable(html.unescape(element.text or ""))
    if name not in _ELEMENTS or (text.startswith("\\") and len(text) > 1) or text == "&":
        raise _UnknownError(name)
    tree: Tree = [name]
    attributes = {
        key: value
        for key, value in element.attrib.items()
        if key in _ATTRIBUTES and (key, value) != ("display", "inline")
    }
    if attributes:
        tree.append(attributes)
    if text:
        tree.append(text)
    for child in element:
        tree.append(_tree(child, depth + 1))
    return tree


@dataclass
class Formulas:
    """The formulas of a page, each once."""

    trees: dict[str, Tree] = field(default_factory=dict)
    """Formula, as it is written with its delimiters -> its tree."""
    room: int = FORMULA_BYTES
    """Bytes that are left."""
    _failed: set[str] = field(default_factory=set)

    def add_from(self, texts: Iterable[str]) -> None:
        """Convert the formulas of texts, as long as there is room."""
        for text in texts:
            for match in _PATTERN.finditer(text):
                self._add(match[0])

    def _add(self, formula: str) -> None:
        if formula in self.trees or formula in self._failed or self.room <= 0:
            return
        tree = formula_tree(formula)
        if tree is None:
            self._failed.add(formula)
            return
        self.trees[formula] = tree
        self.room -= len(formula) + len(str(tree))


_PATTERN = re.compile(FORMULA)
