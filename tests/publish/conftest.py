"""One small finished run to export and push."""

from __future__ import annotations

from pathlib import Path

import pytest

import grouper
from grouper.runs.progress import Progress

SMALL = (
    "sft.steps=2",
    "grpo.steps=2",
    "grpo.prompts_per_step=4",
    "grpo.preflight_prompts=0",
    "data.sft.options.count=60",
    "data.train.options.count=60",
    "data.validation.options.count=4",
    "data.test.options.count=8",
    "model.new.hidden_size=64",
    "model.new.intermediate_size=128",
)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two SFT and two GRPO steps. Tests read it and write nothing into it."""
    outputs = tmp_path_factory.mktemp("outputs")
    recipe = grouper.load_recipe("demo", [*SMALL, f"output_dir={outputs}"])
    with grouper.prepare(recipe) as prepared:
        grouper.train(prepared, display=Progress(quiet=True))
    return outputs / "demo"
