"""Every recipe and preset still does what was recorded before the package was restructured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from frozen import load
from frozen import renamed as with_new_texts
from frozen_runs import FOLDER, names, record_apart

from grouper.runs.records import SPREAD

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of today; `shared_data` skips them where the real rows are missing."""
    del shared_data
    folder = tmp_path_factory.mktemp("runs")
    record_apart(folder)
    return folder


@pytest.mark.parametrize("name", names())
def test_a_run_is_as_recorded(name: str, runs: Path) -> None:
    recorded, found = (json.loads((f / f"{name}.json").read_text()) for f in (FOLDER, runs))
    recorded = with_new_names(recorded)
    for before, row in zip(recorded["rollouts"], found["rollouts"], strict=True):
        for name in load("renames")["new in rollouts"]:
            if name not in before:
                row.pop(name, None)
    for row in found["metrics"]:
        for name in load("renames")["new metrics"]:
            row["metrics"].pop(name, None)
    same = recorded.pop("arithmetic") == found.pop("arithmetic")
    # bitsandbytes chooses its code by processor, and no variable of the environment stops it.
    same = same and found["recipe"]["sft"]["optimizer"]["name"] != "adamw_8bit"
    if not same:
        # Another library calculates: the same up to rounding.
        for phase in found["weights"]:
            recorded["weights"][phase]["sha256"] = found["weights"][phase]["sha256"]
    assert found["recipe"] == recorded["recipe"]
    assert differences(recorded, found, exactly=same) == []


def with_new_names(recorded: dict[str, Any]) -> dict[str, Any]:
    """What was recorded, with what the table of renames says about settings and metrics."""
    renames = load("renames")
    settings, metrics = renames["settings"], renames["metrics"]

    def renamed(value: Any, path: str) -> Any:
        values = renames["values"].get(path.removesuffix("."), {})
        if value is None or isinstance(value, str):
            return values.get(value or "null", value and with_new_texts(value))
        if isinstance(value, list):
            return [renamed(inner, path) for inner in value]
        if not isinstance(value, dict):
            return value
        new = {
            settings.get(path + key, key): renamed(v, f"{path}{key}.") for key, v in value.items()
        }
        return {key: v for key, v in new.items() if key is not None}

    steps = [
        {**row, "metrics": dict(_columns(row["metrics"], metrics))} for row in recorded["metrics"]
    ]
    recipe = renamed(recorded["recipe"], "")
    for key, value in renames["new settings"].items():
        *path, last = key.split(".")
        reduce(dict.__getitem__, path, recipe)[last] = value
    rollouts = [
        {
            renames["rollouts"].get(key, key): with_new_texts(v) if key == "reason" else v
            for key, v in row.items()
        }
        for row in recorded["rollouts"]
    ]
    return {**recorded, "recipe": recipe, "metrics": steps, "rollouts": rollouts}


def _columns(
    recorded: dict[str, list[float | None]], new_names: dict[str, str]
) -> Iterator[tuple[str, float | None]]:
    """The columns of a step that was recorded as [count, mean, min, max] of each metric."""
    for old, (count, mean, low, high) in recorded.items():
        name = new_names.get(old, old)
        yield name, mean
        if SPREAD.fullmatch(name):
            yield from {f"{name}/count": count, f"{name}/min": low, f"{name}/max": high}.items()


def differences(recorded: Any, found: Any, path: str = "", *, exactly: bool = False) -> list[str]:
    """Where two values differ, or differ by more than the rounding of float32 sums."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        keys = sorted(recorded.keys() | found.keys())
        return [
            line
            for key in keys
            for line in (
                differences(recorded[key], found[key], f"{path}.{key}", exactly=exactly)
                if key in recorded and key in found
                else [f"{path}.{key}: only {'recorded' if key in recorded else 'found'}"]
            )
        ]
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = enumerate(zip(recorded, found, strict=True))
        return [
            line
            for i, pair in pairs
            for line in differences(*pair, f"{path}[{i}]", exactly=exactly)
        ]
    if isinstance(recorded, float) and isinstance(found, float | int) and not exactly:
        same = found == pytest.approx(recorded, rel=1e-4, abs=1e-6)
        return [] if same else [f"{path}: {recorded} -> {found}"]
    return [] if found == recorded else [f"{path}: {recorded!r} -> {found!r}"]
