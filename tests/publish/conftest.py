"""One small finished run to export and push."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import SMALL

import grouper
from grouper.runs.progress import Progress


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two SFT and two GRPO steps. Tests read it and write nothing into it."""
    outputs = tmp_path_factory.mktemp("outputs")
    recipe = grouper.load_recipe("demo", [*SMALL, f"output_dir={outputs}"])
    with grouper.prepare(recipe) as prepared:
        grouper.train(prepared, display=Progress(quiet=True))
    return outputs / "demo"
