"""The Modelfile: read as Ollama reads it, it gives the prompt of training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import grouper
from grouper.errors import ModelError
from grouper.publish.export import export_model
from grouper.publish.modelfile import modelfile, write_modelfile

QUESTION = "Eva has 7 eggs and drops 3. How many eggs does Eva have?"


def read(text: str) -> dict[str, list[str]]:
    """Instruction -> its arguments, as Ollama's parser splits a Modelfile."""
    pattern = r'^(FROM|TEMPLATE|PARAMETER) (?:(\w+) )??(?:"""(.*?)"""|"([^"\n]*)"|(\S+))$'
    found: dict[str, list[str]] = {}
    for name, key, block, quoted, word in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
        found.setdefault(key or name, []).append(block or quoted or word)
    return found


def filled(template: str, question: str) -> str:
    """What Go's text/template makes of the few actions that are written here."""

    def value(match: re.Match[str]) -> str:
        action = match[1].strip()
        return question if action == ".Prompt" else json.loads(action)

    return re.sub(r"\{\{(.*?)\}\}(?!\})", value, template)


@pytest.fixture(scope="session")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export") / "demo-model"
    export_model(str(finished_run / "grpo" / "final"), target)
    return target


def test_the_template_gives_the_prompt_of_training(exported: Path) -> None:
    fields = read(write_modelfile(exported).read_text(encoding="utf-8"))
    assert fields["FROM"] == ["."]
    (template,) = fields["TEMPLATE"]
    with grouper.load_generator(exported, max_new_tokens=2) as generator:
        expected = grouper.solve(QUESTION, generator).prompt
    assert filled(template, QUESTION) == expected


def test_stops_and_sampling_are_those_of_the_evaluation(exported: Path) -> None:
    fields = read(write_modelfile(exported, "demo-model-q8_0.gguf").read_text(encoding="utf-8"))
    record = json.loads((exported / "grouper.json").read_text(encoding="utf-8"))
    assert fields["FROM"] == ["./demo-model-q8_0.gguf"]
    assert fields["num_predict"] == [str(record["sampling"]["max_new_tokens"])]
    assert fields["temperature"] == ["0"]
    assert fields["repeat_penalty"] == ["1"]
    assert set(record["prompt"]["stop"]) <= set(fields["stop"])
    with grouper.load_generator(exported) as generator:
        tokenizer = generator.prepared.tokenizer
    ends = [tokenizer.decode([token]) for token in record["prompt"]["stop_token_ids"]]
    assert set(ends) <= set(fields["stop"])
    assert str(exported.parent) not in (exported / "Modelfile").read_text(encoding="utf-8")


SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "max_new_tokens": 64}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        ("Answer in {x} or {{x}}.\nQ: ", '\nA: "'),
        ('Write """ around code.\n', "\n"),
    ],
)
def test_any_text_survives_the_two_languages(before: str, after: str) -> None:
    text = modelfile(
        weights=".",
        before=before,
        after=after,
        stops=["</answer>", 'a "quoted"\nstop'],
        sampling=SAMPLING,
        context=576,
    )
    fields = read(text)
    assert filled(fields["TEMPLATE"][0], "1+1?") == f"{before}1+1?{after}"
    assert fields["stop"] == ["</answer>", 'a "quoted"\nstop']
    assert [fields[name] for name in ("top_p", "top_k", "num_ctx")] == [["0.95"], ["20"], ["576"]]


def test_a_model_whose_prompt_is_not_known_has_no_modelfile(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing says how"):
        write_modelfile(tmp_path)
