"""What a run trains on and is measured on, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from grouper.config.schema import Recipe
from grouper.data import ProblemSet
from grouper.kernels.library import kernels_in_use
from grouper.prompts import prepare_demonstrations
from grouper.training.problem_sets import ProblemSets
from grouper.training.workbench import Items, Workbench, tell_dropped
from grouper.types import Demonstration

__all__ = ["Inputs", "describe_versions", "prepare_inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything as token ids, ready to be trained on and measured."""

    demonstrations: tuple[Demonstration, ...]
    train: Items
    validation: Items
    test: Items
    validation_demonstrations: tuple[Demonstration, ...] = ()
    """Those of the validation problems that have a worked solution, where SFT is run."""
    budget: str | None = None
    """What `sampling.max_total_tokens` leaves for a completion, in words."""


def _room(bench: Workbench) -> int | None:
    """The longest demonstration that fits after every prompt that is kept, in tokens."""
    return None if bench.context is None else max(1, bench.context - bench.prompt_limit)


def prepare_inputs(recipe: Recipe, sets: ProblemSets, bench: Workbench) -> Inputs:
    """Render every problem once, with the one renderer that all phases share.

    Where the completion budget follows from the prompts, it is settled here, in `bench`.
    """

    def prompts(part: ProblemSet | None, name: str) -> Items:
        return () if part is None else bench.render(part.problems, name)

    def demonstrations(part: ProblemSet | None, name: str) -> tuple[Demonstration, ...]:
        if part is None or recipe.skip_sft:
            return ()
        shown = prepare_demonstrations(
            part.problems,
            bench.format,
            bench.tokenizer,
            bench.stop_tokens.trained,
            max_prompt_tokens=bench.prompt_limit,
            max_completion_tokens=_room(bench),
            max_tokens=recipe.sft.max_tokens if name == "sft" else None,
        )
        tell_dropped(name, shown.dropped)
        for problem, demonstration in shown.items:
            bench.require_known(demonstration.token_ids, f"the solution of {problem.id}")
        return tuple(demonstration for _, demonstration in shown.items)

    # How much room demonstrations have depends on the budget, and that on the prompts.
    early = None if recipe.sampling.max_total_tokens is None else prompts(sets.train, "train")
    budget = None if early is None else bench.settle_budget(early)
    solved = sets.validation is not None and any(p.solution for p in sets.validation.problems)
    return Inputs(
        budget=budget,
        demonstrations=demonstrations(sets.sft, "sft"),
        validation_demonstrations=demonstrations(sets.validation if solved else None, "validation"),
        train=prompts(sets.train, "train") if early is None else early,
        validation=prompts(sets.validation, "validation"),
        test=prompts(sets.test, "test"),
    )


def describe_versions(device: torch.device) -> dict[str, str]:
    """Versions of what the numbers of a run on this device depend on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"python": platform.python_version()}
    for package in ("grouper-rl", "torch", "transformers", "tokenizers", "peft", "math-verify"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if device.type == "cpu":
        found["kernels"] = kernels_in_use()
    return found
