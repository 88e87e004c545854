"""Every source in the layout of its set; what people call one; whole prompts and responses."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from grouper.config.schema import SourceConfig
from grouper.data import ProblemSet, load_problems
from grouper.data.problems import write_problems
from grouper.data.sources import read_fields, read_prompt, read_response
from grouper.errors import DataError
from grouper.prompts import FORMATS
from grouper.prompts.rendering import completion_text

LAYOUTS = Path(__file__).parent / "layouts"


def load(source: str, path: Path | str, **config: object) -> ProblemSet:
    return load_problems(SourceConfig(source=source, path=str(path), **config), seed=0)


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("source", "split", "name", "count", "first", "solution"),
    [
        ("numina-tir", None, "numina-tir/train", 12, "377", "There are 9 times 46"),
        ("numina-tir", "test", "numina-tir/test", 2, "19", "The six add up"),
        ("dapo-math", None, "dapo-math/train", 12, "377", None),
        ("openmath-mini", None, "openmath-mini/cot", 14, "377", "Let me see. There are"),
    ],
)
def test_sets_in_their_layout_on_the_hub(source, split, name, count, first, solution):
    found = load(source, LAYOUTS / source, split=split)
    assert (found.name, len(found), found.quarantined) == (name, count, ())
    problem = found.problems[0]
    assert problem.answer == first
    assert problem.source == source
    assert (problem.solution or "").startswith(solution or "")
    assert (problem.solution is None) == (solution is None)
    # All columns, nested ones too, go to reward functions as they are.
    assert dict(problem.columns) == json.loads(
        next((LAYOUTS / source).rglob(f"{found.name.split('/')[1]}.jsonl"))
        .read_text()
        .splitlines()[0]
    )


def test_decimals_are_numbers_with_all_their_digits_and_no_more():
    texts = ("12.5000", "3.0000", "0.0000001", "-1200", "12345678901234567890123456789.25")
    columns = {"answer": ("answer",)}
    answers = [read_fields({"answer": Decimal(text)}, columns)["answer"] for text in texts]
    assert answers == ["12.5", "3", "0.0000001", "-1200", "12345678901234567890123456789.25"]


def test_rows_of_verl_are_read_as_they_are(tmp_path):
    asked = "What is 2+2? Let's think step by step."
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": asked}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    rows = [row | {"extra_info": {"index": 0, "question": "What is 2+2?"}}, row]
    found = load("file", written(tmp_path / "train.jsonl", rows)).problems
    assert [(p.question, p.answer) for p in found] == [("What is 2+2?", "4"), (asked, "4")]
    instructed = [{"role": "system", "content": "Be brief."}, *row["prompt"]]
    (problem,) = load(
        "file", written(tmp_path / "other.jsonl", [row | {"prompt": instructed}])
    ).problems
    assert (problem.question, problem.earlier) == (asked, tuple(instructed[:1]))
    answered = [*instructed, {"role": "assistant", "content": "4"}]
    path = written(tmp_path / "m.jsonl", [{"messages": answered, "answer": "4"}])
    with pytest.raises(DataError, match=r"`messages\.-2\.content` asks"):
        load("file", path, columns={"question": "messages"})


def test_any_file_reader_knows_these_layouts_too():
    for source in ("numina-tir", "dapo-math/en", "openmath-mini"):
        file = next((LAYOUTS / source).glob("[tc]*.jsonl"))
        found = load("file", file)
        assert not found.quarantined
        known = load(source.split("/")[0], file)
        assert [p.answer for p in found.problems] == [p.answer for p in known.problems]
        assert [p.question for p in found.problems] == [p.question for p in known.problems]


def test_thinking_tags_go_and_thoughts_stay():
    for problem in load("openmath-mini", LAYOUTS / "openmath-mini").problems:
        assert "think>" not in problem.solution
        assert problem.solution.startswith("Let me see.")
        assert problem.solution.endswith(".")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "solution": "34"},
        {"question": "q", "answer": "34"},
        {"problem": "q", "reward_model": {"ground_truth": "34"}},
        # the first that is not empty in a row counts
        {"prompt": "q", "solution": "", "reward_model": {"ground_truth": "34"}},
    ],
)
@pytest.mark.parametrize("source", ["dapo-math", "file"])
def test_the_answer_of_dapo_has_several_names(tmp_path, source, row):
    (problem,) = load(source, written(tmp_path / "a.jsonl", [row])).problems
    assert (problem.question, problem.answer, problem.solution) == ("q", "34", None)


@pytest.mark.parametrize("names", [("body", "question", "answer"), ("Body", "Question", "Answer")])
def test_a_story_stands_before_its_question_in_any_file(tmp_path, names):
    rows = [dict(zip(names, (" Tom has 3 pens ", "How many with 2 more?", 5.0), strict=True))]
    (problem,) = load("file", written(tmp_path / "a.jsonl", rows)).problems
    assert (problem.question, problem.answer) == ("Tom has 3 pens. How many with 2 more?", "5")
    # Prepared rows have both the story and the whole question.
    write_problems(tmp_path / "ready", {"train": load("svamp", tmp_path / "a.jsonl")})
    (again,) = load("file", tmp_path / "ready" / "train.jsonl").problems
    assert again.question == problem.question
    # Without its question it asks for nothing.
    rows.append({**rows[0], names[1]: None})
    (row,) = load("file", written(tmp_path / "a.jsonl", rows)).quarantined
    assert row.reason == "the question is empty"


@pytest.mark.parametrize("column", ["response", "answer"])
@pytest.mark.parametrize(
    ("end", "answer"),
    [
        ("#### 1,234\nThe answer is: 1,234", "1,234"),
        (r"The answer is: $\frac{1}{2}$.", r"$\frac{1}{2}$"),
        ("The answer is: 2.5.\n", "2.5"),
        (r"The answer is: $\boxed{3}$.", "3"),
    ],
)
def test_an_answer_that_is_stated_at_the_end(tmp_path, column, end, answer):
    worked = "First we add all of them up, then we halve them.\n"
    rows = [{"problem": "q?", column: worked + end}]
    (problem,) = load("file", written(tmp_path / "a.jsonl", rows)).problems
    assert (problem.question, problem.answer.replace(",", "")) == ("q?", answer.replace(",", ""))
    assert problem.solution.startswith(worked.strip())
    assert "####" not in problem.solution


def test_a_conversation_is_demonstrated_word_for_word(tmp_path):
    said = r"<think>So.</think> It is \boxed{4}."
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": said}]
    columns = {"question": "messages.-2.content", "response": "messages.-1.content"}
    path = written(tmp_path / "a.jsonl", [{"messages": turns}])
    (problem,) = load("file", path, columns=columns).problems
    assert (problem.question, problem.response, problem.answer) == ("2+2?", said, "4")
    # Prepared, it is what it was.
    told = write_problems(tmp_path / "ready", {"train": load("file", path, columns=columns)})
    (again,) = load_problems(SourceConfig(**told["train"]), seed=0).problems
    assert again == replace(problem, id=again.id, source=again.source, columns=again.columns)


@pytest.mark.parametrize("mark", ["proof", "notfound"])
def test_a_mark_for_no_answer_is_none(tmp_path, mark):
    row = {"problem": "1+1?", "answer": "2", "subject": mark}  # there it is a word
    rows = [{"problem": "Show it.", "answer": mark}, row]
    found = load("file", written(tmp_path / "a.jsonl", rows))
    assert [(p.answer, p.subject) for p in found.problems] == [("2", mark)]
    assert [q.row for q in found.quarantined] == [0]


@pytest.mark.parametrize("question", ["question", "problem", "prompt"])
@pytest.mark.parametrize(
    ("source", "columns"),
    [
        ("gsm8k", {"answer": "so 3\n#### 3"}),
        ("gsm8k", {"solution": "so 3\n#### 3"}),
        ("math", {"solution": r"so \boxed{3}"}),
        ("numina-tir", {"solution": r"so \boxed{3}"}),
        ("numina-tir", {"solution": "so three", "answer": "3"}),
        ("openmath-mini", {"solution": "so 3", "answer": "3"}),
        ("svamp", {"answer": 3}),
    ],
)
def test_columns_under_their_other_names(tmp_path, source, columns, question):
    path = written(tmp_path / "train.jsonl", [{question: "q?", **columns}])
    (problem,) = load(source, path).problems
    assert (problem.question, problem.answer) == ("q?", "3")


R1 = FORMATS["r1-zero"]


def rows_of(*responses: str, **more: object) -> list[dict[str, object]]:
    return [{"prompt": R1.plain_prompt("1+1?"), "response": r, **more} for r in responses]


def test_a_response_is_kept_word_for_word(tmp_path):
    response = "\nFirst: 1+1.  So 2.</think>\n\n<answer>2</answer>"
    path = written(tmp_path / "sft.jsonl", rows_of(response, ground_truth="2"))
    (problem,) = load("prompt-response", path).problems
    assert (problem.question, problem.answer) == ("1+1?", "2")
    assert problem.response == response
    assert problem.solution == "First: 1+1.  So 2."
    assert completion_text(problem, R1) == response


def test_without_a_reference_the_response_answers(tmp_path):
    rows = rows_of(" so </think> <answer> 2 </answer>", " never ends")
    found = load("prompt-response", written(tmp_path / "sft.jsonl", rows))
    assert [p.answer for p in found.problems] == ["2"]
    (row,) = found.quarantined
    assert "no reference answer, and in the response" in row.reason
    with pytest.raises(DataError, match="needs a reference answer to grade"):
        load("prompt-response", tmp_path / "sft.jsonl", only_correct=True)


OWN_PROMPT = "### Task\nWhat is 1+1?\n\n### Solution\n"
OWN_RESPONSE = " One and one, so\n\nthe answer is \\boxed{2}.\n"


def test_a_prompt_of_no_known_template_is_taken_word_for_word(tmp_path):
    rows = [
        *rows_of(" a </think> <answer> 2 </answer>"),
        {"prompt": OWN_PROMPT, "response": OWN_RESPONSE},
        {"prompt": OWN_PROMPT, "response": "just 2", "ground_truth": "2"},
        {"prompt": OWN_PROMPT, "response": "who knows"},
        {"prompt": R1.plain_prompt(" "), "response": "2"},
    ]
    found = load("prompt-response", written(tmp_path / "sft.jsonl", rows))
    known, own, graded = found.problems
    assert known.prompt is None
    assert (own.prompt, own.response, own.answer) == (OWN_PROMPT, OWN_RESPONSE, "2")
    assert (graded.prompt, graded.response) == (OWN_PROMPT, "just 2")
    assert [q.row for q in found.quarantined] == [3, 4]
    (note,) = found.notes
    assert note.startswith("2 of 3 prompts follow no known template: they are used word for word")


@pytest.mark.slow
def test_the_published_sft_rows_are_trained_behind_the_prompts_of_rollouts(shared_data):
    """One blank line more in the file: SFT would teach another prompt than is sampled from."""
    sft = load("prompt-response", shared_data / "math" / "sft.jsonl")
    lines = (shared_data / "math" / "train.jsonl").read_text().splitlines()
    assert (len(sft), sft.quarantined) == (1767, ())
    sampled = {R1.plain_prompt(json.loads(line)["problem"]) for line in lines}
    trained = [R1.plain_prompt(problem.question) for problem in sft.problems]
    assert set(trained) <= sampled
    assert len(set(trained)) == 128
    # Word for word what the file says, but for one row that goes on behind its answer.
    differ = [p for p in sft.problems if p.response != p.columns["response"]]
    assert len(differ) == 1
    assert differ[0].columns["response"].startswith(differ[0].response)
    assert all(text != p.columns["prompt"] for text, p in zip(trained, sft.problems, strict=True))


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
    question, opened = read_prompt(text)
    assert (question, opened) == ("What is\n2 + 2?", True)
    # Rendered again it is the prompt that rollouts start from, whatever the file had.
    assert R1.plain_prompt(question) == TEXT


def test_a_prompt_that_does_not_open_the_first_tag():
    assert read_prompt(TEXT.removesuffix("<think>")) == ("What is\n2 + 2?", False)


def test_a_question_that_talks_like_the_template():
    question = "User: says\nAssistant: what?"
    assert read_prompt(R1.plain_prompt(question))[0] == question


@pytest.mark.parametrize("text", ["", "2+2?", TEXT.replace("Assistant solves", "Assistant tries")])
def test_other_texts_are_of_no_known_template(text):
    assert read_prompt(text) is None


def test_a_template_without_a_question():
    assert read_prompt(R1.plain_prompt(" ")) == ("", True)


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
    assert read_response(response, opened=True) == trained


def test_responses_that_cannot_be_trained():
    with pytest.raises(ValueError, match="empty"):
        read_response(" \n", opened=True)
    with pytest.raises(ValueError, match="neither the prompt nor the response opens <think>"):
        read_response("a </think> <answer> 2 </answer>", opened=False)
