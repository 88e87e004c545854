"""`grouper generate`: one question, a file, a conversation; asked as in training."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from grouper.api import Generator
from grouper.cli import generate
from grouper.grading import extract
from grouper.prompts import FORMATS
from grouper.runs.folder import RunFolder

QUESTION = "Tom has 3 pens and buys 4. How many pens does Tom have?"


@pytest.fixture
def model(finished_run):
    return finished_run / "grpo" / "final"


@pytest.mark.slow
def test_a_model_in_a_run_folder_knows_how_it_is_asked(grouper, model, finished_run):
    called = grouper("generate", model, "--question", QUESTION)
    assert called.code == 0, called.err
    assert "Answer: " in called.out or "No answer: " in called.out
    # The same with the recipe named, and the same again.
    named = grouper("generate", model, "--recipe", finished_run, "-Q", QUESTION)
    assert named.out == called.out


def test_the_answer_is_what_the_evaluation_of_the_run_recorded(grouper, model, finished_run):
    """One renderer, one sampler, one extraction: greedy answers agree with the recorded items."""
    result = RunFolder(finished_run).read_evaluation("grpo")
    assert result is not None
    item = result.items[0]
    question = item.prompt.removeprefix("<|user|>").removesuffix("<|assistant|>")
    called = grouper("generate", model, "--question", question)
    assert called.out.startswith(item.completion)


@pytest.mark.slow
def test_a_file_keeps_every_row_and_column_in_order(grouper, model, tmp_path):
    rows = [
        {"question": QUESTION, "id": 7, "nested": {"a": [1, None]}},
        {"problem": "What is 2 + 2?", "id": 8},
        {"prompt": "word " * 40_000, "id": 9},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    called = grouper("generate", model, "--input", source, "--output", target)
    assert called.code == 0, called.err
    assert "1 questions are too long" in called.err
    answered = [json.loads(line) for line in target.read_text().splitlines()]
    for row, after in zip(rows, answered, strict=True):
        assert {name: after[name] for name in row} == row
    for after in answered[:2]:
        assert after["extracted"] == extract(after["response"], FORMATS["compact"].contract).answer
        assert after["finish_reason"] in ("stop_token", "length")
    assert answered[2]["response"] is None
    # The answer does not depend on the neighbors.
    alone = grouper("generate", model, "--question", QUESTION)
    assert alone.out.startswith(answered[0]["response"])
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_samples_are_rows_of_their_own_and_follow_the_seed(grouper, model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"question": QUESTION}) + "\n")
    options = ["--input", source, "--samples", "3", "--temperature", "1", "--max-new-tokens", "9"]
    first = grouper("generate", model, *options, "--seed", "1", "--quiet")
    rows = [json.loads(line) for line in first.out.splitlines()]
    assert [row["sample"] for row in rows] == [0, 1, 2]
    assert len({row["response"] for row in rows}) > 1
    assert grouper("generate", model, *options, "--seed", "1", "--quiet").out == first.out
    assert grouper("generate", model, *options, "--seed", "2", "--quiet").out != first.out
    called = grouper("generate", model, "--question", QUESTION, "--samples", "2")
    called.refused("evaluation.samples", "temperature above 0")


@pytest.fixture
def answers(monkeypatch):
    """A number of answers after which Ctrl-C is pressed, if any, and those that were made."""
    made = SimpleNamespace(count=0, most=None)
    honest = Generator._solution

    def counted(self, *given):
        if made.count == made.most:
            raise KeyboardInterrupt
        made.count += 1
        return honest(self, *given)

    monkeypatch.setattr(Generator, "_solution", counted)
    return made


@pytest.mark.slow
def test_what_was_answered_before_an_interruption_is_kept(grouper, model, tmp_path, answers):
    """An hour of answers was written only at the end, and lost with Ctrl-C."""
    source, target, whole = (tmp_path / f"{name}.jsonl" for name in ("in", "out", "whole"))
    questions = [f"What is {n} + 2?" for n in range(5)]
    questions[3] = "word " * 40_000
    source.write_text("".join(json.dumps({"question": text}) + "\n" for text in questions))
    how = ["--input", source, "--samples", "2", "--temperature", "1", "--max-new-tokens", "9"]
    assert grouper("generate", model, *how, "--output", whole).code == 0
    answers.count, answers.most = 0, 5  # in the middle of the third question
    called = grouper("generate", model, *how, "--output", target)
    assert called.code == 130
    assert "Stopped. With --output, finished answers are kept" in called.err
    assert not target.exists()
    (kept,) = tmp_path.glob(".out.jsonl.*.part")
    kept.open("a").write('{"row":2,"answers":[{"ques')  # cut off by a kill
    answers.count, answers.most = 0, 1
    (tmp_path / "other.jsonl").write_text('{"question": "2+2?"}\n{"question": "2+3?"}\n')
    for other in (["--seed", "7"], ["--input", tmp_path / "other.jsonl"]):
        called = grouper("generate", model, *how, *other, "--output", target)
        assert called.code == 130, "what was answered with other settings is none of its"
        assert kept.exists()
        answers.count = 0
    answers.count, answers.most = 0, None
    called = grouper("generate", model, *how, "--output", target)
    assert called.code == 0, called.err
    assert "Answered before: 2 of 5 rows." in called.err
    assert answers.count == 4
    assert target.read_bytes() == whole.read_bytes()
    assert not kept.exists()


@pytest.mark.slow
def test_rows_are_printed_as_they_come(grouper, model, tmp_path, answers):
    source = tmp_path / "in.jsonl"
    source.write_text('{"question": "1+1?"}\n{"question": "1+2?"}\n{"question": "1+3?"}\n')
    answers.most = 2
    called = grouper("generate", model, "--input", source, "--max-new-tokens", "9")
    assert called.code == 130
    asked = [json.loads(line)["question"] for line in called.out.splitlines()]
    assert asked == ["1+1?", "1+2?"]


@pytest.mark.slow
def test_piped_questions_are_a_conversation_that_ends_with_the_input(grouper, model):
    called = grouper("generate", model, stdin="What is 3 + 4?\n\n  \nWhat is 2 + 2?")
    assert called.code == 0, called.err
    assert called.out.count("nswer: ") == 2
    long = "word " * 40_000
    called = grouper("generate", model, stdin=f"{long}\nWhat is 2 + 2?\n")
    assert called.code == 0
    assert "leaves room for" in called.err
    assert called.out.count("nswer: ") == 1
    called = grouper("generate", model, stdin="")
    assert called.code == 0
    assert "No question on standard input" in called.err


@pytest.mark.slow
def test_an_interactive_prompt_ends_with_ctrl_d_and_with_ctrl_c(grouper, model, monkeypatch):
    answers = iter(["What is 3 + 4?", EOFError])

    def typed(prompt: str) -> str:
        value = next(answers)
        if isinstance(value, str):
            return value
        raise value

    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(generate, "sys", terminal)
    monkeypatch.setattr("builtins.input", typed)
    called = grouper("generate", model)
    assert called.code == 0, called.err
    assert called.out.count("nswer: ") == 1
    answers = iter([KeyboardInterrupt])
    called = grouper("generate", model)
    assert called.code == 130
    assert "Traceback" not in called.err


def test_a_model_of_elsewhere_needs_a_recipe_or_a_format(grouper, model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    called = grouper("generate", other, "--question", QUESTION)
    called.refused(str(other), "--recipe", "--format", "boxed")
    called = grouper("generate", other, "--format", "bxed", "--question", QUESTION)
    called.refused("--format", "Did you mean 'boxed'?")
    called = grouper(
        "generate", other, "--format", "tags", "--question", QUESTION, "--max-new-tokens", "4"
    )
    assert called.code == 0, called.err
    assert called.out.startswith("<start_working_out>")
    assert "truncated after 4 tokens" in called.out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "there are no rows"),
        ("{\n", "line 1"),
        ('{"question": "2+2?"}\n{"text": "x"}\n', "1 of 2 rows hold no question (row 2)"),
        ('{"question": "2+2?", "response": "4"}\n', "already have a column 'response'"),
    ],
)
def test_an_input_file_that_cannot_be_answered(grouper, model, tmp_path, text, told):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    called = grouper("generate", model, "--input", source, "--output", target)
    called.refused(str(source), told)
    assert not target.exists()


def test_output_files_are_never_overwritten_and_checked_first(grouper, model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"question": QUESTION}) + "\n")
    target.write_text("precious")
    called = grouper("generate", model, "--input", source, "--output", target)
    called.refused("--output", "exists already")
    assert target.read_text() == "precious"
    for missing in (tmp_path / "none.jsonl", tmp_path):
        called = grouper("generate", model, "--input", missing)
        assert (called.code, str(missing) in called.err) == (2, True)


@pytest.mark.parametrize(
    "options", [["-Q", "2+2?", "--input", "x"], ["--output", "x"], ["--question", " "]]
)
def test_options_that_contradict_each_other(grouper, model, options):
    called = grouper("generate", model, *options)
    assert called.code == 2
    assert "Traceback" not in called.err


def test_what_a_model_wrote_cannot_steer_the_terminal(grouper, model, monkeypatch):
    """R7: control characters went to the terminal as they were."""
    honest = Generator._solution

    def hostile(self, *given):
        return replace(
            honest(self, *given), response="\x1b]0;x\x07a\nb", answer="\x1b[2J", reason=""
        )

    monkeypatch.setattr(Generator, "_solution", hostile)
    called = grouper("generate", model, "--question", QUESTION)
    assert "\\x1b]0;x\\x07a\nb\nAnswer: \\x1b[2J\n" in called.out
    assert "\x1b" not in called.out
