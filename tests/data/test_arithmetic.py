"""Generated problems: right answers, honest demonstrations, splits that never overlap."""

from __future__ import annotations

import re

import pytest

from grouper.data.arithmetic import ArithmeticOptions, arithmetic_options, generate, kinds
from grouper.data.generation import SPLITS, split_of
from grouper.errors import ConfigError, DataError

RUSHED = {"add2": 0.65, "three": 0.35}


def made(split="train", seed=0, **options):
    return generate(ArithmeticOptions(**options), split=split, seed=seed)


def steps_of(text):
    """[(left, sign, right, result)] of `6*4=24. 24+1=25.`, nothing else allowed."""
    assert re.fullmatch(r"(\d+[+*-]\d+=\d+\.)( \d+[+*-]\d+=\d+\.)*", text), text
    return [
        (int(a), sign, int(b), int(c))
        for a, sign, b, c in re.findall(r"(\d+)([+*-])(\d+)=(\d+)\.", text)
    ]


CALCULATE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}

# The answer worked out from the numbers in the question, independently of the steps table.
FROM_QUESTION = {
    "one": lambda a, b: a + b,
    "add2": lambda a, b, c: a + b + c,
    "sub2": lambda a, b, c: a - b - c,
    "more": lambda a, b: a + (a + b),
    "fewer": lambda a, b: a + (a - b),
    "boxplus": lambda a, b, c: a * b + c,
    "three": lambda a, b, c, d: a + b - c + d,
    "sum3": lambda a, b, c: a + b + c,
}


def test_answers_follow_from_the_questions_and_every_kind_occurs():
    problems = made(count=600)
    assert {p.columns["kind"] for p in problems} == set(FROM_QUESTION) == set(kinds())
    for p in problems:
        numbers = [int(n) for n in re.findall(r"\d+", p.question)]
        assert all(2 <= n <= 10 for n in numbers)
        assert int(p.answer) == FROM_QUESTION[p.columns["kind"]](*numbers), p.question


def test_solutions_are_true_step_by_step_and_stay_in_range():
    for p in made(count=600):
        steps = steps_of(p.solution)
        assert all(CALCULATE[sign](a, b) == c for a, sign, b, c in steps)
        assert all(1 <= c <= 25 for *_, c in steps)
        assert str(steps[-1][-1]) == p.answer == p.columns["demonstrated_answer"]
        assert p.level.startswith(str(len(steps)))


def test_kinds_are_equally_frequent():
    problems = made(count=1600)
    for kind in kinds():
        # binomial(1600, 1/8): mean 200, standard deviation 13
        assert 140 < sum(p.columns["kind"] == kind for p in problems) < 260


def test_rushed_demonstrations_stop_one_step_early_with_a_wrong_answer():
    problems = made(split="sft", count=800, rushed=RUSHED)
    honest = made(split="sft", count=800)
    for p, whole in zip(problems, honest, strict=True):
        assert (p.question, p.answer) == (whole.question, whole.answer)
        if p.solution == whole.solution:
            assert p.columns["demonstrated_answer"] == p.answer
            continue
        assert p.columns["kind"] in RUSHED
        assert steps_of(p.solution) == steps_of(whole.solution)[:-1]
        assert p.columns["demonstrated_answer"] == str(steps_of(p.solution)[-1][-1]) != p.answer
    for kind, share in RUSHED.items():
        ours = [p for p in problems if p.columns["kind"] == kind]
        rushed = sum(p.columns["demonstrated_answer"] != p.answer for p in ours)
        assert abs(rushed / len(ours) - share) < 0.18  # about 100 draws: 3.5 deviations


def test_no_question_is_in_two_splits_whatever_the_seed():
    questions = {
        split: {p.question for seed in (0, 1) for p in made(split, seed, count=1000)}
        for split in SPLITS
    }
    for split, texts in questions.items():
        assert all(split_of(text) == split for text in texts)
        for other in set(SPLITS) - {split}:
            assert not texts & questions[other]


def test_questions_and_ids_are_distinct():
    problems = made(count=2000)
    assert len({p.question for p in problems}) == len({p.id for p in problems}) == 2000


def test_the_same_arguments_give_the_same_problems_and_a_longer_set_continues():
    assert made(count=50) == made(count=80)[:50]
    assert made(count=50) != made(count=50, seed=1)
    assert made(count=50, seed=1) == generate(
        ArithmeticOptions(count=50, seed=1), split="train", seed=0
    )


def test_the_first_problem_is_pinned():
    """A changed generator is another data set: change this only on purpose."""
    first = made(count=1)[0]
    assert (first.id, first.subject, first.question, first.solution) == (
        "arithmetic/train/0",
        "total when one has fewer",
        "Ida has 4 cups. Ann has 2 fewer than Ida. How many cups do they have together?",
        "4-2=2. 4+2=6.",
    )


def test_options_bound_the_numbers():
    for p in made(count=100, low=3, high=5, max_value=12, kinds=("add2", "more")):
        assert p.columns["kind"] in ("add2", "more")
        assert all(3 <= int(n) <= 5 for n in re.findall(r"\d+", p.question))
        assert all(c <= 12 for *_, c in steps_of(p.solution))


def test_a_space_that_is_too_small_is_an_error_that_says_how_many_there_are():
    with pytest.raises(DataError, match=r"only \d+ different questions"):
        made(count=100_000, kinds=("one",), low=2, high=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuont": 3}, r"options\.cuont.*Did you mean count=3"),
        ({"count": "3"}, r"options\.count.*whole number"),
        ({"count": 10**20}, r"options\.count.*less than"),
        ({"kinds": ["add3"]}, r"no kind 'add3'. Did you mean 'add2'"),
        ({"kinds": []}, "kinds is empty"),
        ({"rushed": {"add2": 1.5}}, r"options\.rushed\.add2"),
        ({"rushed": {"one": 0.5}}, "one step"),
        ({"low": 9, "high": 3}, r"low \(9\) is above high \(3\)"),
    ],
)
def test_options_are_strict(options, message):
    with pytest.raises(ConfigError, match=message):
        arithmetic_options(options, where="data.train")


def test_all_wrong_options_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        arithmetic_options({"cuont": 3, "high": 0}, where="data.train")
    assert "cuont" in str(caught.value)
    assert "high" in str(caught.value)


def test_an_unknown_split_is_an_error():
    with pytest.raises(ConfigError, match="Did you mean 'test'"):
        made(split="tset")
