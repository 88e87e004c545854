"""The report as a browser has it: from disk, without a complaint or a request, by keyboard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from chromium import WIDTHS, Page, program
from drawn_runs import GRPO, NASTY, make_run

from grouper.report.page import write_report

pytestmark = pytest.mark.slow

# A formula that is drawn, one that is hostile, one that cannot be converted.
LATEX = r" $\frac{3}{4}$ \boxed{7} $\href{javascript:alert(1)}{x}$ $\frac$"
OPEN_GROUPS = "document.querySelectorAll('.group').forEach(group => { group.open = true })"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if program() is None:
        pytest.skip("Chromium, which is no Python package, is not installed (apt install chromium)")
    metrics = {**GRPO, "solve_rate": 0.5, "learning_rate": 2e-5}
    folder = tmp_path_factory.mktemp("r") / "demo"
    return write_report([make_run(folder, grpo=metrics, text=NASTY + LATEX)])


@pytest.fixture
def page(report: Path) -> Iterator[Page]:
    with Page() as opened:
        opened.open(report)
        yield opened
        opened.run("1")
        assert opened.said == []
        assert [url for url in opened.asked if not url.startswith(("file:", "data:"))] == []
        assert len([url for url in opened.asked if url.startswith("file:")]) == 1


def test_scripts_in_texts_stay_text(page: Page) -> None:
    assert page.run("document.title") == "demo"
    page.run(OPEN_GROUPS)
    time.sleep(0.3)
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    assert "</script><script>" in page.run("document.getElementById('groups').textContent")
    assert page.run("document.title") == "demo"


def test_formulas_are_drawn_and_others_stay_text(page: Page) -> None:
    sample = "document.querySelector('.sample pre')"
    assert page.run(f"{sample}.querySelectorAll('math').length") == 3
    assert page.run(f"{sample}.querySelector('mfrac').textContent") == "34"
    assert page.run(f"{sample}.textContent").endswith(r" $\frac$")
    assert page.run("document.querySelectorAll('main [href^=javascript]').length") == 0
    width = page.run("document.querySelector('.sample mfrac').getBoundingClientRect().height")
    assert width > 15, "a fraction has two lines"
    page.run("filters.elements.latex.click()")
    assert page.run(f"{sample}.querySelectorAll('math').length") == 0
    assert r"$\frac{3}{4}$" in page.run(f"{sample}.textContent")


def test_a_problem_has_its_prompt_once_above_all_its_completions(page: Page) -> None:
    group = "document.querySelector('.group[open]')"
    assert page.run(f"{group}.querySelectorAll('.sample').length") == 4
    assert page.run(f"[...{group}.querySelectorAll('.kind')].map(node => node.textContent)") == [
        "Prompt. Reference answer: 2"
    ]


def test_filters_find_what_they_say(page: Page) -> None:
    count = "document.getElementById('count').textContent"
    assert page.run(count).startswith("2 of 2 problems, with 8 completions.")

    def pick(name: str, value: str) -> str:
        page.run(
            f"filters.elements.{name}.value = {value!r};"
            f"filters.elements.{name}.dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
        return str(page.run(count)).partition(",")[0]

    assert pick("step", "0") == "2 of 2 problems"
    assert page.run("filters.querySelector('.steps output').textContent") == "1 (1 of 5 steps)"
    assert pick("text", "Question 1?") == "1 of 2 problems"
    assert pick("text", "nowhere") == "0 of 2 problems"
    assert pick("text", "") == "2 of 2 problems"
    assert pick("set", "0") == "20 of 20 problems"
    assert pick("outcome", "correct") == "18 of 20 problems"
    assert pick("change", "stayed wrong") == "0 of 20 problems"
    assert pick("outcome", "not-correct") == "2 of 20 problems"


def test_a_link_leads_to_a_sample_and_to_a_filter(page: Page, report: Path) -> None:
    link = page.run("document.querySelectorAll('.sample a')[2].getAttribute('href')")
    assert link == "#completions?set=2&step=5&problem=train%2F0&sample=sample+2"
    page.run("location.hash = '#completions?set=2&step=2&problem=train%2F1&sample=sample+3'")
    time.sleep(0.3)
    assert page.run("filters.querySelector('.steps output').textContent") == "2 (2 of 5 steps)"
    linked = "document.querySelector('.linked')"
    assert page.run(f"{linked}.closest('.group').dataset.problem") == "train/1"
    assert page.run(f"{linked}.dataset.sample") == "sample 3"
    assert 0 < page.run(f"{linked}.getBoundingClientRect().top") < 900
    page.run(
        "filters.elements.outcome.value = 'wrong';"
        "filters.elements.outcome.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert page.run("location.hash") == "#completions?set=2&step=2&outcome=wrong"


def test_the_keyboard_is_enough(page: Page) -> None:
    page.press("/", 191)
    assert page.run("document.activeElement.name") == "text"
    page.run("document.querySelector('figure').focus()")
    page.press("End", 35)
    assert page.run("document.querySelector('figcaption output').textContent") == "GRPO step 5"
    assert "[" in page.run("document.querySelector('.legend b').textContent")
    # Every chart of the phase speaks of that step, and none of the other phase.
    steps = "[...document.querySelectorAll('figure output')].map(node => node.textContent)"
    phases = page.run("charts.map(one => one.chart.facets.map(facet => facet.phase).join())")
    said = {(phase, step) for phase, step in zip(phases, page.run(steps), strict=True)}
    assert said == {("sft,grpo", "GRPO step 5"), ("grpo", "GRPO step 5"), ("sft", "")}
    page.press("Home", 36)
    said = {(phase, step) for phase, step in zip(phases, page.run(steps), strict=True)}
    assert said == {("sft,grpo", "SFT step 0"), ("grpo", ""), ("sft", "SFT step 0")}
    page.press("Escape", 27)
    assert page.run("document.querySelector('figcaption output').textContent") == ""
    page.run("document.querySelector('.trace summary').focus()")
    page.press("Enter", 13)
    time.sleep(0.3)
    page.run("document.querySelector('.tokens').focus()")
    for _ in range(2):
        page.press("ArrowRight", 39)
    said = page.run("document.querySelector('.readout').textContent")
    assert 'Token 2 " 2": log-prob of the sampler -1, of the trainer -1.25, entropy 2' in said
    assert said.endswith("clipped")
    assert not said.endswith("not clipped")


def test_axis_and_smoothing_change_every_chart(page: Page) -> None:
    names = "[...document.querySelectorAll('.small .plot')].map(plot => plot.textContent)"
    assert all("GRPO step" in name or "SFT step" in name for name in page.run(names))
    for axis, words in (("tokens", "tokens of"), ("seconds", "seconds of")):
        page.run(
            f"axes.elements.axis.value = {axis!r};"
            "axes.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        assert all(words in name for name in page.run(names))
    line = "document.querySelector('.small .line').getAttribute('d')"
    before = page.run(line)
    page.run(
        "axes.elements.smoothing.value = 30;axes.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert page.run("axes.querySelector('.amount').textContent") == "30 %"
    assert before.startswith("M")


def test_test_points_are_points_with_bars_that_no_line_joins(page: Page) -> None:
    overview = "document.querySelector('[data-chart=overview]')"
    assert page.run(f"{overview}.querySelectorAll('.joint').length") == 0
    # Base, SFT and GRPO on test; one validation of each phase.
    assert page.run(f"{overview}.querySelectorAll('circle').length") == 5
    assert page.run(f"{overview}.querySelectorAll('.bar').length") == 3 * 5
    names = f"[...{overview}.querySelectorAll('.plot .name')].map(node => node.textContent)"
    assert set(page.run(names)) == {"SFT", "GRPO", "base"}


def test_a_chart_can_be_downloaded(page: Page) -> None:
    page.run(
        "window.saved = [];download = (blob, name) => { saved.push([name, blob.type, blob.size]) }"
    )
    page.run("document.querySelectorAll('figure')[0].querySelector('[data-save=svg]').click()")
    page.run("document.querySelectorAll('figure')[1].querySelector('[data-save=png]').click()")
    for _ in range(100):
        time.sleep(0.1)
        if page.run("saved.length") == 2:
            break
    (svg, svg_type, svg_size), (png, png_type, png_size) = page.run("saved")
    assert svg == "demo-accuracy-over-the-run.svg"
    assert (svg_type, png_type) == ("image/svg+xml", "image/png")
    assert png.endswith(".png")
    assert min(svg_size, png_size) > 1000
    drawing = ET.fromstring(page.run("standalone(charts[0]).text"))
    texts = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "Accuracy over the run (problems solved (%))"
    assert "base" in texts
    assert "var(--" not in ET.tostring(drawing, encoding="unicode")


# --- layout: bounding boxes rather than pixels, which differ between fonts and versions -----------

BOXES = """[...document.querySelectorAll(
  'header, #facts, nav, section, figure, figcaption, .legend, .score, .group, form, table')]
  .map(node => { const box = node.getBoundingClientRect();
    return [node.tagName, box.left + scrollX, box.top + scrollY, box.width, box.height]; })"""
OVERLAPS = """(() => {
  const found = [];
  const lists = ['main > section', '.first > *', '.score', '.charts > figure', '#groups > *',
    '.samples > *', '#facts dl > *', 'figcaption > *', '.legend > li', 'form > label', 'nav > a'];
  for (const list of lists) {
    const parents = [...document.querySelectorAll(list)].map(node => node.parentNode);
    for (const parent of new Set(parents)) {
      const nodes = [...parent.children].filter(node => node.matches(list) && node.offsetHeight);
      nodes.forEach((one, i) => nodes.slice(i + 1).forEach(other => {
        const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        const texts = [one, other].map(node => node.textContent.slice(0, 40));
        if (wide > 1 && high > 1) found.push([list, ...texts]);
      }));
    }
  }
  return found; })()"""
LABELS = """(() => {
  const found = [];
  for (const plot of document.querySelectorAll('.plot')) {
    const frame = plot.getBoundingClientRect();
    const texts = [...plot.querySelectorAll('text:not(.name)')];
    texts.forEach((text, i) => {
      const a = text.getBoundingClientRect();
      const isInside = a.left >= frame.left - 1 && a.right <= frame.right + 1 &&
        a.top >= frame.top - 3 && a.bottom <= frame.bottom + 1;
      if (!isInside) found.push(['outside', text.textContent]);
      for (const other of texts.slice(i + 1)) {
        const b = other.getBoundingClientRect();
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
          found.push(['overlap', text.textContent, other.textContent]);
      }
    });
  }
  return found; })()"""
CONTRAST = """(() => {
  const rgb = text => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    const size = text.startsWith('color(') ? 1 : 255;
    const alpha = parts.length > 3 ? parts[3] : 1;
    return {color: parts.slice(0, 3).map(part => part / size), alpha};
  };
  const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = color => color.map(linear)
    .reduce((sum, c, i) => sum + [0.2126, 0.7152, 0.0722][i] * c, 0);
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const {color, alpha} = rgb(getComputedStyle(at).backgroundColor);
      if (alpha > 0.99) return color;
    }
    return [1, 1, 1];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.getClientRects().length) continue;
    if (node.closest('script, style, .tokens')) continue;
    const style = getComputedStyle(node);
    const ink = rgb(node.closest('svg') ? style.fill : style.color).color;
    const [a, b] = [luminance(ink), luminance(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const text = walker.currentNode.data.slice(0, 30);
    if (ratio < 4.5) found.push([ratio.toFixed(2), node.tagName, node.className.toString(), text]);
  }
  return found; })()"""


@pytest.mark.parametrize("size", [*WIDTHS])
def test_nothing_overlaps_or_is_wider_than_the_screen(report: Path, size: str) -> None:
    with Page() as page:
        page.open(report, size=size)
        page.run(OPEN_GROUPS)
        time.sleep(0.3)
        assert page.run("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.run(OVERLAPS) == []
        assert page.run(LABELS) == []


def test_the_first_screen_has_facts_verdict_chart_and_results(report: Path) -> None:
    with Page() as page:
        page.open(report)
        bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
        for selector in ("#facts", ".verdict", "figure.large", ".scores"):
            assert page.run(bottom.format(selector)) <= 900, selector
        assert page.run("document.querySelectorAll('.score').length") == 3
        chart, scores = page.run(
            "['figure.large', '.scores'].map(one => document.querySelector(one))"
            ".map(node => node.getBoundingClientRect()).map(box => [box.left, box.top, box.width])"
        )
        assert chart[0] + chart[2] <= scores[0]
        assert chart[1] == scores[1]
        assert chart[2] > 1.5 * scores[2]


def test_pointing_at_a_chart_moves_nothing(page: Page) -> None:
    for number in range(3):
        plot = f"document.querySelectorAll('.plot')[{number}]"
        page.run(f"{plot}.scrollIntoView({{block: 'center'}})")
        time.sleep(0.2)
        before = page.run(BOXES)
        x, y = page.run(
            f"[{plot}.getBoundingClientRect()]"
            ".flatMap(box => [box.left + box.width / 2, box.top + box.height / 2])"
        )
        page.point(x, y)
        output = f"{plot}.closest('figure').querySelector('output').textContent"
        assert " step " in page.run(output)
        assert page.run(BOXES) == before
        page.point(1, 1)
        assert page.run(output) == ""
        assert page.run(BOXES) == before


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_enough_contrast(report: Path, dark: bool) -> None:
    with Page() as page:
        page.open(report, dark=dark)
        page.run(OPEN_GROUPS)
        time.sleep(0.3)
        assert page.run(CONTRAST) == []


def test_the_button_changes_the_theme(page: Page) -> None:
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    page.run("document.getElementById('theme').click()")
    assert page.run("getComputedStyle(document.body).backgroundColor") != ground
