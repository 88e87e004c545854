"""An adapter of another base model is refused by its configuration and names alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_batch, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from grouper.config.loading import load_recipe
from grouper.config.schema import LoraConfig, ModelConfig
from grouper.errors import ModelError
from grouper.models.loading import (
    _lean_adapters,
    _new_adapter,
    check_adapter,
    load_policy,
    quiet,
    save_policy,
)
from grouper.sampling.engine import make_engine
from grouper.sampling.factory import Samplers
from grouper.sampling.kv_cache import CacheSize
from grouper.sampling.weights import SamplingWeights


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Nothing to write: these tests load no tokenizer."""


Change = Callable[[Path, str], None]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    with quiet():
        tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def adapter(base: Path) -> Path:
    # By name: all-linear is saved as the full name of each layer, which says how many there are.
    lora = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))
    config = ModelConfig(path=str(base), lora=lora)
    folder = base.parent / "adapter"
    save_policy(load_policy(config, str(base), seed=0), NoTokenizer(), folder)
    return folder


def set_base(adapter: Path, base: object) -> None:
    configure(adapter, base_model_name_or_path=base)


def configure(adapter: Path, **changes: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_what_fits_passes(base: Path, adapter: Path) -> None:
    config = ModelConfig(path=str(base))
    for path in (adapter, base, "owner/model"):
        check_adapter(config, str(path))
    check_adapter(ModelConfig(path=str(adapter)), str(adapter))


def test_equal_adapters_are_equal_files(base: Path) -> None:
    """PEFT keeps the names of layers in a set, whose order is another one in every process."""
    config = ModelConfig(path=str(base), lora=LoraConfig(rank=4))
    folder = base.parent / "adapter"
    save_policy(load_policy(config, str(base), seed=0), NoTokenizer(), folder)
    names = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    assert len(names) > 5
    assert names == sorted(names)


def test_another_base_than_the_recipes(base: Path, adapter: Path) -> None:
    with quiet():
        tiny_model(intermediate_size=96).save_pretrained(base.parent / "other")
    config = ModelConfig(path=str(base.parent / "other"))
    with pytest.raises(ModelError) as caught:
        check_adapter(config, str(adapter), where="grpo.start_from")
    assert caught.value.where == "grpo.start_from"
    assert "(intermediate_size differ)" in caught.value.what


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": 48}, r"lora_B.weight is 32 x 4 in the adapter, is 48 x 4 for this base"),
        ({"num_hidden_layers": 1}, r"layers\.1\.\S+ is 4 x \d+ in the adapter, is not there for"),
        ({"num_hidden_layers": 3}, r"layers\.2\.\S+ is not there in the adapter, is 4 x \d+ for"),
    ],
)
def test_a_base_that_was_exchanged(
    adapter: Path, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """PEFT refuses the first at the last moment, and takes the others without a word."""
    with quiet():
        tiny_model(**change).save_pretrained(tmp_path / "exchanged")
    set_base(adapter, str(tmp_path / "exchanged"))
    with pytest.raises(ModelError, match=told):
        check_adapter(ModelConfig(path=str(adapter)), str(adapter))


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ("missing", r"layers\.1\.\S+q_proj\.lora_A\.weight is not there in the adapter"),
        ("unexpected", r"layers\.7\.\S+q_proj\.lora_A\.weight is 4 x 32 in .* not there for this"),
    ],
)
def test_a_tensor_too_few_or_too_many(
    base: Path, adapter: Path, change: str, refusal: str, pickled: bool
) -> None:
    """PEFT warns of the first, drops the second without a word, and trains on."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    if change == "missing":
        del tensors[name]
    else:
        tensors[name.replace("layers.1", "layers.7")] = tensors[name].clone()
    if pickled:
        file.unlink()
        torch.save(tensors, adapter / "adapter_model.bin")
    else:
        save_file(tensors, file)
    with pytest.raises(ModelError, match=refusal):
        load_policy(ModelConfig(path=str(base)), str(adapter), seed=0)


def test_layers_that_the_base_does_not_have(adapter: Path, tmp_path: Path) -> None:
    with quiet():
        tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    set_base(adapter, str(tmp_path / "gpt2"))
    with pytest.raises(ModelError, match="does not fit its base model"):
        check_adapter(ModelConfig(path=str(adapter)), str(adapter))


def _cut(adapter: Path, base: str) -> None:
    del base
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_json(adapter: Path, base: str) -> None:
    del base
    (adapter / "adapter_config.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_cut, r"adapter_model.safetensors' cannot be read"),
        (_no_json, r"adapter_config.json' cannot be read"),
        (lambda adapter, _: set_base(adapter, None), "does not say which base model"),
        (lambda adapter, base: set_base(adapter, base + "-gone"), "there is no folder"),
        (lambda adapter, _: configure(adapter, peft_type="IA3"), "of the kind IA3, not LoRA"),
        (lambda adapter, _: configure(adapter, alora_invocation_tokens=[7]), "the kind ALORA, not"),
        (lambda adapter, _: configure(adapter, init_lora_weights="pissa_niter_4"), "which changes"),
        (lambda adapter, _: configure(adapter, init_lora_weights="OLoRA"), "with OLoRA, which"),
        (lambda adapter, _: configure(adapter, r="x"), "does not fit its base model"),
        (lambda adapter, _: configure(adapter, target_modules="("), "does not fit .* missing"),
        (lambda adapter, _: configure(adapter, modules_to_save=["lm_head"]), "fit .*lm_head"),
    ],
)
def test_damage_is_one_paragraph(base: Path, adapter: Path, change: Change, told: str) -> None:
    change(adapter, str(base))
    with pytest.raises(ModelError, match=told):
        check_adapter(ModelConfig(path=str(base)), str(adapter))


def test_adapters_that_pass_over_memory_less_often_compute_the_same() -> None:
    """G2: the layer and its adapter, forward and backward, beside PEFT's own forward."""
    model = tiny_model()
    _new_adapter(model, LoraConfig(rank=4, alpha=3), "base", seed=0)
    layer: Any = model.double().model.layers[0].mlp.up_proj
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(1, 5, 32, dtype=torch.float64, requires_grad=True)

    def results() -> list[Tensor]:
        out = layer(x)
        wanted = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]

    expected = results()
    _lean_adapters(model)
    assert "forward" in vars(layer)
    for ours, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def made_by_peft(base: Path, **settings: Any) -> Path:
    """An adapter of another program, with random weights."""
    lora = peft.LoraConfig(**{"target_modules": ["up_proj"], **settings}, task_type="CAUSAL_LM")
    with quiet():
        made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.uniform_(0.5, 1.0)
    made.peft_config["default"].base_model_name_or_path = str(base)
    made.save_pretrained(base.parent / "made")
    return base.parent / "made"


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@torch.no_grad()
def test_an_adapter_at_one_of_two_tied_ends_changes_that_end_alone(
    target: str, tmp_path: Path
) -> None:
    """Merged it was added to both: into the copy that samples, and where it is trained on."""
    base = tmp_path / "tied"
    with quiet():
        tiny_model(tie_word_embeddings=True).save_pretrained(base)
    folder = str(made_by_peft(base, target_modules=[target]))
    beside = load_policy(ModelConfig(path=str(base), lora=LoraConfig(rank=8)), folder, seed=0)
    merged = load_policy(ModelConfig(path=str(base)), folder, seed=0)
    save_policy(merged, NoTokenizer(), tmp_path / "merged")
    again = ModelConfig(path=str(tmp_path / "merged"))
    copy, batch = SamplingWeights(beside, torch.float32).current(), make_batch()
    for policy in (merged, copy, load_policy(again, str(again.path), seed=0)):
        gap = (policy(batch).logprobs - beside(batch).logprobs).abs()
        assert float(gap.max()) < 2e-4


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_bias": True}])
def test_what_is_more_than_a_plain_adapter_is_computed_by_peft(
    more: dict[str, bool], base: Path
) -> None:
    """The magnitudes of DoRA, and biases, were left out wherever autocast was on."""
    config = ModelConfig(path=str(base), compute_dtype="bfloat16", lora=LoraConfig(rank=8))
    policy = load_policy(config, str(made_by_peft(base, **more)), seed=0)
    layer: Any = policy.model.model.layers[0].mlp.up_proj
    x = torch.randn(1, 5, 32)
    with policy.autocast():
        assert torch.equal(layer(x), type(layer).forward(layer, x))


@pytest.mark.parametrize(
    "more",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [7]},
        *([{"kasa_config": {}}] if hasattr(peft.LoraConfig, "kasa_config") else []),
    ],
)
def test_what_is_more_than_a_sum_is_not_merged_as_if_it_were_one(
    more: dict[str, Any], base: Path
) -> None:
    """Its magnitudes or biases would be missing in rollouts; of modules it was a traceback."""
    config = ModelConfig(path=str(base), lora=LoraConfig(rank=8))
    policy = load_policy(config, str(made_by_peft(base, **more)), seed=0)
    with pytest.raises(ModelError, match="DoRA or biases"):
        SamplingWeights(policy, torch.float32).current()
    recipe = load_recipe("demo").override(model={"path": str(base), "new": None, "lora": {}})
    samplers = Samplers(recipe=recipe, tokenizer=None, stop_token_ids=[2], longest=4)
    assert samplers.over(policy)._weights.current() is policy


def test_an_adapter_that_cannot_be_merged_is_one_paragraph(base: Path) -> None:
    folder = str(made_by_peft(base, lora_bias=True))
    with pytest.raises(ModelError, match=r"cannot be merged: .* has no bias. Set model.lora"):
        load_policy(ModelConfig(path=str(base)), folder, seed=0)


def test_a_head_that_is_saved_whole_beside_its_tied_embedding_is_sampled(tmp_path: Path) -> None:
    """PEFT takes the sides of its matrix for each other; it was a traceback in the sampler."""
    with quiet():
        tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    ends = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    folder = str(made_by_peft(tmp_path / "tied", **ends))
    policy = load_policy(
        ModelConfig(path=str(tmp_path / "tied"), lora=LoraConfig()), folder, seed=0
    )
    assert make_engine(policy, CacheSize(1, 1, 4, 4), [96]).rows.vocabulary == 97


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_products_of_adapters_are_in_the_dtype_of_products(compute: str, base: Path) -> None:
    """Adapters are float32 beside a base of any dtype."""
    config = ModelConfig.model_validate(
        {"path": str(base), "dtype": compute, "lora": LoraConfig(rank=4)}
    )
    policy = load_policy(config, str(base), seed=0)
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    seen = set()
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.requires_grad:
            module.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    policy(make_batch()).logprobs.sum().backward()
    assert seen == {getattr(torch, compute)}
    gradients = [p.grad for p in policy.trainable().values()]
    assert all(g is not None and g.dtype == torch.float32 for g in gradients)
