"""`grouper preview`: what GRPO would start from, sample by sample; 1 where it cannot learn."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from tiny_models import make_rollout

from grouper.cli.preview import _show_rollout
from grouper.prompts import FORMATS
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress


@pytest.mark.slow
def test_samples_of_what_grpo_starts_from(grouper, finished_run):
    called = grouper("preview", finished_run, "--quiet", "grpo.require_correct_in_group=false")
    assert called.code in (0, 1), called.err
    assert f"Model:     {finished_run / 'sft' / 'final'}" in called.out
    assert "temperature 1.0, max_new_tokens 48" in called.out
    assert called.out.count("] reward ") == 5
    assert "Diversity: " in called.out
    assert ("Cause (" in called.out) == (called.code == 1)
    again = grouper("preview", finished_run, "--quiet", "grpo.require_correct_in_group=false")
    assert again.out == called.out


def test_the_problems_are_those_that_grpo_meets_first(grouper, finished_run):
    """Not the first of the file, which may be sorted by subject."""
    called = grouper("preview", finished_run, "-q", "--problems", "4", "--samples", "2")
    shown = re.findall(r"^Problem (.+)$", called.out, re.MULTILINE)
    met = {r["problem_id"]: r["prompt"] for r in RunFolder(finished_run).read_rollouts("grpo", 1)}
    assert set(shown) == set(met)
    assert len(shown) == 4
    for problem, prompt in met.items():  # as the model reads it
        assert f"Problem {problem}\n{prompt}\nReference: " in called.out


def test_a_terminal_shows_that_it_goes_on(grouper, finished_run, monkeypatch):
    """All problems are rendered, of which few are shown: a large set takes a minute."""
    out = io.StringIO()
    display = Progress(console=Console(file=out, width=160, force_terminal=True))
    monkeypatch.setattr("grouper.cli.preview.progress", lambda quiet: display)
    called = grouper("preview", finished_run, "--problems", "1", "--samples", "2")
    assert called.code in (0, 1), called.err
    assert "preview" in out.getvalue()


def test_a_temperature_that_is_too_low_is_named_with_code_1(grouper, finished_run):
    called = grouper(
        "preview",
        finished_run,
        "-q",
        "--problems",
        "2",
        "--samples",
        "3",
        "sampling.temperature=1e-6",
    )
    assert called.code == 1
    assert called.out.count("] reward ") == 6
    assert "Cause (temperature): the temperature is too low" in called.out
    assert "0 of 2 problems" in called.out


def test_mistakes_are_one_paragraph(grouper, finished_run, tmp_path):
    called = grouper("preview", "demo", f"output_dir={tmp_path}")
    called.refused("no model to sample from", "--model")
    called = grouper("preview", finished_run, "--model", "./none")
    called.refused("there is no folder", "--model")
    assert grouper("preview", finished_run, "--samples", "1").code == 2


def test_what_a_model_wrote_cannot_steer_the_terminal(capsys):
    """R7: control characters went to the terminal as they were."""
    rollout = make_rollout([7], 1.0)
    text = "\x1b]0;title\x07 two\nlines\t\x9b31m \u202e"
    rollout = replace(
        rollout,
        completion=replace(rollout.completion, text=text),
        grade=replace(rollout.grade, extracted="\x1b[2J"),
    )
    _show_rollout(rollout, FORMATS["boxed"])
    out = capsys.readouterr().out
    assert "\\x1b]0;title\\x07 two\nlines\t\\x9b31m \\u202e" in out
    assert "answer \\x1b[2J" in out
