"""Answers that a program prints: found, run, compared, and told why there is none."""

from __future__ import annotations

import gc
import os
import time
import weakref

import pytest
from click.testing import CliRunner
from gates import missing

from grouper.cli.main import cli
from grouper.config.schema import GradingConfig, PromptConfig
from grouper.data.problems import grade_shown
from grouper.errors import ConfigError
from grouper.grading import Grader, programs
from grouper.grading.extract import last_program
from grouper.programs import runner
from grouper.programs.runner import ProgramRunner, available_isolation
from grouper.prompts import make_format
from grouper.rewards.core import Completed
from grouper.types import AnswerContract, AnswerKind, Grade, Problem, Verdict

if available_isolation() != "seccomp":
    missing("this machine has no filter of system calls")

CONTRACT = AnswerContract(kind=AnswerKind.PROGRAM, turn_markers=("\nUser:",))
SETTINGS = GradingConfig.model_validate({"programs": {"seconds": 0.5}})


def block(program: str) -> str:
    return f"Let me compute.\n```python\n{program}\n```\n"


@pytest.fixture(scope="module")
def grader():
    with Grader(CONTRACT, SETTINGS) as opened:
        yield opened


@pytest.mark.parametrize(
    ("text", "answer", "verdict"),
    [
        (block("print(6 * 7)"), "42", Verdict.CORRECT),
        (block("print(48 / 2)"), "24", Verdict.CORRECT),
        (block("print('working')\nprint(41)"), "42", Verdict.INCORRECT),
        (
            block("from fractions import Fraction\nprint(Fraction(2, 6))"),
            r"\frac13",
            Verdict.CORRECT,
        ),
        # The last program is the answer, and nothing of an invented turn is.
        (block("print(1)") + block("print(42)"), "42", Verdict.CORRECT),
        (block("print(42)") + "\nUser: and now?\n" + block("print(1)"), "42", Verdict.CORRECT),
        # The symbolic stage compares what is neither the same text nor a number.
        (block(r"print(r'\sqrt{12}')"), r"2\sqrt{3}", Verdict.CORRECT),
    ],
)
def test_the_last_printed_line_is_the_answer(
    grader: Grader, text: str, answer: str, verdict: Verdict
) -> None:
    (grade,) = grader.grade([text], [answer])
    assert grade.verdict is verdict
    assert grade.extracted is not None


@pytest.mark.parametrize(
    ("text", "stage", "reason"),
    [
        ("The answer is 42.", "extract", "no ```python block"),
        ("```python\nprint(42)", "extract", "the last ```python block is not closed"),
        ("```\nprint(42)\n```", "extract", "no ```python block"),
        (block("  "), "extract", "the answer is empty"),
        (block("x = 42"), "program", "the program printed nothing"),
        (block("print(1 / 0)"), "program", "program failed: line 1, ZeroDivisionError: division"),
        (block("x = 1\nprint(y)"), "program", "program failed: line 2, NameError: name 'y'"),
        (block("while True: print(1)"), "program", "program stopped: it printed too much"),
        (block("open('/etc/passwd')"), "program", "program failed: line 1, PermissionError"),
    ],
)
def test_the_reason_why_there_is_no_answer(
    grader: Grader, text: str, stage: str, reason: str
) -> None:
    (grade,) = grader.grade([text], ["42"])
    assert (grade.verdict, grade.extracted, grade.stage) == (Verdict.NO_ANSWER, None, stage)
    assert grade.reason.startswith(reason)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (block("print('The answer is', 42)"), "42"),
        ("The answer is 42.", "42"),
        ("The answer is 42.\n" + block("print(1 / 0)"), "42"),
        (block("print(42)"), "42"),
        # No number inside a program is an answer.
        (block("x = 42"), None),
    ],
)
def test_the_lenient_reading(grader: Grader, text: str, answer: str | None) -> None:
    grade = grader.submit(text, "42", lenient=True).result()
    assert grade.extracted == answer
    assert (grade.verdict is Verdict.CORRECT) == (answer is not None)


def test_a_program_is_run_once(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []
    plain = ProgramRunner.submit

    def submit(self: ProgramRunner, program: str):
        run.append(program)
        return plain(self, program)

    monkeypatch.setattr(ProgramRunner, "submit", submit)
    text = block("print(40 + 2)  # once")
    grades = grader.grade([text, text], ["42", "43"])
    grader.submit(text, "42", lenient=True).result()
    assert [grade.verdict for grade in grades] == [Verdict.CORRECT, Verdict.INCORRECT]
    assert run == ["print(40 + 2)  # once"]


def test_a_grader_that_was_closed_starts_again() -> None:
    with Grader(CONTRACT, SETTINGS) as grader:
        assert grader.grade([block("print(1)")], ["1"])[0].correct
        grader.close()
        assert grader.grade([block("print(2)")], ["2"])[0].correct


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_runs_programs_of_its_own() -> None:
    with Grader(CONTRACT, SETTINGS) as grader:
        assert grader.grade([block("print(1)")], ["1"])[0].correct
        child = os.fork()
        if child == 0:
            try:
                right = grader.grade([block("print(2)")], ["2"])[0].correct
                grader.close()
                os._exit(0 if right else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert grader.grade([block("print(3)")], ["3"])[0].correct


def test_what_cannot_be_isolated_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_isolation", lambda: "limits")
    with (
        Grader(CONTRACT, SETTINGS) as grader,
        pytest.raises(ConfigError, match=r"grading\.programs\.isolation"),
    ):
        grader.start()


def test_a_package_that_is_missing_is_refused_at_the_start() -> None:
    settings = GradingConfig.model_validate({"programs": {"packages": ["no_such_package"]}})
    with (
        Grader(CONTRACT, settings) as grader,
        pytest.raises(ConfigError, match="no_such_package is not installed"),
    ):
        grader.start()


def test_a_worker_that_always_ends_is_a_crash_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner._Worker, "_ask", lambda *_: None)
    with Grader(CONTRACT, SETTINGS) as grader:
        (grade,) = grader.grade([block("print(42)")], ["42"])
    assert (grade.verdict, grade.stage) == (Verdict.CRASH, "program")


def test_finding_programs_is_linear() -> None:
    for text in ("```python\n" * 100_000, "```\n" * 200_000, "`" * 1_000_000):
        started = time.perf_counter()
        last_program(text)
        assert time.perf_counter() - started < 2


def test_every_format_of_programs_has_a_completion_that_is_right() -> None:
    for name in ("program", "program-3-shot"):
        contract = make_format(PromptConfig(format=name)).contract
        with Grader(contract, SETTINGS) as grader:
            grade: Grade = grader.grade([block("print(2 + 2)")], ["4"])[0]
        assert grade.correct


def test_examples_of_the_prompt_for_base_models_print_their_answers() -> None:
    """Each example's program is right by hand: 43, 47 and 4."""
    prompt = make_format(PromptConfig(format="program-3-shot")).plain
    answers = []
    with programs.runner_of(SETTINGS.programs) as opened:
        for part in prompt.split("Problem: ")[1:-1]:
            program = last_program(part).answer
            assert program is not None
            answers.append(programs.printed_answer(opened.run(program)).answer)
    assert answers == ["43", "47", "4"]


def test_what_a_completion_commits_to_is_what_its_program_prints(grader: Grader) -> None:
    """For `generate` and `chat`, for rewards that read the answer, and for `grouper grade`."""
    assert grader.answer(block("print(6 * 7)")).answer == "42"
    assert grader.answer(block("1 / 0")).reason.startswith("program failed: line 1")
    assert grader.answer("42").reason == "no ```python block"
    fmt = make_format(PromptConfig(format="program"))
    done = Completed(text=block("print(6 * 7)"), format=fmt, columns={"answer": "42"})
    assert (done.answer, done.grade.correct) == ("42", True)
    shown = CliRunner().invoke(
        cli, ["grade", block("print(6 * 7)"), "--answer", "42", "--format", "program"]
    )
    assert "prints     42  (last line of the program)" in shown.output
    assert "verdict    correct" in shown.output


def test_a_program_that_takes_too_long_is_a_timeout_that_is_told_the_same_each_time(
    grader: Grader,
) -> None:
    texts = [block(f"while True: pass  # {number}") for number in range(2)]
    grades = grader.grade(texts, ["42", "42"])
    assert {grade.verdict for grade in grades} == {Verdict.TIMEOUT}
    assert {grade.reason for grade in grades} == {"program stopped: it took too long"}


def test_a_grader_that_is_closed_ends_what_waits_and_forgets_it() -> None:
    """What was cancelled is no verdict on the program, which is run again later."""
    settings = GradingConfig.model_validate({"programs": {"seconds": 20.0}})
    with Grader(CONTRACT, settings) as grader:
        texts = [block(f"while True: pass  # {number}") for number in range(4)]
        waiting = [grader.submit(text, "42") for text in texts]
        time.sleep(0.5)
        started = time.monotonic()
        grader.close()
        verdicts = {future.result(timeout=30).verdict for future in waiting}
        assert time.monotonic() - started < 10
        assert verdicts == {Verdict.CRASH}
        assert grader._programs is not None
        assert grader._programs._known == {}


def test_a_grader_that_nobody_knows_is_freed_with_its_processes() -> None:
    grader = Grader(CONTRACT, SETTINGS)
    assert grader.grade([block("print(1)")], ["1"])[0].correct
    programs_of_grader = grader._programs
    assert programs_of_grader is not None
    seen = weakref.ref(grader)
    del grader
    gc.collect()
    assert seen() is None
    assert programs_of_grader._runner is None


def test_programs_of_the_data_can_be_the_right_ones_alone() -> None:
    fmt = make_format(PromptConfig(format="program"))
    for program, right in (("print(2 + 2)", True), ("print(5)", False), ("print(x)", False)):
        problem = Problem(id="a", question="2+2?", answer="4", source="a", program=program)
        assert grade_shown(problem, fmt) is right
