"""Models on disk: loading, adapters, and every mistake told in one paragraph."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import make_batch, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from grouper import errors
from grouper.config.schema import LoraConfig, ModelConfig
from grouper.errors import ConfigError, ModelError
from grouper.models import device, loading
from grouper.models.folders import ADAPTER_FILE, require_model_folder
from grouper.models.loading import (
    context_length,
    load_policy,
    load_tokenizer,
    save_policy,
    shape_of,
    stop_ids_of,
)
from grouper.models.policy import Policy
from grouper.models.quiet import quiet


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Nothing to write: these tests load no tokenizer."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model()
    model.generation_config.eos_token_id = [2, 5]
    model.generation_config.repetition_penalty = 1.05
    with quiet():
        model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config(path: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(path=str(path), **changes)


LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ i }}{% for j in range(9999) %}{{ '' }}{% endfor %}{% endfor %}",
)


@pytest.mark.parametrize("template", LOOPS)
def test_a_chat_template_that_does_not_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """It hung, and so did everything that loaded the model."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(loading, "_TEMPLATE_SECONDS", 0.3)
    before = threading.active_count()
    with pytest.raises(ModelError, match=r"the chat template of .* does not end"):
        load_tokenizer(str(tmp_path))
    assert threading.active_count() == before, "the thread has ended"


def test_threads_load_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that transformers loads at the same time, one was left without weights."""
    inside, most = 0, 0

    def from_pretrained(*_: object, **__: object) -> list[int]:
        nonlocal inside, most
        inside += 1
        for _turn in range(100):
            time.sleep(0)  # lets another thread go on
            most = max(most, inside)
        inside -= 1
        return [1]

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(shape_of, [str(tmp_path)] * 8)) == [[1]] * 8
    assert most == 1


@torch.no_grad()
def test_a_saved_policy_loads_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    policy = load_policy(config(folder), str(folder), seed=0)
    save_policy(policy, NoTokenizer(), tmp_path / "again")
    again = load_policy(config(tmp_path / "again"), str(tmp_path / "again"), seed=0)
    batch = make_batch()
    assert torch.equal(policy(batch).logprobs, again(batch).logprobs)


def test_end_ids_come_from_the_generation_config_and_nothing_else_does(folder: Path) -> None:
    assert stop_ids_of(str(folder)) == [2, 5]
    adapter = folder.parent / "of-peft"  # which writes none
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(folder)}
    (adapter / ADAPTER_FILE).write_text(json.dumps(settings))
    assert stop_ids_of(str(adapter)) == [2, 5]
    (folder / "generation_config.json").unlink()
    assert stop_ids_of(str(folder)) == stop_ids_of(str(adapter)) == []


@pytest.mark.parametrize("kind", ["t5", "bart", "vit"])
def test_what_does_not_continue_text_is_refused(kind: str, tmp_path: Path) -> None:
    """Of BART the decoder was taken, without the texts that it attends to."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelError, match=f"{kind} is not an architecture of a causal") as told:
        load_policy(config(tmp_path), str(tmp_path), seed=0)
    assert told.value.fix == "Name a model that continues text."


@pytest.mark.parametrize("attention", ["native", "sdpa"])
def test_a_model_without_sdpa_runs_its_own_attention(attention: Any, tmp_path: Path) -> None:
    """They were said to be damaged, or unknown to transformers."""
    shape = {"vocab_size": 97, "hidden_size": 32, "n_head": 4, "n_layer": 2}
    with quiet():
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **shape))
        made.save_pretrained(tmp_path)
    policy = load_policy(config(tmp_path, attention=attention), str(tmp_path), seed=0)
    assert not policy.native
    assert policy.model.config._attn_implementation == "eager"


def test_the_context_is_the_models_own(folder: Path) -> None:
    assert context_length(load_policy(config(folder), str(folder), seed=0).model.config) == 128


def test_the_context_of_longrope_ends_where_its_factors_change() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 24}
    assert context_length(tiny_model("llama", rope_parameters=rope).config) == 24


def test_lora_of_one_seed_is_one_adapter_and_leaves_the_generator_alone(folder: Path) -> None:
    lora = config(folder, lora=LoraConfig(rank=4, alpha=8))
    state = torch.get_rng_state()
    first, second, other = (load_policy(lora, str(folder), seed=s).snapshot() for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)


@torch.no_grad()
def test_an_adapter_is_continued_with_lora_and_merged_without(folder: Path, tmp_path: Path) -> None:
    """P31: one rule, and it changes no prediction."""
    lora = config(folder, lora=LoraConfig(rank=4, alpha=8))
    policy = load_policy(lora, str(folder), seed=0)
    for parameter in policy.trainable().values():
        parameter.normal_(std=0.1)
    adapter = tmp_path / "adapter"
    save_policy(policy, NoTokenizer(), adapter)
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(folder)
    batch = make_batch()
    expected = policy(batch).logprobs
    continued = load_policy(lora, str(adapter), seed=1)
    assert torch.equal(continued(batch).logprobs, expected)
    assert continued.trainable().keys() == policy.trainable().keys()
    merged = load_policy(config(folder), str(adapter), seed=1)
    assert merged.adapter is None
    assert len(merged.trainable()) == len(list(Policy(tiny_model()).parameters()))
    torch.testing.assert_close(merged(batch).logprobs, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "slowdown", "told"),
    [
        (
            {"dtype": "bfloat16"},
            5.0,
            "5.0 times as long as in float32. model.dtype=float32 is faster",
        ),
        (
            {"compute_dtype": "bfloat16"},
            5.0,
            "5.0 times as long as in float32. model.compute_dtype=float32 is faster",
        ),
        ({}, 0.4, "2.5 times as fast in bfloat16 as in float32. model.compute_dtype=fastest uses"),
        ({"dtype": "bfloat16"}, 0.4, None),
        ({"compute_dtype": "float32"}, 0.4, None),
        ({}, 0.8, None),
        ({}, 5.0, None),
    ],
)
def test_products_that_are_faster_in_the_other_dtype_are_reported(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    slowdown: float,
    told: str | None,
) -> None:
    """A step of SmolLM2 took six minutes on a processor without instructions for bfloat16."""
    monkeypatch.setattr(loading, "_LARGE", 0)
    for module in (device, loading):
        monkeypatch.setattr(module, "bfloat16_slowdown", lambda: slowdown)
    load_policy(config(folder, **changes), str(folder), seed=0)
    if told is None:
        assert "bfloat16" not in caplog.text
    else:
        assert told in caplog.text


def test_a_missing_folder_names_the_nearest(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no folder .*Did you mean .*model'"):
        require_model_folder(str(folder.parent / "modle"))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a model \(config.json\) nor an adapter"):
        require_model_folder(str(tmp_path))


def test_damaged_weights_are_one_paragraph(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(config(folder), str(folder), seed=0)


@pytest.mark.parametrize("prefix", [None, "_orig_mod."])
def test_weights_that_are_not_there_are_not_made_up(folder: Path, prefix: str | None) -> None:
    """A run began with random numbers in their place, and only transformers spoke of it."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    if prefix is None:
        del weights["model.layers.1.mlp.up_proj.weight"]
    else:
        weights = {prefix + name: value for name, value in weights.items()}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks \d+ of the weights .*, such as \S+weight") as told:
        load_policy(config(folder), str(folder), seed=0)
    assert str(folder) in told.value.what
    assert "wrapper" in told.value.fix


def test_weights_that_the_model_has_no_place_for_are_left(folder: Path) -> None:
    """As those of a head for several tokens at once, which some models bring."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    load_policy(config(folder), str(folder), seed=0)


def test_code_of_a_model_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal transformers asked whether to run it."""
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    places = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    text = json.dumps({"model_type": "its-own", "auto_map": places})
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ModelError, match="custom code") as told:
        load_policy(config(tmp_path), str(tmp_path), seed=0)
    assert told.value.fix.startswith("Grouper never runs it")
    assert not asked


def test_a_hub_name_without_a_network_is_one_paragraph() -> None:
    with pytest.raises(ModelError, match="must be a local folder or in the Hub cache"):
        load_tokenizer("no-such-owner/no-such-model")


def test_an_adapter_of_another_base_model(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its base is not loaded behind the recipe's back; a copy of the recipe's own is told."""
    lora = config(folder, lora=LoraConfig(rank=4, alpha=8))
    save_policy(load_policy(lora, str(folder), seed=0), NoTokenizer(), tmp_path / "adapter")
    with quiet():
        tiny_model(num_hidden_layers=3).save_pretrained(tmp_path / "deeper")
    with pytest.raises(ModelError) as caught:
        load_policy(config(tmp_path / "deeper"), str(tmp_path / "adapter"), seed=0)
    assert "(num_hidden_layers differ)" in caught.value.what
    assert f"Set model.path={folder}" in caught.value.fix
    shutil.copytree(folder, tmp_path / "copy")
    load_policy(config(tmp_path / "copy"), str(tmp_path / "adapter"), seed=0)
    assert f"was trained on {folder}, which is used in place of {tmp_path / 'copy'}" in caplog.text


def test_a_gated_model_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers words what the Hub says; the second half has the address and a request id."""

    def refused(*_: object, **__: object) -> None:
        raise OSError("You are trying to access a gated repo.\nMake sure to have access to it.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refused)
    with pytest.raises(ModelError) as caught:
        load_policy(config(folder), "meta-llama/Llama-3.2-1B-Instruct", seed=0)
    assert caught.value.what == (
        "'meta-llama/Llama-3.2-1B-Instruct' is gated: its owner asks you to accept terms first"
    )
    assert "hf auth login" in caught.value.fix


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (("nothing_like_it",), "'nothing_like_it'"),
        (("q_proj", "v_prj", "o"), "'v_prj' and no 'o'"),  # PEFT is content with one that is there
        (("proj",), "'proj'"),  # a part of a name is no name
    ],
)
def test_target_modules_that_do_not_exist_are_named(
    folder: Path, targets: tuple[str, ...], missing: str
) -> None:
    wrong = config(folder, lora=LoraConfig(target_modules=targets))
    with pytest.raises(ModelError, match=f"LoRA cannot be added: the model has no layer {missing}"):
        load_policy(wrong, str(folder), seed=0)


def test_soft_capping_is_never_left_to_sdpa(tmp_path: Path) -> None:
    with quiet():
        tiny_model("gemma2").save_pretrained(tmp_path / "gemma")
    for attention in ("native", "sdpa"):
        chosen = config(tmp_path / "gemma", attention=attention)
        policy = load_policy(chosen, str(tmp_path / "gemma"), seed=0)
        assert policy.model.config._attn_implementation == "eager"


needs_bitsandbytes = pytest.mark.needs_package("bitsandbytes", extra="quantized")
QLORA = {"quantization": "4bit", "lora": LoraConfig(rank=4, alpha=8)}


def test_quantized_weights_need_lora() -> None:
    with pytest.raises(ValueError, match=r"give model\.lora"):
        ModelConfig(path="x", quantization="4bit")


def test_a_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bitsandbytes.*grouper-rl\[quantized\]"):
        load_policy(config(folder, **QLORA), str(folder), seed=0)


@pytest.mark.slow
@needs_bitsandbytes
def test_no_package_for_faster_products_on_a_cpu_is_advised() -> None:
    """Every command that made an adapter began with it, whether or not anything was in 4 bit."""
    code = "import grouper.models.loading, bitsandbytes"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@needs_bitsandbytes
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_4_bit_base_is_trained_through_its_adapter(
    folder: Path, tmp_path: Path, checkpointing: bool
) -> None:
    """Near the base model, trained by its adapter alone, and the same when loaded again."""
    from grouper.training.parallel import ParallelPolicy
    from grouper.training.update import accumulate_gradient, sft_objective

    batch = make_batch()
    settings = config(folder, gradient_checkpointing=checkpointing, **QLORA)
    policy = load_policy(settings, str(folder), seed=0)
    layer = policy.model.model.layers[0]
    assert layer.mlp.up_proj.base_layer.weight.dtype == torch.uint8
    with torch.no_grad():
        exact = load_policy(config(folder), str(folder), seed=0)(batch).logprobs
        ours = policy(batch).logprobs
    # Random weights round badly; what matters is that it is this model and no other.
    correlation = torch.corrcoef(torch.stack([exact[batch.mask], ours[batch.mask]]))[0, 1]
    assert correlation > 0.9
    assert all("lora_" in name for name in policy.trainable())
    accumulate_gradient(ParallelPolicy(policy), batch, sft_objective, token_budget=64)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
        moved = policy(batch).logprobs
    assert not torch.equal(moved, ours)
    save_policy(policy, NoTokenizer(), tmp_path / "adapter")
    again = load_policy(settings, str(tmp_path / "adapter"), seed=0)
    with torch.no_grad():
        assert torch.equal(again(batch).logprobs, moved)


def with_config(folder: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize("change", [7, -7])
def test_weights_of_other_shapes_than_the_configuration_says(
    folder: Path, tmp_path: Path, change: int
) -> None:
    """R5: one paragraph, without a traceback."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    path = with_config(folder, tmp_path / "changed", vocab_size=vocabulary + change)
    with pytest.raises(ModelError, match=r"shapes that its config\.json says"):
        load_policy(ModelConfig(path=str(path)), str(path), seed=0)


class Opened:
    """What a pickle may hold beside tensors."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["OPENED_FOLDER"],))


def test_pickled_weights_run_no_code(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5: tensors alone are read from one, anything else is one paragraph."""
    monkeypatch.setenv("OPENED_FOLDER", str(tmp_path / "opened"))
    path = with_config(folder, tmp_path / "changed")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save({**tensors, "more": Opened()}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle that holds more than tensors"):
        load_policy(ModelConfig(path=str(path)), str(path), seed=0)
    assert not (tmp_path / "opened").exists()


def test_a_tokenizer_of_another_kind_than_the_configuration_is_one_paragraph(
    tmp_path: Path,
) -> None:
    """transformers raises a TypeError where a BPE vocabulary stands beside a T5 configuration."""
    Tokenizer(BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_decoding_drops_no_space(folder: Path) -> None:
    """Solutions with ` ,` or ` .` in them were left out, as texts that the tokenizer changes."""
    words = {word: number for number, word in enumerate(("<unk>", "2", ",", "3", "?"))}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=True
    ).save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode("2 , 3 ?")) == "2 , 3 ?"


@pytest.mark.parametrize("legacy", [True, False])
def test_a_saved_tokenizer_of_llama_2_encodes_as_it_did(tmp_path: Path, legacy: bool) -> None:
    """A run's own tokenizer wrote prompts of one other token than those that it was trained on."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "\u2581", "a", "b"])}
    made = transformers.LlamaTokenizer(vocab=vocabulary, merges=[], legacy=legacy)
    made.save_pretrained(tmp_path / "base")
    (tmp_path / "base/config.json").write_text('{"model_type": "llama"}')
    file = tmp_path / "base/tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "legacy": legacy}))
    base = load_tokenizer(str(tmp_path / "base"))
    tokens = base.tokenize("<s>ab")
    assert tokens == ["<s>", *["\u2581"] * legacy, "a", "b"]
    shutil.copytree(tmp_path / "base", tmp_path / "trained")
    base.save_pretrained(tmp_path / "trained")
    assert load_tokenizer(str(tmp_path / "trained")).tokenize("<s>ab") == tokens


def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="holds no tokenizer") as refused:
        load_tokenizer(str(tmp_path / "model"))
    assert "tokenizer.json" in refused.value.fix
