"""The HTML report: what it says and leaves out, how large it gets, and that texts stay texts."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace

import pytest
from drawn_runs import GRPO, NASTY, make_run, new_run, report, result, rollout

from grouper.errors import RunFolderError
from grouper.evaluation.result_tables import result_blocks
from grouper.files import write_lines
from grouper.report.page import write_report
from grouper.runs.folder import RunFolder
from grouper.runs.lock import RunLock
from grouper.runs.records import RunEnd
from grouper.types import Verdict

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page(*runs):
    """The text of a report and the data in it."""
    text = write_report(runs, runs[0].path / "x.html").read_text(encoding="utf-8")
    found = DATA.search(text)
    assert found is not None
    return text, json.loads(found[1])


def rows(data):
    """Every completion of a page."""
    return [sample for group in data["groups"] for sample in group["samples"]]


def lines(data):
    """Every line of the charts of a page."""
    charts = [data["overview"], *data["charts"]]
    facets = [facet for chart in charts for facet in chart["facets"]]
    return [line for facet in facets for line in facet["lines"]]


def test_it_says_first_whether_it_got_better(tmp_path):
    text, _ = page(make_run(tmp_path / "demo"))
    verdict = re.search(r'<p class="verdict (\w+)"><bdi>(.*?)</bdi></p>', text)
    assert verdict is not None
    assert verdict[1] == "good"
    assert verdict[2].startswith(
        "Yes: GRPO is better than base. 0.0 % before and 90.0 % after, of 20 test problems: "
        "+90.0 points ["
    )
    assert text.index("Yes: GRPO") < text.index("<figure")


@pytest.mark.parametrize(
    ("before", "after", "tone", "words"),
    [
        (10, 10, "unsure", "No evidence of a change from base to GRPO."),
        (18, 1, "bad", "No: GRPO is worse than base."),
    ],
)
def test_it_does_not_claim_what_is_not_so(tmp_path, before, after, tone, words):
    run = new_run(tmp_path / "run")
    run.write_evaluation(result("base", "base", 0, "test", before))
    run.write_evaluation(result("grpo", "grpo", 9, "test", after))
    text, _ = page(run)
    assert f'<p class="verdict {tone}"><bdi>{words}' in text


def test_what_is_said_is_of_the_problems_that_both_have(tmp_path):
    run = new_run(tmp_path / "run")
    run.write_evaluation(result("base", "base", 0, "test", 5))
    more = result("grpo", "grpo", 9, "test", 20)
    run.write_evaluation(replace(more, items=more.items[:15]))
    assert "33.3 % before and 100.0 % after, of 15 test problems: +66.7 points" in page(run)[0]


def test_validation_speaks_where_nothing_else_was_measured_twice(tmp_path):
    run = new_run(tmp_path / "run")
    assert "Nothing has been measured on held-out problems yet." in page(run)[0]
    run.write_evaluation(result("base", "base", 0, "test", 3))
    assert "there is nothing to compare it with yet" in page(run)[0]
    for step, solved in ((10, 2), (20, 9), (30, 19)):
        name = f"validation-grpo-{step:06d}"
        run.write_evaluation(result(name, "grpo", step, "validation", solved))
    assert "Yes: GRPO step 30 is better than GRPO step 10." in page(run)[0]


def test_tables_curves_recipe_and_environment_are_there(tmp_path):
    text, data = page(make_run(tmp_path / "demo"))
    for words in (
        "accuracy % [95 %]",
        "GRPO - base",
        "algebra",
        "data.test.options.count",
        "2.13.0",
    ):
        assert words in text
    assert 1 + len(data["charts"]) == text.count("<figure ") > 10
    first, second = data["overview"]["facets"]
    assert (first["phase"], second["phase"]) == ("sft", "grpo")
    test_points = first["lines"][0]
    assert test_points["labels"] == ["base", "SFT"]
    assert test_points["bounds"]
    assert not test_points["joined"]
    assert second["lines"][0]["labels"] == ["GRPO"]


def test_every_change_on_the_way_is_told(tmp_path):
    """Of two at the same step one was lost; one that nothing had used was `at None step None`."""
    run = make_run(tmp_path / "run")
    info = json.loads((run.path / "run.json").read_text())
    places = (("grpo", 2, "seed"), ("grpo", 2, "threads"), (None, None, "grpo.steps"))
    info["changes"] = [
        {"phase": p, "step": s, "hash_before": "a", "hash": "b", "changes": {key: [0, 1]}}
        for p, s, key in places
    ]
    (run.path / "run.json").write_text(json.dumps(info))
    text, _ = page(run)
    for told in (
        "from grpo step 2 on: seed 0 -> 1",
        "on: threads 0 -> 1",
        "not used yet: grpo.steps",
    ):
        assert told in text.replace("&gt;", ">")


def test_rewards_are_there_by_subject_and_level(tmp_path):
    run = new_run(tmp_path / "demo")
    for name, step in (("base", 0), ("grpo", 5)):
        plain = result(name, name, step, "test", 10 + step)
        items = [
            replace(item, level="2 steps", rewards={"brevity": 0.25 * n}, reward=0.25 * n)
            for n, item in enumerate(plain.items)
        ]
        run.write_evaluation(replace(plain, items=tuple(items)))
    text, _ = page(run)
    for by, part, mean in (("subject", "algebra", "2.250"), ("level", "2 steps", "2.375")):
        assert f"<bdi>demo: test by {by}</bdi>" in text
        table = text.partition(f">rewards by {by}</th>")[2].partition("</table>")[0]
        cells = re.findall("<bdi>(.*?)</bdi>", table)
        at = cells.index(part)
        assert cells[at : at + 8] == [part, "base", mean, mean, part, "GRPO", mean, mean]


def test_what_a_model_or_a_data_set_wrote_stays_text(tmp_path):
    run = make_run(tmp_path / "demo", text=NASTY)
    text, data = page(run)
    assert text.count("<script") == 2
    assert "<img" not in text
    assert "<b>geometry" not in text
    assert not re.search("[\x00\x1b\u202a-\u202e\u2066-\u2069]", text)
    shown = next(row["completion"] for row in rows(data) if row["sample"] == 0)
    assert "</script><script>" in shown
    assert r"\x1b[31m" in shown
    assert r"\u202e" in shown
    assert "שלום" in shown


@pytest.mark.slow
def test_a_text_of_a_megabyte_is_cut_and_that_is_said(tmp_path):
    text, data = page(make_run(tmp_path / "demo", text="x" * 1_000_000))
    assert len(text) < 3_000_000
    long = next(row["completion"] for row in rows(data) if "x" * 99 in row["completion"])
    assert len(long) < 4000
    assert "characters are left out here" in long


def test_rollouts_with_their_tokens_come_first(tmp_path):
    run = make_run(tmp_path / "demo")
    _, data = page(run)
    found = [row for row in rows(data) if row["trace"]]
    assert len(found) == 5 * 4
    texts, sampled, trained, entropies, clipped, read = found[0]["trace"]
    assert (read, found[0]["calls"]) == ([], 0)
    assert texts == ["so", " 2", "<eos>"]
    assert (sampled[1], trained[1], entropies[1], clipped) == (-1.0, -1.25, 2.0, [1])
    rollouts = [group for group in data["groups"] if group["step"] == 1]
    assert [bool(group["samples"][0]["trace"]) for group in rollouts] == [True, False]


def test_calls_of_tools_are_counted_and_their_tokens_marked(tmp_path):
    run = make_run(tmp_path / "demo")
    lines = [{**rollout(2, n, traced=True), "tool_spans": [[1, 3]]} for n in range(4)]
    write_lines(run.path / "rollouts" / "grpo-000002.jsonl.gz", lines)
    _, data = page(run)
    called = [row for row in rows(data) if row["calls"]]
    assert len(called) == 4
    assert {row["calls"] for row in called} == {1}
    assert called[0]["trace"][-1] == [1, 2]


def test_a_problem_has_all_its_completions_and_its_prompt_once(tmp_path):
    text, data = page(make_run(tmp_path / "demo"))
    kinds = [chosen["kind"] for chosen in data["sets"]]
    assert kinds == ["evaluation", "evaluation", "rollouts"]
    of_step = [group for group in data["groups"] if group["step"] == 2]
    assert [group["problem"] for group in of_step] == ["train/0", "train/1"]
    for group in of_step:
        assert [sample["name"] for sample in group["samples"]] == [f"sample {n}" for n in range(4)]
    measured = next(group for group in data["groups"] if group["set"] == 0)
    assert [sample["name"] for sample in measured["samples"]] == ["base", "SFT", "GRPO"]
    assert measured["change"] == "got better"
    assert text.count("Question 1?") == 1


def test_a_group_that_is_larger_than_its_room_is_there_with_shorter_texts(tmp_path, monkeypatch):
    monkeypatch.setattr("grouper.report.completions.ROLLOUT_BYTES", 20_000)
    run = make_run(tmp_path / "demo", text="word " * 600)
    _, data = page(run)
    for step in range(1, 6):
        groups = [group for group in data["groups"] if group["step"] == step]
        assert [len(group["samples"]) for group in groups] == [4]
        assert len(json.dumps(groups)) < 8_000


def test_an_answer_that_is_missing_is_truncated_where_the_budget_ended_it(tmp_path):
    run = make_run(tmp_path / "demo")
    ended = {"verdict": "no_answer", "finish_reason": "length"}
    write_lines(run.path / "rollouts" / "grpo-000009.jsonl.gz", [{**rollout(9, 0), **ended}])
    write_lines(
        run.path / "rollouts" / "grpo-000010.jsonl.gz",
        [{**rollout(10, 0), "verdict": "no_answer"}],
    )
    text, data = page(run)
    outcomes = {
        group["step"]: group["samples"][0]["outcome"] for group in data["groups"] if group["step"]
    }
    assert (outcomes[9], outcomes[10]) == ("truncated", "no_answer")
    assert data["outcomes"]["truncated"] == "truncated"
    assert ">truncated</th>" in text
    assert "cut off" not in text.lower()


def test_the_facts_are_first(tmp_path):
    text, _ = page(make_run(tmp_path / "demo"))
    names = re.findall(r"<dt>(.*?)</dt>", text)
    assert names == [
        "model", "data", "algorithm", "steps", "hardware", "time", "tokens", "seed", "commit",
    ]  # fmt: skip
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd><bdi>(.*?)</bdi>", text))
    assert facts["steps"] == "SFT 40 of 400, GRPO 5 of 60"
    assert facts["seed"] == "0"
    assert "20 test" in facts["data"]
    assert "sampled by GRPO" in facts["tokens"]
    assert text.index("<dl>") < text.index("<figure")


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        (None, "interrupted"),
        (RunEnd(state="stopped", reason="SIGTERM"), "at GRPO step 5, by SIGTERM"),
        (RunEnd(state="failed", reason="the disk is <full>"), "the disk is &lt;full&gt;"),
    ],
)
def test_the_state_of_the_run_is_shown(tmp_path, end, shown):
    run = make_run(tmp_path / "demo")
    run.write_end(end)
    text, _ = page(run)
    state = text.partition('<p class="state">')[2].partition("</p>")[0]
    assert shown in state


def test_a_run_whose_process_lives_is_running(tmp_path):
    run = make_run(tmp_path / "demo")
    lock = RunLock(run.path)
    try:
        assert '<span class="chip plain">running</span>' in page(run)[0]
    finally:
        lock.release()


@pytest.mark.slow
def test_many_runs_share_the_points_of_a_chart(tmp_path):
    """Each had sixty however many there were: a page of 24 runs had more than 4 MB."""
    run = make_run(tmp_path / "0", steps=2)
    for step in range(3, 101):
        run.append_metrics(report("grpo", step, GRPO))
    others = [shutil.copytree(run.path, tmp_path / str(n)) for n in range(1, 12)]
    _, data = page(run, *map(RunFolder, others))
    for chart in data["charts"]:
        points = [len(line["steps"]) for facet in chart["facets"] for line in facet["lines"]]
        assert sum(points) <= 400


@pytest.mark.slow
def test_a_large_run_is_small_and_quick_and_says_what_it_holds(tmp_path):
    run = make_run(tmp_path / "demo", steps=2)
    text = "step by step we find that " * 40
    for step in range(3, 1001):
        run.append_metrics(report("grpo", step, GRPO))
    for step in range(1, 1001, 10):  # of which forty are read, as they would be of a thousand
        lines = [rollout(step, n, text=f"{n} {text}", traced=n < 16) for n in range(64)]
        write_lines(run.path / "rollouts" / f"grpo-{step:06d}.jsonl.gz", lines)
    started = time.monotonic()
    path = write_report([run])
    assert time.monotonic() - started < 10  # 5 on an idle machine
    assert path.stat().st_size < 3_000_000
    said = re.search(r"Rollouts of 40 of 101 steps are here.*?</p>", path.read_text())
    assert said is not None


def test_several_runs_lie_over_each_other(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", sft=False)]
    text, data = page(*runs)
    assert "<h1>a against b</h1>" in text
    assert "The last models against each other" in text
    assert "no evidence of a change" in text
    assert {line["name"] for line in lines(data)} == {"a", "b"}
    assert {clock["steps"][-1] for clock in data["clocks"]} == {40, 5}


def test_runs_are_compared_on_their_own_problems_whatever_was_measured_afterwards(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    later = RunFolder(runs[1].path / "eval_runs" / "b-grpo-final")
    later.write_evaluation(result("gsm8k-greedy-20x1", "grpo", 5, "gsm8k", 3, problem="other"))
    text, _ = page(*runs)
    assert "share no problem" not in text
    assert "b - a" in text


def test_models_of_different_phases_are_named_with_them(tmp_path):
    """The SFT of a run that was stopped stood against the GRPO of another without a word."""
    whole, stopped = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for file in (stopped.path / "evaluations").glob("grpo.*"):
        file.unlink()
    assert "b (SFT) - a (GRPO)" in page(whole, stopped)[0]
    assert "a - " in page(make_run(tmp_path / "c"), whole)[0]


def test_a_unit_is_there_only_where_a_curve_has_one(tmp_path):
    text, _ = page(make_run(tmp_path / "demo"))
    assert "<small>mean reward of a completion</small>" in text
    assert "<small></small>" in text


def test_runs_of_other_problems_are_not_compared(tmp_path):
    first, second = make_run(tmp_path / "a"), new_run(tmp_path / "b")
    second.write_evaluation(result("grpo", "grpo", 5, "test", 3, problem="other"))
    said = re.search(r'class="note unsure"><bdi>(.*?)</bdi>', page(first, second)[0])
    assert said is not None
    assert "share no problem" in said[1]


def test_a_model_of_which_nothing_could_be_scored_stands_alone():
    scored = result("sft", "sft", 5, "test", 3)
    items = tuple(replace(item, verdict=Verdict.NOT_SCORED) for item in scored.items)
    unscored = replace(scored, name="base", phase="base", step=0, items=items)
    text = str(list(result_blocks([unscored, scored])))
    assert "no problem could be scored in every result" in text
    assert "base" in text
    assert "sft" in text.lower()


def test_what_was_measured_afterwards_has_a_table_of_its_own(tmp_path):
    run = make_run(tmp_path / "demo")
    for model, phase, solved in (("first", "sft", 4), ("second", "grpo", 9)):
        measured = result("gsm8k-greedy-20x1", phase, 5, "gsm8k", solved)
        RunFolder(run.path / "eval_runs" / model).write_evaluation(measured)
    text = page(run)[0]
    assert "Results on gsm8k-greedy-20x1" in text
    assert "second - first" in text
    assert '<p class="verdict good"><bdi>Yes: GRPO is better than base.' in text


def test_what_is_damaged_or_missing_is_said(tmp_path):
    run = make_run(tmp_path / "demo")
    (run.path / "rollouts" / "grpo-000002.jsonl.gz").write_bytes(b"no gzip")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "grpo", "st')  # a run being written
    (run.path / "recipe.yaml").write_text("name: from-the-future\nwarp: 9\n")
    text, data = page(run)
    assert "grpo-000002.jsonl.gz: the file cannot be read" in text
    assert "The recipe cannot be read by this version of Grouper" in text
    assert {group["step"] for group in data["groups"]} == {None, 1, 3, 4, 5}
    for file in (run.path / "rollouts").iterdir():
        file.unlink()
    assert "No rollouts are stored in the run folder." in page(run)[0]


def test_damaged_rollouts_leave_the_rest_of_the_page(tmp_path):
    run = make_run(tmp_path / "demo")
    (run.path / "rollouts" / "grpo-000002.jsonl.gz").write_bytes(b"no gzip")
    write_lines(run.path / "rollouts" / "grpo-000003.jsonl.gz", [["no row"]])
    text, data = page(run)
    assert "a learning rate of 0.003 looks too high" in text
    assert "Left out: " in text
    assert text.count("the file cannot be read") >= 2
    assert {group["step"] for group in data["groups"]} == {None, 1, 4, 5}


def test_a_run_of_an_older_version_has_fewer_fields(tmp_path):
    run = make_run(tmp_path / "demo")
    old = {k: v for k, v in rollout(9, 0).items() if k not in ("advantage", "rewards", "stage")}
    write_lines(run.path / "rollouts" / "grpo-000009.jsonl.gz", [old])
    assert any(row["advantage"] is None for row in rows(page(run)[1]) if row["tokens"] == 3)


def test_a_damaged_record_is_refused(tmp_path):
    run = make_run(tmp_path / "demo")
    run.path.joinpath("metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(RunFolderError, match="line 1 cannot be read"):
        write_report([run])
