"""The report: a run, or several, as one HTML file that needs no network.

What a model or a data set wrote is data: control characters and direction marks are shown as
escapes, HTML is escaped, long texts are cut, and the rest reaches the page as JSON that a script
puts into text nodes. The file stays below 3 MB: what is left out is said in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markupsafe import Markup

from grouper.evaluation.result import OUTCOME_NAMES
from grouper.files import write_atomic
from grouper.report.charts import Charts
from grouper.report.completions import Completions
from grouper.report.curves import are_current, draw_curves
from grouper.report.facts import (
    Change,
    Score,
    changes_between,
    facts_of,
    headline,
    scores_of,
    state_of,
    verdict_of,
)
from grouper.report.formulas import FORMULA
from grouper.report.panels import COLORS, RunView, overlaid, overview, panels_of
from grouper.report.sections import Views, last_results_of, table_sections
from grouper.report.templating import templates
from grouper.runs.folder import PHASES, RunFolder
from grouper.tables import Line, Tone

# Points of all curves of one metric together.
MOST_POINTS = 400
# Runs that the title names; of more it has their number.
MOST_NAMED = 3


def write_report(runs: Sequence[RunFolder | RunView], path: Path | None = None) -> Path:
    """Write a report of one or several runs, finished or not, as one HTML file.

    Args:
        runs: one, or several whose curves are laid over each other.
        path: the file; `report.html` in the first run folder by default.

    Returns:
        The path written.

    Raises:
        RunFolderError: a run cannot be read, or the file not written.
    """
    views = [run if isinstance(run, RunView) else RunView.of(run) for run in runs]
    target = path or views[0].folder.path / "report.html"
    # A text of a model may hold lone surrogates, which UTF-8 cannot carry.
    html = _page(views).encode("utf-8", "backslashreplace")
    write_atomic(target, html)
    return target


def draw_pictures(folder: RunFolder) -> None:
    """Write the report and the curves of a run into its folder."""
    run = RunView.of(folder)
    write_report([run])
    # At its end a run has often drawn all its curves, and only its state is new.
    if not are_current(folder):
        draw_curves(run)


def _page(runs: Sequence[RunView]) -> str:
    names = _names(runs)
    views = dict(zip(names, runs, strict=True))
    panels = panels_of(runs[0])
    if len(runs) > 1:
        panels_by_run = {name: panels_of(run) for name, run in views.items()}
        panels = overlaid(panels_by_run)
    overview_panels = overview(views)
    if len(runs) == 1:
        # The overview shows these, whole.
        panels = [panel for panel in panels if not panel.title.startswith("Held-out accuracy")]
    most_points = max(20, MOST_POINTS // len(runs))
    charts = Charts(views, most_points)
    completions = Completions(len(runs))
    completions.add_evaluations(views)
    for name, run in views.items():
        completions.add_rollouts(run, f"{name}: " if len(runs) > 1 else "")
    phase_lengths = [len(run.of_phase(phase)) for run in runs for phase in PHASES]
    drawings = {
        "overview": charts.chart(overview_panels) if overview_panels else None,
        "charts": [charts.chart([panel]) for panel in panels],
    }
    data = {
        **drawings,
        "clocks": charts.clocks,
        "outcomes": OUTCOME_NAMES,
        "sets": completions.sets,
        "groups": completions.groups,
        "prompts": [*completions.prompts],
        "formula": FORMULA,
        "formulas": completions.formulas.trees,
    }
    template = templates().get_template("report.html")
    return template.render(
        title=" against ".join(names) if len(runs) <= MOST_NAMED else f"{len(runs)} runs",
        written=datetime.now().astimezone().isoformat(" ", "minutes"),
        version=version("grouper-rl"),
        states={name: state_of(run) for name, run in views.items()},
        facts={name: facts_of(run) for name, run in views.items()},
        paths={name: run.folder.path for name, run in views.items()},
        verdicts=_verdicts(views),
        scores=_scores(views),
        changes=_changes(views),
        charts=drawings,
        parts=table_sections(views, completions.notes),
        steps_per_point=math.ceil(max(phase_lengths) / most_points),
        data=_json(data),
    )


def _names(runs: Sequence[RunView]) -> list[str]:
    """Name the runs by their folders; by their paths if two folders have the same name."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        return [str(run.folder.path) for run in runs]
    return names


def _verdicts(views: Views) -> list[Line]:
    """Compare the last model of each run with its first, on the first set of problems."""
    lines = []
    for name, run in views.items():
        tests = headline(run)
        tone: Tone = "unsure"
        if tests is None:
            text = "Nothing has been measured on held-out problems yet."
        else:
            tone, text = verdict_of(*tests)
        if len(views) > 1:
            text = f"{name}: {text}"
        lines.append(Line(text, tone, "verdict"))
    return lines


def _scores(views: Views) -> list[Score]:
    """Return the rows of results beside the wide chart; of several runs their last models."""
    if len(views) > 1:
        return scores_of(last_results_of(views), [*COLORS])
    (run,) = views.values()
    tests = headline(run)
    return scores_of(tests[1]) if tests is not None else []


def _changes(views: Views) -> list[Change]:
    """Return the differences between the results beside the wide chart."""
    if len(views) > 1:
        return changes_between(last_results_of(views))
    (run,) = views.values()
    tests = headline(run)
    return changes_between(tests[1]) if tests is not None else []


def _json(value: Any) -> Markup:
    """Write JSON for a script element: ASCII, without characters that HTML could interpret."""
    # A browser's JSON knows no NaN and infinities.
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    text = json.dumps(finite, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # noqa: S704 - everything that could end the element is escaped above
