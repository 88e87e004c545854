"""System A by hand: 2.0 + 0.5 + 0.5 + 0.5 + 4 x 0.125 for a perfect answer."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reward_calls import XML, score

ONE_LINE = "<reasoning>\nonly one\n</reasoning>\n<answer>\n42\n</answer>\n"
LINES = "<reasoning>\none\ntwo\n</reasoning>\n<answer>\n42\n</answer>"


@pytest.mark.parametrize(
    ("text", "reference", "value"),
    [
        (LINES, "42", 2.0),
        (LINES, " 42 ", 2.0),
        ("<answer>1234</answer>", "1,234", 2.0),  # commas leave the reference,
        ("<answer>1,234</answer>", "1234", 0.0),  # not the answer
        ("<answer>42.0</answer>", "42", 0.0),  # the text counts, not the number
        ("<answer>41</answer> no, <answer>42</answer>", "42", 2.0),  # the last tag
        ("<answer>42</answer> no, <answer>41</answer>", "42", 0.0),
        ("<answer>41 or 42</answer>", "42", 0.0),
        ("<answer>42", "42", 0.0),
        ("42", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_correctness(text: str, reference: str, value: float) -> None:
    assert score("xml_correctness", XML, text, reference) == value


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("42", 0.5),
        ("007", 0.5),
        ("-4", 0),
        ("4.0", 0),
        ("1,000", 0),
        ("4 2", 0),
        ("٤", 0),
        ("²", 0),
    ],
)
def test_integer(answer: str, value: float) -> None:
    assert score("xml_integer", XML, f"<answer>\n{answer}\n</answer>") == value
    assert score("xml_integer", XML, answer) == 0


FORMAT_CASES = [
    # text, strict, soft, original strict, original soft
    (LINES, 0.5, 0.5, 0, 0),  # reasoning over two lines
    (LINES + "\n", 0.5, 0.5, 0, 0),
    (ONE_LINE, 0.5, 0.5, 0.5, 0),  # `<reasoning>\n` already ends the original's soft line
    (ONE_LINE.rstrip(), 0.5, 0.5, 0, 0),
    ("<reasoning>a</reasoning> <answer>4</answer>", 0, 0.5, 0, 0.5),
    ("<reasoning>a</reasoning>\n\n<answer>4</answer>so", 0, 0.5, 0, 0.5),
    ("hm <reasoning>a</reasoning><answer>4</answer>", 0, 0.5, 0, 0),
    (ONE_LINE + "more", 0, 0.5, 0, 0),
    (" " + ONE_LINE, 0, 0.5, 0, 0),
    ("<reasoning>\n\n</reasoning>\n<answer>\n\n</answer>\n", 0, 0.5, 0.5, 0),
    ("<reasoning>a</reasoning> so <answer>4</answer>", 0, 0, 0, 0),
    (ONE_LINE.replace("one", "</answer>"), 0, 0.5, 0.5, 0),
    ("<answer>4</answer><reasoning>a</reasoning>", 0, 0, 0, 0),
    ("", 0, 0, 0, 0),
]


@pytest.mark.parametrize(("text", "strict", "soft", "old_strict", "old_soft"), FORMAT_CASES)
def test_formats(text: str, strict: float, soft: float, old_strict: float, old_soft: float) -> None:
    assert score("xml_strict_format", XML, text) == strict
    assert score("xml_soft_format", XML, text) == soft
    assert score("xml_strict_format", XML, text, variant="original") == old_strict
    assert score("xml_soft_format", XML, text, variant="original") == old_soft


@pytest.mark.parametrize(
    ("text", "value", "original"),
    [
        (ONE_LINE, 0.5, 0.5),
        # Without the newline at the end the original counts the whole text once, gives one back.
        (LINES, 0.5, 0.5 - 0.001 * len(LINES) + 0.001),
        (ONE_LINE + "abc", 0.5 - 0.003, 0.5 - 0.006),
        (ONE_LINE + "a" * 1000, 0.5 - 1.0, 0.5 - 2.0),
        ("<reasoning>\na", 0.125, 0.125),
        (ONE_LINE.replace("<answer>\n", "<answer>"), 0.375, 0.375),
        (ONE_LINE + "<reasoning>\n", 0.375 - 0.012, 0.375 - 0.024),
        ("", 0, 0),
        ("42", 0, 0),
    ],
)
def test_tag_count(text: str, value: float, original: float) -> None:
    assert score("xml_tag_count", XML, text) == pytest.approx(value)
    assert score("xml_tag_count", XML, text, variant="original") == pytest.approx(original)


def published_strict(text: str) -> float:
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    return 0.5 if re.match(pattern, text) else 0.0


def published_soft(text: str) -> float:
    return 0.5 if re.match(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", text) else 0.0


def published_tag_count(text: str) -> float:
    opened = text.count("\n<answer>\n") == 1
    closed = text.count("\n</answer>") == 1
    once = (text.count("<reasoning>\n") == 1) + (text.count("\n</reasoning>\n") == 1)
    total = 0.125 * (once + opened + closed)
    if opened:
        total -= 0.001 * len(text.rsplit("\n</answer>\n", maxsplit=1)[-1])
    if closed:
        total -= 0.001 * (len(text.rsplit("\n</answer>", maxsplit=1)[-1]) - 1)
    return total


PIECES = (*(XML.tags or ()), "\n", "\n", " ", "a", "\r", "<reasoning>\n", "</reasoning>\n<answer>")
WHOLE = (ONE_LINE, "<reasoning>a</reasoning>", "<answer>4</answer>")


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES + WHOLE), max_size=9).map("".join))
@example(ONE_LINE + "\n")
@example(ONE_LINE + "\n\n")
@example("<reasoning>a</reasoning>b</reasoning><answer>4</answer>")
@example("<reasoning></reasoning><answer>\n</reasoning><answer></answer>")
@example("<reasoning></reasoning><answer></reasoning>\n<answer>4</answer>")
@example("<reasoning>\n</reasoning>\n\n<answer>\n4\n</answer>\n</answer>\nmore")
@example("\n<answer>\n</answer>\n</answer>")
def test_original_is_the_published_behaviour(text: str) -> None:
    assert score("xml_strict_format", XML, text, variant="original") == published_strict(text)
    assert score("xml_soft_format", XML, text, variant="original") == published_soft(text)
    count = score("xml_tag_count", XML, text, variant="original")
    assert count == pytest.approx(published_tag_count(text))


def test_a_second_closing_tag_does_not_hide_what_trails() -> None:
    text = ONE_LINE + "x" * 100 + "\n</answer>"
    assert score("xml_tag_count", XML, text) == pytest.approx(0.375 - 0.001 * 110)


def test_numbers_can_be_set() -> None:
    assert score("xml_correctness", XML, LINES, "42", value=3.0) == 3.0
    assert score("xml_tag_count", XML, ONE_LINE + "ab", value=0.25, penalty=0.1) == 0.8


@pytest.mark.parametrize("variant", ["default", "original"])
@pytest.mark.parametrize("name", ["xml_strict_format", "xml_soft_format", "xml_tag_count"])
def test_long_output_is_fast(name: str, variant: str) -> None:
    started = time.perf_counter()
    for part in ("<reasoning>", "</reasoning>\n<answer>", "<reasoning></reasoning><answer>", "\n"):
        score(name, XML, part * 20_000, variant=variant)
    pairs = "<reasoning>" + "</reasoning><answer>" * 20_000
    score(name, XML, f"{pairs}\n</answer>", variant=variant)
    assert time.perf_counter() - started < 2.0
