"""`grouper data`: sources, problems as they are read, and audits of files and recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from grouper.data import SOURCES
from grouper.runs.progress import Progress
from grouper.training.problem_sets import ProblemSets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sets = {
        "train": [("What is 2+2?", "4"), ("What is 3 + 3?", "6"), ("Bad?", r"\frac{1")],
        "test": [("what is 2 + 2", "4"), ("What is 9+9?", "18"), ("What is 9 + 9?", "19")],
    }
    for name, rows in sets.items():
        lines = (json.dumps({"question": q, "answer": a}) for q, a in rows)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def bars(monkeypatch) -> list[str]:
    """The names of the bars that a terminal would show."""
    shown, within = [], Progress.within

    def noted(self, name, total=None):
        shown.append(name)
        return within(self, name, total)

    monkeypatch.setattr(Progress, "within", noted)
    return shown


@pytest.mark.parametrize("command", ["audit", "prepare"])
def test_a_terminal_shows_that_a_large_set_is_being_read(
    grouper, folder, bars, command, monkeypatch
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        "grouper.training.problem_sets.load_problem_sets",
        lambda *_: bars.append("read") or ProblemSets(),
    )
    assert grouper("data", command, "demo").code == 0
    assert bars == [command, "read"]


PARTS = {"sft", "train", "validation", "test"}


def test_the_list_names_every_source(grouper):
    called = grouper("data", "list")
    assert called.code == 0
    assert all(name in called.out for name in SOURCES)


def test_show_prints_problems_as_they_are_read(grouper, folder):
    called = grouper("data", "show", folder, "--split", "train", "-n", "1")
    assert called.code == 0, called.err
    assert "What is 2+2?" in called.out
    assert "Answer: 4" in called.out
    assert "3 + 3" not in called.out


def test_a_few_problems_of_a_recipe_that_holds_some_out_are_shown(grouper, folder):
    """It was refused: 0.03 of 3 problems leaves one side empty."""
    recipe = {
        "name": "own",
        "model": {"path": "."},
        "data": {
            "train": {"source": "file", "path": str(folder), "split": "test"},
            "validation_share": 0.03,
        },
    }
    (folder / "own.yaml").write_text(json.dumps(recipe))
    called = grouper("data", "show", folder / "own.yaml", "-n", "1")
    assert called.code == 0, called.err
    assert called.out.count("Answer: ") == 1
    held_out = grouper("data", "show", folder / "own.yaml", "-n", "1", "data.validation_share=0.03")
    held_out.refused("leaves one side empty")


def test_an_audit_finds_and_writes_everything(grouper, folder, tmp_path):
    output = tmp_path / "quarantine.jsonl"
    called = grouper(
        "data", "audit", folder, "--split", "train", "--split", "test", "--output", output
    )
    assert called.code == 0, called.err
    text = " ".join(called.out.split())
    assert "1 row that cannot be used row 2: the reference" in text
    assert "1 question with different answers" in text
    # In the training data and held out is another line.
    assert "0 questions asked more than once" in text
    assert "0 held-out questions sharing 13 words" in text
    assert "18 | 19" in text
    assert "1 held-out question in the training data" in text
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 4
    assert {bool(row["reason"]) for row in rows} == {True}
    assert f"4 findings written to {output}" in called.out
    # Perhaps the data themselves, or a recipe.
    grouper("data", "audit", folder, "--output", output).refused(f"{output} exists already")
    assert len(output.read_text().splitlines()) == 4
    grouper("data", "audit", folder, "--output", ".").refused("--output: . exists already")


def test_a_recipe_stands_for_all_its_parts(grouper):
    called = grouper("data", "audit", "demo", "--limit", "30")
    assert called.code == 0, called.err
    assert [line for line in called.out.splitlines() if line.startswith(("sft:", "test:"))] == [
        "sft: arithmetic/sft",
        "test: arithmetic/test",
    ]
    assert "0 held-out questions in the training data" in called.out
    assert "integer: 30" in called.out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "arithmetic"])
def test_a_built_in_name_wins_over_a_folder_unless_written_as_a_path(
    grouper, folder, tmp_path, monkeypatch, name
):
    work = tmp_path / "work"
    (work / name).mkdir(parents=True)
    (folder / "train.jsonl").rename(work / name / "train.jsonl")
    monkeypatch.chdir(work)
    for command in (("audit", name, "--limit", "9"), ("show", name)):
        built_in = grouper("data", *command)
        assert "arithmetic/train" in built_in.out
        assert f"{name} is taken as the built-in" in built_in.err
        assert f"./{name}" in built_in.err
    for command in (("audit", f"./{name}"), ("show", f"./{name}")):
        local = grouper("data", *command)
        assert f"{name}/train" in local.out
        assert "arithmetic/train" not in local.out or name == "arithmetic"
        assert local.err == ""
        assert "2 problems" in local.out or "What is 2+2?" in local.out


def test_an_unknown_source_names_the_nearest(grouper):
    grouper("data", "audit", "gsm8").refused("Did you mean 'gsm8k'?")
    grouper("data", "show", "file").refused("path is missing")


LAYOUTS = Path(__file__).resolve().parents[1] / "data" / "layouts"


def test_the_list_says_where_each_lies(grouper):
    text = " ".join(grouper("data", "list").out.split())
    assert "open-r1/DAPO-Math-17k-Processed on the Hub, config en, train" in text


def test_show_takes_the_settings_of_data_train(grouper):
    path = LAYOUTS / "openmath-mini"
    called = grouper(
        "data", "show", "openmath-mini", "numeric_only=true", "--path", path, "-n", "11"
    )
    assert called.code == 0, called.err
    assert "numeric_only: 9 of 11 answers are plain numbers." in called.out
    assert "Solution: Let me see." in called.out
    assert "sqrt" not in called.out


def test_prepare_writes_a_folder_that_a_recipe_reads(grouper, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    called = grouper(
        "data", "prepare", "openmath-mini", "only_correct=true", "validation_share=0.2",
        "--path", LAYOUTS / "openmath-mini",
    )  # fmt: skip
    assert called.code == 0, called.err
    folder = tmp_path / "prepared" / "openmath-mini"
    assert {f.name for f in folder.iterdir()} == {
        "cot.jsonl", "cot.invalid.jsonl", "validation.jsonl", "validation.invalid.jsonl"
    }  # fmt: skip
    assert "only_correct: 13 of 14 demonstrations are correct." in called.out
    use = [line.strip() for line in called.out.splitlines() if line.startswith("  data.")]
    assert use == [
        "data.train={source: file, path: prepared/openmath-mini, split: cot}",
        "data.validation={source: file, path: prepared/openmath-mini, split: validation}",
    ]
    dry = grouper("run", "gsm8k-tiny", "--dry-run", *use, "data.sft=null", use[0].replace(
        "data.train", "data.test"))  # fmt: skip
    assert dry.code == 0, dry.err
    assert "# Evaluation on validation: 3 problems" in dry.out
    again = grouper("data", "prepare", "openmath-mini", "--path", LAYOUTS / "openmath-mini")
    again.refused("a file with other content is here already", "--overwrite")
    prepared = folder / "cot.jsonl"
    before = prepared.read_text()
    words = ("--path", LAYOUTS / "openmath-mini", "--overwrite")
    assert grouper("data", "prepare", "openmath-mini", *words).code == 0
    assert prepared.read_text() != before


def test_the_line_for_a_recipe_is_yaml_whatever_the_folder_is_called(grouper, tmp_path):
    folder = tmp_path / "mine, and 'yours'"
    called = grouper("data", "prepare", "arithmetic", "options={count: 4}", "--output", folder)
    line = called.out.splitlines()[-1]
    assert yaml.safe_load(line.partition("=")[2])["path"] == str(folder)


def test_prepare_takes_a_whole_recipe(grouper, tmp_path, small):
    called = grouper("data", "prepare", "demo", *small, "--output", tmp_path / "ready")
    assert called.code == 0, called.err
    names = {f.stem for f in (tmp_path / "ready").glob("*.jsonl")}
    assert {name for name in names if not name.endswith(".invalid")} == PARTS
    shown = grouper("data", "show", tmp_path / "ready", "--split", "test", "-n", "1")
    assert "arithmetic/test/0" in shown.out


def test_a_question_twice_with_one_answer_is_no_contradiction(grouper, tmp_path):
    rows = [("1 + 1?", "2"), ("1+1?", "2"), ("2 + 2?", "4"), ("2+2?", "5")]
    lines = (json.dumps({"question": question, "answer": answer}) for question, answer in rows)
    (tmp_path / "twice.jsonl").write_text("\n".join(lines))
    text = " ".join(grouper("data", "audit", tmp_path / "twice.jsonl").out.split())
    assert re.search(r"1 question asked more than once \S+/0, \S+/1 1 question with", text), text
    assert re.search(r"1 question with different answers \S+/2, \S+/3: 4 \| 5", text), text


def test_several_splits_keep_their_names(grouper, tmp_path):
    called = grouper(
        "data", "prepare", "numina-tir", "--path", LAYOUTS / "numina-tir",
        "--split", "train", "--split", "test", "--output", tmp_path / "ready",
    )  # fmt: skip
    assert called.code == 0, called.err
    assert (tmp_path / "ready" / "train.jsonl").exists()
    assert f"data.test={{source: file, path: {tmp_path / 'ready'}, split: test}}" in called.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "'' is not a source, file, folder or recipe"),
        (["svamp", "numeric_onl=true"], "Did you mean data.train.numeric_only=true?"),
        (["svamp", "numeric_only"], "Write key=value"),
        (["svamp", "validation_share=2"], "should be less than 1 (got 2)"),
        (["demo", "--path", "x"], "a recipe names its own paths"),
        (["hub", "--path", "nobody/nothing"], "HF_HUB_OFFLINE is set"),
    ],
)
def test_mistakes_are_one_paragraph(grouper, tmp_path, arguments, message):
    called = grouper("data", "prepare", *arguments, "--output", tmp_path / "ready")
    called.refused(message)
    assert not (tmp_path / "ready").exists()
