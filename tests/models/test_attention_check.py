"""The start-up check of attention: it passes what is right, and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from grouper.config.schema import LoraConfig
from grouper.errors import ModelError
from grouper.models import attention
from grouper.models.attention import SharedPrompts
from grouper.models.attention_check import check_logits, check_native_attention
from grouper.models.loading import _new_adapter
from grouper.models.policy import Policy
from grouper.models.token_scores import LogitScaling

INTERFACE = [family for family in FAMILIES if family != "gpt2"]
BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize("family", INTERFACE)
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_every_family_passes_and_stays_as_it_was(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    window = getattr(model.config, "sliding_window", None)
    check_native_attention(Policy(model))
    assert getattr(model.config, "sliding_window", None) == window
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation not in {attention.NAME, "grouper-check"}


def test_a_model_that_does_not_run_is_one_paragraph() -> None:
    """X-MOD wants to be told a language first."""
    config = AutoConfig.for_model("xmod", vocab_size=97, hidden_size=32, num_attention_heads=4)
    config.update({"num_hidden_layers": 1, "is_decoder": True})
    policy = Policy(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ModelError, match="XmodForCausalLM cannot be run: Input language unknown"):
        check_logits(policy)


def test_what_does_not_run_natively_is_not_looked_at() -> None:
    check_native_attention(Policy(tiny_model("gpt2"), native=False))


@pytest.mark.parametrize("seed", range(10))
def test_24_random_layers_in_bfloat16_pass(seed: int) -> None:
    """T9: rounding added up over the layers, and a model like this was refused."""
    shape = {"num_hidden_layers": 24, "hidden_size": 128, "head_dim": 32, "scale": 1.0}
    model = tiny_model("qwen2", intermediate_size=256, **shape)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    check_native_attention(Policy(model.to(BFLOAT16)))


@pytest.mark.parametrize("kind", ["autocast", "lora", "checkpointed"])
def test_what_is_trained_in_another_way_passes(kind: str) -> None:
    model = tiny_model(dtype=BFLOAT16 if kind == "lora" else torch.float32)
    if kind == "lora":
        _new_adapter(model, LoraConfig(rank=4), "base", seed=0)
    policy = Policy(
        model,
        compute_dtype=None if kind == "checkpointed" else BFLOAT16,
        gradient_checkpointing=kind == "checkpointed",
    )
    check_native_attention(policy)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", [None, BFLOAT16])
def test_the_logits_of_every_family_are_its_own(family: str, compute: torch.dtype | None) -> None:
    check_logits(Policy(tiny_model(family), compute_dtype=compute))
    check_logits(Policy(tiny_model(family, dtype=BFLOAT16)))


# --- faults --------------------------------------------------------------------------------------

Attend = Callable[..., Tensor]


def wrong_spec(honest: Attend, **wrong: Callable[[Any], Any]) -> Attend:
    """Our attention with one thing misunderstood."""

    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, spec: Any) -> Tensor:
        changes = {name: change(getattr(spec, name)) for name, change in wrong.items()}
        return honest(self, query, key, value, replace(spec, **changes))

    return attend


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_wrong_scale_is_caught(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = wrong_spec(SharedPrompts.attend, scaling=lambda scaling: 1.05 * scaling)
    monkeypatch.setattr(SharedPrompts, "attend", wrong)
    with pytest.raises(ModelError, match=r"disagrees .* layer 0 .results differ"):
        check_native_attention(Policy(tiny_model(family, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("window", [4, 4096])
def test_a_missing_window_is_caught(
    window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is longer than any text we could look at, too."""
    wrong = wrong_spec(SharedPrompts.attend, window=lambda _: None)
    monkeypatch.setattr(SharedPrompts, "attend", wrong)
    model = tiny_model("mistral", dtype=dtype, sliding_window=window)
    with pytest.raises(ModelError, match=r"disagrees .* layer 0 .results differ"):
        check_native_attention(Policy(model))
    assert model.config.sliding_window == window


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_shifted_positions_are_caught(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions that begin one position late; attention itself would be the same."""
    honest = SharedPrompts.__init__

    def shifted(self: Any, batch: Any) -> None:
        honest(self, batch)
        completions = torch.arange(self.token_ids.shape[1]) >= int(batch.prompt_lengths.sum())
        self.position_ids = self.position_ids + completions

    monkeypatch.setattr(SharedPrompts, "__init__", shifted)
    with pytest.raises(ModelError, match=r"disagrees .* layer 0 .(queries|keys) differ"):
        check_native_attention(Policy(tiny_model(dtype=dtype)))


def test_a_fault_in_a_late_layer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SharedPrompts.attend

    def attend(self: Any, *heads: Any) -> Tensor:
        spec = heads[-1]
        return honest(self, *heads) * (1.01 if spec.layer == 1 else 1.0)

    monkeypatch.setattr(SharedPrompts, "attend", attend)
    with pytest.raises(ModelError, match="layer 1"):
        check_native_attention(Policy(tiny_model(dtype=BFLOAT16)))


class Mixing(torch.nn.Module):
    """A convolution over neighboring tokens, as LFM2 has in place of attention."""

    layer_idx = 0

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states + hidden_states.roll(1, 1), None


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_what_mixes_tokens_in_another_way_is_refused(dtype: torch.dtype) -> None:
    """It went over the borders of sequences, in every step, without a word."""
    model = tiny_model(dtype=dtype)
    model.model.layers[0].self_attn = Mixing()
    with pytest.raises(ModelError, match=r"layer 0 \(results of Mixing differ by"):
        check_native_attention(Policy(model))
    model._is_stateful = True  # as recurrent models say
    assert not Policy(model).native


def test_what_our_attention_cannot_take_is_one_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's keys and values differ in size; Nemotron does not hand on what we need."""

    def attend(self: Any, *heads: Any) -> Tensor:
        raise RuntimeError("The size of tensor a (32) must match\nthe size of tensor b (4)")

    monkeypatch.setattr(SharedPrompts, "attend", attend)
    with pytest.raises(ModelError, match="does not fit Qwen3ForCausalLM: The size of tensor a"):
        check_native_attention(Policy(tiny_model()))


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("qwen3", LogitScaling(factor=0.5)),
        ("cohere", LogitScaling()),
        ("gemma2", LogitScaling()),
    ],
)
@pytest.mark.parametrize("native", [True, False])
def test_a_head_of_another_kind_is_refused(family: str, wrong: LogitScaling, native: bool) -> None:
    """What HyperCLOVA X calls `logits_scaling` multiplies, and was taken for a divisor."""
    model = tiny_model(family)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(100)  # where a cap bites
    policy = Policy(model, native=native)
    check_logits(policy)
    policy._scaling = wrong
    with pytest.raises(ModelError, match="logits disagree with those of"):
        check_logits(policy)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("bert", "BertLMHeadModel sees the tokens after each token .* not a causal language model"),
        ("modernbert-decoder", "logits disagree with those of ModernBertDecoderForCausalLM"),
        ("llama4_text", "logits disagree with those of Llama4ForCausalLM"),
    ],
)
def test_what_is_wrong_whatever_the_attention_is_refused(kind: str, told: str) -> None:
    """Masked models ran with padded rows; ModernBERT has a layer between its body and its head."""
    small = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **heads))
    with pytest.raises(ModelError, match=told):
        check_logits(Policy(model.eval(), native=False))


def test_weights_that_are_not_finite_are_named() -> None:
    """R10: they were told as attention that disagrees, to be reported."""
    policy = Policy(tiny_model())
    with torch.no_grad():
        policy.model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(
        ModelError, match=r"1 of 2,048 .* model\.layers\.1\.mlp\.up_proj\.weight are"
    ) as told:
        check_native_attention(policy)
    assert "report" not in str(told.value)


def test_weights_too_large_to_compute_with_are_no_fault_of_ours() -> None:
    """A checkpoint of a run that diverged was told as a disagreement, to be reported."""
    policy = Policy(tiny_model())
    with torch.no_grad():
        policy.model.model.layers[1].mlp.up_proj.weight.mul_(1e38)
    with pytest.raises(ModelError, match="use an earlier checkpoint") as told:
        check_logits(policy)
    assert "report" not in str(told.value)
