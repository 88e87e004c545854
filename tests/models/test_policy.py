"""Policy: per-token log-probs against a naive loop, for every family and layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, make_batch, tiny_model
from torch import Tensor

from grouper.algorithms.batching import TrainBatch
from grouper.config.schema import LoraConfig
from grouper.errors import ModelError
from grouper.models import attention, token_scores
from grouper.models.loading import _new_adapter
from grouper.models.policy import Policy
from grouper.training.parallel import ParallelPolicy


def naive_logprobs(model: torch.nn.Module, batch: TrainBatch, temperature: float) -> Tensor:
    """One unpadded forward of the whole model per row, log-softmax, and a Python loop (T1)."""
    result = torch.zeros(batch.mask.shape, dtype=next(model.parameters()).dtype)
    for row in range(batch.rows):
        owner = int(batch.prompt_index[row])
        prompt = batch.prompt_ids[owner, : int(batch.prompt_lengths[owner])]
        length = int(batch.completion_lengths[row])
        completion = batch.completion_ids[row, :length]
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0]
        logprobs = (logits / temperature).log_softmax(-1)
        for place in range(length):
            result[row, place] = logprobs[len(prompt) - 1 + place, completion[place]]
    return result


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("native", [True, False], ids=["shared-prompts", "padded"])
@torch.no_grad()
def test_logprobs_equal_a_naive_loop(family: str, native: bool) -> None:
    """T1, T24: one row at a time, without any padding, against every layout."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    batch = make_batch()
    expected = naive_logprobs(model, batch, 1.0)
    found = Policy(model, native=native)(batch).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    # The model itself is left as it was.
    torch.testing.assert_close(naive_logprobs(model, batch, 1.0), expected, rtol=0, atol=0)


@torch.no_grad()
def test_temperature_divides_the_logits() -> None:
    model = tiny_model()
    batch = make_batch()
    found = Policy(model)(replace(batch, temperature=0.5)).logprobs
    torch.testing.assert_close(found, naive_logprobs(model, batch, 0.5), rtol=0, atol=1e-5)


@torch.no_grad()
def test_entropy_is_that_of_the_sampled_distribution() -> None:
    model = tiny_model()
    batch = make_batch()
    outputs = Policy(model)(batch)
    owner = int(batch.prompt_index[0])
    prompt = batch.prompt_ids[owner, : int(batch.prompt_lengths[owner])]
    distribution = model(input_ids=prompt[None]).logits[0, -1].softmax(-1)
    expected = float(torch.distributions.Categorical(distribution).entropy())
    assert float(outputs.entropies[0, 0]) == pytest.approx(expected, abs=1e-5)
    assert (outputs.entropies[~batch.mask] == 0).all()


def test_the_chunked_head_changes_neither_values_nor_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = make_batch(dtype=torch.float64)

    def run() -> tuple[Tensor, list[Tensor]]:
        policy = Policy(tiny_model(dtype=torch.float64))
        logprobs = policy(batch).logprobs
        (logprobs * batch.weights).sum().backward()
        return logprobs.detach(), [p.grad for p in policy.parameters() if p.grad is not None]

    whole = run()
    monkeypatch.setattr(token_scores, "CHUNK_ELEMENTS", 5 * 97)
    monkeypatch.setattr(token_scores, "CPU_ROWS", 1)
    chunked = run()
    torch.testing.assert_close(chunked[0], whole[0], rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(chunked[1], whole[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


HEADS = {
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "granite": ("granite", {}),
    "cohere": ("cohere", {}),
    "gemma2": ("gemma2", {"final_logit_softcapping": 3.0}),
}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_gradients_equal_a_naive_loop(name: str, lora: bool) -> None:
    """Through the whole model and every kind of head; LoRA on the head takes another way."""
    family, changes = HEADS[name]
    batch = make_batch(dtype=torch.float64)

    def run(ours: bool) -> Tensor:
        model = tiny_model(family, dtype=torch.float64, scale=2.0, **changes)
        if lora:
            config = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "lm_head"))
            _new_adapter(model, config, "base", seed=0)
        model.set_attn_implementation("eager")
        temperature = 0.7
        if ours:
            logprobs = Policy(model)(replace(batch, temperature=temperature)).logprobs
        else:
            logprobs = naive_logprobs(model, batch, temperature)
        (logprobs * batch.weights).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    found, expected = run(True), run(False)
    # Norms compute in float32 inside transformers.
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_an_entropy_bonus_has_a_gradient_where_it_is_asked_for() -> None:
    batch = make_batch(dtype=torch.float64)
    model = tiny_model(dtype=torch.float64, scale=2.0)
    assert not Policy(model)(batch).entropies.requires_grad
    outputs = Policy(model)(batch, entropy_gradient=True)
    (outputs.entropies * batch.mask).sum().backward()
    weight = model.get_input_embeddings().weight
    found = weight.grad.clone()
    weight.grad = None
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(batch.rows):
        owner = int(batch.prompt_index[row])
        prompt = batch.prompt_ids[owner, : int(batch.prompt_lengths[owner])]
        completion = batch.completion_ids[row, : int(batch.completion_lengths[row])]
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[
            0, len(prompt) - 1 : -1
        ]
        loss = loss + torch.distributions.Categorical(logits=logits).entropy().sum()
    loss.backward()
    assert float((found - weight.grad).norm() / found.norm()) < 1e-6


@torch.no_grad()
def test_two_forwards_are_identical() -> None:
    policy = Policy(tiny_model("llama", attention_dropout=0.0))
    batch = make_batch()
    assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)


def test_what_attention_gives_can_be_viewed_as_another_shape() -> None:
    """AFMoE does so, and ended with a traceback after it had been found to fit."""
    layout = attention.SharedPrompts(make_batch())
    heads = torch.randn(1, 4, layout.token_ids.shape[1], 8)
    out, _ = attention._entry(torch.nn.Identity(), heads, heads, heads, None, layout=layout)
    assert out.view(1, -1, 32).shape[1] == heads.shape[2]


def test_unknown_attention_features_are_refused() -> None:
    policy = Policy(tiny_model())
    with (
        policy.native_attention(),
        pytest.raises(ModelError, match="called directly"),
        torch.no_grad(),
    ):
        policy.model(input_ids=torch.tensor([[7, 8]]))
    from grouper.models.attention import _entry

    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ModelError, match="s_aux"):
        _entry(torch.nn.Module(), query, query, query, None, layout=object(), s_aux=torch.ones(4))


@torch.no_grad()
def test_reference_weights_change_nothing() -> None:
    policy = Policy(tiny_model())
    batch = make_batch()
    before = policy(batch).logprobs
    snapshot = policy.snapshot()
    assert torch.equal(ParallelPolicy(policy).score(batch, snapshot).logprobs, before)
    for parameter in policy.parameters():
        parameter.add_(0.01)
    moved = policy(batch).logprobs
    assert not torch.allclose(moved, before)
    assert torch.equal(ParallelPolicy(policy).score(batch, snapshot).logprobs, before)
    assert torch.equal(policy(batch).logprobs, moved)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_are_rounded_up_change_no_result(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64, 1e-12: values and gradients, with and without sliding windows."""
    found = []
    for multiple in (1, 8, 64):
        monkeypatch.setattr(Policy, "size_multiple", multiple)
        policy = Policy(tiny_model(family, dtype=torch.float64, scale=1.0))
        outputs = policy(make_batch(dtype=torch.float64))
        weights = torch.arange(outputs.logprobs.numel()).view_as(outputs.logprobs)
        (outputs.logprobs * weights).sum().backward()
        gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        found.append((outputs.logprobs.detach(), torch.cat(gradients)))
    for logprobs, gradient in found[1:]:
        torch.testing.assert_close(logprobs, found[0][0], rtol=1e-12, atol=1e-12)
        # Gemma sums the gradient of a norm's weight over all rows in float32.
        accuracy = 1e-5 if family.startswith("gemma") else 1e-11
        torch.testing.assert_close(gradient, found[0][1], rtol=accuracy, atol=accuracy)


def test_products_in_bfloat16_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDNN compiles one for each and keeps it: rows of ever new lengths took ever more memory."""
    sizes: set[int] = set()
    plain = torch.nn.functional.linear

    def linear(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.add(rows.numel() // rows.shape[-1])
        return plain(rows, *others)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    policy = Policy(tiny_model(), compute_dtype=torch.bfloat16)
    batch = make_batch()
    for rows in range(1, batch.rows + 1):
        policy(batch.select(torch.arange(rows)))
    assert sizes
    assert all(size % 64 == 0 for size in sizes)
