"""Which weights draw: those that are trained, or a copy of them that says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_batch, tiny_model

from grouper.config.schema import LoraConfig, ModelConfig, SamplingConfig
from grouper.models.loading import load_policy
from grouper.models.policy import Policy
from grouper.sampling.weights import SamplingWeights, copy_dtype


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model"
    tiny_model().save_pretrained(path)
    return path


def adapted(folder: Path, targets: Any = "all-linear", dtype: str = "float32") -> Policy:
    lora = LoraConfig(rank=4, alpha=8, target_modules=targets)
    config = ModelConfig.model_validate({"path": str(folder), "dtype": dtype, "lora": lora})
    return load_policy(config, str(folder), seed=0)


@torch.no_grad()
def change(policy: Policy, version: int) -> None:
    torch.manual_seed(version)
    for parameter in policy.trainable().values():
        parameter.normal_(std=0.1)
    policy.version = version


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "embed_tokens")])
@torch.no_grad()
def test_lora_is_merged_into_a_copy_only(folder: Path, targets: Any) -> None:
    policy = adapted(folder, targets)
    before = {n: p.clone() for n, p in policy.named_parameters() if not p.requires_grad}
    weights, batch = SamplingWeights(policy, torch.float32), make_batch()
    for version in (1, 2):
        change(policy, version)
        copy = weights.current()
        torch.testing.assert_close(copy(batch).logprobs, policy(batch).logprobs, rtol=0, atol=2e-5)
    for name, parameter in policy.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_made_late_is_one_that_was_kept_up(folder: Path, dtype: str) -> None:
    """A resumed run makes its copy at a version at which the other run refreshed it."""
    policy = adapted(folder, dtype=dtype)
    kept = SamplingWeights(policy, getattr(torch, dtype))
    for version in (1, 2, 3):
        change(policy, version)
        kept.current()
    late = SamplingWeights(policy, getattr(torch, dtype)).current()
    theirs = dict(kept.current().named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in late.named_parameters())


@pytest.mark.parametrize(
    ("sampling", "model", "device", "lora", "expected"),
    [
        ("auto", {}, "cpu", False, None),
        ("auto", {}, "cpu", True, torch.float32),
        ("auto", {"dtype": "bfloat16"}, "cpu", True, torch.bfloat16),
        ("auto", {"compute_dtype": "bfloat16"}, "cpu", True, torch.bfloat16),
        ("auto", {}, "cuda", True, None),
        ("same", {}, "cpu", True, None),
        ("bfloat16", {}, "cuda", False, torch.bfloat16),
        ("float32", {"dtype": "bfloat16"}, "cpu", True, torch.float32),
    ],
)
def test_a_copy_is_made_where_it_is_asked_for_or_faster(
    sampling: str, model: dict[str, Any], device: str, lora: bool, expected: torch.dtype | None
) -> None:
    config = SamplingConfig.model_validate({"dtype": sampling})
    shape = ModelConfig.model_validate({"path": "a-model", **model})
    assert copy_dtype(config, shape, device, lora=lora) is expected


def test_quantised_weights_are_not_copied() -> None:
    model = ModelConfig.model_validate(
        {"path": "a-model", "quantization": "4bit", "lora": LoraConfig(), "dtype": "bfloat16"}
    )
    assert copy_dtype(SamplingConfig(), model, "cpu", lora=True) is None


@torch.no_grad()
def test_a_copy_in_the_training_dtype_computes_as_training_does() -> None:
    """T4: float32 weights with bfloat16 products, copied because they are about to be split."""
    policy = Policy(tiny_model(), compute_dtype=torch.bfloat16)
    batch = make_batch()
    copy = SamplingWeights(policy, copy_now=True).current()
    assert copy is not policy
    assert torch.equal(copy(batch).logprobs, policy(batch).logprobs)
