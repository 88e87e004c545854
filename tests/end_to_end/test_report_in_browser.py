"""The report as a browser has it: from disk, without a complaint or a request, by keyboard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page, program
from drawn_runs import NASTY, make_run

from grouper.report.page import write_report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if program() is None:
        pytest.skip("Chromium, which is no Python package, is not installed (apt install chromium)")
    return write_report([make_run(tmp_path_factory.mktemp("r") / "demo", text=NASTY)])


@pytest.fixture
def page(report: Path) -> Iterator[Page]:
    with Page() as opened:
        opened.open(report)
        yield opened
        opened.run("1")
        assert opened.said == []
        assert [url for url in opened.asked if not url.startswith("file:")] == []
        assert len(opened.asked) == 1


def test_scripts_in_texts_stay_text(page: Page) -> None:
    assert page.run("document.title") == "demo"
    page.run("document.querySelectorAll('.card').forEach(card => { card.open = true })")
    time.sleep(0.3)
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    assert "</script><script>" in page.run("document.getElementById('cards').textContent")
    assert page.run("document.title") == "demo"


def test_filters_find_what_they_say(page: Page) -> None:
    count = "document.getElementById('count').textContent"
    assert page.run(count) == "120 of 120 completions in this file."

    def pick(name: str, value: str) -> str:
        page.run(
            f"filters.elements.{name}.value = {value!r};"
            "filters.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        return str(page.run(count)).split()[0]

    assert pick("verdict", "correct") == str(8 + 18 + 17 + 5 * 4)
    assert pick("least", "1.4") == str(5 * 2)
    assert pick("text", "Question 1") == str(5 * 2)
    assert pick("text", "nowhere") == "0"


def test_the_keyboard_is_enough(page: Page) -> None:
    page.press("/", 191)
    assert page.run("document.activeElement.name") == "text"
    page.run("document.querySelector('figure').focus()")
    page.press("End", 35)
    assert page.run("document.querySelector('figcaption output').textContent") == "step 40"
    assert "[" in page.run("document.querySelector('.legend b').textContent")
    # Every chart of the phase speaks of that step, and none of the other phase.
    steps = "[...document.querySelectorAll('figure output')].map(node => node.textContent)"
    phases = page.run("data.charts.map(chart => chart.phase)")
    said = {(p, s) for p, s in zip(phases, page.run(steps), strict=True)}
    assert said == {("sft", "step 40"), ("grpo", "")}
    page.press("Escape", 27)
    assert page.run("document.querySelector('figcaption output').textContent") == ""
    page.run("filters.elements.traced.click(); document.querySelector('.card summary').focus()")
    page.press("Enter", 13)
    time.sleep(0.3)
    page.run("document.querySelector('.tokens').focus()")
    for _ in range(2):
        page.press("ArrowRight", 39)
    said = page.run("document.querySelector('.tokens + p').textContent")
    assert 'Token 2 " 2": log-prob of the sampler -1, of the trainer -1.25, entropy 2' in said
    assert said.endswith("clipped")
    assert not said.endswith("not clipped")


def test_before_and_after_of_one_problem(page: Page) -> None:
    assert page.run("document.querySelector('#pairs select').selectedOptions[0].textContent") == (
        "wrong, then right (18)"
    )
    assert page.run("document.querySelectorAll('#pair > details[open]').length") == 3
    page.run("document.querySelector('#pairs [name=next]').click()")
    assert page.run("document.querySelector('#pairs [role=status]').textContent") == "2 of 18"


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(report: Path, size: str) -> None:
    with Page() as page:
        page.open(report, size=size, dark=True)
        page.run("document.querySelectorAll('.card').forEach(card => { card.open = true })")
        time.sleep(0.3)
        assert page.run("document.documentElement.scrollWidth - innerWidth") <= 0
        ground = page.run("getComputedStyle(document.body).backgroundColor")
        page.run("document.getElementById('theme').click()")
        assert page.run("getComputedStyle(document.body).backgroundColor") != ground
