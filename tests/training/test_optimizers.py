"""Optimizers beside the plain one; how schedules run is in test_update."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_batch, tiny_model

from grouper.config import extras
from grouper.config.schema import OptimizerConfig
from grouper.errors import ConfigError
from grouper.models.policy import Policy
from grouper.models.team import Solo
from grouper.training.objectives import sft_objective
from grouper.training.optimizers import SCHEDULES, Optimizer, make_optimizer, schedule
from grouper.training.sharded_optimizer import load_shards, save_shards
from grouper.training.update import update

needs_bitsandbytes = pytest.mark.needs_package("bitsandbytes", extra="quantized")


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
    with pytest.raises(ConfigError, match=r"bitsandbytes.*grouper-rl\[quantized\]"):
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


def changed(name: Any) -> OptimizerConfig:
    return OptimizerConfig(
        name=name, learning_rate=1e-3, weight_decay=0.5, betas=(0.5, 0.6), eps=1e-3
    )


@pytest.mark.parametrize(
    "name",
    ["adamw", "muon", pytest.param("adamw_8bit", marks=needs_bitsandbytes)],
)
def test_a_loaded_state_brings_no_settings_with_it(name: Any) -> None:
    """T1: what the recipe says now is in force, on one process."""
    policy = wide_policy()
    before = make_optimizer(policy, config(name))
    train(policy, before, 2)
    fresh, after = make_optimizer(policy, changed(name)), make_optimizer(policy, changed(name))
    after.load_state_dict(before.state_dict())
    for part, untouched in zip(after.parts, fresh.parts, strict=True):
        assert part.state, "the moments have been taken over"
        for group, expected in zip(part.param_groups, untouched.param_groups, strict=True):
            assert group == expected


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_loaded_shards_bring_no_settings_with_them(tmp_path: Path) -> None:
    """T1, where the state is split over processes."""
    policy = wide_policy()
    before = make_optimizer(policy, config("adamw"))
    train(policy, before, 2)
    save_shards(before, tmp_path / "shards", Solo())
    after = make_optimizer(policy, changed("adamw"))
    load_shards(after, tmp_path / "shards")
    (part,) = after.parts
    assert part.state
    (group,) = part.param_groups
    assert (group["betas"], group["weight_decay"], group["eps"]) == ((0.5, 0.6), 0.5, 1e-3)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_every_step_of_a_schedule_does_something(name: Any, warmup: int, total: int) -> None:
    """T7: also the first step of a warm-up and the last one of a decay to nothing."""
    settings = OptimizerConfig(schedule=name, warmup_steps=warmup)
    scales = [schedule(settings, step, total) for step in range(total)]
    assert min(scales) > 0
    assert max(scales) <= 1
    if name == "linear" and warmup < total:
        assert scales[-1] == pytest.approx(1 / (total - warmup))
