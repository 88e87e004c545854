"""Whole models with and without the kernels; and that nothing else notices them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from grouper.algorithms.batching import unweighted_rows
from grouper.kernels import modules
from grouper.kernels.cpu.library import library, listened
from grouper.kernels.switch import running, switched_off
from grouper.models.policy import Policy

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler, or kernels are off")

# What a family's code has for a kernel: Gemma 2 caps its scores, Cohere centres its norms and
# rotates neighbors, GPT-2 has attention only.
ALL = {"rms_norm", "rotate", "gated", "attention"}
USED = {
    "gemma2": ALL - {"attention"},
    "cohere": {"gated", "attention"},
    "gpt2": {"attention"},
}


@pytest.fixture
def calls() -> Iterator[set[str]]:
    """The kernels that were called."""
    found: set[str] = set()

    def note(name: str, *_: object) -> None:
        found.add(name.rpartition("_")[0])  # without its types

    with listened(note):
        yield found


def gradients(policy: Policy) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy.zero_grad()
    ids = ((torch.arange(24).view(4, 6) * 7 + 3) % 97).tolist()
    # Two prompts and four completions, of different lengths.
    completions = [ids[0], ids[1][:1], ids[2][:4], ids[3][:3]]
    batch = unweighted_rows([ids[0][:5], ids[1][:3]], completions, [0, 1, 0, 1])
    logprobs = policy(batch).logprobs
    logprobs.sum().backward()
    return logprobs.detach(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_says_and_learns_the_same(family: str, calls: set[str]) -> None:
    policy = Policy(tiny_model(family))
    calls.clear()  # a class that is new is tried on random numbers
    logprobs, fused = gradients(policy)
    expected = USED.get(family, ALL)
    assert {name.removesuffix("_backward") for name in calls} == expected
    assert {name for name in calls if name.endswith("_backward")} == {
        f"{name}_backward" for name in expected - {"rotate"}
    }
    calls.clear()
    with switched_off():
        plain_logprobs, plain = gradients(policy)
    assert not calls
    assert float((logprobs - plain_logprobs).abs().max()) < 2e-5
    for ours, theirs in zip(fused, plain, strict=True):
        assert float((ours - theirs).norm() / (theirs.norm() + 1e-6)) < 1e-4


def test_a_copy_runs_its_own_weights() -> None:
    policy = Policy(tiny_model("qwen3"))
    other = Policy(copy.deepcopy(policy.model))
    before = gradients(policy)[0]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(gradients(policy)[0], before)
    assert not torch.allclose(gradients(other)[0], before)


def test_a_model_called_directly_is_left_alone(calls: set[str]) -> None:
    model = tiny_model("qwen3")
    ids = torch.arange(6)[None]
    before = model(input_ids=ids).logits
    Policy(model)
    calls.clear()
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not calls


def test_transformers_functions_are_theirs_once_a_pass_is_over(calls: set[str]) -> None:
    """T11: what the pass swaps in its module does not stay there."""
    before = modeling_qwen3.apply_rotary_pos_emb
    policy = Policy(tiny_model("qwen3"))
    assert modeling_qwen3.apply_rotary_pos_emb is before
    gradients(policy)
    assert "rotate" in calls
    assert modeling_qwen3.apply_rotary_pos_emb is before
    with running(), running():
        assert modeling_qwen3.apply_rotary_pos_emb is not before
    assert modeling_qwen3.apply_rotary_pos_emb is before


def test_attaching_twice_does_nothing_more() -> None:
    model = tiny_model("gemma2")
    modules.attach(model)
    forwards = [m.forward for m in model.modules()]
    modules.attach(model)
    assert [m.forward for m in model.modules()] == forwards


class Odd(nn.Module):
    """A norm that divides by the largest value; its weight and eps look like the usual one's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max() * self.weight


class OddMLP(nn.Module):
    """It adds where others multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


@pytest.mark.parametrize("kind", [Odd, OddMLP])
def test_a_layer_that_only_looks_like_one_of_ours_keeps_its_code(kind: type[nn.Module]) -> None:
    module = kind()
    modules.attach(module)
    assert "forward" not in vars(module)


def test_an_activation_without_a_kernel_keeps_its_code() -> None:
    model = tiny_model("llama", hidden_act="relu")
    modules.attach(model)
    assert "forward" not in vars(model.model.layers[0].mlp)
    assert "forward" in vars(model.model.layers[0].input_layernorm)


def test_the_global_generator_is_not_touched() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    modules._norm_ones.cache_clear()
    modules.attach(tiny_like := tiny_model("llama"))
    del tiny_like
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), before)
