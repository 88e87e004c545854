"""Validation problems out of the training problems: seeded, and never shared."""

from __future__ import annotations

import pytest

from grouper.data import ProblemSet, find_overlap, hold_out, without
from grouper.data.problem_set import fingerprint_of
from grouper.errors import DataError
from grouper.types import Problem


def problem_set(*questions: str) -> ProblemSet:
    problems = tuple(
        Problem(id=f"a/{i}", question=question, answer="1", source="a")
        for i, question in enumerate(questions)
    )
    return ProblemSet(name="a", problems=problems, fingerprint=fingerprint_of(problems))


WHOLE = problem_set(*(f"What is {i} + {i}?" for i in range(200)))


def test_every_problem_is_on_one_side():
    train, held_out = hold_out(WHOLE, 0.1, seed=0)
    assert (len(train), len(held_out)) == (180, 20)
    assert find_overlap(train.problems, held_out.problems) == ()
    assert {p.id for p in (*train.problems, *held_out.problems)} == {p.id for p in WHOLE.problems}
    assert train.name == "a"
    assert held_out.name == "a (held out)"
    assert len({train.fingerprint, held_out.fingerprint, WHOLE.fingerprint}) == 3


def test_the_seed_decides_and_the_order_does_not():
    _, first = hold_out(WHOLE, 0.1, seed=0)
    _, other = hold_out(WHOLE, 0.1, seed=1)
    backwards = problem_set(*(p.question for p in reversed(WHOLE.problems)))
    _, reordered = hold_out(backwards, 0.1, seed=0)
    questions = [{p.question for p in part.problems} for part in (first, other, reordered)]
    assert questions[0] == questions[2]
    assert questions[0] != questions[1]


def test_repeated_questions_stay_together():
    twice = problem_set(*(f"What is {i // 4}?{' ' * (i % 4)}" for i in range(200)))
    train, held_out = hold_out(twice, 0.2, seed=0)
    assert find_overlap(train.problems, held_out.problems) == ()
    assert len(held_out) == 40


def test_a_share_that_leaves_nothing():
    for share, size in ((0.01, 10), (0.99, 10)):
        with pytest.raises(DataError, match="leaves one side empty"):
            hold_out(problem_set(*map(str, range(size))), share, seed=0)


def test_demonstrations_lose_what_is_held_out():
    sft = problem_set("what is 2+2", "Something else?")
    kept = without(sft, problem_set("What is 2 + 2?"))
    assert [p.question for p in kept.problems] == ["Something else?"]
    assert kept.notes == ("validation_share: 1 held-out rows left out.",)
    assert without(sft, problem_set("unknown")) is sft
    with pytest.raises(DataError, match="every problem of it is held out"):
        without(sft, sft)
