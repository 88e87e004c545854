"""The style of the page: every text has the contrast that WCAG 2 asks for (level AA)."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest

CSS = files("grouper.report").joinpath("templates/report.css").read_text(encoding="utf-8")
COLORS = {
    name: (light, dark)
    for name, light, dark in re.findall(
        r"--(\w+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS
    )
}
THEMES = ("light", "dark")
SURFACES = ("ground", "card")
TEXTS = ("text", "dim", "accent", "good", "bad", "unsure")
LINES = ("blue", "red", "green", "orange", "purple", "sky", "gray", "ink")


def channels(color):
    return [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]


def luminance(rgb):
    """Relative luminance, WCAG 2.2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first, second):
    brighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def color(name, theme):
    return channels(COLORS[name][THEMES.index(theme)])


def test_the_formula_of_the_contrast_is_that_of_wcag():
    assert contrast(channels("#000000"), channels("#ffffff")) == pytest.approx(21)
    assert contrast(channels("#777777"), channels("#ffffff")) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("text", "surface"), itertools.product(TEXTS, SURFACES))
def test_texts_and_badges_have_enough_contrast(text, surface, theme):
    assert contrast(color(text, theme), color(surface, theme)) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("line", "surface"), itertools.product(LINES, SURFACES))
def test_lines_and_marks_have_enough_contrast(line, surface, theme):
    assert contrast(color(line, theme), color(surface, theme)) >= 3


@pytest.mark.parametrize("theme", THEMES)
def test_the_darkest_token_can_be_read(theme):
    share = int(re.search(r"var\(--heat\) \* (\d+)%", CSS)[1]) / 100
    heat = [
        share * c + (1 - share) * surface
        for c, surface in zip(color("purple", theme), color("ground", theme), strict=True)
    ]
    assert contrast(color("text", theme), heat) >= 4.5


def test_no_text_has_a_color_that_is_not_tested():
    used = set(re.findall(r"(?<![-\w])color: var\(--(\w+)", CSS))
    assert used - {"tone"} <= set(TEXTS)
    tones = set(re.findall(r"--tone: var\(--(\w+)\)", CSS))
    assert tones <= set(TEXTS)
    assert set(COLORS) == {*SURFACES, *TEXTS, *LINES, "edge"}
