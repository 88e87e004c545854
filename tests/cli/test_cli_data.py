"""`grouper data`: sources, problems as they are read, and audits of files and recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grouper.data import SOURCES


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


def test_an_audit_finds_and_writes_everything(grouper, folder, tmp_path):
    output = tmp_path / "quarantine.jsonl"
    called = grouper(
        "data", "audit", folder, "--split", "train", "--split", "test", "--output", output
    )
    assert called.code == 0, called.err
    text = " ".join(called.out.split())
    assert "1 rows that cannot be used row 2: the reference" in text
    assert "1 questions with different answers" in text
    assert "18 | 19" in text
    assert "1 held-out questions are trained on" in text
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 4
    assert {bool(row["reason"]) for row in rows} == {True}
    assert f"4 findings written to {output}" in called.out


def test_a_recipe_stands_for_all_its_parts(grouper):
    called = grouper("data", "audit", "demo", "--limit", "30")
    assert called.code == 0, called.err
    assert [line for line in called.out.splitlines() if line.startswith(("sft:", "test:"))] == [
        "sft: arithmetic/sft",
        "test: arithmetic/test",
    ]
    assert "0 held-out questions are trained on" in called.out
    assert "integer: 30" in called.out


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
