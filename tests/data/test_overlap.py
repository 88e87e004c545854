"""Leaks between training and test problems are found, and no others (P15)."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from grouper.data import find_overlap
from grouper.data.arithmetic import ArithmeticOptions, generate
from grouper.types import Problem

STORY = "one two three four five six seven eight nine ten eleven twelve thirteen"


def problems(prefix, *questions, source="a"):
    return [
        Problem(id=f"{prefix}/{i}", question=q, answer="1", source=source)
        for i, q in enumerate(questions)
    ]


def test_the_same_question_in_other_clothes():
    (found,) = find_overlap(
        problems("train", "x", "What  is 2\N{MINUS SIGN}2 ?"),
        problems("test", "what is 2 - 2", "what is 2+2?"),
    )
    assert (found.held_out_id, found.trained_id, found.same_question) == (
        "test/0",
        "train/1",
        True,
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("8-4-2?", "8-(4-2)?"),
        ("What is 5!?", "What is 5?"),
        ("20%?", "20?"),
        ("8 \N{MULTIPLICATION SIGN} 3?", "8 \N{DIVISION SIGN} 3?"),
        ("8 \N{MULTIPLICATION SIGN} 3?", "8 \N{MINUS SIGN} 3?"),
        ("x \N{LESS-THAN OR EQUAL TO} 3", "x \N{GREATER-THAN OR EQUAL TO} 3"),
        ("|-5|?", "-5?"),
        ("f'(2)?", "f''(2)?"),
        (".5 + 1?", "5 + 1?"),
    ],
)
def test_brackets_and_signs_of_numbers_make_another_question(one, other):
    assert find_overlap(problems("train", one), problems("test", other)) == ()
    assert find_overlap(problems("train", one), problems("test", f" {one}\n"))


def test_thirteen_words_in_a_row_and_not_twelve():
    trained = problems("train", f"Before it: {STORY}, and on it goes.")
    (found,) = find_overlap(trained, problems("test", f"{STORY} differently"))
    assert not found.same_question
    twelve = STORY.rsplit(" ", 1)[0]
    assert find_overlap(trained, problems("test", f"{twelve} differently")) == ()


def test_generated_problems_share_sentences_but_not_questions():
    train, test = (
        generate(ArithmeticOptions(count=1000), split=split, seed=0) for split in ("train", "test")
    )
    assert find_overlap(train, test) == ()
    assert len(find_overlap(train, train)) == 1000
    # A file of that name may hold anything.
    own = problems("own", f"{STORY} differently", source="arithmetic")
    assert find_overlap(own, problems("test", STORY))


def test_a_large_training_set_is_not_held_in_memory_once_more():
    """All runs of words of 200,000 training problems took 1.3 GB."""
    long = " ".join(f"w{i}" for i in range(200))

    def peak(count):
        trained = (problem for i in range(count) for problem in problems(i, f"{i} {long} {i}"))
        tracemalloc.start()
        try:
            (found,) = find_overlap(trained, problems("test", STORY, f"{long} 7"))
            return found.trained_id, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)  # what is made once
    (first, few), (same, many) = peak(10), peak(300)
    assert first == same == "0/0", "the first that shares a run"
    assert many < 3 * few


def test_real_sets(shared_data):
    def read(name, column):
        lines = (shared_data / name).read_text().split("\n")
        return problems(name, *(json.loads(line)[column] for line in lines if line))

    train, test = read("math/train.jsonl", "problem"), read("math/validation.jsonl", "problem")
    by_id = {p.id: p.question for p in train + test}
    same = [overlap for overlap in find_overlap(train, test) if overlap.same_question]
    # MATH's own split holds four questions twice, spaced or punctuated differently.
    assert len(same) == 4
    assert all(by_id[o.held_out_id] != by_id[o.trained_id] for o in same)
    assert len(find_overlap(train, train[:50])) == 50


def test_without_held_out_problems_nothing_is_read():
    """As in the audit of a single set, where it would take half a minute."""
    assert find_overlap([None], []) == ()
