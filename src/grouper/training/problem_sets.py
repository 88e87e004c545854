"""The problem sets of a recipe, loaded and checked. No torch: a dry run reads them, too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from grouper.config.schema import Recipe, SourceConfig
from grouper.data import ProblemSet, hold_out, load_problems, without
from grouper.errors import DataError
from grouper.prompts import make_format
from grouper.types import Problem

__all__ = ["MEASURED", "PARTS", "ProblemSets", "load_part", "load_problem_sets"]

log = logging.getLogger(__name__)

MAX_QUARANTINED_SHARE = 0.05
"""Training refuses data of which more than this cannot be read."""

PARTS = ("sft", "train", "validation", "test")
MEASURED = ("validation", "test")
"""Parts of which nothing is learnt: a published set is measured whole, whatever it holds."""


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
    def notes(self) -> list[str]:
        """What the filters of each part left out, a line each."""
        lines = [
            f"data.{name}: {note}"
            for name in PARTS
            if (part := getattr(self, name)) is not None
            and not (name == "sft" and part is self.train)
            for note in part.notes
        ]
        return list(dict.fromkeys(lines))

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
    train, validation = _train_and_validation(recipe)
    # A new model's tokenizer is fitted to the same texts whatever phases run.
    wanted = not recipe.skip_sft or recipe.model.new is not None
    sft = None
    if wanted:
        sft = train if data.sft is None else _sft(recipe, data.sft, validation)
    test = None if data.test is None else _load("test", data.test, recipe)
    return ProblemSets(sft=sft, train=train, validation=validation, test=test)


def load_part(recipe: Recipe, part: str) -> ProblemSet | None:
    """Load one of `PARTS` as a run would use it; None where the recipe has no such part.

    Raises:
        DataError: missing or empty data, or too many rows that cannot be read.
    """
    data, share = recipe.data, recipe.data.validation_share
    if share and part != "test":
        train, validation = _train_and_validation(recipe)
        if part == "sft" and data.sft is not None:
            return _sft(recipe, data.sft, validation)
        return validation if part == "validation" else train
    config: SourceConfig | None = getattr(data, part)
    if part == "sft" and config is None:
        config = data.train
    return None if config is None else _load(part, config, recipe)


def _train_and_validation(recipe: Recipe) -> tuple[ProblemSet, ProblemSet | None]:
    data = recipe.data
    train = _load("train", data.train, recipe)
    if data.validation_share:
        return hold_out(train, data.validation_share, seed=recipe.seed)
    if data.validation is None:
        return train, None
    return train, _load("validation", data.validation, recipe)


def _sft(recipe: Recipe, config: SourceConfig, validation: ProblemSet | None) -> ProblemSet:
    """The demonstrations; where validation was taken out of train, none of its questions."""
    sft = _load("sft", config, recipe)
    held_out = recipe.data.validation_share > 0 and validation is not None
    return without(sft, validation) if held_out and validation is not None else sft


def _load(part: str, source: SourceConfig, recipe: Recipe) -> ProblemSet:
    """Load one part and report which of its rows are left out.

    What is only measured on keeps the problems whose reference cannot be read.
    """
    problems = load_problems(
        source,
        seed=recipe.seed,
        fmt=make_format(recipe.prompt),
        keep_unreadable=part in MEASURED,
    )
    _check_quarantine(part, problems)
    return problems


def quarantine_lines(sets: ProblemSets) -> Iterator[str]:
    """One line for every source row that is left out."""
    for name in PARTS:
        part: ProblemSet | None = getattr(sets, name)
        # Validation problems held out of train have its quarantine, which is told already.
        if part is not None and not (name == "sft" and part is sets.train):
            for row in part.quarantined:
                yield f"data.{name}: row {row.row} of {part.name} is left out: {row.reason}"


def _check_quarantine(part: str, problems: ProblemSet) -> None:
    if not problems.quarantined:
        return
    first = problems.quarantined[0]
    summary = (
        f"{len(problems.quarantined)} of {problems.rows_read} rows of {problems.name} cannot be "
        f"used; the first is row {first.row}: {first.reason}"
    )
    if part not in MEASURED and problems.quarantined_share > MAX_QUARANTINED_SHARE:
        raise DataError(
            summary,
            where=f"data.{part}",
            fix=f"At most {MAX_QUARANTINED_SHARE:.0%} may be unusable; check data.{part}.columns.",
        )
    log.warning("data.%s: %s. They are left out.", part, summary)
