"""Which problem sets SOURCE stands for on the command line, and their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.options import warn
from grouper.config.schema import Recipe, SourceConfig
from grouper.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from grouper.data import ProblemSet

Loaded = dict[str, "tuple[SourceConfig, ProblemSet]"]
"""Part or split -> how it was read, and what."""

_OPTIONS = (
    click.option(
        "--path", metavar="PATH", help="A local copy of the source, or the Hub name of `hub`."
    ),
    click.option(
        "--split",
        "splits",
        multiple=True,
        help="The split to read; several are looked through for overlap, the first being the "
        "trained one.  [default: the source's first]",
    ),
    click.argument("settings", nargs=-1, metavar="[key=value]..."),
    click.argument("source"),
)


def source_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """SOURCE, its settings, --path and --split."""
    for option in _OPTIONS:
        command = option(command)
    return command


def load_sets(
    source: str,
    path: str | None,
    splits: Sequence[str],
    settings: Sequence[str],
    *,
    limit: int | None = None,
) -> Loaded:
    """The problem sets that SOURCE stands for, by part or split.

    Args:
        source: a source, a file or folder, or a recipe.
        path: where the source lies.
        splits: of a source; a recipe names its own.
        settings: `key=value`: those of `data.train` (`numeric_only=true`), `validation_share` and
            `seed`; of a recipe any `section.key=value`.
        limit: read at most this many rows of each.

    Raises:
        ConfigError: an unknown source or setting.
        DataError: see `load_problems`.
    """
    from grouper.data import load_problems
    from grouper.prompts import make_format
    from grouper.training.problem_sets import MEASURED

    recipe = _as_recipe(source, path, splits, settings)
    configs: Mapping[str, SourceConfig]
    if recipe is not None:
        parts = {part: getattr(recipe.data, part) for part in _PARTS}
        configs = {part: config for part, config in parts.items() if config is not None}
        share, seed = recipe.data.validation_share, recipe.seed
        fmt = make_format(recipe.prompt)
    else:
        fmt = None
        configs, share, seed = _of_source(source, path, splits, settings)
    loaded: Loaded = {}
    for name, config in configs.items():
        few = min(filter(None, (limit, config.limit)), default=None)
        read = config.model_copy(update={"limit": few})
        # As a run does: what is only measured on is kept whole.
        keep = recipe is not None and name in MEASURED
        problems = load_problems(read, seed=seed, fmt=fmt, keep_unreadable=keep)
        loaded[name] = (read, problems)
    return _with_held_out(loaded, share, seed) if share else loaded


_PARTS = ("sft", "train", "validation", "test")


def _with_held_out(loaded: Loaded, share: float, seed: int) -> Loaded:
    """As a run does: validation taken out of train, and its questions out of sft."""
    from grouper.data import hold_out, without

    first = "train" if "train" in loaded else next(iter(loaded))
    config, whole = loaded[first]
    train, held_out = hold_out(whole, share, seed=seed)
    split = loaded | {first: (config, train), "validation": (config, held_out)}
    if "sft" in loaded:
        split["sft"] = (loaded["sft"][0], without(loaded["sft"][1], held_out))
    return split


def _as_recipe(
    source: str, path: str | None, splits: Sequence[str], settings: Sequence[str]
) -> Recipe | None:
    """The recipe that SOURCE is, or None where it is none."""
    from grouper.config.loading import list_recipes, load_recipe
    from grouper.data import SOURCES

    shipped = [recipe for recipe, _ in list_recipes()]
    here = Path(source).expanduser().exists()
    if here and source in (*SOURCES, *shipped):
        kind = "source" if source in SOURCES else "recipe"
        warn(f"{source} is taken as the built-in {kind}; what lies here is ./{source}")
    if source not in SOURCES and (source in shipped or source.endswith((".yaml", ".yml"))):
        if path is not None or splits:
            raise ConfigError(
                "a recipe names its own paths and splits",
                where="--path" if path is not None else "--split",
                fix="Change them as data.train.path=... and data.train.split=...",
            )
        return load_recipe(source, settings)
    if source not in SOURCES and not here:
        raise ConfigError(
            f"{source!r} is no source, file, folder or recipe",
            where="SOURCE",
            fix=did_you_mean(source, [*SOURCES, *shipped]),
        )
    return None


def _of_source(
    source: str, path: str | None, splits: Sequence[str], settings: Sequence[str]
) -> tuple[Mapping[str, SourceConfig], float, int]:
    """(split -> settings, share held out, seed) of a source, file or folder."""
    from grouper.data import SOURCES

    given = dict(map(_setting, settings))
    share, seed = given.pop("validation_share", 0.0), given.pop("seed", 0)
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError("must be from 0 to below 1", where=f"validation_share={share}")
    if not isinstance(seed, int) or seed < 0:
        raise ConfigError("must be a whole number, 0 or more", where=f"seed={seed}")
    if share and len(splits) > 1:
        raise ConfigError(
            "validation problems are held out of one split", where="validation_share",
            fix="Give one --split.",
        )  # fmt: skip
    known = source in SOURCES
    place = {"source": source if known else "file", "path": path if known else source}
    configs = {
        split or (source if known else Path(source).name): _config(
            {**given, **place, **({"split": split} if split else {})}
        )
        for split in splits or (None,)
    }
    return configs, float(share), seed


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{text!r} is not a setting", fix="Write key=value, as in numeric_only=true."
        )
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{value!r} is not valid YAML", where=key) from error


def _config(settings: Mapping[str, Any]) -> SourceConfig:
    import json

    from grouper.config.checks import validate_json

    return validate_json(SourceConfig, json.dumps(settings, default=str), where="settings")
