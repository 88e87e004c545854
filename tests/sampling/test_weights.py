"""Which weights draw: those that are trained, or a copy of them that says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LetterTokenizer, make_batch, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from grouper.config.loading import load_recipe
from grouper.config.schema import LoraConfig, ModelConfig, SamplingConfig
from grouper.models import device
from grouper.models.device import PRODUCT_DTYPES, on_device
from grouper.models.loading import _as_policy, computed_on, load_policy
from grouper.models.merging import whole_weights
from grouper.models.policy import Policy
from grouper.sampling import weights
from grouper.sampling.factory import Samplers
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import (
    SamplingWeights,
    copy_dtype,
    describe_dtypes,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model"
    tiny_model().save_pretrained(path)
    return path


def adapted(
    folder: Path,
    targets: Any = "all-linear",
    dtype: str = "float32",
    compute_dtype: str = "auto",
) -> Policy:
    lora = LoraConfig(rank=4, alpha=8, target_modules=targets)
    settings = {"path": str(folder), "dtype": dtype, "compute_dtype": compute_dtype, "lora": lora}
    config = ModelConfig.model_validate(settings)
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


@pytest.mark.parametrize("family", ["olmoe", "ernie4_5_moe"])
@torch.no_grad()
def test_adapters_of_experts_are_merged_too(family: str, tmp_path: Path) -> None:
    """A layer's experts are two parameters, one adapter around the other: it drew without them."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    experts = {"num_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2}
    experts |= {"intermediate_size": 16, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    shape = AutoConfig.for_model(family, num_key_value_heads=2, **small, **experts)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    policy, batch = adapted(tmp_path), make_batch()
    change(policy, 1)
    copy = SamplingWeights(policy, torch.float32).current()
    torch.testing.assert_close(copy(batch).logprobs, policy(batch).logprobs, rtol=0, atol=2e-5)
    plain = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for merged in (True, False):
        sent = dict(whole_weights(policy, merged=merged))
        assert {name: w.shape for name, w in sent.items()} == {n: p.shape for n, p in plain.items()}


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


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bfloat16_copy_says_what_the_trainer_says_after_the_smallest_update(
    folder: Path, dtype: str
) -> None:
    """M10: merged and rounded it would say what it said before the update, or something else."""
    policy = adapted(folder, dtype=dtype, compute_dtype="bfloat16")
    batch = make_batch()
    weights = SamplingWeights(policy, torch.bfloat16)
    before = policy(batch).logprobs
    # With float32 weights the trainer's norms are in float32, and the copy's are not.
    usual = float((weights.current()(batch).logprobs - before).abs().mean())
    assert (usual == 0) == (dtype == "bfloat16")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.trainable().items():
        if "lora_B" in name:
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    policy.version += 1
    after = policy(batch).logprobs
    assert float((after - before).abs().mean()) > 3 * usual
    gap = float((weights.current()(batch).logprobs - after).abs().mean())
    assert gap <= 1.5 * usual


def test_weights_that_nothing_changes_are_shared_with_the_trainer(folder: Path) -> None:
    policy = adapted(folder, dtype="bfloat16")
    copy = SamplingWeights(policy, torch.bfloat16).current()
    theirs = dict(copy.named_parameters())
    for name, parameter in policy.named_parameters():
        shared = theirs[name].data_ptr() == parameter.data_ptr()
        assert shared == ("lora_" not in name), name
        assert not theirs[name].requires_grad
    assert all(p.requires_grad == ("lora_" in n) for n, p in policy.named_parameters())


LORA: dict[str, Any] = {"lora": LoraConfig()}
HALF = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("sampling", "model", "device", "expected"),
    [
        ("auto", {}, "cpu", None),
        ("auto", LORA, "cpu", torch.float32),
        ("auto", {**LORA, **HALF}, "cpu", torch.bfloat16),
        ("auto", {**LORA, "compute_dtype": "bfloat16"}, "cpu", torch.bfloat16),
        ("auto", {"compute_dtype": "bfloat16"}, "cpu", None),
        ("auto", {}, "cuda", torch.bfloat16),
        ("auto", HALF, "cuda", None),
        ("auto", {**LORA, **HALF}, "cuda", torch.bfloat16),
        ("auto", LORA, "cuda", torch.bfloat16),
        ("auto", {"compute_dtype": "float32"}, "cuda", None),
        ("auto", {**LORA, "compute_dtype": "float32"}, "cuda", torch.float32),
        ("auto", {**LORA, **HALF, "quantization": "4bit"}, "cuda", None),
        ("auto", {**LORA, "quantization": "4bit"}, "cpu", None),
        ("auto", LORA, "mps", None),
        ("same", LORA, "cpu", None),
        ("same", LORA, "cuda", None),
        ("bfloat16", {}, "cpu", torch.bfloat16),
        ("float32", {**LORA, **HALF}, "cpu", torch.float32),
    ],
)
def test_a_copy_is_made_where_it_is_asked_for_or_faster(
    sampling: str, model: dict[str, Any], device: str, expected: torch.dtype | None
) -> None:
    """G2, G3: on CUDA of adapters and of float32 weights whose products are in bfloat16."""
    config = SamplingConfig.model_validate({"dtype": sampling})
    shape = ModelConfig.model_validate({"path": "a-model", **model})
    assert copy_dtype(config, shape, device) is expected


BANNERS: list[tuple[dict[str, Any], bool, str]] = [
    ({}, True, "float32 weights, products in bfloat16, samples from a bfloat16 copy."),
    (
        {**LORA, **HALF},
        True,
        (
            "bfloat16 weights with float32 adapters, products in bfloat16, samples from the "
            "weights themselves with bfloat16 adapters."
        ),
    ),
    (
        LORA,
        True,
        (
            "float32 weights with float32 adapters, products in bfloat16, samples from a bfloat16 "
            "copy with the adapters kept separate."
        ),
    ),
    (
        {**LORA, "compute_dtype": "float32"},
        True,
        (
            "float32 weights with float32 adapters, products in float32, samples from a float32 "
            "copy with the adapters merged."
        ),
    ),
    (
        {**LORA, **HALF, "quantization": "4bit"},
        True,
        (
            "NF4 weights with float32 adapters, products in bfloat16, samples from the weights "
            "themselves."
        ),
    ),
    (
        {},
        False,
        (
            "float32 weights, products in float16, samples from a float16 copy. This GPU has no "
            "bfloat16, so products are in float16, and the loss is scaled."
        ),
    ),
    (
        HALF,
        False,
        (
            "bfloat16 weights, products in bfloat16, samples from the weights themselves. This "
            "GPU has no bfloat16 and emulates it: set model.dtype=float32."
        ),
    ),
]


@pytest.mark.parametrize(("model", "has_it", "expected"), BANNERS)
def test_the_banner_says_what_auto_is(
    model: dict[str, Any], has_it: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G7, G11: on a T4, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_it)
    shape = ModelConfig.model_validate({"path": "a-model", **model})
    assert describe_dtypes(SamplingConfig(), shape) == f"On CUDA: {expected}"


@torch.no_grad()
def test_a_copy_keeps_its_frequencies_in_float32() -> None:
    """Rounded to bfloat16 they would turn heads by whole radians after some hundred tokens."""
    model = tiny_model("llama")
    copied = SamplingWeights(Policy(model), torch.bfloat16, copy_now=True).current().model
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    buffers = dict(model.named_buffers())
    assert buffers
    for name, buffer in copied.named_buffers():
        assert torch.equal(buffer, buffers[name])
        assert buffer.data_ptr() != buffers[name].data_ptr()


@torch.no_grad()
def test_a_copy_in_the_training_dtype_computes_as_training_does() -> None:
    """T4: float32 weights with bfloat16 products, copied because they are about to be split."""
    policy = Policy(tiny_model(), compute_dtype=torch.bfloat16)
    batch = make_batch()
    copy = SamplingWeights(policy, copy_now=True).current()
    assert copy is not policy
    assert torch.equal(copy(batch).logprobs, policy(batch).logprobs)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_weights_rounded_once_say_what_weights_rounded_each_time_say(tied: bool) -> None:
    """To the last bit, also after an update; a tied head leaves the embedding as it was."""
    policy = Policy(tiny_model(tie_word_embeddings=tied), compute_dtype=torch.bfloat16)
    batch = make_batch()
    weights = SamplingWeights(policy)
    for version in range(3):
        change(policy, version)
        current = weights.current()
        assert current is not policy
        assert torch.equal(current(batch).logprobs, policy(batch).logprobs)
    embedding, head = current.model.get_input_embeddings(), current.model.get_output_embeddings()
    assert embedding.weight.data_ptr() == policy.model.get_input_embeddings().weight.data_ptr()
    assert head.weight.dtype == torch.bfloat16
    linears = [module for module in policy.model.modules() if type(module) is torch.nn.Linear]
    copied = weights.copied()
    assert sum(p.numel() for p in copied) == sum(module.weight.numel() for module in linears)
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


def test_weights_are_rounded_once_only_where_autocast_rounds_them(folder: Path) -> None:
    """Not in one dtype, not on a GPU (which has a copy), not with adapters (which have, too)."""
    same = Policy(tiny_model())
    assert SamplingWeights(same).current() is same
    assert SamplingWeights(same).copied() == []
    mixed = Policy(tiny_model(), compute_dtype=torch.bfloat16)
    assert SamplingWeights(mixed, device="cuda").current() is mixed
    lora = adapted(folder, compute_dtype="bfloat16")
    assert SamplingWeights(lora).current() is lora


@pytest.mark.parametrize(("family", "copied"), [("qwen3", torch.float16), ("gemma3", None)])
def test_a_gpu_without_bfloat16_samples_as_it_trains(
    family: str, copied: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16, but for a family whose hidden states it cannot hold."""
    monkeypatch.setattr(device, "has_bfloat16", lambda: False)
    monkeypatch.setattr(weights, "has_bfloat16", lambda: False)
    recipe = load_recipe("demo", ["model={path: x}"])
    products = on_device(recipe.model, "cuda").compute_dtype
    assert products == "float16"
    model = tiny_model(family)
    config = computed_on(recipe.model, model.config, "cuda")
    policy = _as_policy(model, None, config)
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    samplers = Samplers(recipe=recipe, tokenizer=LetterTokenizer(), stop_token_ids=[2], longest=8)
    sampler = samplers.over(policy)
    assert isinstance(sampler, NativeSampler)
    assert sampler._weights._dtype is copied
    assert PRODUCT_DTYPES[samplers.dtype("float16")] is torch.float16
    banner = describe_dtypes(SamplingConfig(), config)
    assert ("products in float16" in banner) == (copied is torch.float16)
    assert ("This GPU has no bfloat16." in banner) == (copied is None)
