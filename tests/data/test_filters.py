"""Which problems are used, and what is said about the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grouper.config.schema import SourceConfig
from grouper.data import ProblemSet, load_problems
from grouper.data.filters import grade_shown
from grouper.errors import DataError
from grouper.prompts.formats import FORMATS
from grouper.rewards import REWARDS
from grouper.rewards.builtin import format_holds
from grouper.types import Problem

LAYOUTS = Path(__file__).parent / "layouts"


def load(source: str, path: Path | str | None = None, **config: object) -> ProblemSet:
    where = None if path is None else str(path)
    return load_problems(SourceConfig(source=source, path=where, **config), seed=0)


def written(path: Path, answers: list[str]) -> Path:
    path.write_text("".join(json.dumps({"question": f"q{a}", "answer": a}) + "\n" for a in answers))
    return path


def test_numeric_only_asks_for_plain_numbers(tmp_path):
    answers = ["3", "-1,000", "2.5", r"\frac{1}{3}", "x", "5 cm", "40%", "(1, 2)", "12+7"]
    path = written(tmp_path / "a.jsonl", answers)
    found = load("file", path, numeric_only=True)
    assert [p.answer for p in found.problems] == answers[:3]
    assert found.notes == ("numeric_only: 3 of 9 answers are plain numbers.",)
    assert found.left_out == 6


def test_numeric_only_keeps_what_rewards_of_numbers_can_read(shared_data):
    """No fractions, units or LaTeX: the right text in the answer tag would earn no number."""
    found = load("math", shared_data / "math", split="validation", numeric_only=True)
    number = REWARDS["dapo_number"](FORMATS["tags"])
    texts = [f"a<end_working_out><SOLUTION>{p.answer}</SOLUTION>" for p in found.problems]
    paid = number(
        prompts=["q"] * len(texts),
        completions=texts,
        reference_answer=[problem.answer for problem in found.problems],
    )
    assert len(found) > 2_000
    assert set(paid) == {3.0}


def test_only_correct_grades_what_is_shown():
    found = load("openmath-mini", LAYOUTS / "openmath-mini", only_correct=True)
    assert found.notes == ("only_correct: 13 of 14 demonstrations are correct.",)
    assert "openmath-mini/cot/5" not in {p.id for p in found.problems}


def test_only_correct_of_generated_problems_drops_the_rushed():
    options = {"count": 40, "rushed": {"add2": 1.0}, "kinds": ["add2", "sum3"]}
    whole = load("arithmetic", options=options)
    wrong = {p.id for p in whole.problems if p.columns["demonstrated_answer"] != p.answer}
    right = load("arithmetic", options=options, only_correct=True)
    assert wrong
    assert {p.id for p in whole.problems} - {p.id for p in right.problems} == wrong


def test_solutions_that_state_no_answer_show_the_reference(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "so it is\n#### 3"}))
    found = load("gsm8k", path, only_correct=True)
    (note,) = found.notes
    assert note.endswith("correct, 1 more state no answer of their own and show the reference.")


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"response": " a </think> <answer> 4/2 </answer>"}, True),
        ({"response": " a </think> <answer> 3 </answer>"}, False),
        ({"response": " a </think>\n<answer> 2 </answer>"}, False),  # which the rewards do not pay
        ({"response": r"so \boxed{2}"}, True),
        ({"response": "no answer"}, False),
        ({"solution": r"so \boxed{2.0}"}, True),
        ({"solution": "so"}, None),
        ({}, False),
    ],
)
def test_what_a_demonstration_shows(fields, right):
    problem = Problem(id="a", question="q", answer="2", source="a", **fields)
    assert grade_shown(problem) is right


def test_the_ready_variants_of_system_b(shared_data):
    """1,767 rows, of which 1,710 differ, over 128 problems."""
    path = shared_data / "math" / "sft.jsonl"
    sizes = {
        (count, by): len(load("prompt-response", path, unique=count, unique_by=by))
        for count, by in [(128, "row"), (256, "row"), ("all", "row"), (128, "problem")]
    }
    assert sizes == {(128, "row"): 128, (256, "row"): 256, ("all", "row"): 1767,
                     (128, "problem"): 1767}  # fmt: skip
    few = load("prompt-response", path, unique=2, unique_by="problem")
    assert len({p.question for p in few.problems}) == 2
    assert len(few) > 2
    correct = load("prompt-response", path, only_correct=True)
    told = "only_correct: 1,421 of 1,767 demonstrations are correct and in"
    assert correct.notes == (f"{told} their format.",)
    of_a_recipe = load_problems(
        SourceConfig(source="prompt-response", path=str(path), only_correct=True),
        seed=0,
        fmt=FORMATS["r1-zero"],
    )
    assert of_a_recipe.notes == (f"{told} the format r1-zero.",)
    assert of_a_recipe.problems == correct.problems


def test_only_correct_keeps_what_the_rewards_pay(shared_data):
    """326 right answers after `</think>` and a newline earn nothing in the recipe's rewards."""
    path = shared_data / "math" / "sft.jsonl"
    layout = FORMATS["r1-zero"]
    pays = REWARDS["r1_zero_answer"](layout)
    holds = REWARDS["r1_zero_format"](layout)
    whole = load("prompt-response", path)
    texts = [problem.response for problem in whole.problems]
    columns = {
        "prompts": ["q"] * len(texts),
        "completions": texts,
        "reference_answer": [problem.answer for problem in whole.problems],
    }
    paid = [p.id for p, r in zip(whole.problems, pays(**columns), strict=True) if r == 1]
    kept = load("prompt-response", path, only_correct=True)
    assert [problem.id for problem in kept.problems] == paid
    # The rewards and the metric of evaluations have one notion of the format.
    assert holds(**columns) == [float(format_holds(text, layout)) for text in texts]
    assert sum(holds(**columns)) == 1_439


def test_more_asked_for_than_there_are_is_said(tmp_path):
    found = load("file", written(tmp_path / "a.jsonl", ["1", "2", "2", "1"]), unique=9)
    assert [p.id for p in found.problems] == ["a/0", "a/1"]
    assert found.notes == (
        "unique: 2 different rows of the 2 there are in 4 rows, 2 rows used; 9 were asked for.",
    )


def test_filters_follow_each_other(tmp_path):
    path = written(tmp_path / "a.jsonl", ["x", "1", "2", "3"])
    found = load("file", path, numeric_only=True, unique=2)
    assert [p.answer for p in found.problems] == ["1", "2"]
    assert len(found.notes) == 2


@pytest.mark.parametrize(
    ("answers", "config", "message"),
    [
        (["x", "y"], {"numeric_only": True}, "numeric_only: true leaves none of 2 problems"),
        (["1"], {"only_correct": True}, "only_correct: true leaves none of 1 problems.*0 of 1"),
    ],
)
def test_a_filter_that_leaves_nothing(tmp_path, answers, config, message):
    with pytest.raises(DataError, match=message):
        load("file", written(tmp_path / "a.jsonl", answers), **config)


def test_what_filters_leave_out_is_not_unusable(tmp_path):
    """One bad row in a hundred stays one in a hundred, however few are used."""
    path = written(tmp_path / "a.jsonl", [*map(str, range(99)), r"\frac{1}{"])
    found = load("file", path, unique=3)
    assert (len(found), found.rows_read, found.quarantined_share) == (3, 100, 0.01)


def test_numeric_only_asks_no_worker_about_the_rest(tmp_path, monkeypatch):
    from grouper.data import loading

    asked = []
    real = loading.check_references
    monkeypatch.setattr(
        loading, "check_references", lambda answers: asked.extend(answers) or real(answers)
    )
    load("file", written(tmp_path / "a.jsonl", [r"\sqrt{2}", "5"]), numeric_only=True)
    assert asked == ["5"]
