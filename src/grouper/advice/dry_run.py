"""What a run would do, from its recipe and data alone: a dry run prints it, and loads no model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from grouper.config.loading import recipe_hash, resolved_yaml
from grouper.config.schema import Recipe
from grouper.errors import GrouperError, RunFolderError, raise_all
from grouper.grading import require_symbolic
from grouper.prompts import make_format
from grouper.rewards import build_rewards
from grouper.tracking.run_folder import RunFolder
from grouper.training.problem_sets import (
    ProblemSets,
    find_leaks,
    load_problem_sets,
    phase_lines,
)
from grouper.types import Problem, Prompt

__all__ = ["Plan", "make_plan"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run would do."""

    sizes: tuple[str, ...]
    """One line per phase, measurement and folder."""
    warnings: tuple[str, ...]
    leaks: tuple[str, ...]
    """Those of the warnings that are about held-out problems, in a few words each."""
    unchecked: tuple[str, ...]
    """What could not be looked at, and why."""


def make_plan(
    recipe: Recipe, *, resume: bool = False, overwrite: bool = False, allow_changes: bool = False
) -> Plan:
    """Check what can be checked without a model, and work out the sizes.

    Reads the data, runs the reward functions on a made-up group, and looks at the run folder.
    Where `model.path` is a local folder its tokenizer is loaded and every prompt is rendered;
    torch is imported only then, and to look for a device that the recipe names.

    Raises:
        GrouperError: everything that would stop the run at its start, all at once.
    """
    problems: list[GrouperError] = []

    def attempt(check: Callable[[], Result]) -> Result | None:
        try:
            return check()
        except GrouperError as error:
            problems.append(error)
            return None

    attempt(partial(require_symbolic, recipe.grading))
    attempt(partial(_check_device, recipe.device))
    unchecked = attempt(partial(_check_models, recipe, resume=resume))
    intent = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    folder = attempt(partial(_folder_line, recipe, **intent))
    sets = attempt(partial(load_problem_sets, recipe))
    if sets is not None:
        prompts = attempt(partial(_prompts, recipe, sets))
        warnings = attempt(partial(_check_rewards, recipe, sets, prompts))
    raise_all(problems)
    assert unchecked is not None
    assert folder is not None
    assert sets is not None
    assert prompts is not None
    assert warnings is not None
    if not prompts.lines:
        unchecked.append("the lengths of the prompts, which take the model's tokenizer")
    leaks = find_leaks(sets)
    return Plan(
        sizes=(*phase_lines(recipe, sets), *prompts.lines, folder),
        warnings=(*(leak.warning for leak in leaks), *warnings),
        leaks=tuple(leak.count for leak in leaks),
        unchecked=tuple(unchecked),
    )


def _check_device(name: str) -> None:
    if name not in ("auto", "cpu"):
        from grouper.models.device import find_device

        find_device(name)


def _check_models(recipe: Recipe, *, resume: bool) -> list[str]:
    """Look at the models that the run will load.

    Returns:
        What could not be looked at.
    """
    model = recipe.model
    if model.path is None and recipe.grpo.start_from is None and model.lora is None:
        return []  # torch is needed for no more than this
    from grouper.training.run import check_models

    run = Path(recipe.output_dir).expanduser() / recipe.name
    missing = check_models(recipe, run, resume=resume)
    return [f"the model {path!r}, which is not on this machine" for path in missing]


def _check_rewards(recipe: Recipe, sets: ProblemSets, prompts: _Prompts | None) -> list[str]:
    """Try the rewards on a real problem with its columns, in a chat where the run has one.

    Returns:
        Warnings.
    """
    if recipe.skip_grpo:
        return []
    assert sets.train is not None
    fmt = make_format(recipe.prompt)
    problem = sets.train.problems[0]
    prompt = fmt.made_up_prompt(problem)
    if prompts is not None and prompts.first is not None:
        problem, prompt = prompts.first
    rewards = build_rewards(recipe.rewards, fmt.layout)
    return rewards.check(problem=problem, prompt=prompt, right=fmt.right_completion(problem))


def _folder_line(recipe: Recipe, *, resume: bool, overwrite: bool, allow_changes: bool) -> str:
    path = Path(recipe.output_dir).expanduser() / recipe.name
    # A run of this recipe is no mistake to a dry run; one of another recipe is.
    found = RunFolder.check(
        path,
        recipe_hash=recipe_hash(recipe),
        recipe_yaml=resolved_yaml(recipe),
        resume=True,
        overwrite=overwrite,
        allow_changes=allow_changes,
    )
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(parent, os.W_OK):
        raise RunFolderError(
            "cannot write here", where=str(parent), fix="Set output_dir to a folder of yours."
        )
    if not found:
        return f"Output: {path} (new)"
    if overwrite:
        return f"Output: {path} (the run that is there will be deleted first)"
    if not resume:
        return f"Output: {path} (holds a run of this recipe: it will take --resume or --overwrite)"
    done = [phase for phase in ("sft", "grpo") if (path / phase / "final").is_dir()]
    state = f"finished: {', '.join(done)}" if done else "nothing finished yet"
    return f"Output: {path} (continues the run that is there; {state})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """The prompts of a run, as far as they are known without its model."""

    lines: tuple[str, ...] = ()
    first: tuple[Problem, Prompt] | None = None
    """The first that is trained."""


def _prompts(recipe: Recipe, sets: ProblemSets) -> _Prompts:
    """Every prompt through the real tokenizer, where it lies on this machine."""
    path = recipe.model.path
    if path is None or not Path(path).expanduser().exists():
        return _Prompts()
    from grouper.training.prepare import prepare

    prepared = prepare(recipe, sets)
    lines = [_lengths_line("Prompts", [len(prompt.token_ids) for _, prompt in prepared.train])]
    if prepared.demonstrations:
        lengths = [len(demonstration.token_ids) for demonstration in prepared.demonstrations]
        lines.append(_lengths_line("Demonstrations", lengths))
    lines += [] if prepared.budget_note is None else [prepared.budget_note]
    stops = [prepared.tokenizer.decode([i]) for i in prepared.stop_tokens.all]
    lines.append(f"Stop tokens: {' '.join(stops)}")
    return _Prompts(lines=tuple(lines), first=prepared.train[0] if prepared.train else None)


def _lengths_line(what: str, lengths: Sequence[int]) -> str:
    return (
        f"{what}: {len(lengths):,} fit, {sum(lengths) // len(lengths)} tokens on average, at most "
        f"{max(lengths)}"
    )
