"""`grouper probe`: what it says of a set, and of a model that cannot be probed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grouper.models.folders import identity_of
from grouper.runs.probes import read_probes


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [
        {
            "question": f"Ann has {n} pens, and {' '.join(['then'] * 9)} gets 2. How many?",
            "answer": "1",
        }
        for n in range(4)
    ]
    rows.append({"question": "1+1?", "answer": "2"})
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy, in which probes are recorded."""
    shutil.copytree(finished_run, tmp_path / "demo")
    return tmp_path / "demo"


def test_a_run_is_probed_beside_a_control(grouper, run, questions, tmp_path):
    out = tmp_path / "probe.jsonl"
    called = grouper("probe", run, "--on", questions, "--output", out, "--quiet")
    assert called.code == 0, called.err
    assert "control (new problems)" in called.out
    assert "mine: no more than can be guessed" in called.out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    mine = [row for row in rows if row["set"] == "mine"]
    assert len(mine) == 4, "the short question is left out"
    assert all(row["shown"] + row["ending"] for row in mine)
    assert len(rows) - len(mine) >= 4, "and the control's"


def test_settings_of_training_are_no_matter(grouper, run, questions):
    recipe = run / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8")
    assert text.count("learning_rate: 0.003") == 1
    recipe.write_text(text.replace("learning_rate: 0.003", "learning_rate: 0.5"), encoding="utf-8")
    dry = grouper("run", run, "--dry-run")
    assert "destroys a model within a step" in dry.err
    for command in (("probe", run, "--on", questions), ("grade", run)):
        called = grouper(*command)
        assert called.code == 0, called.err
        assert "destroys" not in called.err


def test_as_json(grouper, run, questions):
    called = grouper("probe", run, "--on", questions, "--limit", 2, "--json", "--quiet")
    assert called.code == 0, called.err
    mine, control = json.loads(called.out)["probes"]
    assert mine["questions"] == control["questions"] == 2
    assert mine["exact"] == 0
    assert mine["high"] > 0.5


def test_what_cannot_be_probed_is_refused(grouper, run, tmp_path):
    grouper("probe", run, "--on", "gsm").refused("there is no suite 'gsm'")
    grouper("probe", tmp_path, "--on", "gsm8k").refused("MODEL")
    called = grouper("probe", run / "grpo" / "final")
    assert called.code == 2
    assert "name the problems with --on" in called.err


def test_a_run_is_probed_on_its_own_problems_and_keeps_what_was_found(grouper, run, tmp_path):
    called = grouper("probe", run, "--limit", 3, "--quiet")
    assert called.code == 0, called.err
    assert grouper("probe", run, "--on", "validation", "--limit", 2, "--quiet").code == 0
    found = {recorded.probe.name: recorded for recorded in read_probes(run)}
    assert found.keys() == {"test", "train", "validation"}
    assert len(found["test"].probe.completed) == len(found["test"].control.completed) == 3
    assert found["test"].model_hash == identity_of(str(run / "grpo" / "final"))
    assert grouper("report", run).code == 0
    assert "Has the model read these problems before?" in (run / "report.html").read_text()
    assert grouper("export", run, tmp_path / "out", "--license", "mit").code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| validation | 2 | 0.0 [0.0, 65.8] |" in card
    assert "- train: no more than can be guessed." in card
    (run / "probes" / "test.json").write_text("{}")
    assert (
        "the record of this probe is damaged"
        in grouper("report", run).err + (run / "report.html").read_text()
    )


def test_a_base_model_without_a_chat_template_is_probed_as_plain_text(
    grouper, run, questions, tmp_path
):
    base = tmp_path / "base"
    shutil.copytree(run / "base", base)
    (base / "chat_template.jinja").unlink()
    called = grouper("probe", base, "--on", questions, "--quiet")
    assert called.code == 0, called.err
    assert "mine: no more than can be guessed" in called.out
