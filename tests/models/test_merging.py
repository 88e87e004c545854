"""Adapters merged into coarse weights keep their update; rounding to the nearest loses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from grouper.config.schema import LoraConfig, ModelConfig
from grouper.models.loading import load_policy
from grouper.models.merging import (
    Rounding,
    merged_copy,
    round_at_random,
    weight_shapes,
    whole_weights,
)
from grouper.models.policy import Policy

SMALL = 2e-5
"""Of the adapter's second factor: products far below the distance of two bfloat16 weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merging") / "model"
    tiny_model().to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def policy(folder: Path) -> Policy:
    lora = LoraConfig(rank=4, alpha=8)
    config = ModelConfig(path=str(folder), dtype="bfloat16", lora=lora)
    made = load_policy(config, str(folder), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.trainable().items():
            if "lora_B" in name:
                parameter.copy_(SMALL * torch.randn(parameter.shape, generator=generator))
    return made


def test_rounding_at_random_keeps_the_mean_and_is_addressed() -> None:
    value = 1.0 + 2**-7 / 8  # an eighth of the way to the next bfloat16 number
    values = torch.full((40_000,), value)
    rounded = round_at_random(values, seed=3)
    assert rounded.unique().tolist() == [1.0, 1.0 + 2**-7]
    up = float((rounded > 1).double().mean())
    # Five standard deviations of a share of an eighth of 40,000 draws.
    assert up == pytest.approx(1 / 8, abs=5 * (0.125 * 0.875 / 40_000) ** 0.5)
    assert torch.equal(rounded, round_at_random(values, seed=3))
    assert not torch.equal(rounded, round_at_random(values, seed=4))
    assert torch.equal(round_at_random(-values, seed=3), -rounded)


def test_a_small_update_survives_rounding_at_random_alone(policy: Policy) -> None:
    """M10: to the nearest number most of the update is gone, and nothing said so."""
    shares = {}
    for seed in (None, 0):
        rounding = Rounding(torch.bfloat16, seed)
        weights = dict(rounding.weights(policy))
        assert {value.dtype for value in weights.values()} == {torch.bfloat16}
        shares[seed] = rounding.share
    nearest, random = shares[None], shares[0]
    assert nearest < 0.2
    copy, share = merged_copy(policy, torch.bfloat16, seed=0)
    assert share == random
    for name, value in dict(Rounding(torch.bfloat16, seed=0).weights(policy)).items():
        assert torch.equal(dict(copy.model.named_parameters())[name], value)
    assert random == pytest.approx(1.0, abs=0.2)


def test_weights_without_an_adapter_are_rounded_as_ever(folder: Path) -> None:
    plain = load_policy(ModelConfig(path=str(folder)), str(folder), seed=0)
    rounding = Rounding(torch.bfloat16, seed=0)
    exact = dict(whole_weights(plain))
    for name, value in rounding.weights(plain):
        assert torch.equal(value, exact[name].to(torch.bfloat16))
    assert rounding.share == 1.0


def test_training_all_weights_from_an_adapter_keeps_what_it_learned(
    policy: Policy, folder: Path, tmp_path: Path
) -> None:
    """SFT with LoRA, then GRPO on all weights: the merge is into the base's bfloat16."""
    policy.adapter.save_pretrained(tmp_path / "adapter")
    config = ModelConfig(path=str(folder), dtype="bfloat16")
    merged = load_policy(config, str(tmp_path / "adapter"), seed=0)
    before = dict(load_policy(config, str(folder), seed=0).model.named_parameters())
    added = wanted = 0.0
    for name, exact in whole_weights(policy):
        target = exact.float() - before[name].float()
        if not target.any():
            continue
        found = dict(merged.model.named_parameters())[name].float() - before[name].float()
        added += float((found * target).sum())
        wanted += float(target.square().sum())
    assert wanted > 0
    assert added / wanted == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("merged", [True, False])
def test_shapes_are_those_of_the_weights_that_are_sent(
    policy: Policy, folder: Path, merged: bool
) -> None:
    """In the same order: a receiver is told the shapes first."""
    plain = load_policy(ModelConfig(path=str(folder)), str(folder), seed=0)
    for model in (policy, plain):
        sent = [(name, tuple(weight.shape)) for name, weight in whole_weights(model, merged=merged)]
        assert list(weight_shapes(model).items()) == sent
    assert weight_shapes(policy) == weight_shapes(plain)
