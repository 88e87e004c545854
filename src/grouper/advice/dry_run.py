"""The dry run: describes a run from its recipe and data, without loading a model."""

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
from grouper.sampling.step_ahead import require_step_ahead
from grouper.training.problem_sets import (
    ProblemSets,
    data_warnings,
    find_leaks,
    load_problem_sets,
    phase_lines,
)

if TYPE_CHECKING:
    from grouper.training.prepare import Prepared

# Bytes of weights, stored in 16 bits, from which on products take most of the time of a step.
_LARGE = 40_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Description of a run that has not been started."""

    sizes: tuple[str, ...]
    """One line per phase, measurement and folder."""
    warnings: tuple[str, ...]
    leaks: tuple[str, ...]
    """The warnings about held-out problems, in a few words each."""
    unchecked: tuple[str, ...]
    """Checks that were not possible, and why."""


def make_plan(recipe: Recipe, **intent: Unpack[Intent]) -> Plan:
    """Run all checks that need no model, and work out the sizes.

    Reads the data, runs the reward functions on a made-up group, and checks the run folder. If
    `model.path` is a local folder, its tokenizer is loaded and every prompt is rendered; torch is
    imported only then, and to look for a device that the recipe names.

    Args:
        recipe: of the run.
        intent: permissions about a run that is in its folder already.

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
        model = recipe.model
        unchecked: list[str] = []
        has_teachers = any(getattr(recipe, phase).teacher for phase in recipe.phases)
        # Otherwise torch is not imported.
        if model.path or model.lora or recipe.grpo.start_from or has_teachers:
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
        require_step_ahead(recipe, 1)
    with collected(problems):
        _check_programs(recipe)
    with collected(problems):
        sets = load_problem_sets(recipe)
        with collected(problems):
            path = recipe.model.path
            if path is not None and Path(path).expanduser().exists():
                from grouper.training.prepare import Prepared

                prepared = Prepared(recipe, sets)
                if has_teachers:
                    from grouper.training.teachers import check_teachers

                    check_teachers(recipe, prepared.model_path)
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
            *_slow_dtypes(recipe),
            *data_warnings(recipe, sets),
            *(leak.warning for leak in leaks),
            *warnings,
        ),
        leaks=tuple(leak.count for leak in leaks),
        unchecked=tuple(unchecked),
    )


def _models_without_weights(recipe: Recipe) -> list[str]:
    """Warn of model folders that a run would refuse once it loads them."""
    warnings = []
    paths = {"model.path": recipe.model.path, "grpo.start_from": recipe.grpo.start_from}
    for where, path in paths.items():
        if path is not None and is_model(Path(path).expanduser()) and not weight_files(path):
            warnings.append(
                f"{where}: {path} holds no weights (*.safetensors): a run cannot load it."
            )
    return warnings


def _slow_dtypes(recipe: Recipe) -> list[str]:
    """Warn of products that the CPU is slow in, if a model of some size would run on it.

    A model that is not on this machine will perhaps run on another.
    """
    path = recipe.model.path
    if path is None:
        return []
    from grouper.advice.first_answers import stored_bytes
    from grouper.models.device import find_device, slow_products

    if (stored_bytes(path) or 0) < _LARGE or find_device(recipe.device).type != "cpu":
        return []
    warning = slow_products(recipe.model)
    return [] if warning is None else [warning]


def _check_programs(recipe: Recipe) -> None:
    """Check that programs of the model can be isolated, and that the user's tools can be loaded.

    Raises:
        ConfigError: not as the recipe asks for.
    """
    fmt = make_format(recipe.prompt)
    programs = recipe.grading.programs
    if fmt.runs_programs:
        from grouper.programs.runner import require_isolation, require_packages

        require_isolation(programs.isolation, where="grading.programs.isolation")
        require_packages(programs.packages, where="grading.programs.packages")
    if fmt.tools or recipe.sampling.tools.functions:
        from grouper.sampling.tools import toolbox_of

        toolbox_of(recipe, fmt)


def _check_rewards(recipe: Recipe, sets: ProblemSets, prepared: Prepared | None) -> list[str]:
    """Try the rewards on a real problem with its columns, as a chat if the run uses one.

    Returns:
        Warnings.
    """
    if prepared is not None:
        return prepared.check_rewards()
    if recipe.skip_grpo:
        return []
    assert sets.train is not None
    fmt = make_format(recipe.prompt)
    problem = sets.train.problems[0]
    rewards = build_rewards(recipe.rewards, fmt)
    return rewards.check(
        problem=problem,
        prompt=example_prompt(problem, fmt),
        right=right_completion(problem, fmt),
    )


def _folder_line(recipe: Recipe, intent: Intent) -> str:
    """Describe the run folder, and what the run would do with a run in it."""
    path = recipe.run_folder
    run = RunFolder(path)
    # An existing run of this recipe is not an error of a dry run; one of another recipe is.
    lenient: Intent = {**intent, "resume": True}
    exists = run.check(recipe_hash(recipe), resolved_yaml(recipe), **lenient)
    done = [phase for phase in ("sft", "grpo") if run.has_finished([phase])]
    if not exists:
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
    """Yield the model that GRPO starts from, if it is not this run's SFT, and the stop strings."""
    start = recipe.grpo.start_from
    if not recipe.skip_grpo and (start or recipe.skip_sft):
        has_sft = RunFolder(recipe.run_folder).has_finished(["sft"])
        if not start and has_sft and not intent.get("overwrite"):
            start = str(recipe.run_folder / "sft" / "final")
        yield f"GRPO starts from {start or recipe.model.path or 'a new random model'}."
    fmt = make_format(recipe.prompt)
    if prepared is not None:
        # With the tokenizer it is known whether prompts are plain text, which has other stop
        # strings.
        fmt = prepared.format
    stops = fmt.stop if recipe.sampling.stop is None else recipe.sampling.stop
    if stops:
        yield f"Stop strings: {' '.join(map(json.dumps, stops))}"


def _length_lines(prepared: Prepared | None) -> list[str]:
    """Describe the lengths of prompts and demonstrations, and the end of completions."""
    if prepared is None:
        return []
    lengths_by_noun = {
        "Prompts": [len(prompt.token_ids) for _, prompt in prepared.train],
        "Demonstrations": [len(row.token_ids) for row in prepared.demonstrations],
    }
    lines = []
    for noun, lengths in lengths_by_noun.items():
        if lengths:
            mean = sum(lengths) // len(lengths)
            lines.append(
                f"{noun}: {len(lengths):,} fit, {mean} tokens on average, at most {max(lengths)}"
            )
    if prepared.budget_note is not None:
        lines.append(prepared.budget_note)
    stop_tokens = [prepared.text([token]) for token in prepared.stop_tokens]
    lines.append(f"Stop tokens: {' '.join(stop_tokens)}")
    return lines
