"""The problem sets of a recipe, loaded and checked. No torch: a dry run reads them, too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from grouper.config import Recipe, SourceConfig
from grouper.data import ProblemSet, load_problems
from grouper.errors import DataError
from grouper.types import Problem

__all__ = ["ProblemSets", "load_problem_set", "load_problem_sets"]

log = logging.getLogger(__name__)

MAX_QUARANTINED_SHARE = 0.05
"""Training refuses data of which more than this cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSets:
    """The problem sets of a recipe; the parts it does not use are None."""

    sft: ProblemSet | None
    train: ProblemSet | None
    validation: ProblemSet | None
    test: ProblemSet | None

    @property
    def fingerprints(self) -> dict[str, str]:
        parts = {"sft": self.sft, "train": self.train, "validation": self.validation}
        parts["test"] = self.test
        return {name: part.fingerprint for name, part in parts.items() if part is not None}

    @property
    def for_fitting(self) -> list[Problem]:
        """The problems a new tokenizer is fitted to: never those it is measured on."""
        return [p for part in (self.sft, self.train) if part is not None for p in part.problems]


def load_problem_sets(recipe: Recipe) -> ProblemSets:
    """Load what the recipe's phases need.

    Raises:
        DataError: missing or empty data, or too many rows that cannot be read.
    """
    data = recipe.data
    # A new model's tokenizer is fitted to the same texts whatever phases run.
    wanted = not recipe.skip_sft or recipe.model.new is not None
    parts = {
        "train": data.train,
        "sft": data.sft if wanted else None,
        "validation": data.validation,
        "test": data.test,
    }
    loaded = {
        name: None if source is None else load_problem_set(name, source, seed=recipe.seed)
        for name, source in parts.items()
    }
    if wanted and data.sft is None:
        loaded["sft"] = loaded["train"]
    return ProblemSets(**loaded)


def load_problem_set(part: str, source: SourceConfig, *, seed: int) -> ProblemSet:
    """Load one part (`train`, `test`, ...) and tell which of its rows are left out.

    Raises:
        DataError: missing or empty data, or too many rows that cannot be read.
    """
    problems = load_problems(source, seed=seed)
    _check_quarantine(part, problems)
    return problems


def quarantine_lines(sets: ProblemSets) -> Iterator[str]:
    """One line for every source row that is left out."""
    for name in ("sft", "train", "validation", "test"):
        part: ProblemSet | None = getattr(sets, name)
        if part is not None:
            for row in part.quarantined:
                yield f"data.{name}: row {row.row} of {part.name} is left out: {row.reason}"


def _check_quarantine(part: str, problems: ProblemSet) -> None:
    if not problems.quarantined:
        return
    first = problems.quarantined[0]
    summary = (
        f"{len(problems.quarantined)} of {len(problems) + len(problems.quarantined)} rows of "
        f"{problems.name} cannot be used; the first is row {first.row}: {first.reason}"
    )
    if problems.quarantined_share > MAX_QUARANTINED_SHARE:
        raise DataError(
            summary,
            where=f"data.{part}",
            fix=f"At most {MAX_QUARANTINED_SHARE:.0%} may be unusable; check data.{part}.columns.",
        )
    log.warning("data.%s: %s. They are left out.", part, summary)
