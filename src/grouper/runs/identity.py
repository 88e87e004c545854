"""`run.json`: which experiment a run folder holds, and what has changed in it since it began."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from grouper.config.loading import NOT_THE_EXPERIMENT

# Dotted key -> [before, now].
Changes = dict[str, list[Any]]

# A finished phase may be given more of these without `--allow-changes`.
LENGTHS = ("sft.steps", "sft.epochs", "grpo.steps", "grpo.epochs")

NOT_THERE = "(not there)"


class Change(BaseModel, strict=True, extra="forbid"):
    """What differed when a run was continued with `--allow-changes`."""

    phase: str | None = None
    """With `step`: from where on the changes hold; not known before a checkpoint is loaded."""
    step: int | None = None
    hash_before: str
    hash: str
    changes: Changes


class RunInfo(BaseModel, strict=True, extra="forbid"):
    """The content of `run.json`; all but `host` is equal in equal runs."""

    format: Literal[1] = 1
    recipe_hash: str
    versions: dict[str, str]
    """Of packages and kernels, by name, when the run began."""
    fingerprints: dict[str, str]
    """Part of the data -> hash of its problems."""
    code: dict[str, str]
    """File of the user's own -> hash of its source."""
    host: dict[str, str | int]
    """Where and how the run began."""
    changes: list[Change] = []
    resolved: dict[str, int] | None = None
    """Settings that followed from the data."""


def content_changes(before: RunInfo, now: RunInfo) -> Changes:
    """The data sets (`data.NAME`) and files of the user's (`code.NAME`) that have other content."""
    data = that_differ(before.fingerprints, now.fingerprints)
    code = that_differ(before.code, now.code)
    return {
        **{f"data.{name}": pair for name, pair in data.items()},
        **{f"code.{name}": pair for name, pair in code.items()},
    }


def recipe_changes(before: str, now: str) -> Changes:
    """What two resolved recipes have different, but for what does not change the experiment.

    >>> recipe_changes("grpo: {steps: 6, beta: 0.0}", "grpo: {steps: 8, beta: 0.0}")
    {'grpo.steps': [6, 8]}
    """
    old, new = dict(flat_settings(yaml.safe_load(before))), dict(flat_settings(yaml.safe_load(now)))
    pairs = {key: [old.get(key, NOT_THERE), new.get(key, NOT_THERE)] for key in {**old, **new}}
    return {
        key: [before, now]
        for key, (before, now) in pairs.items()
        if before != now
        and not any(f"{key}.".startswith(f"{name}.") for name in NOT_THE_EXPERIMENT)
    }


def only_prolongs(changes: Changes) -> bool:
    """Whether phases are given more steps or epochs, and nothing else differs.

    >>> only_prolongs({"grpo.steps": [6, 8]}), only_prolongs({"grpo.steps": [8, 6]})
    (True, False)
    """
    return bool(changes) and all(
        key in LENGTHS and None not in pair and pair[0] < pair[1] for key, pair in changes.items()
    )


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


def that_differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """What both know and has another value now.

    >>> that_differ({"torch": "2.13.0", "peft": "0.19"}, {"torch": "2.14.0", "trl": "1.8"})
    {'torch': ['2.13.0', '2.14.0']}
    """
    return {
        name: [before[name], value]
        for name, value in sorted(now.items())
        if name in before and before[name] != value
    }


def describe_changes(changes: Changes, limit: int = 8) -> str:
    """For people to read, on one line.

    >>> describe_changes({"grpo.steps": [6, 8], "seed": [0, 1]})
    'grpo.steps 6 -> 8, seed 0 -> 1'
    """
    shown = [f"{key} {old} -> {new}" for key, (old, new) in list(changes.items())[:limit]]
    rest = len(changes) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Rising numbers, with each run of consecutive ones as a range.

    >>> numbers_in_words([1, 2, 3, 7, 9, 10])
    '1 to 3, 7, 9 to 10'
    """
    # Within a stretch, a number less its place is the same for all.
    by_start = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    stretches = [[number for _, number in pairs] for _, pairs in by_start]
    return ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in stretches)


def host(threads: int, processes: int) -> dict[str, str | int]:
    """Where and how a run began; of no meaning to the experiment."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.node(),
        "threads": threads,
        "processes": processes,
    }
