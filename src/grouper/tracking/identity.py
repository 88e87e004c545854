"""Which experiment a run folder holds, and what another recipe, data or version changes in it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import yaml

from grouper.errors import RunFolderError
from grouper.recipe import NOT_THE_EXPERIMENT

__all__ = [
    "Changes",
    "data_changes",
    "describe_changes",
    "entries_of_change",
    "flat_settings",
    "host",
    "recipe_changes",
    "refuse_changed_data",
    "versions_that_differ",
]

Changes = dict[str, list[Any]]
"""Dotted key -> [before, now]."""

NOT_THERE = "(not there)"


def recipe_changes(before: str, now: str) -> Changes:
    """What two resolved recipes have different, but for what does not change the experiment.

    >>> recipe_changes("grpo: {steps: 6, beta: 0.0}", "grpo: {steps: 8, beta: 0.0}")
    {'grpo.steps': [6, 8]}
    """
    old, new = dict(flat_settings(yaml.safe_load(before))), dict(flat_settings(yaml.safe_load(now)))
    keys = [key for key in {**old, **new} if not _is_no_matter(key)]
    return {
        key: [old.get(key, NOT_THERE), new.get(key, NOT_THERE)]
        for key in keys
        if old.get(key, NOT_THERE) != new.get(key, NOT_THERE)
    }


def _is_no_matter(key: str) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in NOT_THE_EXPERIMENT)


def flat_settings(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted key; `rewards.0.weight` where a list holds sections.

    >>> list(flat_settings({"seed": 0, "rewards": [{"name": "correctness"}]}))
    [('seed', 0), ('rewards.0.name', 'correctness')]
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat_settings(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from flat_settings(inner, f"{prefix}.{index}")
    else:
        yield prefix, value


def data_changes(before: Mapping[str, str], now: Mapping[str, str]) -> Changes:
    """The data sets whose content is another one than when the run began."""
    return {
        f"data.{name}": [before[name], mark]
        for name, mark in now.items()
        if name in before and before[name] != mark
    }


def versions_that_differ(before: Mapping[str, str], now: Mapping[str, str]) -> Changes:
    """Packages of another version than the run began with."""
    return {
        name: [before[name], version]
        for name, version in sorted(now.items())
        if name in before and before[name] != version
    }


def describe_changes(changes: Changes, limit: int = 8) -> str:
    """For people to read, on one line.

    >>> describe_changes({"grpo.steps": [6, 8], "seed": [0, 1]})
    'grpo.steps 6 -> 8, seed 0 -> 1'
    """
    shown = [f"{key} {old} -> {new}" for key, (old, new) in list(changes.items())[:limit]]
    rest = len(changes) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def host(threads: int, processes: int) -> dict[str, str | int]:
    """Where and how a run began; of no meaning to the experiment."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.node(),
        "threads": threads,
        "processes": processes,
    }


def entries_of_change(before: str, now: str, changes: Changes) -> Iterator[dict[str, Any]]:
    """The entry in `run.json` for allowed changes between two recipe hashes.

    From which phase and step on they hold is not known yet.
    """
    if changes or before != now:
        yield {"phase": None, "step": None, "hash_before": before, "hash": now, "changes": changes}


def refuse_changed_data(changes: Changes, path: Path) -> NoReturn:
    """Raise the `RunFolderError` that names the data sets that changed."""
    raise RunFolderError(
        "the data changed since this run began: "
        + ", ".join(sorted(key.removeprefix("data.") for key in changes)),
        where=str(path),
        fix="Put the old data back, start a new run under another name, or continue all the "
        "same with --resume --allow-changes.",
    )
