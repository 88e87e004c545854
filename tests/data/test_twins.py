"""Twins: right by construction and by another computation, or none at all."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

import pytest
from gates import shared

from grouper.data.twins import make_twin
from grouper.programs.from_marks import MARK, program_from_marks

PENS = "Ann has 17 pens and buys 5 boxes of 9 pens. How many has she?"
STEPS = "5*9=<<5*9=45>>45 in boxes.\n17+45=<<17+45=62>>62"
STEPS_45 = STEPS.replace("17", "45").replace("62", "90")


def rows(split: str) -> list[dict[str, Any]]:
    path = shared("gsm8k", f"{split}.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_twin_by_hand() -> None:
    twin = make_twin(PENS, STEPS, "62", key=0)
    assert twin is not None
    first, boxes, each = map(int, re.findall(r"\d+", twin.question))
    assert int(twin.answer) == first + boxes * each
    pens = f"Ann has {first} pens and buys {boxes} boxes of {each} pens."
    assert twin.question == f"{pens} How many has she?"
    assert make_twin(PENS, STEPS, "62", key=0) == twin
    assert make_twin(PENS, STEPS, "62", key=1) != twin


@pytest.mark.parametrize(
    ("question", "solution", "answer", "why"),
    [
        (PENS, STEPS, "63", "the last step is not the answer"),
        (PENS, STEPS.replace("17+45", "13+45").replace("62", "58"), "58", "13 is nowhere"),
        (PENS, STEPS.replace("<<5*9=45>>", ""), "62", "45 is the result of no step"),
        (PENS, "5*9=<<5*9=45>>45\n17+5=<<17+5=22>>22", "22", "a step that leads nowhere"),
        (PENS.replace("17", "45"), STEPS_45, "90", "45 could be either"),
        (PENS.replace("5 boxes", "six boxes"), STEPS, "62", "5 is nowhere"),
        ("He has 3 of 40 and 4 shares.", "4*40=<<4*40=160>>160", "160", "4 may be 3 + 1"),
        ("A third of 3 in 40.", "40/3=<<40/3=13.333>>13.333", "13.333", "3 in words, and rounded"),
        ("Cut 20% of 40 off.", "40*.2=<<40*.2=8>>8\n40-8=<<40-8=32>>32", "32", ".2 is nowhere"),
        ("No number.", "No step.", "1", "nothing is marked"),
    ],
)
def test_what_cannot_be_proved_has_no_twin(
    question: str, solution: str, answer: str, why: str
) -> None:
    assert make_twin(question, solution, answer, key=0) is None, why


def test_a_number_that_stands_there_twice_stays() -> None:
    question = PENS.replace("17", "9")
    twin = make_twin(question, STEPS.replace("17", "9").replace("62", "54"), "54", key=0)
    assert twin is not None
    assert list(twin.changed) == ["5"]


def test_a_story_keeps_its_order_and_whole_numbers() -> None:
    question = "Of 48 eggs 12 broke and the others fill boxes of 9. How many boxes?"
    solution = "48-12=<<48-12=36>>36\n36/9=<<36/9=4>>4"
    for key in range(20):
        twin = make_twin(question, solution, "4", key)
        assert twin is not None
        eggs, broken, size = map(int, re.findall(r"\d+", twin.question))
        # 12 is a unit, and stays.
        assert broken == 12
        assert (eggs - broken) % size == 0
        assert eggs > broken > size


@pytest.mark.parametrize("split", ["test", pytest.param("train", marks=pytest.mark.slow)])
def test_every_twin_of_gsm8k_adds_up_by_another_computation(split: str) -> None:
    """The steps of each are run as a program; and those of the original give its own reference."""
    made = 0
    for row in rows(split):
        solution, _, answer = row["answer"].rpartition("####")
        answer = answer.strip().replace(",", "")
        twin = make_twin(row["question"], solution, answer, key=3)
        if twin is None:
            continue
        made += 1
        program = program_from_marks(twin.solution, twin.question, twin.answer)
        assert program is not None, twin
        assert twin.question != row["question"]
        assert twin.answer != answer
        # Nothing but digits has changed, and as many steps are left.
        assert re.sub(r"[\d,]+", "#", twin.question) == re.sub(r"[\d,]+", "#", row["question"])
        assert len(MARK.findall(twin.solution)) == len(MARK.findall(solution))
        assert Fraction(twin.answer) > 0
        # As a program has it: the same operations on other numbers.
        original = program_from_marks(solution, row["question"], answer)
        assert original is not None
    assert made >= {"test": 230, "train": 1_450}[split]
