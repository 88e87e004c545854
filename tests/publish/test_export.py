"""Exporting: the merged model is the model, or it is not written."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

import grouper
from grouper.errors import ModelError
from grouper.models.folders import EXPORT_FILE, recipe_for
from grouper.models.policy import Policy
from grouper.prompts.rendering import render
from grouper.publish import export
from grouper.publish.card import model_card
from grouper.publish.export import export_model
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import ProblemSets
from grouper.types import Problem


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tied-head model with a tokenizer."""
    folder = tmp_path / "base"
    tiny_model("qwen3", scale=1.0).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[5, 6, 7, 8]])).logits
    return found


def test_a_merged_export_gives_the_adapters_logits(
    base: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = export_model(str(adapter), tmp_path / "out")
    loud = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not loud, "nobody has set a rank here (U17)"
    assert done.gap < 1e-4
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(base)
    side_by_side = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(logits(exported), logits(side_by_side), rtol=0, atol=1e-4)
    assert not torch.allclose(logits(exported), logits(plain), atol=1e-2)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 97


def test_a_whole_model_can_be_exported_in_bfloat16(base: Path, tmp_path: Path) -> None:
    done = export_model(str(base), tmp_path / "out", dtype="bfloat16")
    assert 0 < done.gap < 0.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16


@torch.no_grad()
def test_a_small_update_survives_an_export_in_bfloat16(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    """M10: rounded to the nearest number, weights with a small update were the base's again."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    small = {n: 1e-3 * t if "lora_B" in n else t for n, t in tensors.items()}
    save_file(small, adapter / "adapter_model.safetensors")
    export_model(str(adapter), tmp_path / "out", dtype="bfloat16")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = {name: value.bfloat16().float() for name, value in plain.state_dict().items()}
    merged = PeftModel.from_pretrained(plain, adapter).merge_and_unload().state_dict()
    exact = {name: value.float() for name, value in merged.items()}
    start = AutoModelForCausalLM.from_pretrained(base).state_dict()
    added = wanted = 0.0
    for name, value in exported.items():
        change = exact[name] - start[name]
        added += float(((value.float() - before[name]) * change).sum())
        wanted += float(change.square().sum())
    assert wanted > 0
    assert added / wanted == pytest.approx(1.0, abs=0.25)


def test_an_export_that_disagrees_is_not_left_behind(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = export.save_policy

    def forgetful(policy: Policy, *others: Any, **options: Any) -> None:
        with torch.no_grad():
            next(policy.model.parameters()).mul_(1.5)
        honest(policy, *others, **options)

    monkeypatch.setattr(export, "save_policy", forgetful)
    with pytest.raises(ModelError, match="disagrees"):
        export_model(str(adapter), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_must_not_run_natively_is_exported(tmp_path: Path) -> None:
    """Trained with model.attention: sdpa, it could be measured, and its export was refused."""
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    made = AutoConfig.for_model("lfm2", **shape, layer_types=["conv", "full_attention"])
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "base")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2")
    tokenizer.save_pretrained(tmp_path / "base")
    assert export_model(str(tmp_path / "base"), tmp_path / "out").gap == 0.0


def test_nothing_is_overwritten(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exists already"):
        export_model(str(base), base)
    with pytest.raises(ModelError, match="no folder"):
        export_model(str(tmp_path / "nothing"), tmp_path / "out")


def test_an_adapter_of_a_folder_is_not_exported_alone(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a folder of this machine.*which merges the two"):
        export_model(str(adapter), tmp_path / "out", adapter=True)
    with pytest.raises(ModelError, match="whole model, and has no adapter"):
        export_model(str(adapter.parent / "base"), tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


# --- an export of a run --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export") / "demo-model"
    done = export_model(str(finished_run / "grpo" / "final"), target, license_id="apache-2.0")
    assert done.prompts_alone
    return target


TRANSFORMERS_ALONE = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "grouper" not in sys.modules
folder, question = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt",
    return_dict=True,
)
drawn = model.generate(**inputs)[0, inputs["input_ids"].shape[1]:]
drawn = drawn[:-1] if int(drawn[-1]) in model.generation_config.eos_token_id else drawn
print(json.dumps(tokenizer.decode(drawn)))
"""


@pytest.mark.slow
def test_transformers_alone_gives_the_same_text(exported: Path) -> None:
    question = "Eva has 7 eggs and drops 3. How many eggs does Eva have?"
    own = grouper.solve(question, exported, temperature=0.0)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    words = [sys.executable, "-c", TRANSFORMERS_ALONE, str(exported), question]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment, cwd=exported, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == own.response


def test_an_export_knows_how_it_is_prompted(exported: Path, finished_run: Path) -> None:
    own, theirs = recipe_for(str(exported)), recipe_for(str(finished_run))
    assert own.prompt.format == theirs.prompt.format
    assert (own.seed, own.rewards, own.evaluation) == (
        theirs.seed,
        theirs.rewards,
        theirs.evaluation,
    )
    record = json.loads((exported / EXPORT_FILE).read_text())
    assert [row["name"] for row in record["evaluations"] if row["split"] == "test"]
    assert str(finished_run.parent) not in (exported / EXPORT_FILE).read_text()


def test_an_export_names_no_folder_of_this_machine(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the model, nor of data, rewards, hooks and trackers; it is loaded anywhere."""
    home = tmp_path / "home"
    run = home / "outputs" / "mine"
    shutil.copytree(finished_run, run)
    shutil.copytree(run / "base", home / "models" / "my-base")
    (home / "mine.py").write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    settings = yaml.safe_load((run / "recipe.yaml").read_text())
    settings["model"] |= {"path": str(home / "models" / "my-base"), "new": None}
    settings["rewards"].append({"name": f"{home}/mine.py:f", "params": {"table": f"{home}/t.csv"}})
    settings["hooks"] = [f"{home}/mine.py:f"]
    settings["tracking"]["trackers"] = [{"name": f"{home}/mine.py:f"}]
    settings["grpo"]["start_from"] = str(run / "sft" / "final")
    settings["save_path"] = str(home / "saved")
    for part in ("train", "test"):
        settings["data"][part] = {"source": "file", "path": f"{home}/data/{part}.jsonl"}
    (run / "recipe.yaml").write_text(yaml.safe_dump(settings))
    source = str(run / "grpo" / "final")
    with grouper.load_generator(source, max_new_tokens=2) as generator:
        expected = grouper.solve("What is 3 + 4?", generator)
    export_model(source, home / "out")
    files = [file for file in (home / "out").rglob("*") if file.is_file()]
    assert len(files) >= 7
    for file in files:
        content = file.read_bytes()
        for private in (
            str(tmp_path),
            str(finished_run.parent),
            "local_files_only",
            'start_from": "/',
        ):
            assert private.encode() not in content, (file.name, private)
    card = (home / "out" / "README.md").read_text()
    assert "Trained from my-base by" in card
    assert "| data.train | train.jsonl" in card
    assert "mine.py:f" in card
    (tmp_path / "elsewhere").mkdir()
    (home / "out").rename(tmp_path / "elsewhere" / "model")
    shutil.rmtree(home)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with grouper.load_generator("./model", max_new_tokens=2) as generator:
        assert generator.recipe.model.path == "./model"
        assert grouper.solve("What is 3 + 4?", generator) == expected


def test_the_card_has_the_results_with_their_intervals(exported: Path, finished_run: Path) -> None:
    card = (exported / "README.md").read_text()
    assert card.startswith("---\n")
    metadata = yaml.safe_load(card[4:].split("\n---\n")[0])
    assert ModelCard(card).data.to_dict() == metadata, "as the Hub reads it"
    result = grouper.RunFolder(finished_run).read_evaluation("grpo")
    assert result is not None
    (metric,) = metadata["model-index"][0]["results"][0]["metrics"]
    assert metric["value"] == round(result.accuracy, 4)
    assert metadata["license"] == "apache-2.0"
    low, high = 100 * result.interval.low, 100 * result.interval.high
    assert f"| GRPO | {100 * result.accuracy:.1f} [{low:.1f}, {high:.1f}] |" in card
    assert "| GRPO - base |" in card
    assert f'pipeline("text-generation", "./{exported.name}")' in card
    assert "![" in card
    assert (exported / "curves.png").is_file()
    assert "load_generator(" in card
    assert "None" not in card


@pytest.mark.slow
def test_the_card_of_an_sft_model_has_its_own_results(finished_run: Path, tmp_path: Path) -> None:
    export.export_model(str(finished_run / "sft" / "final"), tmp_path / "sft")
    card = (tmp_path / "sft" / "README.md").read_text()
    metadata = yaml.safe_load(card[4:].split("\n---\n")[0])
    result = grouper.RunFolder(finished_run).read_evaluation("sft")
    assert result is not None
    (metric,) = metadata["model-index"][0]["results"][0]["metrics"]
    assert metric["value"] == round(result.accuracy, 4)
    assert "grpo" not in metadata["tags"]
    assert "by\nSFT with" in card
    assert "| SFT - base |" in card
    assert "| GRPO" not in card
    record = json.loads((tmp_path / "sft" / EXPORT_FILE).read_text())
    assert "grpo" not in {row["phase"] for row in record["evaluations"]}
    export.export_model(str(finished_run / "base"), tmp_path / "base")
    assert "Exported with Grouper" in (tmp_path / "base" / "README.md").read_text()


def test_stops_are_in_the_generation_config(exported: Path) -> None:
    config = json.loads((exported / "generation_config.json").read_text())
    record = json.loads((exported / EXPORT_FILE).read_text())
    assert config["eos_token_id"] == record["prompt"]["stop_token_ids"]
    assert config["max_new_tokens"] == record["sampling"]["max_new_tokens"]


@pytest.mark.parametrize(
    ("evaluated", "drawn"),
    [("{}", {}), ("{temperature: 0.6, top_p: 0.9}", {"temperature": 0.6, "top_p": 0.9})],
)
def test_others_draw_as_was_measured_whatever_the_base_had(
    finished_run: Path, tmp_path: Path, evaluated: str, drawn: dict[str, float]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    settings = yaml.safe_load((run / "recipe.yaml").read_text())
    settings["evaluation"] |= yaml.safe_load(evaluated)
    (run / "recipe.yaml").write_text(yaml.safe_dump(settings))
    file = run / "grpo/final/generation_config.json"
    odd = {"do_sample": True, "repetition_penalty": 1.1, "min_p": 0.1, "no_repeat_ngram_size": 2}
    file.write_text(json.dumps(json.loads(file.read_text()) | odd))
    export_model(str(run / "grpo/final"), tmp_path / "out")
    used = GenerationConfig.from_pretrained(tmp_path / "out")
    assert used.do_sample is bool(drawn)
    assert (used.repetition_penalty or 1.0, used.no_repeat_ngram_size or 0) == (1.0, 0)
    if drawn:
        assert (used.temperature, used.top_p, used.top_k, used.min_p) == (0.6, 0.9, 0, 0.0)
    else:
        assert used.min_p is None


def test_an_export_says_that_its_model_calls_tools(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    settings = yaml.safe_load((run / "recipe.yaml").read_text())
    settings["prompt"] |= {"format": "python-tool", "max_prompt_tokens": 512}
    (run / "recipe.yaml").write_text(yaml.safe_dump(settings))
    done = export_model(str(run / "grpo/final"), tmp_path / "out")
    assert done.calls_tools
    assert json.loads((tmp_path / "out" / EXPORT_FILE).read_text())["prompt"]["tools"]
    assert "invents the output" in (tmp_path / "out" / "README.md").read_text()


FORMATS = ("xml", "compact", "think", "r1-zero", "question-only", "boxed", "tags")


@pytest.mark.parametrize("template", ["auto", "plain", "install"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_user_message_alone_is_the_prompt(finished_run: Path, name: str, template: str) -> None:
    if (name, template) == ("question-only", "install"):
        pytest.skip("it has no layout of its own to install")
    recipe = grouper.load_recipe(
        "demo", [f"prompt={{format: {name}, template: {template}, max_prompt_tokens: 512}}"]
    )
    source = str(finished_run / "grpo" / "final")
    with Prepared(recipe, ProblemSets(), model=source, quiet=True) as prepared:
        tokenizer = AutoTokenizer.from_pretrained(source)
        assert export._make_portable(prepared, tokenizer)
        problem = Problem(id="q", question="1+1?", answer="2", source="test")
        prompt = render(problem, prepared.format, prepared.tokenizer)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == prompt.text


CHATS = {
    "with system": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "without": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "thinks": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}",
    "shuts thinking": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n\n</think>\n\n{% endif %}",
    "thinks of sums": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if '+' in messages[-1].content %}<think>\n{% else %}<think>{% endif %}",
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", ["xml", "boxed", "tags"])
def test_a_base_models_own_chat_template_is_kept(finished_run: Path, name: str, chat: str) -> None:
    source = str(finished_run / "grpo" / "final")
    recipe = grouper.load_recipe("demo", [f"prompt={{format: {name}}}"])
    with Prepared(recipe, ProblemSets(), model=source, quiet=True) as prepared:
        prepared.tokenizer.chat_template = CHATS[chat]
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.chat_template = CHATS[chat]
        alone = export._make_portable(prepared, tokenizer)
        problem = Problem(id="q", question="1+1?", answer="2", source="test")
        prompt = render(problem, prepared.format, prepared.tokenizer)
        # What is exported may be measured again, or trained on with another instruction.
        assert render(problem, prepared.format, tokenizer).token_ids == prompt.token_ids
        other = replace(prepared.format, system="Do.")
        expected = render(problem, other, prepared.tokenizer)
        assert render(problem, other, tokenizer).token_ids == expected.token_ids
        # Those who ask for what it wrote in a finished turn get all of it.
        turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>\n"}]
        assert "<think>\n" in tokenizer.apply_chat_template(turns, tokenize=False)
    # Where the question decides whether a thinking block is opened, it says that it cannot.
    assert alone is (chat != "thinks of sums")
    assert (tokenizer.chat_template == CHATS[chat]) is not alone


@pytest.mark.parametrize("chat", ["with system", "without"])
def test_an_instruction_may_have_any_character(chat: str, finished_run: Path) -> None:
    source = str(finished_run / "grpo" / "final")
    prompt = "prompt={format: boxed, system: 'Find \U0001d465 in a \"\\boxed{}\".'}"
    with Prepared(grouper.load_recipe("demo", [prompt]), ProblemSets(), model=source) as prepared:
        prepared.tokenizer.chat_template = CHATS[chat]
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.chat_template = CHATS[chat]
        assert export._make_portable(prepared, tokenizer)


def test_a_format_that_adds_nothing_leaves_the_template_alone(finished_run: Path) -> None:
    source = str(finished_run / "grpo" / "final")
    with Prepared(grouper.load_recipe("demo"), ProblemSets(), model=source) as prepared:
        assert not prepared.format.system + prepared.format.prefix
        tokenizer = AutoTokenizer.from_pretrained(source)
        assert export._make_portable(prepared, tokenizer)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template


def test_a_mode_of_the_chat_template_is_exported(finished_run: Path, tmp_path: Path) -> None:
    """M12: what serves the export asks as in training, and can still be told otherwise."""
    chat = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{{ '<think></think>' if enable_thinking is "
        "defined and not enable_thinking else '<think>' }}{% endif %}"
    )
    source = str(shutil.copytree(finished_run / "grpo" / "final", tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(source)
    ends = {False: "[assistant]<think></think>", True: "[assistant]<think>"}
    for thinking, end in ends.items():
        setting = f"{{enable_thinking: {json.dumps(thinking)}}}"
        prompt = f"prompt={{format: boxed, chat_template_kwargs: {setting}}}"
        tokenizer = AutoTokenizer.from_pretrained(source)
        recipe = grouper.load_recipe("demo", [prompt])
        with Prepared(recipe, ProblemSets(), model=source, quiet=True) as prepared:
            assert export._make_portable(prepared, tokenizer)
        turn = [{"role": "user", "content": "1+1?"}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        assert text.endswith(end)
        other = tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True, enable_thinking=not thinking
        )
        assert other.endswith(ends[not thinking])


def test_the_card_names_the_library_that_loads_what_is_exported(
    adapter: Path, tmp_path: Path
) -> None:
    """M17: a merged model was called one of PEFT, whose loader looks for an adapter."""
    export_model(str(adapter), tmp_path / "out")
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert ModelCard.load(tmp_path / "out" / "README.md").data.library_name == "transformers"
    alone = model_card(str(adapter), None, "me/adapter", adapter=True)
    assert ModelCard(alone).data.library_name == "peft"


def test_a_bfloat16_model_is_exported_as_it_is(base: Path, tmp_path: Path) -> None:
    """M17: in float32 it took twice the room, without a word."""
    half = tmp_path / "half"
    shutil.copytree(base, half)
    original = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    original.save_pretrained(half)
    done = export_model(str(half), tmp_path / "out", dtype="auto")
    assert (done.dtype, done.larger) == ("bfloat16", False)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert exported.dtype == torch.bfloat16
    for name, value in exported.state_dict().items():
        assert torch.equal(value, original.state_dict()[name]), name
    assert export_model(str(base), tmp_path / "full", dtype="auto").dtype == "float32"
