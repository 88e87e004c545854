"""The pictures of the report in README and docs/ are of the report as it is."""

from __future__ import annotations

import pytest
from gates import package

from benchmarks.tools import screenshots

Image = package("PIL.Image", extra="dev")


def test_pictures_are_of_the_report_as_it_is() -> None:
    """Its templates have changed: `python -m benchmarks.tools.screenshots` takes them anew."""
    assert screenshots.MARK.read_text(encoding="ascii").strip() == screenshots.source_mark()


@pytest.mark.parametrize("name", screenshots.SHOWN)
def test_a_picture_shows_its_theme_on_its_screen(name: str) -> None:
    size, theme, _ = screenshots.SHOWN[name]
    picture = Image.open(screenshots.IMAGES / f"{name}.png").convert("L")
    assert (picture.width > picture.height) == (size == "desktop")
    # The background is what most of the picture is.
    counts = picture.histogram()
    is_dark = sum(counts[:100]) > sum(counts[156:])
    assert is_dark == (theme == "dark")
    assert len([count for count in counts if count]) > 20, "nothing is on it"
