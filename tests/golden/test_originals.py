"""`variant: original` gives what the published functions give, for every text of the file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import originals
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from originals import FILE, PAGE, PLACE, Case, differs, render

from grouper.prompts.formats import FORMATS


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    if not FILE.is_file():
        text = f"{FILE} is not beside this checkout"
        (pytest.fail if os.environ.get("GROUPER_REQUIRE_SHARED_DATA") else pytest.skip)(text)
    return originals.read()


def test_the_original_variants_differ_on_no_text(cases: list[Case]) -> None:
    assert len({(case.text, case.reference, case.layout.tags) for case in cases}) > 1_400
    assert len({case.reward for case in cases}) == 15
    wrong = [
        (case.reward, case.reference, case.text, case.published, value)
        for case in cases
        if differs(case, value := case.ours(variant="original"))
    ]
    assert len(wrong) == 0, wrong[:5]


def test_the_page_has_the_table_of_the_differences(cases: list[Case]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert PLACE.search(page) is not None
    assert render(page, cases) == page, "run `python tests/golden/originals.py`"


REASONING = r"^\s*<start_working_out>.+?<end_working_out>.*?<SOLUTION>(.+?)</SOLUTION>\s*$"
PATTERNS: dict[str, tuple[Any, Callable[[str], float]]] = {
    "dapo_exact_format": (
        FORMATS["tags"],
        lambda text: 3.0 if re.match(REASONING, text, re.DOTALL) else 0.0,
    ),
    "format": (
        FORMATS["think"],
        lambda text: float(
            re.match(r"^<think>.*?</think>\s*<answer>.*?</answer>$", text, re.DOTALL | re.MULTILINE)
            is not None
        ),
    ),
}
"""Layout and the pattern that the reward stands for."""
PIECES = ("\n", " ", "a", "7", "</answer>\n", "</answer> b", "</think>\n<answer>")


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_matched_without_backtracking(name: str) -> None:
    layout, published = PATTERNS[name]
    assert layout.tags is not None

    @settings(max_examples=600, deadline=None, derandomize=True)
    @given(st.lists(st.sampled_from((*layout.tags, *PIECES)), max_size=9).map("".join))
    @example("<think></think><answer></answer>")
    @example("<think></think><answer></think>\n<answer>4</answer>\nso")
    @example("<start_working_out>a<end_working_out><SOLUTION></SOLUTION></SOLUTION>")
    def compare(text: str) -> None:
        case = Case(name, layout, text, "4", published(text))
        assert case.ours(variant="original") == case.published

    compare()
