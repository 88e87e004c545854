"""`grouper bench`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace

import pytest

from grouper.advice import bench
from grouper.cli.bench import bench as bench_command
from grouper.errors import ConfigError

FEW = ("--steps", "2", "--warmup", "0", "-q")


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.slow
def test_the_table_of_a_run_folder(grouper, finished_run, scratch):
    done = grouper("bench", finished_run, *FEW, "--completion-tokens", "5")
    assert done.code == 0, done.err
    for text in (
        str(finished_run / "sft" / "final"),
        "completions of 5 tokens (made so)",
        "prefill, s",
        "no kernels",
        "MFU of the step",
        " GiB in the whole process\n",
        "The recipe's 2 GRPO steps: ",
    ):
        assert text in done.out, done.out
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_json_of_a_recipe_that_makes_its_model(grouper, small, tmp_path):
    done = grouper(
        "bench",
        "demo",
        *small,
        *FEW,
        "--json",
        "--no-plain",
        "--completion-tokens",
        "4",
        f"output_dir={tmp_path}",
    )
    told = json.loads(done.out)
    assert told["model"] == "a new model"
    assert told["steps"] == 2
    assert told["metrics"]["completion/tokens"]["max"] == 4
    assert told["metrics_without_kernels"]["completion/tokens"] == {}
    assert sum(told["shares"].values()) == pytest.approx(1)
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
def test_memory_that_ran_out_names_the_setting_to_begin_with(grouper, finished_run, monkeypatch):
    honest = bench.bench
    short = lambda *args, **named: replace(honest(*args, **named), token_limit=96)  # noqa: E731
    monkeypatch.setattr(bench, "bench", short)
    done = grouper("bench", finished_run, *FEW, "--completion-tokens", "2")
    assert "Memory ran out: slices have had at most 96 tokens since." in done.out
    assert "Set grpo.tokens_per_micro_batch=96" in done.out


@pytest.mark.slow
def test_mistakes_are_one_paragraph(grouper, finished_run):
    grouper("bench", "demo", "--model", "./none").refused("there is no folder", "--model")
    grouper("bench", "demo", "--model", str(finished_run.parent)).refused("holds neither")
    grouper("bench", finished_run, "--completion-tokens", "100000").refused("100000")
    grouper("bench", finished_run, "grpo.group_sise=4").refused("group_size")
    assert grouper("bench", finished_run, "--steps", "0").code == 2


def test_several_processes_are_refused(finished_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"one process.*metrics\.jsonl"):
        bench_command.main([str(finished_run)], standalone_mode=False)
