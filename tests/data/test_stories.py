"""Generated stories: right answers, plain English, held-out stories that training never sees."""

from __future__ import annotations

import operator
import random
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grouper.data import generation
from grouper.data.generation import SPLITS, split_of
from grouper.data.overlap import find_overlap
from grouper.data.stories import (
    HELD_OUT_SPLITS,
    StoriesOptions,
    draw_numbers,
    generate,
    parse_equation,
    plural,
    stories_options,
    tables,
)
from grouper.errors import ConfigError, DataError

STORIES = tables().stories
HELD_OUT = {name for name, story in STORIES.items() if story.held_out}
# What would mean the distractor where one stands before it.
BACK_REFERENCE = r"^\W*(it|they|them|that)\b|\bof them\b|\b(after|before|from) (that|this)\b"
CALCULATE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

# The answer from the numbers of a story, written without a look at its steps.
ANSWERS = {
    "boxes-and-drawer": lambda a, b, c: a * b + c,
    "sharing-cookies": lambda a, b, c: (a + b) / c,
    "change-from-a-bill": lambda a, b, c: c - a * b,
    "bicycle-trip": lambda a, b, c: a * b + c,
    "pages-left": lambda a, b, c: c - a * b,
    "weekly-savings": lambda a, b, c: a + b * c,
    "empty-seats": lambda a, b, c: a * b - c,
    "egg-cartons": lambda a, b, c: a * b / c,
    "sale-price": lambda a, b: a * (1 - 1 / b),
    "ages-together": lambda a, b: 2 * a + b,
    "age-in-years": lambda a, b, c: a * b + c,
    "times-as-many": lambda a, b: a * (1 + b),
    "bus-passengers": lambda a, b, c: a - b + c,
    "fence": lambda a, b: 2 * (a + b),
    "price-of-one": lambda a, b, c: c * b / a,
    "rope-pieces": lambda a, b, c: (a - b) / c,
    "market-baking": lambda a, b, c: a * b - c,
    "music-practice": lambda a, b, c: a * b + c,
    "giving-a-part": lambda a, b: a * (1 - 1 / b),
    "same-speed": lambda a, b, c: c * a / b,
    "temperature": lambda a, b, c: a + b - c,
    "heavy-parcel": lambda a, b, c: a + b * c,
    "rest-of-the-film": lambda a, b: 60 * a - b,
    "game-points": lambda a, b, c: a + b - c,
    "tables-for-guests": lambda a, b, c: (a + b) / c,
    "growing-plant": lambda a, b, c: a + b * c,
    "water-tank": lambda a, b, c: a * b - c,
    "album-pages": lambda a, b, c: (a + b) / c,
    "weeks-to-a-goal": lambda a, b, c: (a - b) / c,
    "parking-garage": lambda a, b, c: a * b + c,
    "part-of-a-class": lambda a, b, c: a / b + c,
    "printing-pages": lambda a, b, c: c * a / b,
    "building-blocks": lambda a, b, c: a - b + c,
    "book-cart": lambda a, b, c: a - b + c,
    "giving-and-getting": lambda a, b, c: a + b - c,
    "flower-beds": lambda a, b: 2 * a - b,
    "parking-lot": lambda a, b, c: a - b - c,
    "elevator-ride": lambda a, b, c: a + b - c,
    "playlist": lambda a, b, c: a + b - c,
    "aquarium": lambda a, b, c: a + b + c,
    "mail-route": lambda a, b, c: a + b + c,
    "lake-trail": lambda a, b, c: a - b - c,
    "fair-trade": lambda a, b, c: a - b + c,
    "fruit-pickers": lambda a, b, c: b + c - a,
    "dinner-shopping": lambda a, b, c: a - b - c,
    "lap-swimmers": lambda a, b, c: a - b + c,
    "farm-animals": lambda a, b, c: a - b - c,
    "coming-and-going": lambda a, b, c: a + b - c,
    "snowfall": lambda a, b, c: a + b - c,
    "beads": lambda a, b: 2 * a - b,
    "school-drive": lambda a, b, c: a - b - c,
    "two-halves": lambda a, b, c: b + c - a,
    "tall-trees": lambda a, b, c: a + b - c,
    "two-kinds": lambda a, b, c, d: a * b + c * d,
    "school-vans": lambda a, b, c, d: a * b - c - d,
    "bakery-bags": lambda a, b, c, d: (a * b - c) / d,
    "two-baskets": lambda a, b, c: 2 * a * b - c,
    "reading-plan": lambda a, b, c, d: c - d - a * b,
    "way-to-work": lambda a, b, c: 2 * a * b + c,
    "groups-of-the-rest": lambda a, b, c: a * (1 - 1 / b) / c,
    "day-of-work": lambda a, b, c, d: (a + b) * c - d,
    "soup-for-many": lambda a, b, c, d: a * c / b - d,
    "lower-price": lambda a, b, c, d: d - (a - b) * c,
    "weeks-of-food": lambda a, b, c: (7 * a + c) * b,
    "lemonade-stand": lambda a, b, c, d: a * b - c - d,
    "zoo-tickets": lambda a, b, c, d: a * b - c * d,
    "marathon-training": lambda a, b, c, d: d - c - a * b,
    "two-bakers": lambda a, b, c, d: a + b - c - d,
    "forest-finds": lambda a, b, c: 2 * a + b - c,
    "streetcar": lambda a, b, c, d: a - b + c - d,
    "three-purchases": lambda a, b, c, d: a - b - c - d,
    "friendly-gift": lambda a, b, c: a - b - 2 * c,
    "market-day": lambda a, b, c, d: a + b + c - d,
    "two-day-tour": lambda a, b, c, d: a + b - c - d,
    "party-budget": lambda a, b, c, d, e: e - a * b - c * d,
    "egg-money": lambda a, b, c, d, e: (a * b - c) / d * e,
    "weekend-job": lambda a, b, c, d, e: (a * b + c) * d - e,
    "two-schools": lambda a, b, c, d: (a + b) * (1 - 1 / c) / d,
    "two-savers": lambda a, b, c, d, e: e - a * b - c * d,
    "library-shelves": lambda a, b, c, d, e: a * b + c * d - e,
    "bottles-for-shops": lambda a, b, c, d, e: (a * b - c) / d + e,
}


def made(split="train", seed=0, **options):
    return generate(StoriesOptions(**options), split=split, seed=seed)


@pytest.fixture(scope="module")
def problems():
    """Many problems of all stories, half of them with a distractor."""
    return [
        problem
        for split in ("train", "test")
        for problem in made(split, count=2500, distractors=0.5, steps=(2, 3, 4))
    ]


def equations(solution):
    """[(left, sign, right, result)] of a solution, of which each sentence has exactly one."""
    sentences = re.findall(r"[^:]+: (\d+)([-+*/])(\d+)=(\d+)(?: [a-z ]+)?\.(?: |$)", solution)
    assert len(sentences) == solution.count("=") == solution.count(":"), solution
    return [(int(a), sign, int(b), int(c)) for a, sign, b, c in sentences]


# --- the table -----------------------------------------------------------------------------------


def test_about_a_quarter_of_the_stories_of_each_length_is_held_out():
    assert len(STORIES) >= 24
    for steps in (2, 3, 4):
        held_out = [story.held_out for story in STORIES.values() if len(story.steps) == steps]
        assert 0.2 <= sum(held_out) / len(held_out) <= 0.3


@pytest.mark.parametrize("name", STORIES)
def test_the_steps_of_a_story_lead_to_its_answer(name):
    story = STORIES[name]
    draw = random.Random(0)
    checked = 0
    while checked < 100:
        numbers = draw_numbers(StoriesOptions(), story, draw)
        if numbers is None:
            continue
        letters = {letter: Fraction(numbers[letter]) for letter in story.numbers}
        assert ANSWERS[name](**letters) == pytest.approx(list(numbers.values())[-1])
        checked += 1


@pytest.mark.parametrize("name", STORIES)
def test_a_story_uses_its_numbers_and_words_and_nothing_else(name):
    story = STORIES[name]
    results = []
    operands = set()
    for step in story.steps:
        result, left, _, right = parse_equation(step.equation)
        for operand in (left, right):
            assert operand.isdigit() or operand in story.numbers or operand in results
        operands |= {left, right}
        results.append(result)
    assert not set(results) & set(story.numbers)
    # Every number is needed, and so is every result but the last.
    assert {*story.numbers, *results[:-1]} <= operands
    assert "n" not in {*story.numbers, *results, *operands}

    everything = " ".join(story.texts)
    for text in story.texts:
        places = set(re.findall(r"\{(\w+)", text)) - {"extra"}
        assert set(story.numbers) <= places, "every text has to tell all numbers"
        assert places <= {*story.numbers, *story.words, *"pqr"}
    for word in story.words:
        assert re.search(rf"[{{:]{word}\b", everything)
    for step in story.steps:
        assert set(re.findall(r"\{(\w+)", step.words)) <= {
            *story.numbers,
            *results,
            *story.words,
            *"pqr",
        }
    assert all(low >= 2 for low, *_ in story.numbers.values()), "1 would need a singular"


@pytest.mark.parametrize("name", STORIES)
def test_a_distractor_fits_wherever_it_may_stand(name):
    story = STORIES[name]
    assert len(story.texts) >= 3
    assert len(story.distractors) >= 2
    for text in story.texts:
        before, *after = text.split("{extra}")
        assert after, "a distractor needs a place"
        assert re.search(r"[.?]\]? $", before)
        for part in after:
            sentence = re.split(r"[.?]", part)[0]
            assert not re.search(BACK_REFERENCE, sentence, re.IGNORECASE), sentence
        for distractor in story.distractors:
            for name in ("{p}", "{q}", "{r}"):
                if name in distractor.text and name in text:
                    assert name in before, f"{distractor.text} would introduce {name}"
            assert "{p}" not in distractor.text or "{p}" in text
    constants = set(re.findall(r"\d+", " ".join(step.equation for step in story.steps)))
    for distractor in story.distractors:
        assert "{n" in distractor.text
        assert not constants & {str(n) for n in distractor.n}
        assert min(distractor.n) >= 2


# --- problems ------------------------------------------------------------------------------------


def test_all_stories_occur(problems):
    assert {problem.columns["template"] for problem in problems} == set(STORIES)


def test_solutions_are_true_step_by_step_and_end_with_the_answer(problems):
    for problem in problems:
        steps = equations(problem.solution)
        assert len(steps) == problem.columns["steps"]
        assert all(CALCULATE[sign](a, b) == c for a, sign, b, c in steps), problem.solution
        assert all(1 <= c <= 200 for *_, c in steps)
        assert str(steps[-1][-1]) == problem.answer
        assert problem.level == f"{len(steps)} steps"


def test_a_distractor_is_one_number_that_the_solution_does_not_have(problems):
    for problem in problems:
        in_question = re.findall(r"\b\d+\b(?!%)", problem.question)
        assert len(in_question) == len(set(in_question)), problem.question
        in_solution = set(re.findall(r"\d+", problem.solution))
        unused = [number for number in in_question if number not in in_solution]
        assert len(unused) == problem.columns["distractor"], (problem.question, problem.solution)


def test_no_template_syntax_is_left(problems):
    for problem in problems:
        for text in (problem.question, problem.solution):
            assert not re.search(r"[{}\[\]|_]|  |\s[.,?:;]|\bNone\b", text), text


def singular_nouns():
    """Every noun that a number may stand before."""
    nouns = {noun for choices in tables().words.values() for noun in choices}
    for story in STORIES.values():
        for choices in story.words.values():
            if not isinstance(choices, str):
                nouns.update(choices)
        texts = (*story.texts, *(distractor.text for distractor in story.distractors))
        nouns.update(re.findall(r"\{[a-en]:([a-z ]+)\}", " ".join(texts)))
        nouns.update(step.unit for step in story.steps)
        nouns -= story.words.keys()
    # Not a noun, and one whose plural is the same.
    return nouns - {"", "sheep", "percent", "fraction", "times"}


def test_the_english_is_plain(problems):
    nouns = "|".join(sorted(singular_nouns(), key=len, reverse=True))
    singular = re.compile(rf"({nouns})\b")
    wrong = re.compile(
        r"\b(\w+) \1\b"  # a word twice
        r"|\ba (?=[aeio]|un(?!i)|hour|8|11|18)|\ban (?![aeiou]|hour|8|11|18)"
        r"|\b(he|she|his|her|him|hers)\b",
        re.IGNORECASE,
    )
    for problem in problems:
        for text in (problem.question, problem.solution):
            assert not wrong.search(text), text
            assert not re.search(r"[.?] [a-z]", text), text
            for number, noun in re.findall(r"\b(\d+) ([a-z][a-z ]+)", text):
                match = singular.match(noun)
                is_singular = match is not None and not noun[match.end() :].startswith(" of ")
                if number != "1":
                    assert not is_singular, text
            assert not re.search(r"=1 \w+s\b", problem.solution), problem.solution
            assert not re.search(r"(?<![\d=])1 \w", problem.question), problem.question
        assert re.fullmatch(r"[A-Z\d].*\?", problem.question), problem.question
        assert 10 <= len(problem.question.split()) <= 60
        assert len(problem.solution.split()) <= 25


def test_most_problems_are_small_enough_for_a_small_model():
    problems = made(count=1000)
    levels = Counter(problem.level for problem in problems)
    assert 0.55 < levels["2 steps"] / 1000 < 0.65
    assert 0.06 < levels["4 steps"] / 1000 < 0.14
    given = sorted(int(n) for p in problems for n in re.findall(r"\d+", p.question))
    assert given[int(0.8 * len(given))] <= 35
    assert sorted(int(problem.answer) for problem in problems)[500] <= 60
    distractors = sum(problem.columns["distractor"] for problem in problems)
    assert 0.21 < distractors / 1000 < 0.29


# --- splits --------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    split=st.sampled_from(SPLITS),
    seed=st.integers(0, 2**63 - 1),
    count=st.integers(1, 60),
    steps=st.lists(st.sampled_from([2, 3, 4]), min_size=1),
    distractors=st.floats(0, 1),
)
def test_problems_are_a_function_of_the_arguments_and_a_longer_set_continues(
    split, seed, count, steps, distractors
):
    options = {"steps": tuple(steps), "distractors": distractors}
    shorter = made(split, seed, count=count, **options)
    assert shorter == made(split, seed, count=count + 20, **options)[:count]
    assert shorter == generate(
        StoriesOptions(count=count, seed=seed, **options), split=split, seed=seed ^ 1
    )
    assert len({problem.id for problem in shorter}) == count
    assert len({problem.question for problem in shorter}) == count
    for problem in shorter:
        assert split_of(problem.question) == split
        assert problem.columns["steps"] in steps
        assert split in HELD_OUT_SPLITS or problem.columns["seen"]


def test_another_seed_gives_other_problems():
    assert made(count=20) != made(count=20, seed=1)


def test_no_question_is_in_two_splits_whatever_the_seed():
    questions = {
        split: {p.question for seed in (0, 1) for p in made(split, seed, count=250)}
        for split in SPLITS
    }
    for split, texts in questions.items():
        for other in set(SPLITS) - {split}:
            assert not texts & questions[other]


@pytest.mark.parametrize("split", SPLITS)
def test_training_never_sees_a_held_out_story(split):
    problems = made(split, count=2000, steps=(2, 3, 4))
    stories = {problem.columns["template"] for problem in problems}
    if split in HELD_OUT_SPLITS:
        assert stories == set(STORIES)
        new = [problem for problem in problems if problem.subject == "new story"]
        assert 0.44 < len(new) / len(problems) < 0.56
        assert {problem.level for problem in new} == {"2 steps", "3 steps", "4 steps"}
    else:
        assert stories == set(STORIES) - HELD_OUT
    for problem in problems:
        assert problem.columns["seen"] == (problem.columns["template"] not in HELD_OUT)
        assert problem.subject == ("seen story" if problem.columns["seen"] else "new story")


@pytest.mark.slow
def test_there_are_thousands_of_different_questions():
    """Apart from names: 5,000 problems hardly repeat a story with the same things and numbers."""
    names = re.compile(rf"\b({'|'.join(tables().names)})\b")
    problems = made("sft", count=5000)
    assert len({names.sub("Ada", problem.question) for problem in problems}) > 4500


def test_problems_of_one_story_share_sentences_but_not_questions():
    assert find_overlap(made("train", count=300), made("test", count=300)) == ()


def test_the_problems_of_the_documentation_are_generated():
    """A changed story is another data set: change these only on purpose."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    examples = re.findall(r"^stories/(\w+)/(\d+), (.+)\n(.+)\n(.+)$", page, re.MULTILINE)
    assert len(examples) == 2
    for split, index, kind, question, solution in examples:
        problem = made(split, count=int(index) + 1)[-1]
        assert (kind, question, solution) == (
            f"{problem.subject}, {problem.level}",
            problem.question,
            problem.solution,
        )
    held_out = len(HELD_OUT)
    counts = (
        rf"use {len(STORIES) - held_out} of the {len(STORIES)} stories;.* the other {held_out},"
    )
    assert re.search(counts, page)


# --- options -------------------------------------------------------------------------------------


def test_options_bound_the_numbers():
    for problem in made(count=200, high=20, max_value=40, distractors=1.0):
        assert all(int(n) <= 20 for n in re.findall(r"\b\d+\b(?!%)", problem.question))
        assert all(c <= 40 for *_, c in equations(problem.solution))
        assert problem.columns["distractor"]
    assert not any(problem.columns["distractor"] for problem in made(count=200, distractors=0.0))


def signs(story):
    """The signs in the steps of a story."""
    return {parse_equation(step.equation)[2] for step in story.steps}


@pytest.mark.parametrize("operations", ["+-", "-+", "+-*", "*/+-"])
def test_operations_leave_only_stories_of_these_signs(operations):
    problems = made("test", count=1000, steps=(2, 3), operations=operations)
    assert {problem.columns["template"] for problem in problems} == {
        name
        for name, story in STORIES.items()
        if len(story.steps) < 4 and signs(story) <= set(operations)
    }


def test_all_operations_are_the_default():
    assert made(count=50) == made(count=50, operations="/*-+")


ADDITION = {
    "operations": "+-",
    "high": 20,
    "max_value": 30,
    "steps": (2, 2, 2, 3),
    "distractors": 0.1,
}


@pytest.mark.parametrize(("split", "count"), [("train", 2000), ("sft", 600), ("test", 300)])
def test_addition_with_small_numbers_gives_enough_problems(split, count):
    problems = made(split, count=count, **ADDITION)
    assert len({problem.question for problem in problems}) == count
    for problem in problems:
        assert {sign for _, sign, _, _ in equations(problem.solution)} <= set("+-")
        assert all(int(n) <= 20 for n in re.findall(r"\b\d+\b", problem.question))
        assert int(problem.answer) <= 30
    stories = {problem.columns["template"] for problem in problems}
    held_out = stories & HELD_OUT
    assert len(stories - held_out) >= 20
    if split == "test":
        assert len(held_out) >= 9
        new = sum(problem.subject == "new story" for problem in problems)
        assert 0.4 < new / count < 0.6  # binomial(300, 1/2): standard deviation 3 %
    else:
        assert not held_out


def test_operations_that_no_story_of_these_steps_keeps_to_are_an_error():
    with pytest.raises(DataError, match=r"no story of 4 steps .*options\.operations"):
        made(steps=(2, 4), operations="+-")


def test_steps_that_are_named_more_often_occur_more_often():
    levels = Counter(problem.columns["steps"] for problem in made(count=800, steps=(2, 4, 4, 4)))
    assert set(levels) == {2, 4}
    assert 540 < levels[4] < 660  # binomial(800, 3/4): mean 600, standard deviation 12


def test_limits_that_no_story_can_keep_are_an_error():
    with pytest.raises(DataError, match="no story of 4 steps has numbers that small"):
        made(steps=(4,), max_value=3)


def test_a_space_that_is_too_small_is_an_error_that_says_how_many_there_are(monkeypatch):
    monkeypatch.setattr(generation, "PATIENCE", 8)
    with pytest.raises(DataError, match=r"only \d+ different questions"):
        made(count=10**6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuont": 3}, r"options\.cuont.*Did you mean count=3"),
        ({"count": "3"}, r"options\.count.*whole number"),
        ({"steps": [5]}, "no story of 5 steps, only of 2, 3, 4"),
        ({"steps": []}, "steps is empty"),
        ({"operations": ""}, "operations is empty"),
        ({"operations": "+-%"}, r"there is no operation '%', only \+, -, \*, /"),
        ({"operations": ["+"]}, r"options\.operations"),
        ({"distractors": 1.5}, r"options\.distractors"),
        ({"high": 0}, r"options\.high"),
    ],
)
def test_options_are_strict(options, message):
    with pytest.raises(ConfigError, match=message):
        stories_options(options, where="data.train")


def test_an_unknown_split_is_an_error():
    with pytest.raises(ConfigError, match="Did you mean 'test'"):
        made(split="tset")


def test_nouns_get_their_plurals():
    nouns = ("pen", "red box", "bag of flour", "cherry", "loaf", "toy", "child", "sheep", "bus")
    assert [plural(noun) for noun in nouns] == [
        "pens",
        "red boxes",
        "bags of flour",
        "cherries",
        "loaves",
        "toys",
        "children",
        "sheep",
        "buses",
    ]
