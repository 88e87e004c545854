r"""The table of data sources: where each one is, what its columns are called, how a row is read.

A new source is one row of `sources.yaml`; a layout that column names cannot describe also gets a
function in `LAYOUTS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from typing import Any

from grouper.errors import DataError, did_you_mean, raise_all
from grouper.files import table
from grouper.grading import extract
from grouper.grading.normalise import tidy
from grouper.grading.numbers import is_number
from grouper.prompts import FORMATS
from grouper.types import AnswerContract, AnswerKind

Row = Mapping[str, Any]

# The format whose plain text is published as whole prompts.
R1 = FORMATS["r1-zero"]
# Where the answer of a response is read from, whatever is between the tags.
RESPONSE_CONTRACT: AnswerContract = replace(R1.contract, open="<answer>")


def read_prompt(text: str) -> tuple[str, bool] | None:
    r"""The question in a whole prompt, and whether the prompt opens the format's first tag.

    None where the text does not follow the template of R1-Zero. White space between the parts of
    the template may differ: the published SFT rows have one blank line more.

    >>> read_prompt(R1.plain_prompt("1+1?"))
    ('1+1?', True)
    """
    match = _r1_prompt().fullmatch(text)
    return match and (match["question"].strip(), match["prefix"] is not None)


@cache
def _r1_prompt() -> re.Pattern[str]:
    before, _, after = R1.plain.removeprefix("{system}").partition("{question}")
    system, before, after = (
        r"\s+".join(map(re.escape, part.split())) for part in (R1.system, before, after)
    )
    return re.compile(
        rf"\s*{system}\s*\n\s*{before}(?P<question>.*)\n\s*{after}"
        rf"\s*(?P<prefix>{re.escape(R1.prefix)})?\s*",
        re.DOTALL,
    )


def read_response(text: str, *, opened: bool) -> str:
    r"""A response as the completion that sampling in the format of R1-Zero would have given.

    Word for word, except at its ends: the tag that the prompt opens is not repeated, text after the
    stop string is cut off, and an answer that was published without its closing tag gets it back.

    Args:
        text: the response as published.
        opened: whether the published prompt ended in the format's prefix.

    Raises:
        ValueError: it is empty, or neither it nor its prompt opens the first tag.

    >>> read_response(" 1+1=2 </think> <answer> 2 </answer>\n", opened=True)
    ' 1+1=2 </think> <answer> 2 </answer>'
    >>> read_response("<think> so </think> <answer> 2", opened=False)
    ' so </think> <answer> 2 </answer>'
    """
    if not text.strip():
        raise ValueError("the response is empty")
    if text.lstrip().startswith(R1.prefix):
        text = text.lstrip().removeprefix(R1.prefix)
    elif not opened:
        raise ValueError(f"neither the prompt nor the response opens {R1.prefix}")
    if ends := [text.find(stop) + len(stop) for stop in R1.stop if stop in text]:
        return text[: min(ends)]
    if "<answer>" in text:
        return text.rstrip() + R1.template.partition("{answer}")[2]
    return text


# Our field -> the set's columns, of which the first that is not empty in a row is taken.
Columns = Mapping[str, tuple[str, ...]]
FIELDS = ("question", "answer", "solution", "response", "subject", "level", "id")
# Our fields of one row, each as text or None.
Fields = dict[str, str | None]

BOXED = AnswerContract(kind=AnswerKind.BOXED)


def _gsm8k(row: Fields) -> Fields:
    """`answer` holds the worked solution with `<<48/2=24>>` annotations, then `#### 72`.

    Commas between thousands go: rewards that compare text expect the digits alone.
    """
    solution, marker, answer = (row["answer"] or "").rpartition("####")
    if not marker:
        raise ValueError("the answer has no ####")
    answer = re.sub(r"(?<=\d),(?=\d{3})", "", answer)
    solution = re.sub(r"<<[^<>]*>>", "", solution).strip()
    return {**row, "solution": solution or row["solution"], "answer": answer}


# GSM8K's own notation, whatever the source is called.
_HASHED = re.compile(r"####[ \t]*\S[^\n]*\s*\Z")
# MetaMathQA's, below GSM8K's or alone.
_STATED = re.compile(r"(?:####.*\n)?The answer is:[ \t]*((?!.*\\boxed)\S.*?)\.?\s*\Z")
# Characters below which a text is no worked solution.
_SHORT = 40


def _boxed_answer(row: Fields) -> Fields:
    r"""The answer column where there is one, else the last `\boxed{}` of the solution or response.

    A solution that is only a number is the answer: some sets name the column so. Of a worked
    solution that ends in `#### 72` or `The answer is: 72`, or has a box, in either column, the
    answer is what stands there; but an answer with several boxes, or with one inside an
    expression, is left as it is.
    """
    text, solution = row["answer"] or row["solution"] or row["response"], row["solution"]
    if text is None:
        raise ValueError("the answer is empty")
    text = _STATED.sub(r"#### \1", text)
    hashed, found = _HASHED.search(text), extract(text, BOXED)
    before, *boxes = text.split("\\boxed")
    one = len(boxes) == 1 and before.count("{") == before.count("}") and not hashed
    if found.answer is not None and (one or row["answer"] is None):
        worked = len(text) >= _SHORT and not re.match(r"\W*boxed\b", text)
        return {**row, "answer": found.answer, "solution": solution or (text if worked else None)}
    if hashed:
        return _gsm8k({**row, "answer": text})
    short_number = len(text) < _SHORT and is_number(tidy(text))
    if row["answer"] is None and not short_number:
        tagged = extract(text, RESPONSE_CONTRACT)
        if tagged.answer is None:
            raise ValueError(f"no answer, and in the solution: {found.reason}")
        # In the tags of a format already, as an assistant's turn of a conversation may be.
        return {**row, "answer": tagged.answer, "solution": None, "response": text}
    same = (solution or "").strip() == text.strip()
    return {**row, "answer": text, "solution": None if same else solution}


def _without_thinking_tags(row: Fields) -> Fields:
    """The thoughts are kept without their tags; a prompt format has tags of its own."""
    solution = re.sub(r"</?think>", "", row["solution"] or "").strip()
    return _boxed_answer({**row, "solution": solution or None})


def _prompt_response(row: Fields) -> Fields:
    """The question out of the whole prompt; the response as it is to be trained.

    A prompt that follows no known template is the question, and is trained word for word.
    """
    prompt, response = row["question"] or "", row["response"] or ""
    known = read_prompt(prompt)
    if known is None:
        if not response.strip():
            raise ValueError("the response is empty")
        found = {"solution": response.strip(), "prompt": prompt}
    else:
        question, opened = known
        response = read_response(response, opened=opened)
        # The part before the answer, for users who want the working alone.
        solution = response.partition("</think>")[0].strip() or response.strip()
        found = {"question": question, "solution": solution, "response": response}
    return {**row, **found, "answer": row["answer"] or _answer_of(response)}


def _answer_of(response: str) -> str:
    """The answer that a response commits to. Raises `ValueError`: none."""
    found = extract(response, RESPONSE_CONTRACT)
    if found.answer is None:
        found = extract(response, BOXED)
    if found.answer is None:
        raise ValueError(f"no reference answer, and in the response: {found.reason}")
    return found.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One kind of problem set: a row of `sources.yaml`, which says what each field is.

    Example: `Source(description="...", hub="openai/gsm8k", subset="main",
    splits=("train", "test"), columns={"question": ("question",), "answer": ("answer",)})`.
    """

    description: str
    hub: str | None = None
    subset: str | None = None
    splits: tuple[str, ...] = ("train",)
    columns: Columns
    parse_row: Callable[[Fields], Fields] = _boxed_answer
    """Turns the mapped columns into our fields. Raises `ValueError` with the reason for a row
    that cannot be used."""
    has_solutions: bool = True


# How rows are read that column names cannot describe.
LAYOUTS = {
    "gsm8k": _gsm8k,
    "without-thinking-tags": _without_thinking_tags,
    "prompt-response": _prompt_response,
}
SOURCES = {
    name: Source(
        splits=tuple(row.pop("splits", ("train",))),
        columns={ours: tuple(theirs) for ours, theirs in row.pop("columns").items()},
        parse_row=LAYOUTS.get(row.pop("rows", ""), _boxed_answer),
        **row,
    )
    for name, row in table("grouper.data", "sources.yaml").items()
}


def choose_columns(
    source: Source, named: Mapping[str, str], rows: Collection[Row], *, where: str
) -> dict[str, tuple[str, ...]]:
    """The columns that a recipe names, and for the other fields those the source knows.

    Args:
        source: whose names to look for.
        named: our field -> column, from the recipe.
        rows: some rows of the set.
        where: the set, for errors.

    Raises:
        DataError: every missing column.
    """
    present = {name for row in rows for name in row}

    def is_there(column: str) -> bool:
        return column in present or column.partition(".")[0] in present

    problems = [
        DataError(
            f"there is no column {theirs!r} for `{ours}`",
            where=where,
            fix=did_you_mean(theirs, present),
        )
        for ours, theirs in named.items()
        if not is_there(theirs)
    ]
    chosen: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in named.items()}
    for ours, candidates in source.columns.items():
        found = tuple(n for n in candidates if is_there(n) and n not in named.values())
        if ours not in chosen and found:
            chosen[ours] = found
    missing = "" if {"answer", "solution", "response"} & chosen.keys() else "answer"
    missing = missing if "question" in chosen else "question"
    if missing:
        names = ", ".join(sorted(present))
        fix = f"Name it as `columns: {{{missing}: ...}}`. Columns: {names}."
        problems.append(DataError(f"no column holds the {missing}", where=where, fix=fix))
    raise_all(problems)
    return chosen


def read_fields(row: Row, columns: Columns) -> Fields:
    """Our fields of one row. Raises `ValueError` for a column that is neither text nor number."""
    fields: Fields = dict.fromkeys(FIELDS)
    for ours, candidates in columns.items():
        values = (_text(_look_up(row, name), name) for name in candidates)
        missing = _NO_ANSWER if ours == "answer" else {None}
        fields[ours] = next((value for value in values if value not in missing), None)
    question, body = fields["question"] or "", (fields.pop("body", None) or "").strip()
    # Rows that were prepared have it in front already.
    if question and not question.startswith(body):
        stop = "" if body.endswith((".", "?", "!", ",")) else "."
        fields["question"] = f"{body}{stop} {question}".strip()
    return fields


def _look_up(row: Row, column: str) -> Any:
    """`reward_model.ground_truth` reaches into a column, `messages.-1.content` into a list, too."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if isinstance(value, list):
            value = {str(place): value[place] for place in range(-len(value), len(value))}
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# What pandas writes for what is missing, where it makes text of it.
_MISSING = {"", "nan", "NaN", "NAN"}
# What NuminaMath-1.5 writes where there is no answer.
_NO_ANSWER = {None, "proof", "notfound"}


def _text(value: Any, column: str) -> str | None:
    """Text as it is, numbers in their shortest form (145.0 is `145`), what is missing as None.

    A list is its elements with commas; OlympiadBench has lists of one. verl's prompts are lists of
    the user's message; of a conversation the recipe must name a turn, which may not be the first.
    """
    if isinstance(value, Mapping) and value.get("role") == "user":
        value = value.get("content")
    if isinstance(value, list) and value:
        roles = [part.get("role") if isinstance(part, Mapping) else None for part in value]
        if len(roles) > 1 and "user" in roles:
            asks = f"`{column}.{-1 - roles[::-1].index('user')}.content` asks"
            raise ValueError(f"column {column!r} holds a conversation: name a turn of it; {asks}")
        parts = [_text(part, f"{column}.{place}") for place, part in enumerate(value)]
        return ", ".join(part for part in parts if part is not None) or None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        shortest = f"{value:f}".rstrip("0") if isinstance(value, Decimal) else str(value)
        return str(int(value)) if int(value) == value else shortest
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:  # no tokenizer and no file takes it
            half = value[error.start]
            raise ValueError(f"column {column!r} holds {half!a}, half of a character") from error
        return None if value.strip() in _MISSING else value
    names = ", ".join(f"`{column}.{name}`" for name in value) if isinstance(value, Mapping) else ""
    fix = f"; name a part of it: {names}" if names else ""
    raise ValueError(f"column {column!r} holds a {type(value).__name__}, not text or a number{fix}")
