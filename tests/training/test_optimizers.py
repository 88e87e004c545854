"""Optimizers beside the plain one; how schedules run is in test_update."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tiny_models import make_batch, tiny_model

from grouper import extras
from grouper.config import OptimizerConfig
from grouper.errors import ConfigError
from grouper.policy import Policy
from grouper.training.objectives import sft_objective
from grouper.training.optimizers import Optimizer, make_optimizer
from grouper.training.update import update

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="the extra `quantized` is not installed"
)


def wide_policy() -> Policy:
    """Matrices of 4096 elements and more: smaller ones keep 32-bit moments."""
    return Policy(tiny_model(hidden_size=64, intermediate_size=128, head_dim=16))


def train(policy: Policy, optimizer: Optimizer, steps: int) -> list[float]:
    return [
        update(
            policy,
            make_batch(),
            sft_objective,
            optimizer,
            scale=1.0,
            max_grad_norm=1.0,
            token_budget=64,
        )
        .tallies["loss"]
        .mean
        for _ in range(steps)
    ]


def config(name: Any) -> OptimizerConfig:
    return OptimizerConfig(name=name, learning_rate=3e-3, weight_decay=0.01)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bitsandbytes.*grouper\[quantized\]"):
        make_optimizer(wide_policy(), config("adamw_8bit"))


@needs_bitsandbytes
def test_8_bit_moments_learn_like_32_bit_ones() -> None:
    losses = {}
    for name in ("adamw", "adamw_8bit"):
        policy = wide_policy()
        losses[name] = train(policy, make_optimizer(policy, config(name)), 20)
    assert losses["adamw_8bit"][0] == losses["adamw"][0]
    fallen = losses["adamw"][0] - losses["adamw"][-1]
    assert fallen > 1
    assert losses["adamw_8bit"][-1] == pytest.approx(losses["adamw"][-1], abs=0.05 * fallen)


@needs_bitsandbytes
def test_8_bit_moments_take_8_bits() -> None:
    policy = wide_policy()
    optimizer = make_optimizer(policy, config("adamw_8bit"))
    train(policy, optimizer, 1)
    (part,) = optimizer.parts
    matrix = policy.model.model.layers[0].mlp.up_proj.weight
    assert part.state[matrix]["state1"].dtype == torch.uint8
    assert part.state[matrix]["state2"].dtype == torch.uint8


@needs_bitsandbytes
def test_8_bit_state_round_trips_through_a_file() -> None:
    straight = wide_policy()
    train(straight, make_optimizer(straight, config("adamw_8bit")), 4)
    halves = wide_policy()
    first = make_optimizer(halves, config("adamw_8bit"))
    train(halves, first, 2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make_optimizer(halves, config("adamw_8bit"))
    second.load_state_dict(torch.load(file, weights_only=True))
    train(halves, second, 2)
    for a, b in zip(straight.parameters(), halves.parameters(), strict=True):
        assert torch.equal(a, b)
