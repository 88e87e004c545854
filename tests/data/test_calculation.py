"""Generated calculations: exact at any length, by precedence, and never in two splits."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grouper.data.calculation import (
    MOST_STEPS,
    CalculationOptions,
    calculation_options,
    draw_calculation,
    generate,
    write_calculation,
)
from grouper.data.generation import SPLITS, split_of
from grouper.data.overlap import find_overlap, question_words
from grouper.data.twins import make_twin
from grouper.errors import ConfigError, DataError
from grouper.programs.from_marks import MARK, evaluate_expression, program_from_marks

SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def made(split="test", seed=0, **options):
    return generate(CalculationOptions(**options), split=split, seed=seed)


@pytest.fixture(scope="module")
def problems():
    """1,000 problems of 1 to 200 operations."""
    return made(count=1000, steps=tuple(range(1, 201)))


def expression_of(problem):
    """The calculation of a question."""
    match = re.fullmatch(r"What is ([-+*/() \d]+)\?", problem.question)
    assert match, problem.question
    return match[1]


def operations_in(expression):
    """Value, and [(left, sign, right, result)] as Python reads an expression, left to right."""
    operations = []

    def value_of(node):
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        left = value_of(node.left)
        right = value_of(node.right)
        sign = SIGNS[type(node.op)]
        result = {
            "+": left + right,
            "-": left - right,
            "*": left * right,
            "/": left / right if sign == "/" else None,
        }[sign]
        operations.append((left, sign, right, result))
        return result

    return value_of(ast.parse(expression, mode="eval").body), operations


# --- answers and solutions -----------------------------------------------------------------------


def test_answers_and_every_result_are_right_by_another_evaluator(problems):
    for problem in problems:
        value, operations = operations_in(expression_of(problem))
        assert Fraction(problem.answer) == value
        assert len(operations) == problem.columns["steps"]
        assert all(r.denominator == 1 and 1 <= r <= 1000 for *_, r in operations)
    assert {problem.columns["steps"] for problem in problems} >= {1, 2, 199, 200}


def test_the_solution_has_the_steps_of_the_expression_in_order(problems):
    for problem in problems:
        _, operations = operations_in(expression_of(problem))
        expected = [f"{left}{sign}{right} = {result}" for left, sign, right, result in operations]
        assert problem.solution.split("\n") == expected
        marked = problem.columns["marked_solution"]
        assert re.sub(r"<<[^<>]*>>", "", marked) == problem.solution
        assert problem.answer == marked.rpartition(">>")[2]


def test_marks_are_true_and_make_a_program_that_prints_the_answer(problems):
    for problem in problems[:200]:
        marked = problem.columns["marked_solution"]
        marks = MARK.findall(marked)
        assert len(marks) == problem.columns["steps"]
        for expression, stated in marks:
            assert evaluate_expression(expression, {}, Fraction) == Fraction(stated)
        program = program_from_marks(marked, problem.question, problem.answer)
        assert program is not None
        assert program.count("\nstep_") + program.startswith("step_") == len(marks)


def test_a_program_prints_the_answer():
    for problem in made(count=3, steps=(1, 5, 60), min_value=-1000):
        marked = problem.columns["marked_solution"]
        program = program_from_marks(marked, problem.question, problem.answer)
        printed = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert Fraction(printed.stdout.strip()) == Fraction(problem.answer)


def test_precedence_decides(problems):
    """Many problems have another value when read from left to right, without parentheses."""

    def left_to_right(text):
        first, *rest = re.findall(r"\d+|[-+*/]", text)
        value = Fraction(first)
        for sign, number in zip(rest[::2], rest[1::2], strict=True):
            other = Fraction(number)
            if sign == "+":
                value += other
            elif sign == "-":
                value -= other
            elif sign == "*":
                value *= other
            else:
                value /= other
        return value

    for steps in (3, 5, 20):
        some = made(count=100, steps=(steps,))
        naive = [left_to_right(expression_of(p)) == Fraction(p.answer) for p in some]
        assert sum(naive) < 60
        without = [operations_in(re.sub(r"[()]", "", expression_of(p)))[0] for p in some]
        same = sum(value == Fraction(p.answer) for value, p in zip(without, some, strict=True))
        # Without parentheses, short ones may still be the same; long ones hardly ever are.
        assert same < 80
        assert steps == 20 or same >= 5
    assert all("(" in p.question for p in problems if p.columns["steps"] > 20)


def test_no_pair_of_parentheses_can_be_left_out():
    """Each pair changes the order of the steps, as Python reads it."""

    def inner(expression, start):
        depth = 0
        for end in range(start, len(expression)):
            depth += (expression[end] == "(") - (expression[end] == ")")
            if depth == 0:
                return expression[:start] + expression[start + 1 : end] + expression[end + 1 :]
        raise AssertionError(expression)

    for problem in made(count=100, steps=(2, 6, 12)):
        expression = expression_of(problem)
        tree = ast.dump(ast.parse(expression))
        for match in re.finditer(r"\(", expression):
            assert ast.dump(ast.parse(inner(expression, match.start()))) != tree


def test_all_signs_are_frequent_at_every_length():
    for steps in (1, 2, 5, 20, 200):
        problems = made(count=200, steps=(steps,))
        signs = Counter("".join(re.findall(r"[-+*/]", "".join(p.question for p in problems))))
        assert min(signs[sign] for sign in "+-*/") > 0.1 * signs.total()


def test_answers_cannot_be_guessed():
    answers = Counter(p.answer for p in made(count=500))
    assert answers.most_common(1)[0][1] < 0.06 * 500


# --- any length ----------------------------------------------------------------------------------


def test_long_calculations_need_no_recursion_and_no_more_time_per_step():
    options = CalculationOptions()
    limit = sys.getrecursionlimit()
    seconds = {}
    for count in (2_000, 40_000):
        start = time.process_time()
        # The depth of the test itself is about 50.
        sys.setrecursionlimit(200)
        try:
            calculation = draw_calculation(options, count, random.Random("long"))
            text = write_calculation(calculation)
        finally:
            sys.setrecursionlimit(limit)
        seconds[count] = time.process_time() - start
        assert len(re.findall(r" [-+*/] ", text)) == count
    assert seconds[40_000] < 20 * 5 * seconds[2_000]


def test_parentheses_are_not_nested_deeply(problems):
    for problem in problems:
        depth = 0
        for sign in re.findall(r"[()]", problem.question):
            depth += 1 if sign == "(" else -1
            assert depth <= 25


# --- twins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "least", "most"), [(1, 75, 95), (3, 45, 75), (5, 12, 40)])
def test_twins_of_short_calculations(steps, least, most):
    """Among more numbers, some are equal or add up to another one: then a twin is not provable."""
    twins = 0
    for problem in made(count=100, steps=(steps,)):
        marked = problem.columns["marked_solution"]
        twin = make_twin(problem.question, marked, problem.answer, key=0)
        if twin is None:
            continue
        twins += 1
        value, _ = operations_in(twin.question.removeprefix("What is ").removesuffix("?"))
        assert Fraction(twin.answer) == value
        assert twin.question != problem.question
    assert least <= twins <= most


# --- splits --------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    split=st.sampled_from(SPLITS),
    seed=st.integers(0, 2**63 - 1),
    count=st.integers(1, 40),
    steps=st.lists(st.integers(2, 60), min_size=1, max_size=5),
)
def test_problems_are_a_function_of_the_arguments_and_a_longer_set_continues(
    split, seed, count, steps
):
    options = {"steps": tuple(steps)}
    shorter = made(split, seed, count=count, **options)
    assert shorter == made(split, seed, count=count + 20, **options)[:count]
    named = CalculationOptions(count=count, seed=seed, **options)
    assert shorter == generate(named, split=split, seed=seed ^ 1)
    assert len({problem.id for problem in shorter}) == count
    assert len({question_words(problem.question) for problem in shorter}) == count
    for index, problem in enumerate(shorter):
        assert problem.id == f"calculation/{split}/{index}"
        assert split_of(problem.question) == split
        assert problem.columns["steps"] in steps


def test_another_seed_gives_other_problems():
    assert made(count=20) != made(count=20, seed=1)


def test_no_question_is_in_two_splits_whatever_the_seed():
    questions = {
        split: {p.question for seed in (0, 1) for p in made(split, seed, count=250, steps=(1, 2))}
        for split in SPLITS
    }
    for split, texts in questions.items():
        for other in set(SPLITS) - {split}:
            assert not texts & questions[other]
    assert find_overlap(made("train", count=300), made("test", count=300)) == ()


def test_levels_tell_the_length():
    assert {p.level for p in made(count=50, steps=(1, 2, 30))} == {"1 step", "2 steps", "30 steps"}


def test_the_problem_of_the_documentation_is_generated():
    """A changed generator makes another data set: change this only on purpose."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    example = re.search(
        r"^calculation/(\w+)/(\d+), (.+)\n(What is .+)\n((?:.+ = .+\n)+)", page, re.MULTILINE
    )
    assert example
    split, index, level, question, marked = example.groups()
    problem = made(split, count=int(index) + 1)[-1]
    assert (level, question) == (problem.level, problem.question)
    assert marked.strip() == problem.columns["marked_solution"]


# --- options -------------------------------------------------------------------------------------


def test_options_bound_the_numbers():
    for problem in made(count=200, steps=(1, 30), low=3, high=20, max_value=60):
        _, operations = operations_in(expression_of(problem))
        assert all(3 <= int(n) <= 20 for n in re.findall(r"\d+", problem.question))
        assert all(1 <= r <= 60 for *_, r in operations)


def test_negative_results_are_an_option():
    problems = made(count=200, steps=(2, 10, 100), min_value=-300)
    results = [r for p in problems for *_, r in operations_in(expression_of(p))[1]]
    assert -300 <= min(results) < -100
    for problem in problems:
        value, operations = operations_in(expression_of(problem))
        assert Fraction(problem.answer) == value
        # Negative numbers to the right of a sign are in parentheses.
        assert not re.search(r"[-+*/]-", problem.solution)
        assert len(problem.solution.split("\n")) == len(operations)


@pytest.mark.parametrize("operations", ["+", "+-", "*/", "-"])
def test_operations_leave_only_these_signs(operations):
    for problem in made(count=50, steps=(2,), operations=operations):
        _, done = operations_in(expression_of(problem))
        assert {sign for _, sign, _, _ in done} <= set(operations)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2..4", (2, 3, 4)), ("10..30 by 10", (10, 20, 30)), ([5, 5, 7], (5, 5, 7))],
)
def test_steps_are_a_range_or_a_list(text, numbers):
    assert calculation_options({"steps": text}, where="data").steps == numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuont": 3}, "there is no setting 'cuont'.*Did you mean count=3"),
        ({"steps": []}, "steps is empty"),
        ({"steps": "5..2"}, "steps is empty"),
        ({"steps": [0, 3]}, "steps has 0, and a problem has 1 to 10,000"),
        ({"steps": [MOST_STEPS + 1]}, "steps has 10001"),
        ({"steps": 3}, r"options\.steps"),
        ({"steps": "1..99999999"}, r"options\.steps"),
        ({"operations": ""}, "operations is empty"),
        ({"operations": "+%"}, "there is no operation '%'"),
        ({"low": 9, "high": 4}, r"low \(9\) is above high \(4\)"),
        ({"max_value": 50}, r"max_value \(50\) is below high \(100\): raise max_value"),
        ({"min_value": 2000}, r"min_value \(2000\) is above max_value \(1000\)"),
        (
            {"steps": [200], "operations": "+"},
            "no calculation of 200 steps was found .* 1 to 1000: raise max_value",
        ),
        ({"steps": [30], "operations": "*/"}, "no calculation of 30 steps"),
    ],
)
def test_options_are_strict(options, message):
    with pytest.raises(ConfigError, match=message):
        calculation_options(options, where="data.test")


def test_too_few_different_questions_are_an_error():
    with pytest.raises(DataError, match=r"different questions were found for 200 problems.*Raise"):
        made(count=200, steps=(1,), high=4)


def test_an_unknown_split_is_an_error():
    with pytest.raises(ConfigError, match="Did you mean 'test'"):
        made(split="tset")
