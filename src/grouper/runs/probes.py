"""Probes for contamination in the record of a run: `probes/<set>.json`, a file for each set.

A file holds the set's questions and those of its control, with what the model has written. The
shares and intervals are computed from these, so that they cannot disagree with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from grouper.errors import RunFolderError
from grouper.evaluation.contamination import Completed, Probe, is_suspicious
from grouper.evaluation.items import checked
from grouper.files import read_errors_as, read_json, write_atomic
from grouper.tables import Line, Table, Tone, table

PROBES_FOLDER = "probes"

_DAMAGED = "the record of this probe is damaged"
_FIX = "Restore the file, or delete it and run `grouper probe` again."


class _Questions(BaseModel, strict=True, extra="forbid"):
    """A set of questions in the file."""

    name: str
    completed: list[dict[str, Any]]
    too_short: int


class _Content(BaseModel, strict=True, extra="forbid"):
    """The content of a file."""

    format: Literal[1] = 1
    model: str
    model_hash: str | None
    probe: _Questions
    control: _Questions


_parse = checked(_Content.model_validate)
_parse_completed = checked(TypeAdapter(tuple[Completed, ...]).validate_python)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProbe:
    """A probe of one set of problems beside its control."""

    model: str
    model_hash: str | None
    """The identity of its weights (`identity_of`)."""
    probe: Probe
    control: Probe

    @property
    def suspicious(self) -> bool:
        """Whether the model completes more of the set than can be guessed."""
        return is_suspicious(self.probe, self.control)

    @property
    def sentence(self) -> str:
        """The finding in words."""
        if self.suspicious:
            return (
                f"{self.probe.name}: the model completes more of these questions than can be "
                "guessed, so it has probably read them. Its accuracy on them is no measure of "
                "what it can; `grouper eval --twins` measures on the same problems with other "
                "numbers."
            )
        return f"{self.probe.name}: no more than can be guessed. No evidence that it has read them."


def probe_table(probes: Sequence[RecordedProbe]) -> Table:
    """Make the table of probes; a control stands below the sets that it was made for."""
    rows = []
    for number, recorded in enumerate(probes):
        rows.append(_row(recorded.probe.name, recorded.probe))
        is_last = number + 1 == len(probes)
        if is_last or probes[number + 1].control != recorded.control:
            rows.append(_row("control (new problems)", recorded.control))
    return table(("problems", "questions", "completed word for word %", "ROUGE-L %"), rows)


def _row(name: str, probe: Probe) -> tuple[str, str, str, str]:
    low = 100 * probe.interval.low
    high = 100 * probe.interval.high
    exact = f"{100 * probe.exact:.1f} [{low:.1f}, {high:.1f}]"
    return name, str(len(probe.completed)), exact, f"{100 * probe.similarity:.0f}"


def probe_lines(probes: Sequence[RecordedProbe]) -> list[Line]:
    """Return the finding on each set."""
    lines = []
    for recorded in probes:
        tone: Tone = "unsure" if recorded.suspicious else "plain"
        lines.append(Line(recorded.sentence, tone))
    return lines


def write_probe(run: Path, recorded: RecordedProbe) -> Path:
    """Record a probe in a run folder; an earlier one of the same set is replaced.

    Returns:
        The file.
    """
    content = _Content(
        model=recorded.model,
        model_hash=recorded.model_hash,
        probe=_questions(recorded.probe),
        control=_questions(recorded.control),
    )
    name = re.sub(r"[^\w.+-]+", "-", recorded.probe.name).strip("-.") or "problems"
    file = run / PROBES_FOLDER / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    write_atomic(file, json.dumps(content.model_dump(), indent=2).encode("utf-8", "replace"))
    return file


def _questions(probe: Probe) -> _Questions:
    completed = [asdict(one) for one in probe.completed]
    return _Questions(name=probe.name, completed=completed, too_short=probe.too_short)


def read_probes(run: Path) -> list[RecordedProbe]:
    """Read the probes of a run folder, by the names of their files; none were made: none.

    Raises:
        RunFolderError: a file is damaged.
    """
    return [_read(file) for file in sorted((run / PROBES_FOLDER).glob("*.json"))]


def _read(file: Path) -> RecordedProbe:
    row = read_json(file, _DAMAGED)
    with read_errors_as(file, _DAMAGED, _FIX):
        content = _parse(row)
        probe = _probe(content.probe)
        control = _probe(content.control)
    if not probe.completed or not control.completed:
        raise RunFolderError(_DAMAGED, where=str(file), fix=_FIX)
    return RecordedProbe(
        model=content.model, model_hash=content.model_hash, probe=probe, control=control
    )


def _probe(questions: _Questions) -> Probe:
    return Probe(
        name=questions.name,
        completed=_parse_completed(questions.completed),
        too_short=questions.too_short,
    )
