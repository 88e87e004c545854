"""Optimizers beside the plain one; how schedules run is in test_update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_batch, tiny_model

from grouper import errors
from grouper.config.loading import load_recipe
from grouper.config.schema import OptimizerConfig
from grouper.errors import CheckpointError, ConfigError, ModelError
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.training import checkpoint
from grouper.training.checkpoint import load_optimizer, save_optimizer
from grouper.training.optimizers import SCHEDULES, Optimizer, make_optimizer, schedule
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import sft_objective, update

needs_bitsandbytes = pytest.mark.needs_package("bitsandbytes", extra="quantized")
NAMES = ["adamw", "muon", pytest.param("adamw_8bit", marks=needs_bitsandbytes)]


def wide_policy() -> Policy:
    """Matrices of 4096 elements and more: smaller ones keep 32-bit moments."""
    return Policy(tiny_model(hidden_size=64, intermediate_size=128, head_dim=16))


def train(policy: Policy, optimizer: Optimizer, steps: int) -> list[float]:
    return [
        update(
            ParallelPolicy(policy),
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


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_biases_do_not_decay(name: Any) -> None:
    policy = wide_policy()
    before = {key: value.detach().clone() for key, value in policy.trainable().items()}
    optimizer = make_optimizer(policy, config(name))
    for parameter in policy.trainable().values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    kept = {key for key, value in policy.trainable().items() if value.equal(before[key])}
    assert kept == {key for key, value in before.items() if value.ndim == 1}


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bitsandbytes.*grouper-rl\[quantized\]"):
        make_optimizer(wide_policy(), config("adamw_8bit"))


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_were_stored_quantized_are_not_trained_in_part(name: Any) -> None:
    """Of a model in 4 bits, embeddings and norms were trained, and nothing was said."""
    policy = wide_policy()
    layer = policy.model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
    with pytest.raises(ModelError, match="stored quantized") as told:
        make_optimizer(policy, config(name))
    assert "model.lora" in told.value.fix
    object.__setattr__(policy, "adapter", policy.model)  # which would be trained in their place
    make_optimizer(policy, config(name))


@pytest.mark.slow
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


@pytest.mark.parametrize("name", NAMES)
def test_a_state_round_trips_through_files(tmp_path: Path, name: Any) -> None:
    """Whatever a state is made of: moments, steps, tables that all weights share, numbers."""
    straight = wide_policy()
    whole = make_optimizer(straight, config(name))
    train(straight, whole, 4)
    halves = wide_policy()
    first = make_optimizer(halves, config(name))
    train(halves, first, 2)
    save_optimizer(first, tmp_path, ProcessGroup(), named=tmp_path)
    second = make_optimizer(halves, config(name))
    load_optimizer(second, tmp_path)
    train(halves, second, 2)
    for a, b in zip(straight.parameters(), halves.parameters(), strict=True):
        assert torch.equal(a, b)
    mine, theirs = second.state_dict(), whole.state_dict()
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert type(value) is type(theirs[key]), key
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key])), key


@pytest.mark.parametrize("name", NAMES)
def test_equal_states_are_equal_bytes(tmp_path: Path, name: Any) -> None:
    found = []
    for number in range(2):
        policy, folder = wide_policy(), tmp_path / str(number)
        folder.mkdir()
        optimizer = make_optimizer(policy, config(name))
        train(policy, optimizer, 1)
        save_optimizer(optimizer, folder, ProcessGroup(), named=tmp_path)
        found.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_state_in_many_files_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    """A large state is cut into files, so that an accelerator's is not copied all at once."""
    policy = wide_policy()
    optimizer = make_optimizer(policy, config(name))
    train(policy, optimizer, 1)
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 20_000)
    save_optimizer(optimizer, tmp_path, ProcessGroup(), named=tmp_path)
    assert len(list(tmp_path.iterdir())) > 3
    back = make_optimizer(policy, config(name))
    load_optimizer(back, tmp_path)
    mine, theirs = back.state_dict(), optimizer.state_dict()
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key])), key


def test_a_state_before_the_first_step_is_a_state(tmp_path: Path) -> None:
    policy = wide_policy()
    save_optimizer(make_optimizer(policy, config("muon")), tmp_path, ProcessGroup(), named=tmp_path)
    optimizer = make_optimizer(policy, config("muon"))
    load_optimizer(optimizer, tmp_path)
    assert optimizer.state_dict() == {}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"name": "adamw", "hidden_size": 32}, "another optimizer, or of other weights"),
        ({"name": "muon", "hidden_size": 64}, "another optimizer, or of other weights"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    tmp_path: Path, theirs: dict[str, Any], words: str
) -> None:
    """Of other shapes, too: torch takes such moments and breaks at the next step."""
    policy = Policy(tiny_model(hidden_size=theirs["hidden_size"], head_dim=16))
    saved = make_optimizer(policy, config(theirs["name"]))
    train(policy, saved, 1)
    save_optimizer(saved, tmp_path, ProcessGroup(), named=tmp_path)
    ours = make_optimizer(Policy(tiny_model(hidden_size=64, head_dim=16)), config("adamw"))
    with pytest.raises(CheckpointError, match=f"does not fit: .*{words}"):
        load_optimizer(ours, tmp_path)
    assert ours.state_dict() == {}


def test_a_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not fit"):
        load_optimizer(make_optimizer(wide_policy(), config("adamw")), tmp_path)


def changed(name: Any) -> OptimizerConfig:
    return OptimizerConfig(
        name=name, learning_rate=1e-3, weight_decay=0.5, betas=(0.5, 0.6), eps=1e-3
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_brings_no_settings_with_it(tmp_path: Path, name: Any) -> None:
    """T1: what the recipe says now is in force, on one process."""
    policy = wide_policy()
    before = make_optimizer(policy, config(name))
    train(policy, before, 2)
    save_optimizer(before, tmp_path, ProcessGroup(), named=tmp_path)
    fresh, after = make_optimizer(policy, changed(name)), make_optimizer(policy, changed(name))
    load_optimizer(after, tmp_path)
    for part, untouched in zip(after.parts, fresh.parts, strict=True):
        assert part.state, "the moments have been taken over"
        for group, expected in zip(part.param_groups, untouched.param_groups, strict=True):
            assert group == expected


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


# --- masters: bfloat16 weights that are stepped in float32


def half_policy() -> Policy:
    return Policy(tiny_model(hidden_size=64, head_dim=16, scale=1.0).to(torch.bfloat16))


def with_masters(name: Any = "adamw", rate: float = 3e-3) -> OptimizerConfig:
    return OptimizerConfig(
        name=name, learning_rate=rate, muon_learning_rate=rate, master_weights=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_small_steps_add_up_in_masters(name: Any) -> None:
    """Steps of 1e-6 are lost in bfloat16 weights, and sum up beside them."""
    lost, kept = half_policy(), half_policy()
    start = {key: value.detach().clone() for key, value in kept.trainable().items()}
    train(lost, make_optimizer(lost, OptimizerConfig(learning_rate=1e-6)), 300)
    optimizer = make_optimizer(kept, with_masters(name, 1e-6))
    train(kept, optimizer, 300)

    def moved(policy: Policy) -> float:
        changed = [
            float((value.detach() != start[key]).float().mean())
            for key, value in policy.trainable().items()
            if value.ndim == 2
        ]
        return sum(changed) / len(changed)

    assert moved(lost) < 0.1
    assert moved(kept) > 2 * moved(lost)
    for weight, master in optimizer._masters:
        assert torch.equal(weight, master.to(torch.bfloat16))


def test_masters_learn_as_float32_weights_do() -> None:
    """Bfloat16 products in both: 200 steps that float32 weights hold, and bfloat16 ones hardly."""
    rate = 2e-5
    exact = Policy(tiny_model(hidden_size=64, head_dim=16, scale=1.0), compute_dtype=torch.bfloat16)
    plain, masters = half_policy(), half_policy()
    exact_losses = train(exact, make_optimizer(exact, OptimizerConfig(learning_rate=rate)), 200)
    plain_losses = train(plain, make_optimizer(plain, OptimizerConfig(learning_rate=rate)), 200)
    losses = train(masters, make_optimizer(masters, with_masters(rate=rate)), 200)
    gain = exact_losses[0] - exact_losses[-1]
    assert gain > 0.1
    assert losses[0] - losses[-1] == pytest.approx(gain, rel=0.1)
    assert abs(plain_losses[0] - plain_losses[-1] - gain) > 0.1 * gain


@pytest.mark.parametrize("name", NAMES)
def test_masters_are_saved(tmp_path: Path, name: Any) -> None:
    straight, halves = half_policy(), half_policy()
    whole = make_optimizer(straight, with_masters(name))
    losses = train(straight, whole, 4)
    first = make_optimizer(halves, with_masters(name))
    begun = train(halves, first, 2)
    save_optimizer(first, tmp_path / "state", ProcessGroup(), named=tmp_path)
    second = make_optimizer(halves, with_masters(name))
    load_optimizer(second, tmp_path / "state")
    assert begun + train(halves, second, 2) == losses
    for one, other in zip(straight.parameters(), halves.parameters(), strict=True):
        assert torch.equal(one, other)
    # An optimizer without masters does not take them.
    with pytest.raises(CheckpointError, match="does not fit"):
        load_optimizer(make_optimizer(half_policy(), config(name)), tmp_path / "state")


def test_masters_are_for_weights_that_are_coarser() -> None:
    for changed in ("model.dtype=float32", "model.lora={rank: 4}"):
        settings = ["model={path: x, dtype: bfloat16}", changed]
        with pytest.raises(ConfigError, match=r"is for model\.dtype: bfloat16 without LoRA"):
            load_recipe("demo", [*settings, "grpo.optimizer.master_weights=true"])
