"""GGUF files: the model of the folder is the file's, and a file that is no model is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf_files import PROBLEMS, TinyGguf, gguf
from tokenizers import Regex, pre_tokenizers
from torch import Tensor

from grouper.config.schema import ModelConfig
from grouper.errors import ConfigError, GrouperError, ModelError, RunFolderError
from grouper.models import gguf as reading
from grouper.models.folders import (
    base_of,
    folder_of,
    gguf_cache,
    identity_of,
    on_this_machine,
    require_model_folder,
    weight_files,
)
from grouper.models.gguf import check_tokenizer, folder_of_gguf, llama3_factors, read_header
from grouper.models.loading import load_policy, load_tokenizer, shape_of, stop_ids_of

TEXT = "Ann has 12 boxes of 3 pens. 12*3=36."


@pytest.fixture(scope="module")
def tiny() -> TinyGguf:
    return TinyGguf()


@pytest.fixture(scope="module")
def llama() -> TinyGguf:
    return TinyGguf("llama")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GROUPER_CACHE", str(folder))
    return folder


def logits_of(model: Any, tokenizer: Any) -> Tensor:
    ids = tokenizer.encode(TEXT, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        logits: Tensor = model(ids).logits
    return logits


# --- the model is the file's ---------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_plain_weights_come_back_to_the_last_bit(
    tiny: TinyGguf, llama: TinyGguf, tmp_path: Path, architecture: str
) -> None:
    made = tiny if architecture == "qwen3" else llama
    file = made.write(tmp_path / "tiny.gguf")
    folder = folder_of_gguf(str(file))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert torch.equal(logits_of(model, tokenizer), logits_of(made.model, made.tokenizer))
    assert tokenizer.chat_template == made.tokenizer.chat_template
    for problem in PROBLEMS:
        theirs = made.tokenizer.encode(problem.question, add_special_tokens=False)
        assert tokenizer.encode(problem.question, add_special_tokens=False) == theirs
    record = json.loads((folder / "gguf.json").read_text())
    assert record["file"] == "tiny.gguf"
    assert record["losses"] == []


def test_every_stop_token_is_kept(tiny: TinyGguf, tmp_path: Path) -> None:
    file = str(tiny.write(tmp_path / "tiny.gguf"))
    assert stop_ids_of(file) == [tiny.tokenizer.eos_token_id, 5]
    assert load_tokenizer(file).eos_token == tiny.tokenizer.eos_token


def test_quantized_weights_are_what_the_library_reads(tiny: TinyGguf, tmp_path: Path) -> None:
    file = tiny.write(tmp_path / "tiny.gguf", quantized="Q8_0")
    folder = folder_of_gguf(str(file))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    kind = gguf.GGMLQuantizationType.Q8_0
    weight = tiny.model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    rounded = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind))
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, rounded.bfloat16())
    # bfloat16 adds no more than its own half step to what quantizing has lost already.
    assert not torch.equal(rounded, torch.from_numpy(weight))
    record = json.loads((folder / "gguf.json").read_text())
    assert "its weights are quantized (15 Q8_0 of" in record["losses"][0]


def test_a_head_that_was_quantized_twice_is_tied_again(tiny: TinyGguf, tmp_path: Path) -> None:
    embedding = tiny.tensors()["token_embd.weight"]
    coarse = (embedding * 500).round() / 500
    file = tiny.write(
        tmp_path / "tiny.gguf",
        tensors={"token_embd.weight": coarse, "output.weight": embedding},
    )
    folder = folder_of_gguf(str(file))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_a_head_of_its_own_stays_one(tiny: TinyGguf, tmp_path: Path) -> None:
    embedding = tiny.tensors()["token_embd.weight"]
    file = tiny.write(tmp_path / "tiny.gguf", tensors={"output.weight": -embedding})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of_gguf(str(file)))
    assert torch.equal(model.get_output_embeddings().weight, -embedding)
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_positions_of_llama_3_are_restored(llama: TinyGguf, tmp_path: Path) -> None:
    """transformers drops the factors, and with them every long wave is wrong."""
    pairs = llama.config.head_dim // 2
    frequencies = [500_000.0 ** (-pair / pairs) for pair in range(pairs)]
    factors = torch.tensor(llama3_factors(frequencies, 32.0))
    file = llama.write(tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": factors})
    shape = shape_of(str(file))
    assert shape.rope_parameters["rope_type"] == "llama3"
    assert shape.rope_parameters["factor"] == 32.0
    # Against transformers' own computation of the frequencies.
    turned = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](shape, "cpu")[0]
    assert torch.allclose(turned * factors, torch.tensor(frequencies), rtol=1e-4)
    assert not torch.allclose(turned, torch.tensor(frequencies), rtol=0.5)


def test_linear_scaling_is_restored(llama: TinyGguf, tmp_path: Path) -> None:
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    shape = shape_of(str(llama.write(tmp_path / "tiny.gguf", metadata=scaled)))
    assert shape.rope_parameters["rope_type"] == "linear"
    assert shape.rope_parameters["factor"] == 4.0


# --- the tokenizer -------------------------------------------------------------------------------


def test_digits_are_split_by_the_rule_that_the_file_names(tiny: TinyGguf, tmp_path: Path) -> None:
    """With merges of digits, as other vocabularies have them, GPT-2's rule would join them."""
    file = tiny.write(tmp_path / "tiny.gguf")
    splitter = load_tokenizer(str(file)).backend_tokenizer.pre_tokenizer
    pieces = [piece for piece, _ in splitter.pre_tokenize_str("it's 123  more\n")]
    assert pieces == ["it", "'s", "Ġ", "1", "2", "3", "Ġ", "Ġmore", "Ċ"]


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("qwen2", ["Price", ":", "Ġ", "1", "2", "3", "4", "Ġkg", ".ĊĊ", "Ok"]),
        ("llama-bpe", ["Price", ":", "Ġ", "123", "4", "Ġkg", ".ĊĊ", "Ok"]),
        ("gpt-2", ["Price", ":", "Ġ1234", "Ġkg", ".", "Ċ", "Ċ", "Ok"]),
    ],
)
def test_rules_of_other_models(
    tiny: TinyGguf, tmp_path: Path, rule: str, pieces: list[str]
) -> None:
    file = tiny.write(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.pre": rule})
    splitter = load_tokenizer(str(file)).backend_tokenizer.pre_tokenizer
    assert [p for p, _ in splitter.pre_tokenize_str("Price: 1234 kg.\n\nOk")] == pieces


def test_a_rule_that_is_not_known_is_reported(
    tiny: TinyGguf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tiny.write(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.pre": "never-heard-of"})
    folder_of_gguf(str(file))
    assert "splits text by a rule that is not known here ('never-heard-of')" in caplog.text


def test_another_tokenizer_is_refused(tiny: TinyGguf, tmp_path: Path) -> None:
    header = read_header(tiny.write(tmp_path / "tiny.gguf"))
    check_tokenizer(header, tiny.tokenizer)
    tokens = list(header.metadata["tokenizer.ggml.tokens"])
    tokens[40], tokens[41] = tokens[41], tokens[40]
    other = read_header(
        tiny.write(tmp_path / "other.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    )
    with pytest.raises(ModelError, match="with tokens that the file reads as"):
        check_tokenizer(other, tiny.tokenizer)


def test_text_that_the_tokenizer_changes_is_refused(tiny: TinyGguf, tmp_path: Path) -> None:
    header = read_header(tiny.write(tmp_path / "tiny.gguf"))
    tokenizer = load_tokenizer(str(header.file))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" "), behavior="removed"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    with pytest.raises(ModelError, match="with tokens that the file reads as"):
        check_tokenizer(header, tokenizer)


# --- the cache -----------------------------------------------------------------------------------


def test_a_file_is_read_once(
    tiny: TinyGguf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tiny.write(tmp_path / "tiny.gguf")
    folder = folder_of_gguf(str(file))
    assert f"{file} is read once" in caplog.text
    monkeypatch.setattr(reading, "read_header", lambda _: pytest.fail("it was read again"))
    assert folder_of_gguf(str(file)) == folder
    moved = tmp_path / "elsewhere" / "tiny.gguf"
    moved.parent.mkdir()
    shutil.copy(file, moved)
    assert folder_of_gguf(str(moved)) == folder


def test_a_changed_file_is_another_model(tiny: TinyGguf, tmp_path: Path) -> None:
    file = tiny.write(tmp_path / "tiny.gguf")
    before = folder_of_gguf(str(file))
    identity = identity_of(str(file))
    tiny.write(file, quantized="Q8_0")
    after = folder_of_gguf(str(file))
    assert after != before
    assert identity_of(str(file)) != identity
    assert identity_of(str(after)) != identity_of(str(before))


def test_a_cut_conversion_is_done_again(
    tiny: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny.write(tmp_path / "tiny.gguf")

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(reading, "check_tokenizer", stop)
        with pytest.raises(KeyboardInterrupt):
            folder_of_gguf(str(file))
    assert not [entry for entry in gguf_cache().iterdir() if entry.is_dir()]
    assert (folder_of_gguf(str(file)) / "model.safetensors").is_file()


# --- as any other model --------------------------------------------------------------------------


def test_a_file_is_a_model_like_any_other(tiny: TinyGguf, tmp_path: Path) -> None:
    file = str(tiny.write(tmp_path / "tiny.gguf"))
    require_model_folder(file)
    assert on_this_machine(file)
    assert folder_of(file) is None
    assert load_policy(ModelConfig(path=file), file, seed=0).model.dtype == torch.float32
    assert folder_of(file) == folder_of_gguf(file)
    assert base_of(file) == file
    assert len(weight_files(file)) == 1


def test_a_folder_that_was_deleted_from_the_cache(tiny: TinyGguf, tmp_path: Path) -> None:
    """An adapter names the folder; it can be written again."""
    folder = folder_of_gguf(str(tiny.write(tmp_path / "tiny.gguf")))
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match="has been deleted from the cache") as caught:
        require_model_folder(str(folder), where="the base model of the adapter")
    assert "Run any command with that file as the model" in str(caught.value)


# --- what is refused -----------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def not_gguf(file: Path) -> None:
    file.write_bytes(b"PK\x03\x04" + bytes(100))


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut, "ends too early, or is damaged"),
        (cut_in_the_header, "ends too early, or is damaged"),
        (not_gguf, "does not begin with GGUF"),
        (empty, "does not begin with GGUF"),
    ],
)
def test_damaged_files(
    tiny: TinyGguf, tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    file = tiny.write(tmp_path / "tiny.gguf")
    damage(file)
    with pytest.raises(ModelError, match=told):
        folder_of_gguf(str(file))
    assert not gguf_cache().exists() or not any(p.is_dir() for p in gguf_cache().iterdir())


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"general.type": "mmproj"}, "the part of a model that reads images"),
        ({"general.type": "adapter"}, "holds a LoRA adapter for llama.cpp"),
        ({"split.count": 3}, "is one of 3 parts of a model"),
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
        ({"qwen3.rope.scaling.type": "yarn"}, r"positions of tiny.gguf are scaled \(yarn\)"),
        ({"tokenizer.ggml.model": "rwkv"}, "the tokenizer in tiny.gguf cannot be rebuilt"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "the tokenizer in tiny.gguf cannot be rebuilt"),
        ({"tokenizer.ggml.eos_token_id": 99_999}, "the tokenizer in tiny.gguf cannot be rebuilt"),
        ({"qwen3.block_count": None}, "tiny.gguf"),
        ({"qwen3.rope.scaling.type": "linear"}, "the model in tiny.gguf cannot be rebuilt"),
    ],
)
def test_files_that_are_no_model_to_train(
    tiny: TinyGguf, tmp_path: Path, metadata: dict[str, Any], told: str
) -> None:
    file = tiny.write(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=told):
        folder_of_gguf(str(file))


def test_an_architecture_that_transformers_cannot_read(tmp_path: Path) -> None:
    for name, told in (("rwkv7", "of the architecture 'rwkv7'"), ("clip", "reads images")):
        file = tmp_path / f"{name}.gguf"
        writer = gguf.GGUFWriter(file, name)
        writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelError, match=told):
            folder_of_gguf(str(file))


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"blk.1.ffn_up.weight": torch.zeros(0)}, "lacks 1 of the weights of its model"),
        ({"blk.1.attn_sinks.weight": torch.ones(64)}, "finds a place for"),
        ({"rope_freqs.weight": torch.tensor([1.0, 7.0] * 8)}, "scaled .by a table of its own"),
        ({"rope_factors_long.weight": torch.ones(8)}, "scaled .by a table of its own"),
    ],
)
def test_weights_that_do_not_match_the_model(
    tiny: TinyGguf, tmp_path: Path, tensors: dict[str, Tensor], told: str
) -> None:
    """transformers draws a missing weight at random, and drops one that has no place."""
    file = tiny.write(tmp_path / "tiny.gguf", tensors=tensors)
    with pytest.raises(ModelError, match=told):
        folder_of_gguf(str(file))


def test_no_room_for_the_folder(
    tiny: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny.write(tmp_path / "tiny.gguf")
    full = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(RunFolderError, match="are free here") as caught:
        folder_of_gguf(str(file))
    assert "set GROUPER_CACHE to a folder on another disk" in str(caught.value)


def test_a_cache_that_cannot_be_written(
    tiny: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny.write(tmp_path / "tiny.gguf")
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("GROUPER_CACHE", str(tmp_path / "a-file" / "cache"))
    with pytest.raises(RunFolderError):
        folder_of_gguf(str(file))


def test_the_package_is_missing(
    tiny: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny.write(tmp_path / "tiny.gguf")
    monkeypatch.setattr("grouper.errors.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"grouper-rl\[gguf\]"):
        folder_of_gguf(str(file))


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("nowhere.gguf", "there is no file"),
        ("models/nowhere.gguf", "there is no file"),
        ("folder", r"it holds 1 GGUF file"),
        ("notes.txt", "is a file, and a model is a folder"),
    ],
)
def test_what_is_named_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder/tiny.gguf").touch()
    Path("notes.txt").touch()
    with pytest.raises(GrouperError, match=told):
        require_model_folder(named)
