r"""The table of data sources: where each lies, and which column means what.

A new source is one row of `SOURCES`; a layout that column names cannot describe also gets a
`parse_row`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from grouper.data.templates import RESPONSE_CONTRACT, read_prompt, read_response
from grouper.grading import extract
from grouper.grading.normalise import tidy
from grouper.grading.numbers import read_number
from grouper.types import AnswerContract, AnswerKind

FIELDS = ("question", "answer", "solution", "response", "subject", "level", "id")
Fields = dict[str, str | None]
"""Our fields of one row, each as text or None."""

BOXED = AnswerContract(kind=AnswerKind.BOXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One kind of problem set.

    Example: `Source(description="...", hub="openai/gsm8k", subset="main",
    splits=("train", "test"), columns={"question": ("question",), "answer": ("answer",)})`.
    """

    description: str
    hub: str | None = None
    """Name on the Hub; None where the recipe must give a path."""
    subset: str | None = None
    """Hub configuration that is read unless the recipe names one."""
    splits: tuple[str, ...] = ()
    """Split names on the Hub; the first is the default. Local folders may have others."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our field -> column names to look for. Of those that the set has, a row's first that is not
    empty counts. A name with a dot reaches into a nested column."""
    parse_row: Callable[[Fields], Fields] | None = None
    """Turns the mapped columns into our fields. Raises `ValueError` with the reason for a row
    that cannot be used."""
    has_solutions: bool = True
    """Whether rows can hold worked solutions, which SFT needs."""


def _gsm8k(row: Fields) -> Fields:
    """`answer` holds the worked solution with `<<48/2=24>>` annotations, then `#### 72`.

    Commas between thousands go: rewards that compare text expect the digits alone.
    """
    solution, marker, answer = (row["answer"] or "").rpartition("####")
    if not marker:
        raise ValueError("the answer has no ####")
    answer = re.sub(r"(?<=\d),(?=\d{3})", "", answer)
    return {**row, "solution": re.sub(r"<<[^<>]*>>", "", solution).strip(), "answer": answer}


# GSM8K's own notation, whatever the source is called.
_HASHED = re.compile(r"####[ \t]*\S[^\n]*\s*\Z")


def _boxed_answer(row: Fields) -> Fields:
    r"""The answer column where there is one, else the last `\boxed{}` of the solution.

    A solution that is nothing but a number is the answer: some sets call it so. Of a worked
    solution that ends in `#### 72`, in either column, the answer is 72.
    """
    solution = row["solution"]
    if row["answer"] is not None and _HASHED.search(row["answer"]):
        return _gsm8k(row)
    if row["answer"] is not None:
        return {**row, "solution": None if solution == row["answer"] else solution}
    if solution is None:
        raise ValueError("the answer is empty")
    if len(solution) < 40 and read_number(tidy(solution)) is not None:
        return {**row, "answer": solution, "solution": None}
    found = extract(solution, BOXED)
    if found.answer is None and _HASHED.search(solution):
        return _gsm8k({**row, "answer": solution})
    if found.answer is None:
        raise ValueError(f"no answer column, and in the solution: {found.reason}")
    return {**row, "answer": found.answer}


def _without_thinking_tags(row: Fields) -> Fields:
    """The thoughts stay; a prompt format has tags of its own."""
    solution = re.sub(r"</?think>", "", row["solution"] or "").strip()
    return _boxed_answer({**row, "solution": solution or None})


def _prompt_response(row: Fields) -> Fields:
    """The question out of the whole prompt; the response as it is to be trained.

    A prompt of no known template is the question as it stands, and is trained as it stands.
    """
    prompt, response = row["question"] or "", row["response"] or ""
    known = read_prompt(prompt)
    if known is None:
        if not response.strip():
            raise ValueError("the response is empty")
        answer = row["answer"] or _answer_of(response)
        return {**row, "answer": answer, "solution": response.strip(), "prompt": prompt}
    question, fmt, opened = known
    response = read_response(response, fmt, opened=opened)
    # What stands before the answer, for users who want the working alone.
    solution = response.partition(fmt.tags[1])[0].strip() if fmt.tags else response
    return {
        **row,
        "question": question,
        "answer": row["answer"] or _answer_of(response),
        "solution": solution or response.strip(),
        "response": response,
    }


def _answer_of(response: str) -> str:
    """The answer that a response commits to. Raises `ValueError`: none."""
    found = extract(response, RESPONSE_CONTRACT)
    if found.answer is None:
        found = extract(response, BOXED)
    if found.answer is None:
        raise ValueError(f"no reference answer, and in the response: {found.reason}")
    return found.answer


def _svamp(row: Fields) -> Fields:
    """The body of the story goes in front of the question."""
    body, question = row.pop("body", None) or "", row["question"] or ""
    stop = "" if not body or body.rstrip().endswith((".", "?", "!", ",")) else "."
    return {**row, "question": f"{body.rstrip()}{stop} {question}".strip()}


QUESTION = ("question", "problem", "prompt")
ANSWER = ("answer", "expected_answer", "ground_truth", "final_answer", "reward_model.ground_truth")
SOLUTION = ("solution", "generated_solution", "response")

ANY_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "question": QUESTION,
    "answer": ANSWER,
    "solution": SOLUTION,
    "subject": ("subject",),
    "level": ("level",),
    "id": ("unique_id", "id"),
}

SOURCES: dict[str, Source] = {
    "gsm8k": Source(
        description="8,792 school word problems with worked solutions (MIT)",
        hub="openai/gsm8k",
        subset="main",
        splits=("train", "test"),
        columns={"question": QUESTION, "answer": ("answer", "solution")},
        parse_row=_gsm8k,
    ),
    "math": Source(
        description="MATH competition problems with subject and level (MIT); the Hub has MATH-500",
        hub="HuggingFaceH4/MATH-500",
        splits=("test",),
        columns={
            "question": ("problem", "question", "prompt"),
            "answer": ("answer",),
            "solution": ("solution",),
            "subject": ("subject", "type"),
            "level": ("level",),
            "id": ("unique_id",),
        },
        parse_row=_boxed_answer,
    ),
    "numina-tir": Source(
        description=r"72,540 competition problems solved with tools, answer in \boxed{}",
        hub="AI-MO/NuminaMath-TIR",
        splits=("train", "test"),
        columns={
            "question": ("problem", "question", "prompt"),
            "answer": ("answer",),
            "solution": ("solution",),
        },
        parse_row=_boxed_answer,
    ),
    "dapo-math": Source(
        description="DAPO's problems with whole-number answers and no solutions, for GRPO",
        hub="open-r1/DAPO-Math-17k-Processed",
        subset="en",
        splits=("train",),
        columns={
            "question": ("prompt", "question", "problem"),
            # What this set calls the solution is the answer alone.
            "answer": ("solution", "answer", "reward_model.ground_truth"),
        },
        has_solutions=False,
    ),
    "openmath-mini": Source(
        description="OpenMathReasoning in small: problems with long worked solutions, for SFT",
        hub="unsloth/OpenMathReasoning-mini",
        splits=("cot",),
        columns={
            "question": ("problem", "question", "prompt"),
            "answer": ("expected_answer", "answer"),
            "solution": ("generated_solution", "solution"),
        },
        parse_row=_without_thinking_tags,
    ),
    "prompt-response": Source(
        description="rows of whole prompt text and response, trained word for word",
        splits=("train",),
        columns={
            "question": ("prompt", "question", "problem"),
            "response": ("response", "completion"),
            "answer": ("ground_truth", "answer", "expected_answer", "solution"),
            "subject": ("subject",),
            "level": ("level",),
            "id": ("unique_id", "id"),
        },
        parse_row=_prompt_response,
    ),
    "svamp": Source(
        description="1,000 one-step story problems (MIT)",
        hub="ChilleD/SVAMP",
        splits=("train", "test"),
        columns={
            "question": ("Question", *QUESTION),
            "body": ("Body",),
            "answer": ("Answer", "answer"),
            "subject": ("Type",),
            "id": ("ID",),
        },
        parse_row=_svamp,
        has_solutions=False,
    ),
    "file": Source(
        description="any JSONL, JSON, CSV or Parquet file, or a folder with one per split",
        splits=("train",),
        columns=ANY_COLUMNS,
        parse_row=_boxed_answer,
    ),
    "hub": Source(
        description="any problem set on the Hub: its name is `path`",
        splits=("train",),
        columns=ANY_COLUMNS,
        parse_row=_boxed_answer,
    ),
    "arithmetic": Source(
        description="generated word problems in small whole numbers; no file and no network",
        splits=("train", "sft", "validation", "test"),
    ),
    "mixture": Source(
        description="several of the others by weight: `mixture: [{source: gsm8k, weight: 2}, ...]`",
        splits=("train",),
    ),
}
