"""Conversations are read whole, in each of the layouts that they come in, or refused by the row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prompts import tokenizer_fixtures as fixtures

from grouper.config.schema import PromptConfig, SourceConfig
from grouper.data import load_problems
from grouper.data.conversations import with_question
from grouper.data.problems import ProblemSet, write_problems
from grouper.errors import DataError, PromptError
from grouper.prompts import make_format
from grouper.prompts.rendering import demonstrate, render

SYSTEM = {"role": "system", "content": "You are a careful teacher."}
FIRST = {"role": "user", "content": "What is 1+1?"}
SAID = {"role": "assistant", "content": "It is 2."}
ASKED = {"role": "user", "content": "And 2+2?"}
ANSWERED = {"role": "assistant", "content": r"Adding gives \boxed{4}."}
EARLIER = (SYSTEM, FIRST, SAID)
TURNS = [*EARLIER, ASKED, ANSWERED]


def sharegpt(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]


LAYOUTS: dict[str, dict[str, Any]] = {
    "messages": {"messages": TURNS},
    "trl prompt and completion": {"prompt": TURNS[:-1], "completion": TURNS[-1:]},
    "trl prompt and text": {"prompt": TURNS[:-1], "completion": ANSWERED["content"]},
    "sharegpt": {"conversations": sharegpt(TURNS)},
    "parts": {
        "messages": [
            turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS
        ]
    },
    "alpaca": {
        "instruction": "And 2+2?",
        "input": "",
        "output": ANSWERED["content"],
        "system": SYSTEM["content"],
        "history": [[FIRST["content"], SAID["content"]]],
    },
}


def load(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> ProblemSet:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_problems(SourceConfig(**{"source": "file", "path": str(path), **settings}), seed=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversation_is_read_whole(layout: str, tmp_path: Path) -> None:
    """M13: system message and earlier turns were dropped in silence."""
    (problem,) = load(tmp_path, [LAYOUTS[layout]]).problems
    assert problem.question == ASKED["content"]
    assert problem.earlier == EARLIER
    assert problem.solution == ANSWERED["content"]
    assert problem.answer == "4"


def test_a_turn_that_a_recipe_names_brings_what_comes_before(tmp_path: Path) -> None:
    columns = {"question": "messages.-2.content", "solution": "messages.-1.content"}
    (problem,) = load(tmp_path, [{"messages": TURNS}], columns=columns).problems
    assert (problem.question, problem.earlier) == (ASKED["content"], EARLIER)
    (first,) = load(
        tmp_path,
        [{"messages": TURNS, "answer": "2"}],
        columns={"question": "messages.1.content"},
    ).problems
    assert (first.question, first.earlier) == (FIRST["content"], (SYSTEM,))


def test_instruction_and_input_are_one_question(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "2+2", "output": r"\boxed{4}"}
    (problem,) = load(tmp_path, [row]).problems
    assert (problem.question, problem.earlier) == ("Add.\n\n2+2", ())


def test_a_question_of_its_own_wins_over_the_conversation(tmp_path: Path) -> None:
    """NuminaMath-TIR has both."""
    row = {"problem": "q", "solution": r"so \boxed{34}", "messages": TURNS}
    (problem,) = load(tmp_path, [row]).problems
    assert (problem.question, problem.answer, problem.earlier) == ("q", "34", ())


def test_prompts_of_rl_need_no_answer_of_the_assistant(tmp_path: Path) -> None:
    (problem,) = load(tmp_path, [{"prompt": [SYSTEM, ASKED], "answer": "4"}]).problems
    assert (problem.question, problem.earlier) == (ASKED["content"], (SYSTEM,))
    assert problem.solution is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [ASKED, {"role": "tool", "content": "4"}]}, "a turn of 'tool'"),
    ({"messages": [SAID, SAID]}, "whose last question is not from a user"),
    ({"messages": [ASKED, SYSTEM, ASKED, ANSWERED]}, "after the first turn"),
    ({"messages": [{"role": "user", "content": None}, ANSWERED]}, "a turn without text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWERED]},
        "other than text",
    ),
    ({"instruction": "q", "output": "4", "history": ["x"]}, "other than pairs"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_what_cannot_be_rendered_is_set_aside(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    loaded = load(tmp_path, [{"messages": TURNS, "instruction": "q", "output": "4"}, row])
    assert len(loaded.problems) == 1
    (set_aside,) = loaded.quarantined
    assert set_aside.row == 1
    assert reason in set_aside.reason
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        with_question(row)


def test_whole_prompts_are_not_read_out_of_conversations(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Set `source: file`"):
        load(tmp_path, [{"prompt": [ASKED], "completion": [ANSWERED]}], source="prompt-response")


def test_what_was_prepared_reads_back_the_same(tmp_path: Path) -> None:
    first = load(tmp_path, [LAYOUTS["sharegpt"]])
    settings = write_problems(tmp_path / "ready", {"train": first})
    (again,) = load_problems(SourceConfig(**settings["train"]), seed=0).problems
    (problem,) = first.problems
    assert again == replace(problem, id=again.id, source=again.source, columns=again.columns)
    other = load(tmp_path, [{"messages": [ASKED, ANSWERED]}])
    assert first.fingerprint != other.fingerprint


def test_all_turns_are_in_the_prompt(tmp_path: Path) -> None:
    (problem,) = load(tmp_path, [{"messages": TURNS}]).problems
    tokenizer = fixtures.qwen25().tokenizer
    fmt = make_format(PromptConfig(format="boxed", system=""))
    expected = tokenizer.apply_chat_template(TURNS[:-1], tokenize=False, add_generation_prompt=True)
    prompt = render(problem, fmt, tokenizer)
    assert prompt.text == expected
    assert prompt.messages == (*EARLIER, ASKED)
    shown = demonstrate(problem, fmt, tokenizer, 0)
    assert tokenizer.decode(shown.token_ids[:-1]) == ANSWERED["content"]
    # The instruction of the format says how to answer, the data's own what the assistant is.
    instructed = render(problem, make_format(PromptConfig(format="boxed")), tokenizer)
    assert instructed.messages is not None
    system = instructed.messages[0]["content"]
    assert system.startswith(SYSTEM["content"] + "\n\n")
    assert r"\boxed{}" in system


def test_plain_text_has_no_place_for_turns(tmp_path: Path) -> None:
    (problem,) = load(tmp_path, [{"messages": TURNS}]).problems
    tokenizer = fixtures.no_template().tokenizer
    fmt = make_format(PromptConfig(format="boxed"))
    with pytest.raises(PromptError, match=r"turns come before the question.*install"):
        render(problem, fmt, tokenizer)
    (single,) = load(tmp_path, [{"messages": [SYSTEM, ASKED, ANSWERED]}]).problems
    text = render(single, fmt, tokenizer).text
    assert text.startswith(SYSTEM["content"])


def test_an_answer_in_the_formats_tags_is_taken_as_it_is(tmp_path: Path) -> None:
    """Data of SFT for TRL hold the tags already; they were refused as held twice."""
    said = "<reasoning>\n2+2\n</reasoning>\n<answer>\n4\n</answer>"
    turns = [ASKED, {"role": "assistant", "content": said}]
    (problem,) = load(tmp_path, [{"messages": turns}]).problems
    assert problem.answer == "4"
    tokenizer = fixtures.qwen25().tokenizer
    shown = demonstrate(problem, make_format(PromptConfig(format="xml")), tokenizer, 0)
    assert tokenizer.decode(shown.token_ids[:-1]) == said
