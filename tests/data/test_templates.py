"""Whole prompt texts -> questions, and responses as sampling would have written them."""

from __future__ import annotations

import pytest

from grouper.data.templates import read_prompt, read_response
from grouper.prompts import FORMATS

R1 = FORMATS["r1-zero"]
TEXT = R1.plain_prompt("What is\n2 + 2?")


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.replace("\nUser:", "\n\nUser:"),
        TEXT.replace("\nUser: ", "\n\n\nUser:  "),
        TEXT.replace("\nAssistant:", "\n\nAssistant:"),
        f"\n{TEXT}\n",
        TEXT.replace("\n", "\r\n").replace("is\r\n2", "is\n2"),
    ],
)
def test_white_space_of_the_template_does_not_matter(text):
    question, fmt, opened = read_prompt(text)
    assert question == "What is\n2 + 2?"
    assert (fmt.name, opened) == ("r1-zero", True)
    # Rendered again it is the prompt that rollouts start from, whatever the file had.
    assert R1.plain_prompt(question) == TEXT


def test_a_prompt_that_does_not_open_the_first_tag():
    assert read_prompt(TEXT.removesuffix("<think>")) == ("What is\n2 + 2?", R1, False)


def test_a_question_that_talks_like_the_template():
    question = "User: says\nAssistant: what?"
    assert read_prompt(R1.plain_prompt(question))[0] == question


@pytest.mark.parametrize("text", ["", "2+2?", TEXT.replace("Assistant solves", "Assistant tries")])
def test_other_texts_are_of_no_known_template(text):
    assert read_prompt(text) is None


def test_a_template_without_a_question():
    assert read_prompt(R1.plain_prompt(" ")) == ("", R1, True)


@pytest.mark.parametrize(
    ("response", "trained"),
    [
        (" a </think> <answer> 2 </answer>", " a </think> <answer> 2 </answer>"),
        (" a </think> <answer> 2 </answer>\n\n", " a </think> <answer> 2 </answer>"),
        # sampling stops at the first closing tag
        ("a</think> <answer>2</answer> or <answer>3</answer>", "a</think> <answer>2</answer>"),
        # published without the stop string
        (" a </think> <answer> 2", " a </think> <answer> 2 </answer>"),
        # the prompt opens it already
        ("<think> a </think> <answer> 2 </answer>", " a </think> <answer> 2 </answer>"),
        # no answer at all: as it is, and graded as such
        (" I give up", " I give up"),
    ],
)
def test_the_ends_of_a_response(response, trained):
    assert read_response(response, R1, opened=True) == trained


def test_responses_that_cannot_be_trained():
    with pytest.raises(ValueError, match="empty"):
        read_response(" \n", R1, opened=True)
    with pytest.raises(ValueError, match="neither the prompt nor the response opens <think>"):
        read_response("a </think> <answer> 2 </answer>", R1, opened=False)
