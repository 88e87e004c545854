"""Measuring how often a model solves each problem: what the difficulty band starts from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grouper.errors import RunFolderError
from grouper.files import refused
from grouper.sampling.base import Sampler, SampleRequest, address
from grouper.sampling.graded import Grader, draw_and_grade
from grouper.training.difficulty import read_pass_rates
from grouper.types import Problem, Prompt, SamplingParams

__all__ = ["PassRates", "measure_pass_rates"]

CHUNK = 32
"""Problems measured between two writes: what a stop loses at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRates:
    """How to measure, and where the lines go."""

    path: Path
    """JSON lines of problem_id, correct, completions, truncated and settings."""
    samples: int
    """Completions of each problem."""
    params: SamplingParams
    model: str
    """What is measured: another model's lines are not mixed with these."""
    seed: int

    @property
    def settings(self) -> str:
        """Names everything the numbers depend on but the problem."""
        facts = [self.model, self.samples, self.seed, asdict(self.params)]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def measure_pass_rates(
    wanted: PassRates,
    items: Sequence[tuple[Problem, Prompt]],
    *,
    sampler: Sampler,
    grader: Grader,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, tuple[int, int]]:
    """Measure the problems that the file does not hold yet, and add them to it.

    Args:
        wanted: how, and where to.
        items: the problems with their prompts.
        sampler: draws the completions.
        grader: grades them.
        progress: called with (problems known, problems in all).

    Returns:
        Problem id -> (correct, completions) of everything in the file.

    Raises:
        RunFolderError: the file holds measurements of another model or with other settings, or
            cannot be written.
    """
    known = _known(wanted)
    left = [item for item in items if item[0].id not in known]
    done = len(items) - len(left)
    for chunk in _chunks(left):
        lines = _measure(wanted, chunk, sampler, grader)
        _append(wanted.path, lines)
        done += len(chunk)
        if progress is not None:
            progress(done, len(items))
    return read_pass_rates(wanted.path)


def _chunks(items: Sequence[tuple[Problem, Prompt]]) -> Iterator[Sequence[tuple[Problem, Prompt]]]:
    return (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))


def _measure(
    wanted: PassRates, items: Sequence[tuple[Problem, Prompt]], sampler: Sampler, grader: Grader
) -> list[str]:
    requests = [
        SampleRequest(
            prompt=prompt,
            params=wanted.params,
            key=address(wanted.seed, "difficulty", problem.id, sample),
        )
        for problem, prompt in items
        for sample in range(wanted.samples)
    ]
    references = [problem.answer for problem, _ in items for _ in range(wanted.samples)]
    drawn, _ = draw_and_grade(requests, references, sampler=sampler, grader=grader)
    lines = []
    for number, (problem, _) in enumerate(items):
        own = drawn[number * wanted.samples : (number + 1) * wanted.samples]
        record = {
            "problem_id": problem.id,
            "correct": sum(one.grade.correct for one in own),
            "completions": len(own),
            "truncated": sum(one.completion.truncated for one in own),
            "settings": wanted.settings,
        }
        lines.append(json.dumps(record, ensure_ascii=False))
    return lines


def _known(wanted: PassRates) -> set[str]:
    """The problems measured already; a line that a kill has cut is taken off the file."""
    if not wanted.path.exists():
        return set()
    text = wanted.path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        wanted.path.write_text(whole, encoding="utf-8")
    found = read_pass_rates(wanted.path)
    others = {json.loads(line).get("settings") for line in whole.splitlines()} - {wanted.settings}
    if others:
        raise RunFolderError(
            "the file holds pass rates of another model, or with other sampling settings",
            where=str(wanted.path),
            fix="Give another --output, or delete the file.",
        )
    return set(found)


def _append(path: Path, lines: Sequence[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
    except OSError as error:
        refused(error, path)
