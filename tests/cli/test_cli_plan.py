"""`grouper plan`."""

from __future__ import annotations

import json

from grouper.runs.folder import RunFolder

SMALL = ("data.sft.options.count=40", "data.train.options.count=40")


def test_the_tables_are_shown(grouper):
    done = grouper("plan", "demo", *SMALL, "--tokens-per-second", "1000")
    assert done.code == 0, done.err
    for text in ("grpo update", "activations", "141 GB", "sampling.max_slots", "about"):
        assert text in done.out


def test_json(grouper):
    done = grouper("plan", "demo", *SMALL, "--json", "--device", "cuda", "skip_sft=true")
    plan = json.loads(done.out)
    assert plan["device"] == "cuda"
    assert plan["parameters"] > 0
    assert plan["phases"][0]["seconds"] is None


def test_times_of_an_earlier_run(grouper, finished_run):
    done = grouper("plan", "demo", *SMALL, "--json", "--like", finished_run)
    assert all(phase["seconds"] > 0 for phase in json.loads(done.out)["phases"])


def test_a_model_that_is_not_here_is_one_paragraph(grouper):
    grouper("plan", "demo", "model.new=null", "model.path=no/such-model").refused("no/such-model")


def test_times_of_something_that_is_no_run_are_refused(grouper, tmp_path):
    grouper("plan", "demo", *SMALL, "--like", tmp_path / "nowhere").refused("nowhere")
    (tmp_path / "run.json").write_text("{}")
    grouper("plan", "demo", *SMALL, "--like", tmp_path).refused("not a run folder", "recipe_hash")
    RunFolder.create(
        tmp_path / "new", recipe_yaml="", recipe_hash="a", versions={}, fingerprints={}
    )
    called = grouper("plan", "demo", *SMALL, "--like", tmp_path / "new")
    called.refused(str(tmp_path), "not finished a step", "--tokens-per-second")
