"""What a run says before it starts: sizes, biases the recipe accepts, one example as trained."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from grouper.config.schema import Recipe
from grouper.training.problem_sets import ProblemSets
from grouper.training.sizes import phase_lines
from grouper.types import Demonstration

__all__ = ["opening_lines", "preview_demonstration"]

_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def opening_lines(recipe: Recipe, sets: ProblemSets) -> Iterator[str]:
    """The lines printed at the start of a run."""
    yield from phase_lines(recipe, sets)
    s, g = recipe.sampling, recipe.grpo
    if recipe.skip_grpo:
        return
    cut = [name for name in ("top_p", "top_k", "min_p") if getattr(s, name) != _OFF[name]]
    if cut:
        yield (
            f"Bias accepted (sampling.allow_truncated): {', '.join(cut)} cut the distribution that "
            "samples are drawn from, while the gradient assumes the whole one."
        )
    if s.min_new_tokens:
        yield (
            f"Bias accepted: stop tokens are not drawn in the first {s.min_new_tokens} tokens "
            "(sampling.min_new_tokens), while the gradient assumes they could be."
        )
    if g.shuffle_rewards:
        yield "Control run (grpo.shuffle_rewards): rewards are dealt out at random."
    if g.group_size < 4:
        yield f"grpo.group_size={g.group_size}: below 4 most groups carry no signal."


def preview_demonstration(demonstration: Demonstration, tokenizer: object) -> Text:
    """One demonstration as SFT sees it: the prompt dim, trained tokens green, the stop underlined.

    The brackets make the border visible without colours, too.
    """

    def decode(ids: tuple[int, ...]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)  # type: ignore[attr-defined]  # any tokenizer
        return text

    ids = demonstration.token_ids
    return Text.assemble(
        ("One demonstration; SFT trains what stands between >>> and <<<:\n", "bold"),
        (decode(demonstration.prompt.token_ids), "dim"),
        (">>>", "bold"),
        (decode(ids[:-1]), "green"),
        (decode(ids[-1:]), "green underline"),
        ("<<<", "bold"),
    )
