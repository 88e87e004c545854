"""The audit of a problem set: what it finds, and that it does not cry wolf."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grouper.config.schema import SourceConfig
from grouper.data import ProblemSet, find_overlap, load_problems
from grouper.data.audit import answer_type, audit, quarantine_rows


@pytest.fixture
def loaded(tmp_path: Path) -> ProblemSet:
    rows = [
        ("What is 2 + 2?", "4"),
        ("what is 2+2", "4.0"),  # the same question, the same answer
        ("How many legs has a dog?", "4"),
        ("How many legs has a dog??", "5"),  # contradicts
        ("What is a third?", r"\frac{1}{3}"),
        ("Broken?", r"\frac{1}{2"),
        ("Empty?", ""),
        ("Roots of x^2-4?", "-2, 2"),
        ("A long question " + "word " * 30, r"2\sqrt{3}"),
    ]
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return load_problems(SourceConfig(source="file", path=str(file)), seed=0)


def test_what_is_wrong_is_found(loaded: ProblemSet) -> None:
    found = audit(loaded)
    assert [row.row for row in loaded.quarantined] == [5, 6]
    assert [r.problem_ids for r in found.repeated] == [("set/0", "set/1"), ("set/2", "set/3")]
    (contradiction,) = found.contradictions
    assert contradiction.answers == ("4", "5")


def test_what_is_in_it(loaded: ProblemSet) -> None:
    found = audit(loaded)
    assert found.answer_types == {
        "integer": 4, "fraction": 1, "list": 1, "expression": 1
    } or found.answer_types == {
        "integer": 3, "decimal": 1, "fraction": 1, "list": 1, "expression": 1
    }  # fmt: skip
    assert sum(found.question_lengths.values()) == 7
    assert found.question_lengths == {"1-10": 6, "11-20": 0, "21-40": 1}
    assert found.solution_lengths == {}


def test_the_quarantine_names_each_finding(loaded: ProblemSet) -> None:
    rows = list(quarantine_rows([audit(loaded)], find_overlap(loaded.problems, loaded.problems)))
    assert [row["row"] for row in rows if row["row"] is not None] == [5, 6]
    contradicting = [row["id"] for row in rows if "has the answers" in row["reason"]]
    assert contradicting == ["set/2", "set/3"]
    assert sum("held out, but the same question" in row["reason"] for row in rows) == 7
    assert all(json.dumps(row) for row in rows)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("(A)", "choice"),
        (r"\text{Thursday}", "text"),
        (r"\{1, 2\}", "set"),
        (r"(-\infty, 1) \cup (2, 3]", "interval"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "matrix"),
        ("y = 2x + 1", "equation"),
        ("x^2 + 1", "expression"),
        (r"\$5.50", "quantity"),
        (r"30^\circ", "quantity"),
        ("52_8", "integer"),
    ],
)
def test_kinds_of_answers(answer: str, kind: str) -> None:
    assert answer_type(answer) == kind


@pytest.mark.parametrize("column", ["answer", "solution"])
def test_a_large_power_ends_no_data_set(tmp_path: Path, column: str) -> None:
    """One such row ended the whole set; now it is read, or set aside if nothing can be known."""
    answers = ["4", "2^{100000}", "7^{7^7}", "2024^{4046}", "9**9**9**9", r"\sqrt{2^{99999}+1}"]
    file = tmp_path / "set.jsonl"
    rows = [json.dumps({"question": f"Number {i}?", column: a}) for i, a in enumerate(answers)]
    file.write_text("\n".join(rows))
    loaded = load_problems(SourceConfig(source="file", path=str(file)), seed=0)
    assert [problem.answer for problem in loaded.problems] == answers[:4]
    assert [row.row for row in loaded.quarantined] == [4, 5]
    assert all("too large" in row.reason for row in loaded.quarantined)
    assert audit(loaded).problems == loaded
    assert {answer_type(answer) for answer in answers[:4]} == {"integer"}


def test_gsm8k_has_nothing_to_hide(shared_data: Path) -> None:
    path = str(shared_data / "gsm8k")
    test = load_problems(SourceConfig(source="gsm8k", path=path, split="test"), seed=0)
    found = audit(test)
    assert len(test.quarantined) == 0
    assert found.contradictions == ()
    assert found.answer_types["integer"] > 1300
