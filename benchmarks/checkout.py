"""This checkout: where its files lie, and an environment in which its modules are found."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["LENGTHS", "REAL_MODELS", "RESULTS", "ROOT", "importing_from"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LENGTHS = ROOT / "benchmarks" / "ragged_lengths.json"
REAL_MODELS = ROOT / "real-models"
"""Pretrained models: `make real-models` fetches them."""


def importing_from(*folders: Path) -> dict[str, str]:
    """Return this process's environment, with folders that a Python looks for modules in first.

    `python -m` would look in the working directory before them, which may be another checkout.
    """
    held = os.environ.get("PYTHONPATH")
    path = [*map(str, folders), *([held] if held else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
