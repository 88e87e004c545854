"""Run as a program: two training steps of a random model, and the peak of the process.

Prints JSON: bytes above what was resident when everything was imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grouper.algorithms.batching import Rows
from grouper.config.schema import LoraConfig, ModelConfig, OptimizerConfig
from grouper.models.loading import _new_adapter
from grouper.models.policy import Policy
from grouper.training.optimizers import make_optimizer
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import sft_objective, update


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(case: dict) -> None:
    device = torch.device(case["device"])
    settings = ModelConfig(**case["model"])
    before = resident("VmRSS")
    shape = AutoConfig.for_model(**case["shape"])
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").to(device)
    adapter = None
    if settings.lora is not None:
        adapter = _new_adapter(model, LoraConfig(**case["model"]["lora"]), "", seed=0)
    policy = Policy(
        model,
        adapter=adapter,
        gradient_checkpointing=settings.gradient_checkpointing,
        compute_dtype=torch.bfloat16 if settings.compute_dtype == "bfloat16" else None,
    )
    optimizer = make_optimizer(policy, OptimizerConfig())
    rows = Rows(**case["rows"])
    rows = replace(rows, count=rows.count * case["slices"])
    for _ in range(2):
        result = update(
            ParallelPolicy(policy),
            rows.batch(shape.vocab_size),
            sft_objective,
            optimizer,
            scale=1.0,
            max_grad_norm=1.0,
            token_budget=Rows(**case["rows"]).tokens,
        )
        assert result.applied
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resident("VmHWM") - before
    print(json.dumps({"peak": peak}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
