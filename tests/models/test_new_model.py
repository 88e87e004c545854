"""New models: one seed, one model; a tokenizer that loses nothing and splits every digit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grouper.config.schema import NewModelConfig, PromptConfig
from grouper.data.arithmetic import ArithmeticOptions, generate
from grouper.errors import ConfigError, RunFolderError
from grouper.models.new_model import fit_tokenizer, make_new_model, save_new_model
from grouper.prompts import make_format
from grouper.prompts.rendering import completion_text, demonstrate, find_stop_tokens, render

COMPACT = make_format(PromptConfig(format="compact"))
TINY = NewModelConfig(hidden_size=32, layers=1)


@pytest.fixture(scope="module")
def problems():
    return generate(ArithmeticOptions(count=200), split="sft", seed=0)


@pytest.fixture(scope="module")
def made(problems):
    return make_new_model(TINY, problems, COMPACT, seed=0)


@pytest.mark.parametrize(
    "text",
    [
        "6*4=24. 24+34=58.",
        "Ann has 10 pens.",
        "  two  spaces\n\n\ttab ",
        "naïve café Ω 日本 🙂 \u2028",
        "\x00\x7f \\frac{1}{2} ½",
        "<reasoning>\n12</reasoning><answer>-3</answer>",
    ],
)
def test_any_text_survives(made, text):
    _, tokenizer = made
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_and_tags_are_tokens_of_their_own(made):
    _, tokenizer = made
    ids = tokenizer.encode("<answer>120</answer>", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids] == ["<answer>", "1", "2", "0", "</answer>"]
    # tags are ordinary text: a decoder that skips special tokens keeps them
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<answer>120</answer>"
    words = {t for t in tokenizer.get_vocab() if any(c in "0123456789" for c in t)}
    assert words == set("0123456789")


def test_the_prompt_is_short_and_ends_where_the_assistant_begins(made, problems):
    _, tokenizer = made
    prompt = render(problems[0], COMPACT, tokenizer)
    assert prompt.text == f"<|user|>{problems[0].question}<|assistant|>"
    assert len(prompt.token_ids) < 40
    stop = find_stop_tokens(tokenizer, (), COMPACT)
    assert stop[0] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    demonstration = demonstrate(problems[0], COMPACT, tokenizer, stop[0])
    assert tokenizer.decode(demonstration.token_ids[:-1]) == completion_text(problems[0], COMPACT)


def test_a_system_message_has_its_place(made, problems):
    _, tokenizer = made
    fmt = make_format(PromptConfig(format="xml", system="Be brief."))
    prompt = render(problems[0], fmt, tokenizer)
    assert prompt.text.startswith("<|system|>Be brief.<|user|>")


def test_the_vocabulary_is_bounded(problems):
    assert len(fit_tokenizer(problems, COMPACT, vocab_size=300)) == 300
    assert len(fit_tokenizer(problems, COMPACT, vocab_size=9999)) < 9999
    with pytest.raises(ConfigError, match=r"vocab_size 264 is too small.*Use 265 or more"):
        fit_tokenizer(problems, COMPACT, vocab_size=264)
    assert len(fit_tokenizer(problems, COMPACT, vocab_size=265)) == 265


def test_the_seed_decides_the_weights_and_the_global_generator_is_left_alone(problems):
    config = TINY
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = make_new_model(config, problems, COMPACT, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = (make_new_model(config, problems, COMPACT, seed=s)[0] for s in (0, 1))
    assert first.config.model_type == "qwen3"
    for (name, a), b, c in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        if "norm" not in name:
            assert not torch.equal(a, c), name
    assert first.dtype == torch.float32


def test_the_default_size_is_the_one_that_was_measured(problems):
    model, tokenizer = make_new_model(NewModelConfig(), problems, COMPACT, seed=0)
    assert 400_000 < model.num_parameters() < 470_000
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.slow
def test_the_tokenizer_is_the_same_in_another_process(problems):
    script = (
        "from grouper.data.arithmetic import ArithmeticOptions, generate\n"
        "from grouper.models.new_model import fit_tokenizer\n"
        "from grouper.prompts import FORMATS\n"
        "problems = generate(ArithmeticOptions(count=200), split='sft', seed=0)\n"
        "tokenizer = fit_tokenizer(problems, FORMATS['compact'], vocab_size=400)\n"
        "print(tokenizer.backend_tokenizer.to_str())\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = fit_tokenizer(problems, COMPACT, vocab_size=400).backend_tokenizer.to_str()
    assert json.loads(other.stdout) == json.loads(ours)


def test_a_saved_model_loads_as_any_other(made, problems, tmp_path):
    model, tokenizer = made
    folder = save_new_model(tmp_path / "new" / "model", model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder)
    ids = render(problems[0], COMPACT, tokenizer).token_ids
    assert render(problems[0], COMPACT, again).token_ids == ids
    assert (again.eos_token_id, again.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    tokens = torch.tensor([ids])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, loaded(tokens).logits)
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_saving_never_overwrites(made, tmp_path):
    model, tokenizer = made
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(RunFolderError, match="something here already"):
        save_new_model(tmp_path, model, tokenizer)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_a_failed_save_leaves_nothing(made, tmp_path, monkeypatch):
    model, tokenizer = made

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(RunFolderError, match="No space left"):
        save_new_model(tmp_path / "model", model, tokenizer)
    assert list(tmp_path.iterdir()) == []
