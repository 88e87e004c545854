"""Products with one input as one product: the same numbers, from weights that are still written."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grouper.config.schema import LoraConfig, ModelConfig
from grouper.kernels.joined import join_products
from grouper.kernels.switch import planned
from grouper.models.loading import weightless_policy
from grouper.sampling.weights import SamplingWeights

IDS = torch.arange(6, 14)[None]


class Products(TorchDispatchMode):
    """Counts matrix products by the number of columns of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = Counter[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in {"aten::mm", "aten::addmm"}:
            self.columns[result.shape[-1]] += 1
        return result


def joined(family: str) -> tuple[Any, Any]:
    """A model, and a copy of it with joined products."""
    model = tiny_model(family)
    model.requires_grad_(False)
    other = copy.deepcopy(model)
    join_products(other, [])
    return model, other


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3"])
@torch.no_grad()
def test_a_model_computes_the_same_in_fewer_products(family: str) -> None:
    model, other = joined(family)
    with Products() as apart:
        expected = model(IDS).logits
    with Products() as together:
        found = other(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    saved = apart.columns.total() - together.columns.total()
    assert saved == 3 * model.config.num_hidden_layers


@torch.no_grad()
def test_weights_keep_their_names_and_are_written_into() -> None:
    model, other = joined("qwen2")
    names = dict(model.named_parameters())
    assert names.keys() == dict(other.named_parameters()).keys()
    for parameter in names.values():
        parameter.mul_(1.3)
    for name, parameter in other.named_parameters():
        parameter.copy_(names[name])
    torch.testing.assert_close(other(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    attention = other.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1


@torch.no_grad()
def test_each_input_has_its_own_product_whatever_the_order() -> None:
    model, other = joined("qwen2")
    ours, theirs = (m.model.layers[0].self_attn for m in (other, model))
    generator = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    first, second = torch.randn(2, 1, 5, width, generator=generator).unbind()

    def check(name: str, x: Tensor) -> None:
        found, expected = (getattr(attention, name)(x) for attention in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    for name, x in (
        ("v_proj", first),
        ("q_proj", first),
        ("q_proj", first),
        ("k_proj", second),
        ("v_proj", first),
        ("q_proj", second),
        ("v_proj", second),
        ("k_proj", second),
    ):
        check(name, x)


def test_other_layers_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    class Block(nn.Module):
        def __init__(self, *parts: nn.Linear) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = parts

    pairs = [
        (nn.Linear(4, 6), Special(4, 6)),
        (nn.Linear(4, 6), nn.Linear(4, 6, bias=False)),
        (nn.Linear(4, 6), nn.Linear(5, 6)),
        (nn.Linear(4, 6), nn.Linear(4, 6).double()),
    ]
    for parts in pairs:
        join_products(Block(*parts), [])
        assert not any("forward" in vars(part) for part in parts)
    both = nn.Linear(4, 6), nn.Linear(4, 5)
    join_products(Block(*both), [both[0].weight])
    assert not any("forward" in vars(part) for part in both), "one of them is read elsewhere"
    join_products(Block(*both), [])
    assert all("forward" in vars(part) for part in both)


@pytest.mark.parametrize(
    ("settings", "copied", "products"),
    [
        ({"dtype": "float32"}, torch.bfloat16, True),
        # The copy shares the frozen weights, which would then exist twice.
        ({"dtype": "bfloat16", "lora": LoraConfig()}, torch.bfloat16, False),
        ({"dtype": "float32", "lora": LoraConfig()}, torch.float32, True),
    ],
)
def test_only_a_copy_of_its_own_is_joined(
    settings: dict[str, Any], copied: torch.dtype, products: bool
) -> None:
    config = ModelConfig.model_validate({"path": "x", **settings})
    shape = tiny_model("qwen2").config
    for device in ("cpu", "cuda"):
        with planned(device):
            policy = weightless_policy(config, shape, device)
            sampled = SamplingWeights(policy, copied).current()
        layer = sampled.model.get_decoder().layers[0]
        queries = layer.self_attn.q_proj
        of_base = vars(getattr(queries, "base_layer", queries))
        assert ("forward" in of_base) == (products and device == "cuda")
