"""`grouper eval`: what is measured, where it goes, and what is compared with what."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from grouper.errors import DataError
from grouper.models.folders import identity_of
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress
from grouper.runs.twin_results import read_twins


@pytest.fixture
def run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may write into, and a folder for what is written elsewhere."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, tmp_path / "outputs" / "demo")
    return tmp_path / "outputs" / "demo"


@pytest.mark.slow
def test_a_run_folder_measures_what_it_trained_as_training_did(grouper, run):
    called = grouper("eval", run)
    assert called.code == 0, called.err
    label = "demo-grpo-final"
    folder = run / "eval_runs" / label
    (result,) = RunFolder(folder).read_evaluations()
    trained = RunFolder(run).read_evaluation("grpo")
    assert trained is not None
    assert result.items == trained.items
    assert (result.phase, result.step, result.name) == ("grpo", 2, "test-greedy-8x1")
    assert result.card["model"].endswith("grpo/final")
    assert (folder / "recipe.yaml").read_text() == (run / "recipe.yaml").read_text()
    parts = ("subject", "level", "2 steps", "reasoning %", "rewards by subject", "tag_count")
    for text in ("accuracy % [95 %]", "no answer", "truncated", *parts):
        assert text in called.out
    # What was measured afterwards does not disturb the run.
    names = [r.name for r in RunFolder(run).read_evaluations()]
    assert "base" in names
    assert label not in names


@pytest.mark.slow
def test_rewards_are_left_out_where_they_are_not_wanted(grouper, run, tmp_path):
    called = grouper(
        *("eval", run, "--no-base", "evaluation.rewards=false", "--output-dir", tmp_path / "plain")
    )
    assert called.code == 0, called.err
    assert "tag_count" not in called.out
    (summary,) = (tmp_path / "plain").rglob("evaluations/*.json")
    assert json.loads(summary.read_text())["metrics"] is None


@pytest.mark.slow
def test_without_a_grpo_model_it_is_sft_and_never_the_untrained_base(grouper, run):
    """M11: an unfinished run was measured as its base, without a word."""
    shutil.rmtree(run / "grpo")
    assert "demo-sft-final" in grouper("eval", run).out
    shutil.rmtree(run / "sft")
    grouper("eval", run).refused("neither a result nor a checkpoint", "--resume")
    assert "demo-base" in grouper("eval", run, "--model", run / "base").out


@pytest.mark.slow
def test_several_models_are_compared_item_by_item_with_pass_at_k(grouper, run, tmp_path):
    called = grouper(
        "eval",
        run,
        "--model",
        run / "base",
        "--model",
        run / "sft" / "final",
        "--output-dir",
        tmp_path / "mine",
        "evaluation.samples=4",
        "evaluation.temperature=1.0",
    )
    assert called.code == 0, called.err
    assert "demo-sft-final - demo-base" in called.out
    assert "no evidence of a change" in called.out
    assert "pass@4" in called.out
    assert all(f"\n{name} %" in called.out for name in ("pass@2", "pass@4", "maj@k"))
    assert not (run / "eval_runs").exists()
    summary = json.loads((tmp_path / "mine/demo-base/evaluations/test-t1-8x4.json").read_text())
    assert summary["samples"] == 4
    assert summary["card"]["sampling"]["temperature"] == 1.0


@pytest.mark.slow
def test_other_problems_and_other_sampling_are_not_compared_in_silence(grouper, run):
    grouper("eval", run, "--no-base", "--limit", 6, "--output-dir", "few")
    called = grouper("compare", run, "few/demo-grpo-final")
    assert called.code == 0, called.err
    assert "Left out: 2 problems, which not all of them have" in called.out
    grouper("eval", run, "--no-base", "evaluation.temperature=0.5", "--output-dir", "warm")
    called = grouper("compare", run, "warm/demo-grpo-final")
    assert called.code == 0, called.err
    assert "not measured with the same sampling settings" in called.err


@pytest.mark.slow
def test_results_of_other_settings_lie_beside_each_other(grouper, run):
    """U8."""
    assert "same settings" not in grouper("eval", run, "--no-base").err
    assert grouper("eval", run, "evaluation.temperature=0.5").code == 0
    assert grouper("eval", run, "evaluation.max_new_tokens=9").code == 0
    called = grouper("eval", run)
    assert "Measured before with the same settings" in " ".join(called.err.split())
    folder = run / "eval_runs" / "demo-grpo-final" / "evaluations"
    names = {path.stem for path in folder.glob("*.json")}
    assert names == {"test-greedy-8x1", "test-greedy-8x1-2", "test-t0.5-8x1"}


@pytest.mark.slow
def test_the_validation_split_is_kept_apart(grouper, run):
    assert grouper("eval", run).code == 0
    called = grouper("eval", run, "--split", "validation")
    assert called.code == 0, called.err
    names = {path.name for path in (run / "eval_runs/demo-grpo-final/evaluations").glob("*.json")}
    assert len(names) == 2
    assert "test-greedy-8x1.json" in names
    called = grouper("eval", run, "--split", "validation", "data.validation=null")
    called.refused("data.validation", "no validation problems")


def test_a_run_made_with_another_prompt_is_a_warning(grouper, run, tmp_path):
    called = grouper("eval", "demo", f"output_dir={run.parent}", "prompt.format=xml", "--dry-run")
    assert "other `prompt` settings" in called.err
    assert f"grouper eval {run}" in called.err


@pytest.mark.parametrize(
    ("command", "part", "name"),
    [
        (["eval"], "evaluate", "eval"),
        (["data", "difficulty"], "pass_rates", "difficulty"),
        (["synthesize", "--output", "x.jsonl"], "synthesize", "synthesize"),
    ],
)
def test_a_terminal_shows_that_models_and_data_are_being_loaded(
    grouper, run, monkeypatch, command, part, name
):
    """A model of some size, and its problems, take a minute in which nothing was shown."""
    shown = []
    monkeypatch.setattr(Progress, "within", lambda self, name: nullcontext(shown.append(name)))

    def measure(*_, **given):
        assert shown == [name]
        raise DataError("so far")

    monkeypatch.setattr(f"grouper.api.{part}", measure)
    grouper(*command, run).refused("so far")


def test_a_dry_run_writes_nothing(grouper, run):
    called = grouper("eval", run, "--dry-run")
    assert called.code == 0, called.err
    assert "8 test problems x 1 = 8 completions" in called.out
    assert not (run / "eval_runs").exists()


def test_a_model_can_be_measured_before_anything_is_trained(grouper, small, finished_run, tmp_path):
    arguments = ["demo", *small, f"output_dir={tmp_path}"]
    called = grouper("eval", *arguments, "--model", finished_run / "base")
    assert called.code == 0, called.err
    assert (tmp_path / "demo" / "eval_runs").is_dir()
    assert grouper("run", *arguments, "--dry-run").code == 0


def test_nothing_is_written_into_a_folder_that_was_handed_over(grouper, run, tmp_path):
    """The next run with its `save_path` replaces it."""
    handed = tmp_path / "handed-over"
    shutil.copytree(run / "grpo" / "final", handed)
    shutil.copyfile(run / "recipe.yaml", handed / "recipe.yaml")
    before = sorted(handed.iterdir())
    called = grouper("eval", handed, f"output_dir={tmp_path / 'elsewhere'}")
    assert called.code == 0, called.err
    assert sorted(handed.iterdir()) == before
    found = RunFolder(tmp_path / "elsewhere" / "demo" / "eval_runs" / "handed-over")
    assert [r.name for r in found.read_evaluations()] == ["test-greedy-8x1"]


@pytest.fixture
def suite_file(tmp_path: Path) -> Path:
    """Four problems; the reference of one cannot be read."""
    rows = [("Ann has 3 eggs and gets 4. How many?", "7"), ("1+1?", "2"), ("2+2?", "4")]
    rows.append(("Which?", r"\frac{1}{"))
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return path


def test_a_dry_run_lists_what_is_measured_and_nothing_else(grouper, run, suite_file):
    called = grouper("eval", run, "--on", f"svamp={suite_file}", "--dry-run")
    assert called.code == 0, called.err
    listed = re.findall(r"(\S+): 4 svamp problems x 1 = 4 completions(?: in (\S+))?,", called.out)
    base, trained = str(run / "base"), str(run / "grpo" / "final")
    # As in the measurement: the few-shot prompt is for the base alone.
    assert listed == [(base, ""), (base, "gsm8k-5-shot"), (trained, "")]


@pytest.mark.slow
def test_a_suite_is_measured_beside_its_twins(grouper, run, tmp_path):
    """Of a file whose own name ends like that of a set of twins, too."""
    rows = []
    for n in (31, 42, 53):
        solution = f"{n}+17 = <<{n}+17={n + 17}>>{n + 17}\n#### {n + 17}"
        question = f"Ann has {n} eggs and gets 17 more. How many has she?"
        rows.append({"question": question, "answer": solution})
    rows.append({"question": "1+1?", "answer": "#### 2"})
    path = tmp_path / "mine-twins.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", run, "--on", path, "--prompt", "boxed", "--no-base", "--twins", "--quiet"]
    called = grouper(*words, "--json")
    assert called.code == 0, called.err
    found = json.loads(called.out)
    problems = {row["problems"]: row["results"][0]["problems"] for row in found["evaluations"]}
    assert problems == {"mine-twins": 4, "mine-twins with other numbers": 3}
    (twins,) = found["twins"]
    assert (twins["problems"], twins["paired"]["problems"]) == ("mine-twins", 3)
    # A finished evaluation is not repeated.
    again = grouper(*words)
    assert "of 3 problems with a twin, 0.0 % right as they are and 0.0 % with other" in again.out
    several = grouper(*words, "--prompt", "compact")
    assert several.out.count("of 3 problems with a twin") == 2


def test_problems_without_twins_are_refused_before_anything_is_measured(grouper, run, suite_file):
    for words in ([], ["--on", suite_file]):
        called = grouper("eval", run, *words, "--twins")
        called.refused("no problem has a twin")
        assert "evaluating" not in called.err
    assert not (run / "eval_runs").exists()


@pytest.mark.slow
def test_a_run_is_measured_on_twins_of_its_own_problems(grouper, finished_run, tmp_path):
    """They are recorded for the report, the card and a certificate."""
    rows = [
        {
            "question": f"{n} boxes hold 30 eggs each. How many?",
            "answer": f"<<{n}*30={n * 30}>>\n#### {n * 30}",
        }
        for n in (14, 15, 16)
    ]
    (tmp_path / "marked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "demo"
    shutil.copytree(finished_run, path)
    test = f"data.test={{source: gsm8k, path: {tmp_path / 'marked.jsonl'}}}"
    called = grouper("eval", path, test, "--twins", "--no-base", "--json", "--quiet")
    assert called.code == 0, called.err
    (twins,) = json.loads(called.out)["twins"]
    assert (twins["problems"], twins["paired"]["problems"]) == ("test", 3)
    (recorded,) = read_twins(path)
    assert (recorded.phase, recorded.split) == ("grpo", "test")
    assert recorded.model_hash == identity_of(str(path / "grpo" / "final"))


@pytest.mark.slow
def test_a_run_is_measured_on_a_suite_beside_its_base(grouper, run, suite_file):
    called = grouper("eval", run, "--on", f"{suite_file},svamp={suite_file}", "--json", "--quiet")
    assert called.code == 0, called.err
    found = {row["problems"]: row for row in json.loads(called.out)["evaluations"]}
    assert list(found) == ["mine", "svamp"]
    names = [result["name"] for result in found["svamp"]["results"]]
    # The base is also asked in the few-shot prompt of the suite.
    assert names == ["demo-base", "demo-base gsm8k-5-shot", "demo-grpo-final"]
    assert found["mine"]["results"][0]["problems"] == 4
    (summary,) = (run / "eval_runs/demo-grpo-final/evaluations").glob("svamp-*.json")
    card = json.loads(summary.read_text())["card"]
    assert card["suite"] == {
        "name": "svamp",
        "source": "svamp",
        "path": str(suite_file),
        "subset": None,
        "split": "test",
        "answer": "number",
        "revision": None,
    }
    assert card["prompt"] == "compact"
    assert len(card["model_hash"]) == 16


def test_a_base_that_is_not_here_is_left_out_unless_it_is_asked_for(grouper, run):
    shutil.rmtree(run / "base")
    recipe = run / "recipe.yaml"
    text = yaml.safe_load(recipe.read_text())
    text["model"] |= {"path": "nobody/nothing", "new": None}
    recipe.write_text(yaml.safe_dump(text))
    called = grouper("eval", run)
    assert called.code == 0, called.err
    assert "nobody/nothing, is not on this machine; --with-base fetches it" in called.err
    grouper("eval", run, "--with-base").refused("nobody/nothing")


@pytest.mark.slow
def test_a_model_without_a_recipe_is_asked_in_the_prompt_that_suits_it(
    grouper, run, suite_file, tmp_path
):
    model = tmp_path / "bare"
    shutil.copytree(run / "base", model)
    flags = ("--on", suite_file, "--samples", 2, "--temperature", 0.7, "--top-p", 0.9, "--seed", 3)
    called = grouper("eval", model, f"output_dir={tmp_path / 'out'}", *flags)
    assert called.code == 0, called.err
    (summary,) = (tmp_path / "out").rglob("evaluations/*.json")
    found = json.loads(summary.read_text())
    assert summary.stem.startswith("mine-")
    assert (found["samples"], found["card"]["seed"]) == (2, 3)
    sampling = found["card"]["sampling"]
    assert (sampling["temperature"], sampling["top_p"]) == (0.7, 0.9)
    assert "maj@k" in called.out
    assert "pass@2" in called.out


def test_other_rewards_grading_or_arithmetic_are_measured_anew(grouper, run):
    grouper("eval", run, "--no-base", "--limit", 2)
    settings = (
        "rewards=[{name: correctness, weight: 5}]",
        "grading.symbolic=false",
        "model.compute_dtype=bfloat16",
    )
    for setting in settings:
        called = grouper("eval", run, "--no-base", "--limit", 2, setting)
        assert "Measured before" not in called.err
        assert ("tag_count" in called.out) == ("rewards" not in setting)
        again = grouper("eval", run, "--no-base", "--limit", 2, setting)
        assert "Measured before" in again.err
    folder = run / "eval_runs/demo-grpo-final/evaluations"
    names = {"test-greedy-2x1", *(f"test-greedy-2x1-{n}" for n in (2, 3, 4))}
    assert {p.stem for p in folder.glob("*.json")} == names


def test_several_prompts_are_tried_at_the_same_budget(grouper, run, suite_file):
    flags = ("--on", suite_file, "--prompt", "boxed", "--prompt", "gsm8k-5-shot", "--limit", 2)
    called = grouper("eval", run, "--no-base", "--max-new-tokens", 8, *flags)
    assert called.code == 0, called.err
    assert "demo-grpo-final boxed" in called.out
    assert "demo-grpo-final gsm8k-5-shot" in called.out
    folder = run / "eval_runs/demo-grpo-final/evaluations"
    cards = [json.loads(path.read_text())["card"] for path in folder.glob("*.json")]
    assert [card["sampling"]["max_new_tokens"] for card in cards] == [8, 8]
    assert [card["n"] for card in cards] == [2, 2]
    assert {card["prompt"] for card in cards} == {"boxed", "gsm8k-5-shot"}


def test_suites_that_cannot_be_are_refused_before_anything_is_sampled(grouper, run):
    grouper("eval", run, "--on", "gsm8").refused("no suite 'gsm8'", "gsm8k")
    grouper("eval", run, "--on", "gsm8k,").refused("there is no suite ''")
    grouper("eval", run, "--on", "gsm8k=/nowhere.jsonl").refused("no such file", "/nowhere.jsonl")
    grouper("eval", run, "--on", "gsm8k", "--prompt", "boxd").refused("boxd", "boxed")
    assert not (run / "eval_runs").exists()


def test_a_model_alone_says_nothing_of_problems(grouper, run):
    told = "says nothing of the problems", "Add --on SUITE", f"--model {run / 'base'}"
    grouper("eval", run / "base").refused(*told)


def test_json_is_strict_where_nothing_was_right(grouper, run):
    """The mean length of right answers is no number there, which Python would write as NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(grouper("compare", run, "--json").out, parse_constant=refuse)
    lengths = [result["tokens_right"] for result in found["results"]]
    assert None in lengths
