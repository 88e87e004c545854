r"""The table of data sources: where each lies, and which column means what.

A new source is one row of `SOURCES`; a layout that column names cannot describe also gets a
`parse_row`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from grouper.grading import extract
from grouper.types import AnswerContract, AnswerKind

__all__ = ["FIELDS", "SOURCES", "Fields", "Source"]

FIELDS = ("question", "answer", "solution", "subject", "level", "id")
Fields = dict[str, str | None]
"""Our fields of one row, each as text or None."""


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
    """Our field -> column names to look for, the first that the set has."""
    parse_row: Callable[[Fields], Fields] | None = None
    """Turns the mapped columns into our fields. Raises `ValueError` with the reason for a row
    that cannot be used."""
    has_solutions: bool = True
    """Whether rows can hold worked solutions, which SFT needs."""


def _gsm8k(row: Fields) -> Fields:
    """`answer` holds the worked solution with `<<48/2=24>>` annotations, then `#### 72`."""
    solution, marker, answer = (row["answer"] or "").rpartition("####")
    if not marker:
        raise ValueError("the answer has no ####")
    return {**row, "solution": re.sub(r"<<[^<>]*>>", "", solution).strip(), "answer": answer}


def _boxed_answer(row: Fields) -> Fields:
    r"""The answer column where there is one, else the last `\boxed{}` of the solution."""
    if row["answer"] is not None:
        return row
    if row["solution"] is None:
        raise ValueError("the answer is empty")
    found = extract(row["solution"], AnswerContract(kind=AnswerKind.BOXED))
    if found.answer is None:
        raise ValueError(f"no answer column, and in the solution: {found.reason}")
    return {**row, "answer": found.answer}


def _svamp(row: Fields) -> Fields:
    """`subject` arrives as the body of the story: it goes in front of the question."""
    body, question = row.pop("body", None) or "", row["question"] or ""
    stop = "" if not body or body.rstrip().endswith((".", "?", "!", ",")) else "."
    return {**row, "question": f"{body.rstrip()}{stop} {question}".strip()}


ANY_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "question": ("question", "problem", "prompt"),
    "answer": ("answer", "expected_answer", "ground_truth", "final_answer"),
    "solution": ("solution", "generated_solution", "response"),
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
        columns={"question": ("question",), "answer": ("answer",)},
        parse_row=_gsm8k,
    ),
    "math": Source(
        description="MATH competition problems with subject and level (MIT); the Hub has MATH-500",
        hub="HuggingFaceH4/MATH-500",
        splits=("test",),
        columns={
            "question": ("problem", "question"),
            "answer": ("answer",),
            "solution": ("solution",),
            "subject": ("subject", "type"),
            "level": ("level",),
            "id": ("unique_id",),
        },
        parse_row=_boxed_answer,
    ),
    "svamp": Source(
        description="1,000 one-step story problems (MIT)",
        hub="ChilleD/SVAMP",
        splits=("train", "test"),
        columns={
            "question": ("Question",),
            "body": ("Body",),
            "answer": ("Answer",),
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
}
