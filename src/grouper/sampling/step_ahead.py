"""Where the native sampler can begin the rollouts of the next step (`grpo.max_staleness`)."""

from __future__ import annotations

from grouper.config.schema import Recipe
from grouper.errors import ConfigError
from grouper.prompts.formats import make_format


def require_step_ahead(recipe: Recipe, size: int) -> None:
    """Refuse `grpo.max_staleness` where the native sampler cannot begin the next step's rollouts.

    Args:
        recipe: of the run.
        size: processes.

    Raises:
        ConfigError: there are several processes, or completions have turns.
    """
    if recipe.skip_grpo or not recipe.grpo.max_staleness or recipe.sampling.engine != "native":
        return
    obstacle = ""
    if size > 1:
        obstacle = f"the run has {size} processes, and it samples for one alone"
    elif make_format(recipe.prompt).tools:
        obstacle = f"completions have turns (prompt.format: {recipe.prompt.format})"
    if obstacle:
        raise ConfigError(
            f"the native sampler cannot begin the rollouts of the next step: {obstacle}",
            where="grpo.max_staleness",
            fix="Set it to 0, or use sampling.engine=vllm with sampling.vllm.mode=server.",
        )
