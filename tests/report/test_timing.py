"""The picture of where the seconds went."""

from __future__ import annotations

from pathlib import Path

import pytest

from grouper.report import timing
from grouper.report.timing import draw_times
from grouper.runs.folder import RunFolder
from grouper.types import StepReport, Tally

GRPO = {
    "prefill": 0.5,
    "decode": 6.0,
    "grade": 0.5,
    "update": 2.5,
    "other": 0.5,
    "step": 10.0,
    "sampled_tokens_per_second": 7000.0,
    "trained_tokens_per_second": 9000.0,
    "mfu": 0.2,
    "mfu_sample": 0.1,
    "mfu_update": 0.4,
}
SFT = {name: GRPO[name] for name in ("update", "other", "step", "mfu", "mfu_update")}


def reports(phase: str, values: dict[str, float], count: int = 30) -> list[StepReport]:
    tallies = {f"time.{name}": Tally.of([value]) for name, value in values.items()}
    return [
        StepReport(phase=phase, step=step, tallies=tallies, status="learning")
        for step in range(1, count + 1)
    ]


def words(found: list[StepReport]) -> tuple[str, list[str]]:
    """The headline, and the legend of the split."""
    figure = timing._figure(found, "demo")
    assert figure is not None
    legend = figure.axes[0].get_legend()
    assert legend is not None
    return figure._suptitle.get_text(), [text.get_text() for text in legend.get_texts()]


def test_every_part_has_its_share_in_the_legend() -> None:
    headline, legend = words([*reports("sft", SFT), *reports("grpo", GRPO)])
    assert headline == "demo: 5.0 min of GRPO steps"
    assert legend == ["prefill 5%", "decode 60%", "grade 5%", "update 25%", "other 5%"]


def test_a_run_of_sft_alone_shows_that() -> None:
    headline, legend = words([*reports("sft", SFT, count=9), *reports("grpo", GRPO, count=2)])
    assert headline == "demo: 90.0 s of SFT steps"
    assert legend == ["update 83%", "other 17%"]


def test_steps_without_an_update_have_no_gap() -> None:
    silent = {name: value for name, value in GRPO.items() if "update" not in name}
    figure = timing._figure([*reports("grpo", GRPO, 5), reports("grpo", silent, 6)[-1]], "demo")
    assert figure is not None
    areas = [area.get_paths()[0].vertices for area in figure.axes[0].collections]
    assert len(areas) == 5
    for corners in areas:
        assert {float(x) for x in corners[:, 0]} == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}


def test_what_has_no_times_has_no_picture(tmp_path: Path) -> None:
    run = RunFolder.create(
        tmp_path / "run", recipe_yaml="", recipe_hash="a", versions={}, fingerprints={}
    )
    assert draw_times(run) is None
    for report in reports("grpo", {"step": 1.0}, count=9):  # of a run before there was a split
        run.append_metrics(report)
    assert draw_times(run) is None
    for report in reports("grpo", GRPO, count=9):
        run.append_metrics(report)
    written = draw_times(run)
    assert written == run.path / "times.png"
    assert written.stat().st_size > 10_000


@pytest.mark.parametrize("missing", ["mfu", "sampled_tokens_per_second", "prefill"])
def test_a_missing_metric_stops_nothing(missing: str) -> None:
    left = {name: value for name, value in GRPO.items() if name != missing}
    assert timing._figure(reports("grpo", left), "demo") is not None
