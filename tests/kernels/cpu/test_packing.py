"""Weights in the processor's own order, ours or oneDNN's: the same products, where they pay."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_prompt, tiny_model
from torch.nn.functional import linear, silu

from grouper.kernels.cpu import packing
from grouper.kernels.cpu.library import library
from grouper.kernels.cpu.packing import FEWEST, current, pack, packed_bytes
from grouper.models.policy import Policy
from grouper.sampling.engines import SlotEngine

pytestmark = pytest.mark.skipif(
    library() is None or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="no kernels, or no bfloat16 in oneDNN on this processor",
)


@pytest.fixture(params=["ours", "oneDNN"], autouse=True)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose order it is; a processor without the matrix unit has one only."""
    if request.param == "ours" and not packing.has_matrix_unit():
        pytest.skip("no AMX-BF16 on this processor, or Linux does not grant it")
    monkeypatch.setattr(packing, "has_matrix_unit", lambda: request.param == "ours")
    return str(request.param)


def half(family: str = "qwen3", **changes: object) -> Policy:
    return Policy(tiny_model(family, dtype=torch.bfloat16, **changes))


@torch.no_grad()
def test_products_are_the_same() -> None:
    policy = half("qwen2")  # its queries, keys and values have a bias
    layer = policy.model.model.layers[0]
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = pack(policy.model, rows=9, completion=FEWEST)
    for module in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
        wide = torch.cat([x] * (module.in_features // 32), -1)
        ours = packed.product(module, wide, module.bias)
        assert ours is not None
        theirs = linear(wide, module.weight, module.bias)
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    inner = packed.gated(layer.mlp, x, "silu")
    assert inner is not None
    gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
    theirs = silu(linear(x, gate)) * linear(x, up)
    torch.testing.assert_close(inner, theirs, rtol=2e-2, atol=2e-2)
    assert packed.product(layer.mlp.gate_proj, x) is None  # it is a part of the one above
    assert packed.product(policy.model.lm_head, x) is None
    assert packed.gated(layer.mlp, x.float(), "silu") is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma2"])
@torch.no_grad()
def test_a_decode_step_is_the_same_but_for_rounding(family: str) -> None:
    found = []
    for completion in (FEWEST - 1, FEWEST):
        engine = SlotEngine(half(family), slots=3, prompt=7, completion=completion)
        prompts = [make_prompt(0).token_ids, make_prompt(1).token_ids]
        engine.prefill(prompts, [0, 1, 2], [0, 0, 1])
        found.append(engine.decode(torch.tensor([1, 2, 3]), torch.tensor([5, 5, 5])))
        assert current() is None
    plain, packed = found
    assert float((plain - packed).abs().max()) < 0.05 * float(plain.abs().max())


def test_what_is_held_is_what_is_planned(layout: str) -> None:
    policy = half()
    packed = pack(policy.model, rows=4, completion=FEWEST)
    shape = policy.model.config
    heads = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    layer = shape.hidden_size * (2 * heads + 2 * keys + 3 * shape.intermediate_size)
    planned, weights = packed_bytes(policy.model, FEWEST), 2 * layer * shape.num_hidden_layers
    assert planned >= weights if layout == "ours" else planned == weights  # panels are padded
    held = [weight.held.numel() for weight in packed._weights.values() if weight is not None]
    assert 2 * sum(held) == planned


def test_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not packed_bytes(half().model, FEWEST - 1)
    assert not packed_bytes(Policy(tiny_model()).model, FEWEST)
    assert packed_bytes(Policy(tiny_model()).model, FEWEST, torch.bfloat16)
    monkeypatch.setattr(packing, "LARGEST", 1000)
    assert not packed_bytes(half().model, FEWEST)
    assert not pack(half().model, rows=4, completion=FEWEST)._weights


@torch.no_grad()
def test_new_weights_are_packed_anew() -> None:
    """A sampler packs at the start of each batch, so an update in between is seen."""
    policy = half()
    x = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    module = policy.model.model.layers[0].self_attn.q_proj
    before = pack(policy.model, rows=1, completion=FEWEST).product(module, x)
    for parameter in policy.parameters():
        parameter.mul_(2)
    after = pack(policy.model, rows=1, completion=FEWEST).product(module, x)
    assert before is not None
    assert after is not None
    assert torch.equal(after, 2 * before)
    assert not torch.equal(after, before)
