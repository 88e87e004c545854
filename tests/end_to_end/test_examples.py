"""The examples and the Python page, run as they stand."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from tiny_runs import TINY_RUN, data_from, write_problems

import grouper

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_problems(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(here):
    return ["demo", *TINY_RUN, *data_from(str(here)), "sft.steps=2", "grpo.steps=1"]


def run(name, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_look(tiny, here, monkeypatch, capsys):
    run("look.py", tiny, monkeypatch)
    shown = capsys.readouterr().out
    assert "demo: sft then grpo of a new random qwen3 model" in shown
    assert "4 samples per problem" in shown
    assert "'correctness': 1.0" in shown
    assert not (here / "outputs").exists()


@pytest.mark.slow
def test_own_reward(tiny, here, monkeypatch, capsys):
    run("own_reward.py", [*tiny, "name=brief"], monkeypatch)
    assert re.search(r"^grpo: \d+\.\d%$", capsys.readouterr().out, re.MULTILINE)
    rollouts = list(grouper.RunFolder(here / "outputs" / "brief").read_rollouts("grpo"))
    assert {name for r in rollouts for name in r["rewards"]} == {"correctness", "brevity"}


@pytest.mark.slow
def test_ask(lora_run, here, monkeypatch, capsys):
    run("ask.py", [lora_run, "Pick 1.", "Pick 2."], monkeypatch)
    assert capsys.readouterr().out.count(" -> ") == 2
    rows = [json.loads(line) for line in (here / "answers.jsonl").read_text().splitlines()]
    assert [row["question"] for row in rows] == ["Pick 1.", "Pick 2."]


def test_pieces(monkeypatch, capsys):
    run("pieces.py", [], monkeypatch)
    # Every token of the right answer is raised, none of the wrong one, and padding has nothing.
    assert capsys.readouterr().out == (
        "[1.0, 0.0] [0.707, -0.707] [[True, True, False], [False, False, False]]\n"
    )


@pytest.mark.slow
def test_the_python_page_runs_from_top_to_bottom(tiny, here, monkeypatch, capsys):
    honest = grouper.load_recipe
    monkeypatch.setattr(grouper, "load_recipe", lambda name: honest(name, tiny[1:]))
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    for block in blocks:
        # One step is enough to see that it runs.
        exec(block.replace("grpo.steps=20", "grpo.steps=1"), names)
    assert (here / "answers.jsonl").is_file()
    assert "Metrics(format_accuracy=" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "your_data", "read_a_run"])
def test_a_notebook_runs_from_top_to_bottom(name, tiny, here, monkeypatch, capsys):
    """Its cells in their order, with a tiny model; no Jupyter is needed for that."""
    honest = grouper.load_recipe
    # The data and the steps are chosen by the notebook itself.
    sizes = [word for word in tiny[1:] if not word.startswith("data.")]
    monkeypatch.setattr(grouper, "load_recipe", lambda name: honest(name, sizes))
    path = EXAMPLES / "notebooks" / f"{name}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4
    names: dict[str, object] = {}
    for cell in code:
        exec(cell, names)
    assert list((here / "outputs").glob("*/grpo/final"))
