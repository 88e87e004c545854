"""References are asked about once, and what was said is kept for the same grader only."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future

import pytest

from grouper.data import references
from grouper.data.references import check_references
from grouper.errors import GradingError
from grouper.files import cache_folder
from grouper.grading import Grader
from grouper.grading.equivalence import Equivalence
from grouper.types import Verdict

ANSWERS = ["12", r"2\sqrt{3}", "x+1", r"\frac{1}{", "", "blue", "(1, 2)", r"\frac{x}{0}"]


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def asked(monkeypatch):
    """The answers that a worker would be asked about; it can read all but text."""
    seen = []

    def read_reference(self, reference):
        seen.append(reference)
        return "just a word" if reference.isalpha() else None

    monkeypatch.setattr(Grader, "read_reference", read_reference)
    return seen


def test_each_answer_is_readable_or_has_a_reason():
    reasons = check_references([*ANSWERS, *ANSWERS, "because " * 60, r"\foo{1}{2}^^+"])
    assert {answer for answer, why in reasons.items() if why is None} == {
        *("12", r"2\sqrt{3}", "x+1", "blue", "(1, 2)", r"\frac{x}{0}")
    }
    assert (reasons[""], reasons[r"\frac{1}{"]) == ("empty", "unbalanced braces")


def test_only_what_the_exact_rungs_cannot_read_goes_to_a_worker(asked):
    check_references([*ANSWERS, *ANSWERS])
    assert sorted(asked) == ["(1, 2)", r"2\sqrt{3}", r"\frac{x}{0}", "blue", "x+1"]


def test_the_second_time_nobody_is_asked(asked):
    first = check_references(ANSWERS)
    asked.clear()
    assert check_references(ANSWERS) == first
    assert asked == []
    assert check_references([*ANSWERS, "y-1"])["y-1"] is None
    assert asked == ["y-1"]
    check_references(["y-1", "x+1"])
    assert asked == ["y-1"]
    assert [path.name for path in cache_folder().iterdir()] == [
        f"references-{references._version()}.json"
    ]


def test_what_was_checked_before_ctrl_c_is_kept(monkeypatch):
    """A hundred thousand references take minutes."""
    seen = []

    def read_reference(self, reference):
        seen.append(reference)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Grader, "read_reference", read_reference)
    answers = ["x+1", "x+2", "x+3", "x+4"]
    with pytest.raises(KeyboardInterrupt):
        check_references(answers)
    monkeypatch.setattr(Grader, "read_reference", lambda self, reference: seen.append(reference))
    seen.clear()
    check_references(answers)
    assert seen == answers[2:]


def test_another_grader_asks_again_and_leaves_no_old_file(asked, monkeypatch):
    check_references(["x+1"])
    monkeypatch.setattr(references, "_version", lambda: "another")
    check_references(["x+1"])
    assert asked == ["x+1", "x+1"]
    assert [path.name for path in cache_folder().iterdir()] == ["references-another.json"]


@pytest.mark.parametrize("damage", ["", "{", "[1]"])
def test_a_damaged_file_is_written_anew(asked, damage):
    check_references(["x+1"])
    (path,) = cache_folder().iterdir()
    path.write_text(damage)
    assert check_references(["x+1"]) == {"x+1": None}
    assert json.loads(path.read_text()) == {"x+1": None}


@pytest.mark.parametrize("verdict", [Verdict.TIMEOUT, Verdict.CRASH])
def test_what_depends_on_the_moment_is_no_reason_to_drop_a_problem(monkeypatch, verdict):
    """A worker that was late or died says nothing about a reference: no guess, and no record."""

    def late(self, prediction, reference):
        future = Future()
        future.set_result(Equivalence(verdict, "symbolic", "no verdict within 120 s"))
        return future

    monkeypatch.setattr(Grader, "_ask", late)
    with pytest.raises(GradingError, match="could not be checked: no verdict within 120 s"):
        check_references(["x+1"])
    assert not cache_folder().exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "reference",
    [
        r"\binom{1000000000}{500000000}",
        r"\sum_{k=1}^{1000000} \frac{1}{k^2}",
        r"x^{9999999}+y^{8888888}",
        r"\int_0^1 \sin(\cos(\sin(x^{77})))dx",
    ],
)
def test_a_reference_that_takes_long_to_work_out_is_read_like_any_other(reference):
    started = time.monotonic()
    assert check_references([reference]) == {reference: None}
    assert time.monotonic() - started < 10  # of which most is the start of a worker


def test_a_folder_that_cannot_be_written_costs_only_time(asked, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert check_references(["x+1"]) == {"x+1": None}
