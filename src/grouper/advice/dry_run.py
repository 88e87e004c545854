"""What a run would do, from its recipe and data alone: what a dry run prints. Loads no model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from grouper.advice.recipe_checks import collected, missing_packages
from grouper.config.loading import recipe_hash, resolved_yaml
from grouper.config.schema import Recipe
from grouper.errors import GrouperError, raise_all
from grouper.grading import require_symbolic
from grouper.models.folders import is_model, weight_files
from grouper.prompts import make_format
from grouper.prompts.rendering import right_completion
from grouper.rewards import build_rewards
from grouper.rewards.attacks import example_prompt
from grouper.runs.folder import Intent, RunFolder
from grouper.training.problem_sets import (
    ProblemSets,
    data_warnings,
    find_leaks,
    load_problem_sets,
    phase_lines,
)

if TYPE_CHECKING:
    from grouper.training.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run would do."""

    sizes: tuple[str, ...]
    """One line per phase, measurement and folder."""
    warnings: tuple[str, ...]
    leaks: tuple[str, ...]
    """The warnings about held-out problems, in a few words each."""
    unchecked: tuple[str, ...]
    """What could not be checked, and why."""


def make_plan(recipe: Recipe, **intent: Unpack[Intent]) -> Plan:
    """Check what can be checked without a model, and work out the sizes.

    Reads the data, runs the reward functions on a made-up group, and looks at the run folder.
    Where `model.path` is a local folder its tokenizer is loaded and every prompt is rendered;
    torch is imported only then, and to look for a device that the recipe names.

    Args:
        recipe: of the run.
        intent: what the run may do with one that is in its folder.

    Raises:
        GrouperError: everything that would stop the run at its start, all at once.
    """
    problems: list[GrouperError] = missing_packages(recipe)
    prepared = None
    with collected(problems):
        require_symbolic(recipe.grading)
    with collected(problems):
        if recipe.device not in ("auto", "cpu"):
            from grouper.models.device import find_device

            find_device(recipe.device)
    with collected(problems):
        model, unchecked = recipe.model, list[str]()
        if model.path or model.lora or recipe.grpo.start_from:  # torch is needed for nothing more
            from grouper.training.run import check_models

            resume = intent.get("resume", False)
            missing = check_models(recipe, recipe.run_folder, resume=resume)
            unchecked = [f"the model {path!r}, which is not on this machine" for path in missing]
    with collected(problems):
        folder = _folder_line(recipe, intent)
    with collected(problems):
        if recipe.save_path is not None:
            from grouper.training.save_path import check_save_path

            check_save_path(recipe, recipe.run_folder)
    with collected(problems):
        sets = load_problem_sets(recipe)
        with collected(problems):
            path = recipe.model.path
            if path is not None and Path(path).expanduser().exists():
                from grouper.training.prepare import Prepared

                prepared = Prepared(recipe, sets)
        with collected(problems):
            warnings = _check_rewards(recipe, sets, prepared)
    raise_all(problems)
    if prepared is None:
        unchecked.append("the lengths of the prompts, which take the model's tokenizer")
    leaks = find_leaks(recipe, sets)
    return Plan(
        sizes=(
            *phase_lines(recipe, sets, None if prepared is None else prepared.sizes),
            *_length_lines(prepared),
            folder,
            *_start_and_stops(recipe, intent, prepared),
        ),
        warnings=(
            *_models_without_weights(recipe),
            *data_warnings(recipe, sets),
            *(leak.warning for leak in leaks),
            *warnings,
        ),
        leaks=tuple(leak.count for leak in leaks),
        unchecked=tuple(unchecked),
    )


def _models_without_weights(recipe: Recipe) -> list[str]:
    """Model folders that the run would be refused with, once it loads them."""
    named = {"model.path": recipe.model.path, "grpo.start_from": recipe.grpo.start_from}
    return [
        f"{where}: {path} holds no weights (*.safetensors): a run cannot load it."
        for where, path in named.items()
        if path is not None and is_model(Path(path).expanduser()) and not weight_files(path)
    ]


def _check_rewards(recipe: Recipe, sets: ProblemSets, prepared: Prepared | None) -> list[str]:
    """Try the rewards on a real problem with its columns, in a chat where the run has one.

    Returns:
        Warnings.
    """
    if prepared is not None:
        return prepared.check_rewards()
    if recipe.skip_grpo:
        return []
    assert sets.train is not None
    fmt, problem = make_format(recipe.prompt), sets.train.problems[0]
    rewards, prompt = build_rewards(recipe.rewards, fmt), example_prompt(problem, fmt)
    return rewards.check(problem=problem, prompt=prompt, right=right_completion(problem, fmt))


def _folder_line(recipe: Recipe, intent: Intent) -> str:
    path, run = recipe.run_folder, RunFolder(recipe.run_folder)
    # A run of this recipe is no mistake to a dry run; one of another recipe is.
    lenient: Intent = {**intent, "resume": True}
    found = run.check(recipe_hash(recipe), resolved_yaml(recipe), **lenient)
    done = [phase for phase in ("sft", "grpo") if run.has_finished([phase])]
    if not found:
        state = "new"
    elif run.is_untrained() and not intent.get("overwrite"):
        state = "the run that is there has trained nothing yet, and begins again"
    elif intent.get("overwrite"):
        state = "the run that is there will be deleted first"
    elif not intent.get("resume"):
        state = "holds a run of this recipe: it will take --resume or --overwrite"
    else:
        finished = f"finished: {', '.join(done)}" if done else "nothing finished yet"
        state = f"continues the run that is there; {finished}"
    return f"Output: {path} ({state})"


def _start_and_stops(recipe: Recipe, intent: Intent, prepared: Prepared | None) -> Iterator[str]:
    """What GRPO starts from, where that is not the SFT of this run, and the stop strings."""
    start = recipe.grpo.start_from
    if not recipe.skip_grpo and (start or recipe.skip_sft):
        taught = RunFolder(recipe.run_folder).has_finished(["sft"]) and not intent.get("overwrite")
        made = str(recipe.run_folder / "sft" / "final") if taught else recipe.model.path
        yield f"GRPO starts from {start or made or 'a new random model'}."
    # Only the tokenizer says whether prompts are plain text, which has stop strings of its own.
    fmt = make_format(recipe.prompt) if prepared is None else prepared.format
    stops = fmt.stop if recipe.sampling.stop is None else recipe.sampling.stop
    if stops:
        yield f"Stop strings: {' '.join(map(json.dumps, stops))}"


def _length_lines(prepared: Prepared | None) -> list[str]:
    """How long prompts and demonstrations are, and where completions end."""
    if prepared is None:
        return []
    lines = []
    prompts = [prompt for _, prompt in prepared.train]
    for what, rows in (("Prompts", prompts), ("Demonstrations", prepared.demonstrations)):
        lengths = [len(row.token_ids) for row in rows]
        if lengths:
            lines.append(
                f"{what}: {len(lengths):,} fit, {sum(lengths) // len(lengths)} tokens on average, "
                f"at most {max(lengths)}"
            )
    lines += [] if prepared.budget_note is None else [prepared.budget_note]
    stops = [prepared.text([i]) for i in prepared.stop_tokens]
    return [*lines, f"Stop tokens: {' '.join(stops)}"]
