"""What a run reads: problem sets, and the prompts and demonstrations made of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from grouper.config import Recipe
from grouper.data import ProblemSet, load_problems
from grouper.errors import DataError
from grouper.prompts import prepare_demonstrations
from grouper.training.workbench import Items, Workbench, tell_dropped
from grouper.types import Demonstration, Problem

__all__ = ["Inputs", "ProblemSets", "describe_versions", "load_problem_sets", "prepare_inputs"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything as token ids, ready to be trained on and measured."""

    demonstrations: tuple[Demonstration, ...]
    train: Items
    validation: Items
    test: Items


def load_problem_sets(recipe: Recipe) -> ProblemSets:
    """Load what the recipe's phases need.

    Raises:
        DataError: missing or empty data, or too many rows that cannot be read.
    """
    data = recipe.data
    sft = None if recipe.skip_sft else data.sft or data.train
    parts = {"sft": sft, "train": data.train, "validation": data.validation, "test": data.test}
    loaded: dict[str, ProblemSet | None] = {}
    for name, source in parts.items():
        if source is None:
            loaded[name] = None
            continue
        problems = load_problems(source, seed=recipe.seed)
        _check_quarantine(name, problems)
        loaded[name] = problems
    return ProblemSets(**loaded)


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


def prepare_inputs(recipe: Recipe, sets: ProblemSets, bench: Workbench) -> Inputs:
    """Render every problem once, with the one renderer that all phases share."""

    def prompts(part: ProblemSet | None, name: str) -> Items:
        return () if part is None else bench.render(part.problems, name)

    demonstrations: tuple[Demonstration, ...] = ()
    if sets.sft is not None:
        shown = prepare_demonstrations(
            sets.sft.problems,
            bench.format,
            bench.tokenizer,
            bench.stop_tokens.trained,
            max_prompt_tokens=recipe.prompt.max_prompt_tokens,
        )
        tell_dropped("sft", shown.dropped)
        demonstrations = tuple(demonstration for _, demonstration in shown.items)
    return Inputs(
        demonstrations=demonstrations,
        train=prompts(sets.train, "train"),
        validation=prompts(sets.validation, "validation"),
        test=prompts(sets.test, "test"),
    )


def describe_versions() -> dict[str, str]:
    """Versions of what the numbers of a run depend on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"python": platform.python_version()}
    for package in ("grouper", "torch", "transformers", "tokenizers", "peft", "math-verify"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
