"""LaTeX of a model as MathML: what is drawn, what stays text, what never comes through."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grouper.report.formulas import FORMULA, LONGEST, Formulas, formula_tree


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        (r"so $\frac{1}{2}$ and $x$", [r"$\frac{1}{2}$", "$x$"]),
        (r"\(a\) or \[b\] or $$c$$", [r"\(a\)", r"\[b\]", "$$c$$"]),
        (r"the answer is \boxed{\frac{1}{\sqrt{2}}}.", [r"\boxed{\frac{1}{\sqrt{2}}}"]),
        ("it costs $5 and then $3", []),
        ("$5-$3 is $2", []),
        (r"a price of \$5 and \$6", []),
        ("an open $x", []),
        (r"put it into \boxed{}", []),
    ],
)
def test_formulas_are_found_where_they_are_marked(text, formulas):
    assert re.findall(FORMULA, text) == formulas


@pytest.mark.parametrize(
    "formula",
    [
        r"$\frac$",
        r"$\left($",
        r"$\unknown{x}$",
        "$" + "{" * 100 + "x$",
        "$" + "{" * 500 + "x$",
        "$" + "x" * LONGEST + "xx$",
        r"$\begin{cases}a$",
        "$x^a^b$",
    ],
)
def test_what_cannot_be_converted_stays_text(formula):
    assert formula_tree(formula) is None


@pytest.mark.parametrize(
    "formula",
    [
        r"$\href{javascript:alert(1)}{x}$",
        r"$\style{background:url(x)}{x}$",
        r"$\color{red}{x}$",
        r"$\rule{10000em}{1000em}$",
        r"$\hspace{100000em}$",
    ],
)
def test_attributes_of_a_hostile_formula_do_not_come_through(formula):
    text = json.dumps(formula_tree(formula))
    for word in ("href", "javascript", 'style":', "url", "red", "000em"):
        assert word not in text


def test_markup_in_a_formula_is_text():
    tree = formula_tree(r"$\text{<img src=x onerror=alert(1)>}$")
    assert tree == ["math", ["mrow", ["mtext", "<img\xa0src=x\xa0onerror=alert(1)>"]]]


@given(st.text(alphabet=r"\{}^_$&<>abc1 []()", max_size=60))
def test_any_text_is_a_tree_or_none(text):
    tree = formula_tree(f"${text}$")
    assert tree is None or tree[0] == "math"


def test_each_formula_is_there_once_and_only_while_there_is_room():
    formulas = Formulas()
    formulas.add_from(["$x$ and $x$", r"$\frac$ and $y$"])
    assert [*formulas.trees] == ["$x$", "$y$"]
    full = Formulas(room=0)
    full.add_from(["$x$"])
    assert full.trees == {}


def test_a_block_is_a_block():
    tree = formula_tree(r"\[x\]")
    assert tree is not None
    assert tree[1] == {"display": "block"}
