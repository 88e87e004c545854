"""What can be said about a recipe before any data or model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from grouper.advice.checks import find, members, sources
from grouper.config.schema import Recipe, RowsConfig
from grouper.data import SOURCES, check_source
from grouper.errors import ConfigError, GrouperError, did_you_mean, raise_all, require_extra
from grouper.prompts import make_format
from grouper.rewards import build_rewards


@contextmanager
def collected(problems: list[GrouperError]) -> Iterator[None]:
    """Add what the block raises to `problems`, and go on after it."""
    try:
        yield
    except GrouperError as error:
        problems.append(error)


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
    problems: list[GrouperError] = []
    with collected(problems):
        _check_format(recipe)
    for name, source in sources(recipe):
        with collected(problems):
            check_source(source, where=name)
    problems += _contradictions(recipe)
    missing = [*_missing_places(recipe), *_missing_packages(recipe)]
    raise_all([*problems, *(missing if runs_here else ())])
    absent = [f"not on this machine: {error.paragraph()}" for error in missing]
    return [*absent, *map(str, find(recipe))]


def _check_format(recipe: Recipe) -> None:
    """The format and its rewards; a stop string that closes the answer must stay in the text."""
    fmt = make_format(recipe.prompt)
    build_rewards(recipe.rewards, fmt)
    close = fmt.contract.close.strip()
    stops = fmt.stop if recipe.sampling.stop is None else recipe.sampling.stop
    if close and not recipe.sampling.include_stop and any(close in stop for stop in stops):
        raise ConfigError(
            f"the stop string {close!r} closes the answer and would be cut off its text",
            where="sampling.include_stop",
            fix="Set it to true.",
        )


def _contradictions(recipe: Recipe) -> Iterator[ConfigError]:
    """Settings that cannot work together, and models that are not where they should be."""
    parts = members(recipe.data.sft or recipe.data.train)
    if not recipe.skip_sft and not any(map(_can_have_solutions, parts)):
        yield ConfigError(
            f"SFT needs worked solutions, and the source {', '.join(p.source for p in parts)} has "
            "none",
            where="data.sft",
            fix="Name another source there, or set skip_sft: true.",
        )
    models = {"model.path": recipe.model.path, "grpo.start_from": recipe.grpo.start_from}
    for where, path in models.items():
        # A path that can only be local must exist; `owner/name` may be a Hub name.
        local = path is not None and (path.startswith((".", "/", "~")) or path.count("/") > 1)
        if local and not Path(str(path)).expanduser().exists():
            yield ConfigError(f"there is no folder {path!r}", where=where, fix="Check the path.")
    yield from _too_long(recipe)
    if recipe.model.quantization is not None and recipe.sampling.dtype not in {"auto", "same"}:
        yield ConfigError(
            "quantised weights cannot be copied into another dtype",
            where="sampling.dtype",
            fix="Use same.",
        )


def _can_have_solutions(source: RowsConfig) -> bool:
    known = SOURCES.get(source.source)
    return known is None or known.has_solutions or "solution" in source.columns


def _too_long(recipe: Recipe) -> Iterator[ConfigError]:
    """Sequences for which a new model has no positions."""
    total, new = recipe.sampling.max_total_tokens, recipe.model.new
    wanted = total or recipe.prompt.max_prompt_tokens + recipe.sampling.max_new_tokens
    if new is not None and wanted > new.max_position_embeddings:
        what = "max_total_tokens" if total else "max_prompt_tokens + max_new_tokens"
        yield ConfigError(
            f"{what} is {wanted}, above the model's {new.max_position_embeddings} positions",
            where="model.new.max_position_embeddings",
            fix=f"Raise it to {wanted}, or lower {'that' if total else 'the other two'}.",
        )


def _missing_places(recipe: Recipe) -> Iterator[ConfigError]:
    """Files and folders of data that are not on this machine."""
    named = list(sources(recipe))
    mixed = [(f"{n}.mixture.{i}", row) for n, s in named for i, row in enumerate(s.mixture)]
    for where, source in (*named, *mixed):
        path = Path(source.path or ".").expanduser()
        if source.source == "hub" or path.exists():
            continue
        near = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        yield ConfigError(
            f"there is no file or folder {source.path!r}",
            where=f"{where}.path",
            fix=did_you_mean(source.path or "", near)
            or f"Put it there (seen from {Path.cwd()}), or set {where}.path.",
        )


def _missing_packages(recipe: Recipe) -> list[GrouperError]:
    """Libraries that settings of the recipe need and this machine lacks."""
    missing: list[GrouperError] = []
    needs = {} if recipe.model.quantization is None else {"model.quantization": "it to null"}
    for name, skipped in (("sft", recipe.skip_sft), ("grpo", recipe.skip_grpo)):
        if not skipped and getattr(recipe, name).optimizer.name == "adamw_8bit":
            where = f"{name}.optimizer.name"
            needs[where] = f"{where}=adamw (the same update, more memory)"
    for where, instead in needs.items():
        with collected(missing):
            require_extra("bitsandbytes", "quantized", where=where, instead=instead)
    if recipe.model.attention == "flash_attention_2":
        with collected(missing):
            _require_flash_attention()
    return missing


def _require_flash_attention() -> None:
    # transformers takes it from either.
    if find_spec("flash_attn") is None and find_spec("kernels") is None:
        raise ConfigError(
            "flash attention is not installed",
            where="model.attention",
            fix="Install flash-attn, or set model.attention=native: Grouper's own layout, which "
            "runs each prompt once and needs no package.",
        )
