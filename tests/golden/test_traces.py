"""Golden traces: twenty updates over recorded rollouts give the numbers they gave before.

Re-record after a change that is meant to alter numbers, and say why in the commit:
`python tests/golden/test_traces.py`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import make_group, make_prompt, one_step, tiny_model, tokens

from grouper.algorithms.batching import demonstration_batch, micro_batches
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.config.schema import GRPOConfig, OptimizerConfig
from grouper.models.policy import Policy
from grouper.training.assemble import advantages_of
from grouper.training.optimizers import make_optimizer, schedule
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import grpo_objective, sft_objective, update
from grouper.types import Demonstration, RolloutGroup

FILE = Path(__file__).parent / "traces.json"
STEPS = 20
SCHEDULE = OptimizerConfig(
    learning_rate=2e-3, betas=(0.9, 0.99), schedule="cosine", warmup_ratio=0.2, final_ratio=0.1
)

TRACES: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {},
    "dr-grpo": {
        "advantage": "mean",
        "weighting": "constant",
        "weighting_constant": 12.0,
    },
    "rloo-kl": {"advantage": "leave_one_out", "weighting": "sequence_mean", "beta": 0.04},
}


def recorded_groups(step: int) -> list[RolloutGroup]:
    """Four groups of four rollouts, a function of the step alone."""
    return [
        make_group(
            4 * step + g,
            [float((step + g * i + i * i) % 3 == 0) + 0.1 * (i % 2) for i in range(4)],
            [1 + (step * 5 + g * 3 + i * 7) % 11 for i in range(4)],
            prompt_length=2 + (step + g) % 6,
        )
        for g in range(4)
    ]


def fixed_policy() -> Policy:
    """Weights by formula, so that no random generator can change the trace."""
    model = tiny_model("qwen3")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.ndim > 1:
                angles = torch.arange(parameter.numel(), dtype=torch.float64) * 0.7311 + number
                values = torch.sin(angles * angles.sqrt()) / math.sqrt(parameter.shape[-1])
                parameter.copy_(values.view_as(parameter))
    return Policy(model)


def trace(name: str) -> list[dict[str, float]]:
    policy = fixed_policy()
    config = GRPOConfig(**{"require_correct_in_group": False, **TRACES[name]})
    optimizer = make_optimizer(policy, SCHEDULE)
    reference = policy.snapshot()
    rows = []
    for step in range(STEPS):
        if name == "sft":
            demonstrations = [
                Demonstration(
                    prompt=make_prompt(step + i, 3 + i),
                    token_ids=(*tokens(2 + (step + i) % 5, step * i), 2),
                )
                for i in range(4)
            ]
            batch = demonstration_batch(demonstrations, WEIGHTINGS["token_mean"])
        else:
            groups = recorded_groups(step)
            batch = one_step(
                groups,
                advantages_of(groups, config),
                WEIGHTINGS[config.weighting],
                constant=config.weighting_constant or 0.0,
                keep_flat=config.beta > 0,
            )
        if config.beta > 0:
            from dataclasses import replace

            (whole,) = micro_batches(batch, 10_000)
            back = torch.argsort(whole.sequence_ids)
            values = ParallelPolicy(policy).score(whole, reference).logprobs[back]
            batch = replace(batch, reference_logprobs=values)
        result = update(
            ParallelPolicy(policy),
            batch,
            sft_objective if name == "sft" else grpo_objective(config),
            optimizer,
            scale=schedule(SCHEDULE, step, STEPS),
            max_grad_norm=1.0,
            token_budget=60,
        )
        assert result.applied
        with torch.no_grad():
            probe = policy(batch).logprobs.double().sum()
        kept = ("grad_norm", "loss", "trained/entropy", "policy/kl")
        row = {key: result.tallies[key].mean for key in kept if key in result.tallies}
        rows.append({**row, "logprobs_after": float(probe)})
    return rows


@pytest.mark.parametrize("name", TRACES)
def test_twenty_steps_give_the_recorded_numbers(name: str) -> None:
    expected = json.loads(FILE.read_text())[name]
    found = trace(name)
    assert len(found) == len(expected) == STEPS
    for step, (ours, recorded) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(recorded, rel=1e-4, abs=1e-7), f"step {step}"


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: trace(name) for name in TRACES}, indent=1) + "\n")
