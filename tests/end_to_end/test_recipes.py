"""Every shipped recipe through SFT and GRPO with its own prompt, rewards, columns and optimizer.

Only sizes differ: a tiny model, few steps, short completions. A random model earns nothing, so the
tiny model has half learned the demonstrations by heart before the recipe begins: its samples are
right now and then, and the recipe's own rewards tell them apart.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from recipe_data import DATA, NEEDS_SHARED
from safetensors.torch import load_file

from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.evaluation.result import EvaluationResult
from grouper.prompts import make_format
from grouper.runs.progress import Progress
from grouper.training.run import Run
from grouper.types import StepReport

TINY = "{hidden_size: 64, layers: 2, intermediate_size: 192, vocab_size: 640}"

TEACHING = [
    f"model={{new: {TINY}}}",
    "sft.batch_size=8",
    "sft.evaluate_every=0",
    "sft.max_tokens=null",
    "sft.optimizer={name: muon, muon_learning_rate: 0.02, learning_rate: 5e-3, schedule: cosine}",
    "skip_sft=false",
    "skip_grpo=true",
    "data.test=null",
    "name=teaching",
]
"""What makes the tiny model: the recipe's SFT at a rate for a random model."""


@dataclass(frozen=True)
class Sizes:
    """What a recipe is scaled down by."""

    teaching: int
    """Steps by which the tiny model learns the demonstrations."""
    new_tokens: int
    prompts: int = 4


SIZES = {
    "gsm8k-xml": Sizes(teaching=60, new_tokens=110),
    "math-r1-zero": Sizes(teaching=120, new_tokens=90, prompts=8),
    "gsm8k-lite": Sizes(teaching=60, new_tokens=110, prompts=2),
    "openmath-dapo": Sizes(teaching=50, new_tokens=150, prompts=6),
    "r1-zero-numina": Sizes(teaching=60, new_tokens=150),
    "numina-tir": Sizes(teaching=60, new_tokens=150),
    "gsm8k": Sizes(teaching=60, new_tokens=110, prompts=6),
    "math": Sizes(teaching=60, new_tokens=60, prompts=8),
}


@pytest.mark.slow
@pytest.mark.pictures
@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_from_end_to_end(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Asking for the real data skips the test where they are not.
    shared = request.getfixturevalue("shared_data") if name in NEEDS_SHARED else tmp_path
    sizes = SIZES[name]
    data = [*DATA[name](shared, tmp_path / "data"), f"output_dir={tmp_path}", "threads=1"]
    if load_recipe(name).data.validation_share:
        data.append("data.validation_share=0.2")
    taught = run(name, [*data, *TEACHING, f"sft.steps={sizes.teaching}"]).path / "sft" / "final"

    result = run(name, [*data, *small(name, sizes), f"model.path={taught}"])

    assert [r.name for r in result.results] == ["base", "sft", "grpo"]
    reports = result.reports
    assert max(r.mean("frac_groups_with_signal") for r in reports if r.phase == "grpo") > 0
    called = any("tools/calls" in r.tallies for r in reports)
    assert called == make_format(load_recipe(name).prompt).tools
    for phase in ("sft", "grpo"):
        norms = [
            r.mean("grad_norm") for r in reports if r.phase == phase and "grad_norm" in r.tallies
        ]
        assert max(norms) > 0
    adapter = load_recipe(name).model.lora is not None
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    folders = [result.path / phase / "final" for phase in ("sft", "grpo")]
    weights = [load_file(folder / file) for folder in folders]
    for before, after in itertools.pairwise(weights):
        assert any(not torch.equal(before[key], after[key]) for key in before)
    assert {"curves.png", "training.log", "run.json"} <= {p.name for p in result.path.iterdir()}
    template = (result.path / "grpo" / "final" / "chat_template.jinja").read_text()
    installed = load_recipe(name).prompt.template == "install"
    assert ("<start_working_out>" in template) == installed


@dataclass(frozen=True)
class Ran:
    """A finished run, and the report of every step."""

    path: Path
    results: tuple[EvaluationResult, ...]
    reports: list[StepReport]


def run(name: str, overrides: list[str]) -> Ran:
    with Run(load_recipe(name, overrides), Progress(quiet=True)) as open_run:
        result = train(open_run)
        reports = list(open_run.folder.read_metrics())
    return Ran(path=result.path, results=result.results, reports=reports)


def small(name: str, sizes: Sizes) -> list[str]:
    """Overrides that change sizes only, but for what this machine lacks."""
    recipe = load_recipe(name)
    changes = [
        "skip_sft=false",
        "sft.steps=2",
        "sft.batch_size=4",
        "sft.evaluate_every=0",
        "sft.max_tokens=null",
        "grpo.steps=2",
        f"grpo.prompts_per_step={sizes.prompts}",
        "grpo.evaluate_every=2",
        "evaluation.samples=1",
        "evaluation.temperature=0",
        f"evaluation.max_new_tokens={sizes.new_tokens}",
    ]
    if recipe.sampling.max_total_tokens is None:
        changes += [
            f"sampling.max_new_tokens={sizes.new_tokens}",
            f"sampling.min_new_tokens={min(recipe.sampling.min_new_tokens, 4)}",
        ]
    else:
        changes.append(f"sampling.max_total_tokens={2 * sizes.new_tokens}")
    if find_spec("bitsandbytes") is None:
        changes += [
            f"{phase}.optimizer.name=adamw"
            for phase in ("sft", "grpo")
            if getattr(recipe, phase).optimizer.name == "adamw_8bit"
        ]
    return changes
