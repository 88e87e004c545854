"""What can be said about a recipe before any data or model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from grouper.config.data import RowsConfig
from grouper.config.extras import require_extra
from grouper.config.schema import Recipe, SourceConfig
from grouper.data import SOURCES, check_source
from grouper.errors import ConfigError, GrouperError, did_you_mean, raise_all
from grouper.prompts import make_format, warn_about_system
from grouper.rewards import build_rewards

__all__ = ["LORA_RATES", "check_recipe"]


def check_recipe(recipe: Recipe, *, runs_here: bool = True) -> list[str]:
    """Everything that can be said about a recipe before any data or model is loaded.

    Args:
        recipe: what is to be run.
        runs_here: on this machine; else files and libraries that it lacks are only warned of.

    Returns:
        Warnings: settings that work but rarely do what was meant.

    Raises:
        ConfigError: (or a `PromptError`, `RewardError`) all problems at once: unknown source,
            format, reward or option; a path that does not exist; settings that cannot work
            together.
    """
    sources = list(_sources(recipe))
    problems = _problems(
        [
            partial(_check_format, recipe),
            *(partial(check_source, source, where=name) for name, source in sources),
            partial(_check_sft, recipe),
            partial(_check_path, recipe.model.path, "model.path"),
            partial(_check_path, recipe.grpo.start_from, "grpo.start_from"),
            partial(_check_lengths, recipe),
            partial(_check_quantised, recipe),
            partial(_check_targets, recipe),
        ]
    )
    places = [
        *sources,
        *((f"{n}.mixture.{i}", m) for n, s in sources for i, m in enumerate(s.mixture)),
    ]
    missing = _problems(
        [*(partial(_check_place, name, rows) for name, rows in places), *_needed_packages(recipe)]
    )
    raise_all([*problems, *(missing if runs_here else ())])
    # Without any instruction, SFT is what tells the model how to answer.
    taught = recipe.prompt.system == "" and not recipe.skip_sft
    about_system = [] if taught else warn_about_system(make_format(recipe.prompt))
    return [
        *(f"not on this machine: {error.paragraph()}" for error in missing),
        *about_system,
        *_warn_about_data(recipe),
        *_warn_about_rates(recipe),
    ]


def _problems(checks: Sequence[Callable[[], object]]) -> list[GrouperError]:
    """What the checks raise."""
    found: list[GrouperError] = []
    for check in checks:
        try:
            check()
        except GrouperError as error:
            found.append(error)
    return found


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceConfig]]:
    for name in ("sft", "train", "validation", "test"):
        source = getattr(recipe.data, name)
        if source is not None:
            yield f"data.{name}", source


def _check_place(where: str, source: RowsConfig) -> None:
    if source.source == "hub" or source.path is None:
        return
    path = Path(source.path).expanduser()
    if not path.exists():
        near = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"there is no file or folder {source.path!r}",
            where=f"{where}.path",
            fix=did_you_mean(source.path, near)
            or f"Put it there (seen from {Path.cwd()}), or set {where}.path.",
        )


def _check_sft(recipe: Recipe) -> None:
    sources = _members(recipe.data.sft or recipe.data.train)
    if recipe.skip_sft or any(map(_can_have_solutions, sources)):
        return
    names = ", ".join(source.source for source in sources)
    raise ConfigError(
        f"SFT needs worked solutions, and the source {names} has none",
        where="data.sft",
        fix="Name another source there, or set skip_sft: true.",
    )


def _can_have_solutions(source: RowsConfig) -> bool:
    known = SOURCES.get(source.source)
    return known is None or known.has_solutions or "solution" in source.columns


def _members(source: SourceConfig) -> Sequence[RowsConfig]:
    return source.mixture or (source,)


def _check_quantised(recipe: Recipe) -> None:
    """Nothing asks for what 4-bit weights cannot do."""
    if recipe.model.quantization is not None and recipe.sampling.dtype not in {"auto", "same"}:
        raise ConfigError(
            "quantised weights cannot be copied into another dtype",
            where="sampling.dtype",
            fix="Use same.",
        )


def _needed_packages(recipe: Recipe) -> Iterator[Callable[[], None]]:
    """One check for every library that a setting of the recipe needs."""
    bitsandbytes = partial(require_extra, "bitsandbytes", "quantized")
    if recipe.model.quantization is not None:
        yield partial(bitsandbytes, where="model.quantization", instead="it to null")
    for name, skipped in (("sft", recipe.skip_sft), ("grpo", recipe.skip_grpo)):
        if not skipped and getattr(recipe, name).optimizer.name == "adamw_8bit":
            where = f"{name}.optimizer.name"
            yield partial(
                bitsandbytes, where=where, instead=f"{where}=adamw (the same update, more memory)"
            )
    if recipe.model.attention == "flash_attention_2":
        yield _require_flash_attention


def _require_flash_attention() -> None:
    # transformers takes it from either.
    if find_spec("flash_attn") is None and find_spec("kernels") is None:
        raise ConfigError(
            "flash attention is not installed",
            where="model.attention",
            fix="Install flash-attn, or set model.attention=native: Grouper's own layout, which "
            "runs each prompt once and needs no package.",
        )


def _check_path(path: str | None, where: str) -> None:
    """A path that can only be local must exist; `owner/name` may be a Hub name."""
    if path is None or Path(path).expanduser().exists():
        return
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"there is no folder {path!r}", where=where, fix="Check the path.")


def _check_lengths(recipe: Recipe) -> None:
    if recipe.model.new is None:
        return
    room = recipe.model.new.max_position_embeddings
    total = recipe.sampling.max_total_tokens
    wanted = total or recipe.prompt.max_prompt_tokens + recipe.sampling.max_new_tokens
    if wanted > room:
        what = "max_total_tokens" if total else "max_prompt_tokens + max_new_tokens"
        raise ConfigError(
            f"{what} is {wanted}, above the model's {room} positions",
            where="model.new.max_position_embeddings",
            fix=f"Raise it to {wanted}, or lower {'that' if total else 'the other two'}.",
        )


def _check_targets(recipe: Recipe) -> None:
    for name, phase in (("sft", recipe.sft), ("grpo", recipe.grpo)):
        if phase.stop_at_accuracy is not None and not recipe.data.has_validation:
            raise ConfigError(
                "there are no validation problems to reach it on",
                where=f"{name}.stop_at_accuracy",
                fix="Name some in data.validation, set data.validation_share, or leave it out.",
            )


def _check_format(recipe: Recipe) -> None:
    """The format and its rewards; a stop string that closes the answer must stay in the text."""
    fmt = make_format(recipe.prompt)
    build_rewards(recipe.rewards, fmt.layout)
    close = fmt.contract.close.strip()
    stops = fmt.stop if recipe.sampling.stop is None else recipe.sampling.stop
    if close and not recipe.sampling.include_stop and any(close in stop for stop in stops):
        raise ConfigError(
            f"the stop string {close!r} closes the answer and would be cut off its text",
            where="sampling.include_stop",
            fix="Set it to true.",
        )


# Below these, a learning rate was most likely chosen for training all weights: an adapter needs
# about ten times as much (Schulman et al., "LoRA without regret", 2025).
LORA_RATES = {"sft": 5e-5, "grpo": 5e-6}


def _warn_about_rates(recipe: Recipe) -> list[str]:
    return [
        f"{name}.optimizer.learning_rate={rate:g} suits training all weights; an adapter "
        f"(model.lora) needs about ten times as much: try {10 * rate:g}."
        for name, lowest in LORA_RATES.items()
        if recipe.model.lora is not None and not getattr(recipe, f"skip_{name}")
        if (rate := getattr(recipe, name).optimizer.learning_rate) < lowest
    ]


def _warn_about_data(recipe: Recipe) -> list[str]:
    parts = dict(_sources(recipe))
    warnings = [
        f"{held_out} and {trained} read the same rows: its accuracy will say nothing about new "
        "problems."
        for held_out in ("data.validation", "data.test")
        for trained in ("data.sft", "data.train")
        if held_out in parts and trained in parts and _overlap(parts[held_out], parts[trained])
    ]
    if recipe.data.test is None:
        warnings.append("data.test is not set: there will be no final comparison.")
    return warnings


def _overlap(a: SourceConfig, b: SourceConfig) -> bool:
    return any(_same_rows(one, other) for one in _members(a) for other in _members(b))


def _same_rows(a: RowsConfig, b: RowsConfig) -> bool:
    if (a.source, a.path, a.subset) != (b.source, b.path, b.subset) or _split(a) != _split(b):
        return False
    first, second = sorted((a, b), key=lambda source: source.offset)
    return first.limit is None or second.offset < first.offset + first.limit


def _split(source: RowsConfig) -> str:
    return source.split or SOURCES[source.source].splits[0]
