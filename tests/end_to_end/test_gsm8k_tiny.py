"""`gsm8k-tiny`: real GSM8K text through SFT and GRPO on a CPU."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grouper.algorithms.batching import demonstration_batch
from grouper.algorithms.weighting import token_mean
from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.runs.progress import Progress
from grouper.training.run import Run


@pytest.mark.slow
@pytest.mark.timeout(900)  # Muon is slow where a processor has no bfloat16 products
def test_real_text_goes_through_every_part(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "gsm8k"
    paths = [f"data.{part}.path={folder}" for part in ("sft", "train", "test")]
    smaller = ["sft.batch_size=8", "grpo.steps=4"]
    recipe = load_recipe("gsm8k-tiny", [*paths, f"output_dir={tmp_path}", *smaller])
    with Run(recipe, Progress(quiet=True)) as run:
        batch = demonstration_batch(run.prepared.demonstrations[:16], token_mean)
        assert batch.mask.any(dim=1).all()
        stop = run.prepared.stop_tokens[0]
        assert all(d.token_ids[-1] == stop for d in run.prepared.demonstrations)
        result = train(run)
        log = (result.path / "training.log").read_text(encoding="utf-8")
        stopped = re.search(r"Stop check: (\d+)% of 10 samples end by themselves", log)
        assert stopped is not None
        assert int(stopped[1]) >= 80
        reports = [r for r in run.folder.read_metrics() if r.phase == "grpo"]

    assert max(r.mean("frac_groups_with_signal") for r in reports) > 0
    assert max(r.mean("grad_norm") for r in reports if "grad_norm" in r.tallies) > 0
    weights = [
        load_file(result.path / phase / "model.safetensors")
        for phase in ("base", "sft/final", "grpo/final")
    ]
    for before, after in itertools.pairwise(weights):
        assert any(not torch.equal(before[name], after[name]) for name in before)
    assert [r.name for r in result.results] == ["base", "sft", "grpo"]
