"""`grouper plan`."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from grouper.runs.progress import Progress

SMALL = ("data.sft.options.count=40", "data.train.options.count=40")


@pytest.mark.slow
def test_the_tables_are_shown(grouper):
    done = grouper("plan", "demo", *SMALL, "--tokens-per-second", "1000")
    assert done.code == 0, done.err
    for text in ("grpo update", "activations", "141 GB", "sampling.max_slots", "about"):
        assert text in done.out


@pytest.mark.slow
def test_json(grouper):
    done = grouper("plan", "demo", *SMALL, "--json", "--device", "cuda", "skip_sft=true")
    plan = json.loads(done.out)
    assert plan["device"] == "cuda"
    assert plan["parameters"] > 0
    assert plan["phases"][0]["seconds"] is None


def test_a_model_that_is_not_here_is_one_paragraph(grouper):
    grouper("plan", "demo", "model.new=null", "model.path=no/such-model").refused("no/such-model")


def test_a_terminal_shows_that_it_goes_on(grouper, monkeypatch):
    """A large set and a large model take half a minute."""
    out = io.StringIO()
    display = Progress(console=Console(file=out, width=160, force_terminal=True))
    monkeypatch.setattr("grouper.cli.plan.progress", lambda: display)
    grouper("plan", "demo", "model.new=null", "model.path=no/such-model").refused("no/such-model")
    assert "planning" in out.getvalue()


@pytest.mark.slow
def test_each_of_several_processes(grouper):
    done = grouper("plan", "demo", *SMALL, "--nproc", "2", "parallel=fsdp", "skip_sft=true")
    assert done.code == 0, done.err
    for text in ("in 2 processes", "at the peak of each process", "load", "(fsdp)"):
        assert text in done.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--nproc", "1", "parallel=fsdp"), "fsdp splits the weights over several processes"),
        (("--nproc", "5000"), "some processes would never train on one"),
    ],
)
def test_processes_that_make_no_sense_are_one_paragraph(grouper, arguments, text):
    grouper("plan", "demo", *SMALL, *arguments).refused("--nproc", text)


def test_no_process_at_all_is_refused_as_every_number_out_of_range(grouper):
    done = grouper("plan", "demo", "--nproc", "0")
    assert done.code == 2
    assert "Invalid value for '--nproc': 0 is not in the range x>=1." in done.err
