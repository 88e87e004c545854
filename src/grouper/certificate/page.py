"""The certificate as one HTML page, which needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grouper.certificate.certificate import Certificate
from grouper.evaluation.compare import label
from grouper.files import write_atomic
from grouper.report.templating import templates
from grouper.tables import Cell, Table, Tone, table

TONES: Mapping[str, Tone] = {"pass": "good", "fail": "bad", "missing": "unsure"}


def write_page(certificate: Certificate, target: Path) -> Path:
    """Write the page of a certificate.

    Returns:
        The path written.
    """
    html = (
        templates("grouper.certificate")
        .get_template("certificate.html")
        .render(
            certificate=certificate,
            runs=[*certificate.runs, *certificate.controls],
            tone=_tone(certificate),
            items=items_table(certificate),
            stages=_stages_table(certificate),
            curve=_curve_table(certificate),
            file=target.with_suffix(".json").name,
        )
    )
    write_atomic(target, html.encode("utf-8", "backslashreplace"))
    return target


def _tone(certificate: Certificate) -> Tone:
    """Return the color of the verdict."""
    if certificate.count("fail"):
        return "bad"
    return "unsure" if certificate.count("missing") else "good"


def items_table(certificate: Certificate) -> Table:
    """Make the table of items."""
    rows = []
    for item in certificate.items:
        status = Cell(item.status, TONES[item.status])
        rows.append((item.question, status, item.sentence))
    return table(("question", "", "what the record says"), rows, lines=True)


def _numbers_of(certificate: Certificate, name: str) -> Mapping[str, Any]:
    return next((item.numbers for item in certificate.items if item.name == name), {})


def _stages_table(certificate: Certificate) -> Table | None:
    """Make the table of each phase's gain by its causes; None: there are none."""
    stages = _numbers_of(certificate, "gain").get("stages")
    if not stages:
        return None
    causes = [*stages[0]["causes"]]
    rows = []
    for stage in stages:
        points = [stage["difference"], *stage["causes"].values()]
        row = [f"{label(stage['from'])} to {label(stage['to'])}"]
        row += [f"{100 * value:+.1f}" for value in points]
        rows.append(row)
    return table(("phase", "points", *causes), rows)


def _curve_table(certificate: Certificate) -> Table | None:
    """Make the table of accuracy against tokens; None: there is none."""
    curve = _numbers_of(certificate, "tokens").get("curve")
    if not curve:
        return None
    rows = []
    for point in curve:
        precision = point["precision"]
        precision_cell = "-" if precision is None else f"{100 * precision:.1f}"
        rows.append((str(point["tokens"]), f"{100 * point['accuracy']:.1f}", precision_cell))
    return table(("tokens a completion, at most", "accuracy %", "of those answered %"), rows)
