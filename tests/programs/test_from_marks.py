"""Programs made of marked arithmetic: they print the reference, and compute what was computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gates import missing

from grouper.config.schema import ProgramsConfig
from grouper.grading.programs import printed_answer, runner_of
from grouper.programs.from_marks import program_from_marks
from grouper.programs.runner import available_isolation


def test_numbers_that_a_line_computed_become_its_name() -> None:
    program = program_from_marks(
        "She had 5*4=$<<5*4=20>>20.\nOf that 20%*20=$<<20*.01*20=4>>4 went.\n"
        "So she kept <<20-4=16>>16 dollars.",
        "She worked 5 hours for four dollars each and spent 20% of that.",
        "16",
    )
    assert program == (
        "# She had 5*4.\n"
        "step_1 = 5*4\n"
        # A number of the question stays a number.
        "# Of that 20%*20 went.\n"
        "step_2 = 20*.01*20\n"
        "# So she kept step_3 dollars.\n"
        "step_3 = 20-step_2\n"
        "print(step_3)"
    )


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("no marks at all, 4", "4"),
        ("It is <<2+2=5>>5.", "5"),
        ("It is <<2+2=4>>4, and one more makes 5.", "5"),
        ("It is <<__import__('os')=4>>4.", "4"),
        ("It is <<9**9**9**9=4>>4.", "4"),
        ("It is <<x+2=4>>4.", "4"),
        ("It is <<4/0=4>>4.", "4"),
        ("It is <<=4>>4.", "4"),
        ("It is <<((((((((2+2=4>>4.", "4"),
        ("It is <<2+2=4>>4.", "red"),
        ("<<" * 10_000 + "=" * 10_000 + ">>" * 10_000, "4"),
    ],
)
def test_what_does_not_add_up_is_no_program(solution: str, answer: str) -> None:
    assert program_from_marks(solution, "How many?", answer) is None


def test_a_floating_point_sum_is_rounded_where_it_is_not_exact() -> None:
    program = program_from_marks("It is <<0.1+0.2=0.3>>0.3.", "How much?", "0.3")
    assert program is not None
    assert program.endswith("print(round(step_1, 6))")


def test_programs_of_real_solutions_print_their_answers(shared_data: Path) -> None:
    """Of 300 solutions of GSM8K: at least 85 % become programs, and all of those are right."""
    if available_isolation() != "seccomp":
        missing("this machine has no filter of system calls")
    text = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()[:300]]
    made = []
    for row in rows:
        solution, _, answer = row["answer"].rpartition("####")
        answer = answer.strip().replace(",", "")
        program = program_from_marks(solution.strip(), row["question"], answer)
        if program is not None:
            made.append((program, answer))
    assert len(made) > 0.85 * len(rows)
    with runner_of(ProgramsConfig()) as runner:
        results = runner.map([program for program, _ in made])
        for (program, answer), result in zip(made, results, strict=True):
            printed = printed_answer(result).answer
            assert printed is not None, (program, result)
            assert float(printed) == float(answer), program
