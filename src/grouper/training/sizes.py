"""The sizes of a run, and held-out problems that training has seen; from the data alone."""

from __future__ import annotations

from dataclasses import dataclass

from grouper.config.schema import PhaseConfig, Recipe
from grouper.data import find_overlap
from grouper.training.curriculum import total_steps
from grouper.training.problem_sets import ProblemSets

__all__ = ["Leak", "find_leaks", "phase_lines"]


def phase_lines(recipe: Recipe, sets: ProblemSets) -> list[str]:
    """One line per phase and measurement; prompts that turn out too long are not counted yet."""
    lines = sets.notes
    if sets.sft is not None and not recipe.skip_sft:
        batch = recipe.sft.batch_size
        amount = f"{batch} demonstrations a step, {len(sets.sft):,} in all"
        lines.append(f"SFT: {amount}, {_steps(recipe.sft, len(sets.sft), batch)}")
    if not recipe.skip_grpo:
        assert sets.train is not None
        prompts, group = recipe.grpo.prompts_per_step, recipe.grpo.group_size
        total = recipe.sampling.max_total_tokens
        longest = (
            f"{recipe.sampling.max_new_tokens} tokens a completion"
            if total is None
            else f"{total} tokens with the prompt"
        )
        lines.append(
            f"GRPO: {prompts} prompts x {group} samples = {prompts * group} completions a step, "
            f"{_steps(recipe.grpo, len(sets.train), prompts)}, at most {longest}"
        )
    k = recipe.evaluation.samples
    lines += [
        f"Evaluation on {name}: {len(part):,} problems x {k} = {k * len(part):,} completions"
        for name, part in (("validation", sets.validation), ("test", sets.test))
        if part is not None
    ]
    return lines


def _steps(config: PhaseConfig, size: int, per_step: int) -> str:
    steps = total_steps(config, size=size, per_step=per_step)
    return f"{-(-size // per_step):,} steps an epoch; {steps:,} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Held-out problems that training, or the choice of settings, has seen."""

    count: str
    """`data.test: 3 problems are in the training data`."""
    warning: str


def find_leaks(sets: ProblemSets) -> list[Leak]:
    """One per held-out part and the part that it shares problems with."""
    leaks = []
    trained = sets.for_fitting
    for name, part in (("validation", sets.validation), ("test", sets.test)):
        found = find_overlap(trained, part.problems) if part is not None else ()
        if found:
            same = sum(overlap.same_question for overlap in found)
            count = f"data.{name}: {len(found)} problems are in the training data"
            warning = (
                f"{count}, too ({same} with the same question, the others share a run of words); "
                f"the first is {found[0].held_out_id}, as {found[0].trained_id}. What is measured "
                "on them says nothing about new problems."
            )
            leaks.append(Leak(count=count, warning=warning))
    if sets.validation is not None and sets.test is not None:
        chosen_on = {problem.id for problem in sets.validation.problems}
        both = sum(problem.id in chosen_on for problem in sets.test.problems)
        if both:
            count = f"data.test: {both} problems are in data.validation"
            warning = (
                f"{count}, too, which settings are chosen on. Parts of one file need the same "
                "`shuffle`, and offset and limit that keep them apart."
            )
            leaks.append(Leak(count=count, warning=warning))
    return leaks
