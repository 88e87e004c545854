"""`grouper export`: the model of a run, of a checkpoint, and of nothing."""

from __future__ import annotations

import shutil

import pytest


def test_an_exported_model_is_asked_without_its_run(grouper, exported):
    question = "Eva has 7 eggs and drops 3. How many?"
    called = grouper("generate", exported, "--question", question, "--quiet")
    assert called.code == 0, called.err
    assert "license: mit" in (exported / "README.md").read_text()


@pytest.fixture
def unfinished(finished_run, tmp_path):
    """The run as a kill has left it after its last checkpoint of GRPO."""
    run = tmp_path / "demo"
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / "grpo" / "final")
    return run


ASKED = ("--question", "What is 3 + 4?", "--max-new-tokens", "4")


def test_an_unfinished_run_means_its_newest_checkpoint_and_says_so(grouper, unfinished, tmp_path):
    """Its untrained base was exported, and the card said that it was trained."""
    newest, target = unfinished / "grpo" / "checkpoint-2", tmp_path / "out"
    warned = f"the grpo of {unfinished} is not finished: this is its newest checkpoint, step 2 of 2"
    called = grouper("export", unfinished, target)
    assert called.code == 0, called.err
    assert f"warning: {warned} ({newest})." in called.err
    assert called.out.startswith(f"{newest} -> ")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (target / name).read_bytes() == (newest / name).read_bytes()
    card = (target / "README.md").read_text()
    line = "This is checkpoint 2 of the 2 steps of GRPO, in a run that has not been finished."
    assert line in card.splitlines()
    for command in ("generate", "eval"):
        how = ASKED if command == "generate" else ("--no-base", "--max-new-tokens", "4", "-q")
        called = grouper(command, unfinished, *how)
        assert called.code == 0, called.err
        assert warned in called.err
    assert (unfinished / "eval_runs" / "demo-grpo-checkpoint-2").is_dir()


def test_a_checkpoint_is_named(grouper, finished_run, tmp_path):
    called = grouper("export", finished_run, tmp_path / "out", "--checkpoint", "2")
    assert called.code == 0, called.err
    assert "warning" not in called.err
    called = grouper("export", finished_run / "sft" / "checkpoint-2", tmp_path / "sft")
    assert called.code == 0, called.err
    line = "This is checkpoint 2 of the 2 steps of SFT, not the result of its run."
    assert line in (tmp_path / "sft" / "README.md").read_text().splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ("export", "RUN", "TARGET"),
        ("push", "RUN", "me/model"),
        ("serve", "RUN", "--dry-run"),
        ("chat", "RUN"),
        ("generate", "RUN", *ASKED),
        ("eval", "RUN", "--dry-run"),
    ],
)
def test_of_a_run_that_trained_nothing_there_is_no_model(grouper, unfinished, tmp_path, words):
    places = {"RUN": unfinished, "TARGET": tmp_path / "out"}
    command = [places.get(word, word) for word in words]
    named = grouper(*command, "--checkpoint", "77")
    named.refused("there is no checkpoint '77'", "2 (grpo), 2 (sft)")
    for phase in ("sft", "grpo"):
        shutil.rmtree(unfinished / phase)
    for more in ((), ("--checkpoint", "best")):
        grouper(*command, *more).refused("this run has trained nothing yet", str(unfinished))
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_nothing(grouper, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "thesis.tex").write_text("years of work")
    for target in ("model", "thesis.tex"):
        called = grouper("export", tmp_path / "model", tmp_path / target)
        called.refused(f"TARGET: {tmp_path / target} exists already")


def test_a_modelfile_lies_in_the_export(grouper, finished_run, tmp_path):
    called = grouper("export", finished_run, tmp_path / "out", "--modelfile")
    assert called.code == 0, called.err
    assert "Modelfile: ollama create NAME -f Modelfile" in called.out
    assert (tmp_path / "out" / "Modelfile").read_text().count("FROM .\n") == 1


def test_a_converter_that_is_missing_is_refused_before_the_export(
    grouper, finished_run, tmp_path, monkeypatch, extras
):
    monkeypatch.setenv("PATH", str(tmp_path))
    target = tmp_path / "out"
    called = grouper("export", finished_run, target, "--gguf", "q8_0")
    called.refused("llama.cpp's converter is not on the PATH", "--converter", "git clone")
    called = grouper("export", finished_run, target, "--gguf", "q8_0", "--converter", tmp_path)
    called.refused("there is no", "convert_hf_to_gguf.py")
    assert not target.exists()


def test_an_adapter_alone_has_no_gguf_file(grouper, finished_run, tmp_path):
    for more in (
        ("--adapter", "--modelfile"),
        ("--adapter", "--gguf", "f16"),
        ("--converter", "x"),
    ):
        called = grouper("export", finished_run, tmp_path / "out", *more)
        assert called.code == 2
        assert "--gguf" in called.err
    assert not (tmp_path / "out").exists()
