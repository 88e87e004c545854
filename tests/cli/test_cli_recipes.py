"""`grouper recipes`: what it prints can be run and looked up."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from grouper.config.loading import load_recipe
from grouper.prompts import FORMATS


def test_the_list_names_every_shipped_recipe(grouper):
    called = grouper("recipes")
    assert called.code == 0
    assert re.search(r"^demo +Arithmetic", called.out, re.MULTILINE)


def test_what_show_prints_is_the_same_recipe(grouper, tmp_path):
    shown = grouper("recipes", "show", "demo", "grpo.beta=0.01")
    path = tmp_path / "mine.yaml"
    path.write_text(shown.out)
    assert load_recipe(path) == load_recipe("demo", ["grpo.beta=0.01"])


def test_fields_of_a_section_have_type_default_and_meaning(grouper):
    text = " ".join(grouper("recipes", "fields", "grpo").out.split())
    assert "grpo.group_size (int, default 8): samples per prompt" in text
    assert "grpo.steps (int | none, default none): optimizer steps" in text
    assert "grpo.optimizer.betas (list of float, default [0.9, 0.999])" in text
    assert "sft." not in text


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("grpo.group_size", ["grpo.group_size"]),
        ("sampling.min_p", ["sampling.min_p"]),
        ("min_p", ["sampling.min_p", "sampling.allow_truncated", "evaluation.min_p"]),
        ("GDPO", ["grpo.decouple_rewards"]),
        ("Baseline needs two", ["grpo.group_size"]),
        ("learning rate decay", ["sft.optimizer.final_ratio", "grpo.optimizer.final_ratio"]),
        ("num_generations", ["grpo.group_size"]),
        ("num-generations", ["grpo.group_size"]),
        ("num generations", ["grpo.group_size"]),
        ("lora_r", ["model.lora.rank"]),
    ],
)
def test_fields_are_found_by_name_meaning_and_what_others_call_them(grouper, words, keys):
    """U10."""
    called = grouper("recipes", "fields", *words.split())
    assert called.code == 0, called.err
    assert re.findall(r"^(\S+)", called.out, re.MULTILINE) == keys


def test_a_word_of_no_setting_is_one_sentence(grouper):
    grouper("recipes", "fields", "grop").refused("Did you mean 'grpo'?")
    grouper("recipes", "fields", "vllm_model_impl").refused("Grouper samples with its own engine")
    grouper("recipes", "fields", "zzz", "yyy").refused("no setting has 'zzz yyy' in its name")
    assert "Pydantic" not in grouper("recipes", "fields").out


def test_the_table_of_formats_is_complete(grouper):
    called = grouper("recipes", "formats")
    assert called.code == 0
    for name in FORMATS:
        assert re.search(rf"^{name} +\S", called.out, re.MULTILINE)


def test_every_command_a_field_refers_to_exists(grouper):
    """Descriptions send the reader to `grouper recipes ...`."""
    text = " ".join(grouper("recipes", "fields").out.split())
    named = set(re.findall(r"`(grouper [a-z ]+)`", text))
    assert named
    for command in named:
        assert grouper(*command.split()[1:], "--help").code == 0


def test_the_command_for_an_imported_recipe_can_be_pasted(grouper, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text("num_generations: 8\nmodel_name_or_path: a/b\n")
    for output in ("my run.yaml", "mine.yaml"):
        told = grouper("recipes", "from", "theirs.yaml", "-o", output).err
        command = told.rpartition(f"Written to {output}: ")[2]
        assert shlex.split(command) == ["grouper", "run", f"./{output}", "--dry-run"]


def test_the_processes_that_a_file_was_written_for_are_counted(grouper, tmp_path):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("num_generations: 8\nper_device_train_batch_size: 8\n")
    told = grouper("recipes", "from", theirs, "--nproc", "2").out
    assert "For 2 process(es): 2 prompts x 8 = 16 completions per step" in told


def test_a_trl_file_becomes_a_recipe_that_can_be_run(grouper, tmp_path):
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(
        "num_generations: 4\nper_device_train_batch_size: 8\nvllm_model_impl: vllm2\n"
    )
    called = grouper("recipes", "from", theirs, "-o", ours)
    assert called.code == 0, called.err
    assert "vllm_model_impl: Grouper samples with its own engine" in called.err
    assert grouper("recipes", "show", ours).code == 0
    before = ours.read_text()
    assert grouper("recipes", "from", theirs).out == before
    grouper("recipes", "from", theirs, "-o", ours).refused(str(ours), "exists already")
    assert ours.read_text() == before
    theirs.write_text("num_generations: 1\n")
    grouper("recipes", "from", theirs).refused(
        "num_generations is 1, not a whole number of 2 or more"
    )
