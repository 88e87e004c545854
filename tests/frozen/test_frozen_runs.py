"""A run still does what was recorded: the same rollouts, metrics and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from frozen_runs import FOLDER, RUNS, record_apart

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of today; `shared_data` skips them where the real rows are missing."""
    del shared_data
    folder = tmp_path_factory.mktemp("runs")
    record_apart(folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_as_recorded(name: str, runs: Path) -> None:
    recorded, found = (json.loads((f / f"{name}.json").read_text()) for f in (FOLDER, runs))
    same = recorded.pop("arithmetic") == found.pop("arithmetic")
    # bitsandbytes chooses its code by processor, and no variable of the environment stops it.
    same = same and found["recipe"]["sft"]["optimizer"]["name"] != "adamw_8bit"
    if not same:
        # Another library calculates: the same up to rounding.
        for phase in found["weights"]:
            recorded["weights"][phase]["sha256"] = found["weights"][phase]["sha256"]
    assert found["recipe"] == recorded["recipe"]
    assert differences(recorded, found, exactly=same) == []


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
