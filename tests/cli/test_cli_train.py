"""`grouper run`, `sft`, `grpo`: dry runs that say the sizes, flags that are overrides, the end."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from grouper.config.loading import load_recipe
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_demo.py"


def test_a_dry_run_prints_a_recipe_that_can_be_run_and_the_sizes(grouper, tmp_path):
    out = tmp_path / "out"
    called = grouper("run", "demo", "--dry-run", "grpo.group_size=4", f"output_dir={out}")
    assert called.code == 0, called.err
    assert "16 prompts x 4 samples = 64 completions per step, 250 steps per epoch" in called.out
    assert "32 demonstrations per step, 2,000 in all" in called.out
    assert f"Output: {out}/demo (new)" in called.out
    path = tmp_path / "resolved.yaml"
    path.write_text(called.out)
    assert load_recipe(path) == load_recipe("demo", ["grpo.group_size=4", f"output_dir={out}"])
    assert not out.exists()


def test_a_dry_run_begins_with_a_summary(grouper, small, tmp_path, monkeypatch):
    """Issue 17: at most 25 lines before the recipe, whatever the data have to tell."""
    notes = [f"note {number}" for number in range(40)]
    monkeypatch.setattr("grouper.advice.dry_run.phase_lines", lambda *_: notes)
    called = grouper("run", "demo", *small, f"output_dir={tmp_path}", "--dry-run")
    assert called.code == 0, called.err
    lines = called.out.splitlines()
    summary = lines[: lines.index("")]
    assert len(summary) == 25
    assert summary[-1].startswith("# Dry run: no model was loaded")
    assert lines[26].startswith("name: demo")
    assert [line for line in lines if line == "# note 39"]


def test_what_can_be_refused_at_once_is(grouper, small, tmp_path, monkeypatch):
    """U16: before torch is imported and the data are read."""
    monkeypatch.setattr("grouper.cli.train._train", lambda *_, **__: pytest.fail("it was begun"))
    (tmp_path / "file").write_text("")
    out = f"output_dir={tmp_path}/file"
    grouper("run", "demo", *small, out).refused("cannot write here", "Set output_dir")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("years of work")
    grouper("run", "demo", *small, f"output_dir={tmp_path}").refused("not a run of Grouper")


def test_a_dry_run_shows_that_it_goes_on(grouper, small, tmp_path, monkeypatch):
    """A large set takes a minute."""
    out = io.StringIO()
    display = Progress(console=Console(file=out, width=160, force_terminal=True))
    monkeypatch.setattr("grouper.cli.train.progress", lambda: display)
    called = grouper("run", "demo", *small, f"output_dir={tmp_path}", "--dry-run")
    assert called.code == 0, called.err
    assert "reading and preparing the data" in out.getvalue()


def test_a_dry_run_says_what_is_in_the_folder(grouper, small, finished_run):
    out = f"output_dir={finished_run.parent}"
    called = grouper("run", "demo", *small, out, "--dry-run", "--resume")
    assert called.code == 0, called.err
    assert "finished: sft, grpo" in called.out
    called = grouper("run", "demo", *small, out, "--dry-run", "--overwrite")
    assert "will be deleted" in called.out
    assert (finished_run / "grpo" / "final").is_dir()


def test_a_dry_run_says_what_grpo_starts_from_and_what_ends_a_completion(
    grouper, small, finished_run, tmp_path
):
    def said(*words: str) -> str:
        called = grouper("run", "demo", *small, "--dry-run", *words)
        assert called.code == 0, called.err
        return called.out + called.err

    there, sft = f"output_dir={finished_run.parent}", finished_run / "sft" / "final"
    assert f"# GRPO starts from {sft}." in said("--skip-sft", there, "--resume")
    fresh = "# GRPO starts from a new random model."
    assert fresh in said("--skip-sft", there, "--overwrite")
    unfinished = shutil.copytree(finished_run, tmp_path / "demo")
    (unfinished / "sft" / "final" / "trainer_state.json").unlink()
    assert fresh in said("--skip-sft", f"output_dir={tmp_path}", "--resume")
    assert "GRPO starts from" not in said()
    assert f"# GRPO starts from {sft}." in said("--start-from", str(sft))
    assert "nothing is trained" in said("--skip-sft", "--skip-grpo")
    stops = said('sampling.stop=["</a>", "\\n\\nQ:"]')
    assert r'# Stop strings: "</a>" "\n\nQ:"' in stops


def test_a_dry_run_renders_every_prompt_where_the_tokenizer_is_local(grouper, small, finished_run):
    settings = [text for text in small if not text.startswith("model.")]
    base = [*settings, "name=other", "model.new=null", f"model.path={finished_run / 'base'}"]
    called = grouper("run", "demo", *base, "--dry-run")
    assert called.code == 0, called.err
    assert "Prompts: 60 fit" in called.out
    assert "Demonstrations: 60 fit" in called.out
    assert "Stop tokens: <|end|>" in called.out
    called = grouper("run", "demo", *base, "--dry-run", "prompt.max_prompt_tokens=2")
    called.refused("no prompt is left", "prompt.max_prompt_tokens")


def test_a_dry_run_warns_of_leaks_and_of_a_system_prompt_without_the_tags(grouper, tmp_path):
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
    for name in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows[: 8 if name == "train" else 3])
        (tmp_path / f"{name}.jsonl").write_text(text)
    called = grouper(
        "grpo",
        "demo",
        "data.sft=null",
        "data.validation=null",
        f"data.train={{source: file, path: '{tmp_path}/train.jsonl'}}",
        f"data.test={{source: file, path: '{tmp_path}/test.jsonl'}}",
        "prompt.system=Answer briefly.",
        f"output_dir={tmp_path}/out",
        "--dry-run",
    )
    assert called.code == 0, called.err
    assert "data.test: 3 problems are in the training data" in called.err
    (last,) = [line for line in called.out.splitlines() if "Dry run: " in line]
    assert (
        "All checks passed, but data.test: 3 problems are in the training data. Not checked: "
        in last
    )
    assert "prompt.system never mentions <reasoning>" in called.err


@pytest.mark.slow
def test_flags_are_overrides_of_the_phases_that_run(grouper, tmp_path):
    out = f"output_dir={tmp_path}"

    def resolved(*arguments: str) -> dict[str, dict[str, object]]:
        called = grouper(*arguments, out, "--dry-run")
        assert called.code == 0, called.err
        return yaml.safe_load(called.out)

    both = resolved("run", "demo", "--steps", "7")
    assert (both["sft"]["steps"], both["grpo"]["steps"]) == (400, 7)
    sft = resolved("sft", "demo", "--steps", "7", "--learning-rate", "1e-2")
    assert (sft["sft"]["steps"], sft["grpo"]["steps"], sft["skip_grpo"]) == (7, 60, True)
    assert sft["sft"]["optimizer"]["learning_rate"] == 0.01  # type: ignore[index] # a mapping
    assert resolved("grpo", "demo")["skip_sft"] is True


@pytest.mark.slow
def test_a_run_ends_with_the_table_the_reading_and_where_it_lies(grouper, small, finished_run):
    out = f"output_dir={finished_run.parent}"
    called = grouper("run", "demo", *small, out, "--resume", "--quiet")
    assert called.code == 0, called.err
    for text in ("base", "SFT", "GRPO", "verdict", "What this shows", str(finished_run)):
        assert text in called.out
    reports = RunFolder(finished_run).read_metrics()
    assert [(r.phase, r.step) for r in reports] == [
        ("sft", 1),
        ("sft", 2),
        ("grpo", 1),
        ("grpo", 2),
    ]
    for name in ("curves.png", "training.log", "recipe.yaml", "run.json"):
        assert (finished_run / name).stat().st_size > 0


@pytest.mark.slow
def test_another_recipe_goes_on_only_when_told(grouper, small, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "demo")
    shutil.rmtree(tmp_path / "demo" / "grpo")
    arguments = ["run", "demo", *small, f"output_dir={tmp_path}", "grpo.group_size=4", "--resume"]
    grouper(*arguments).refused("grpo.group_size 8 -> 4", "--allow-changes")
    grouper(*arguments, "--dry-run").refused("grpo.group_size 8 -> 4")
    without_resume = grouper(*arguments[:-1], "--allow-changes")
    assert without_resume.code == 2
    assert "add --resume" in without_resume.err
    called = grouper(*arguments, "--allow-changes", "--quiet")
    assert called.code == 0, called.err
    run = RunFolder(tmp_path / "demo")
    assert [r.step for r in run.read_metrics() if r.phase == "grpo"] == [1, 2]
    (change,) = run.read_info().changes
    assert change.changes == {"grpo.group_size": [8, 4]}
    assert (change.phase, change.step) == ("grpo", 0)


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_samples_are_printed_every_so_many_grpo_steps(
    grouper, small, finished_run, tmp_path, quiet
):
    """S14: also in a run that did not print any when it began."""
    shutil.copytree(finished_run, tmp_path / "demo")
    settings = [*small, f"output_dir={tmp_path}", "grpo.steps=5", "tracking.print_every_steps=2"]
    called = grouper("run", "demo", *settings, "--resume", *(["--quiet"] if quiet else []))
    assert called.code == 0, called.err
    shown = [line for line in called.err.splitlines() if line.startswith("Sample of grpo step")]
    assert [line.split()[4] for line in shown] == ([] if quiet else ["4"])
    assert all(
        (f"\n{part}: " in called.err) != quiet
        for part in ("Question", "Answer", "Verdict", "Reward")
    )


@pytest.mark.slow
def test_what_a_reward_beside_the_work_logs_is_a_metric(grouper, small, tmp_path, monkeypatch):
    """U11: a module, as `recipes from` names it. S12: log_metric and trainer_state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    (tmp_path / "rewards_beside_the_work.py").write_text(
        "def counted(completions, log_metric, trainer_state, **kwargs):\n"
        "    log_metric('progress', trainer_state.global_step / trainer_state.max_steps)\n"
        "    return [float(n) for n, _ in enumerate(completions)]\n"
    )
    reward = "rewards=[{name: 'rewards_beside_the_work:counted'}]"
    called = grouper("grpo", "demo", *small, f"output_dir={tmp_path}", reward, "--quiet")
    assert called.code == 0, called.err
    reports = [r for r in RunFolder(tmp_path / "demo").read_metrics() if r.phase == "grpo"]
    assert [r.tallies["rewards/progress"].mean for r in reports] == [0.0, 0.5]


@pytest.mark.slow
def test_sft_then_grpo_in_the_same_folder(grouper, small, tmp_path):
    arguments = ["demo", *small, f"output_dir={tmp_path}", "--quiet"]
    assert grouper("sft", *arguments).code == 0
    assert not (tmp_path / "demo" / "grpo").exists()
    called = grouper("grpo", *arguments, "--resume")
    assert called.code == 0, called.err
    assert (tmp_path / "demo" / "grpo" / "final" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_smallest_python_program_runs_and_runs_again(small, tmp_path):
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, EXAMPLE, *small],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["base", "sft", "grpo"]
    assert (tmp_path / "outputs" / "demo" / "grpo" / "final").is_dir()


@pytest.mark.slow
def test_several_seeds_end_with_one_table(grouper, small, tmp_path):
    out = f"output_dir={tmp_path}"
    called = grouper("run", "demo", *small, out, "seed=4", "--seeds", 2, "--quiet")
    assert called.code == 0, called.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-seed4", "demo-seed5"]
    assert load_recipe(tmp_path / "demo-seed5" / "recipe.yaml").seed == 5
    table = called.out.partition("2 seeds of demo")[2]
    for text in ("base", "SFT", "GRPO", "Over 2 seeds GRPO - SFT: ["):
        assert text in table
    # Finished runs are gone on with, and the table is printed again.
    again = grouper("run", "demo", *small, out, "seed=4", "--seeds", 2, "--quiet", "--resume")
    assert again.out.partition("2 seeds of demo")[2] == table
    called = grouper("run", "demo", *small, out, "seed=4", "--seeds", 2, "--quiet")
    called.refused("the folder already holds a run of this recipe")


@pytest.mark.slow
def test_seeds_are_added_until_there_is_a_verdict(grouper, small, tmp_path):
    """Or none is left; and the table's interval is the one that was decided by."""
    words = ["run", "demo", *small, f"output_dir={tmp_path}", "seed=4", "--seeds", 4, "--quiet"]
    called = grouper(*words, "--until", "99")
    assert called.code == 0, called.err
    # Two seeds of four problems say nothing of what the spread is.
    names = ["demo-seed4", "demo-seed5", "demo-seed6"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert "After 3 of up to 4 seeds, GRPO over SFT: " in called.out
    assert "That is enough." in called.out
    assert "3 seeds of demo" in called.out
    assert "valid after each of up to 4." in called.out
    again = grouper(*words, "--until", "verdict", "--resume")
    assert again.code == 0, again.err
    # The model is too small to learn anything.
    assert again.out.count("no evidence. Another seed follows.") == 3
    assert "4 seeds of demo" in again.out
    assert "After 4 of up to 4 seeds" in again.out


@pytest.mark.parametrize("words", [["--until", "verdict"], ["--until", "2", "--seeds", 2]])
def test_until_needs_seeds_to_choose_from(grouper, words):
    called = grouper("run", "demo", *words)
    assert called.code == 2
    assert "add --seeds N, with N from 3 to 50" in called.err


@pytest.mark.parametrize("until", ["better", "0", "-1", "nan", "100"])
def test_until_is_a_verdict_or_points(grouper, until):
    called = grouper("run", "demo", "--seeds", 3, "--until", until)
    assert called.code == 2
    assert "is neither `verdict` nor a number of points" in called.err


def test_seeds_under_torchrun_are_refused(grouper, small, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("os._exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    called = grouper("run", "demo", *small, f"output_dir={tmp_path}", "--seeds", 2)
    called.refused("--seeds", "Call it without torchrun")


def test_a_run_that_was_moved_is_not_begun_anew_elsewhere(
    grouper, finished_run, tmp_path, monkeypatch
):
    """It was, in the place that its recipe names, without a word; or what is there was deleted."""
    monkeypatch.chdir(tmp_path)
    moved = tmp_path / "moved ü" / "demo"
    shutil.copytree(finished_run, moved)
    for switch in ("--resume", "--overwrite"):
        called = grouper("run", "./moved ü/demo", switch, "--dry-run")
        called.refused(
            f"names another one, {finished_run}", "name its folder demo and add --output-dir"
        )
    called = grouper("run", "./moved ü/demo", "--resume", "--output-dir", "moved ü", "--dry-run")
    assert "finished: sft, grpo" in called.out, called.err
    assert grouper("run", finished_run, "--resume", "--dry-run").code == 0
