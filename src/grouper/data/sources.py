r"""The table of data sources: the place of each, the names of its columns, the reading of a row.

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
from grouper.files import load_table
from grouper.grading import extract
from grouper.grading.normalize import tidy
from grouper.grading.numbers import is_number
from grouper.prompts import FORMATS
from grouper.types import AnswerContract, AnswerKind

Row = Mapping[str, Any]

# The format whose plain text is published as whole prompts.
R1 = FORMATS["r1-zero"]
# The contract by which the answer of a response is read, whatever is between the tags.
RESPONSE_CONTRACT: AnswerContract = replace(R1.contract, open="<answer>")


def read_prompt(text: str) -> tuple[str, bool] | None:
    r"""Read the question of a whole prompt, and whether the prompt opens the format's first tag.

    None where the text does not follow the template of R1-Zero. White space between the parts of
    the template may differ: the published SFT rows have one blank line more.

    >>> read_prompt(R1.plain_prompt("1+1?"))
    ('1+1?', True)
    """
    match = _r1_prompt().fullmatch(text)
    if match is None:
        return None
    return match["question"].strip(), match["prefix"] is not None


@cache
def _r1_prompt() -> re.Pattern[str]:
    """Compile a pattern for whole prompts of R1-Zero."""
    question_prefix, _, question_suffix = R1.plain.removeprefix("{system}").partition("{question}")

    def with_any_space(text: str) -> str:
        return r"\s+".join(re.escape(word) for word in text.split())

    return re.compile(
        rf"\s*{with_any_space(R1.system)}\s*\n"
        rf"\s*{with_any_space(question_prefix)}(?P<question>.*)\n"
        rf"\s*{with_any_space(question_suffix)}\s*(?P<prefix>{re.escape(R1.prefix)})?\s*",
        re.DOTALL,
    )


def read_response(text: str, *, opened: bool) -> str:
    r"""Read a response as the completion that sampling in the format of R1-Zero would have given.

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
    stop_ends = [text.find(stop) + len(stop) for stop in R1.stop if stop in text]
    if stop_ends:
        return text[: min(stop_ends)]
    if "<answer>" in text:
        _, _, answer_close = R1.template.partition("{answer}")
        return text.rstrip() + answer_close
    return text


# Our field -> the set's columns, of which the first that is not empty in a row is taken.
Columns = Mapping[str, tuple[str, ...]]
FIELDS = ("question", "answer", "solution", "program", "response", "subject", "level", "id")
# Our fields of one row, each as text or None.
Fields = dict[str, str | None]

BOXED = AnswerContract(kind=AnswerKind.BOXED)


def _gsm8k(row: Fields) -> Fields:
    """Split an answer that holds the worked solution with `<<48/2=24>>`, then `#### 72`.

    Commas between thousands are removed: rewards that compare text expect the digits alone.
    """
    solution, marker, answer = (row["answer"] or "").rpartition("####")
    if not marker:
        raise ValueError("the answer has no ####")
    answer = re.sub(r"(?<=\d),(?=\d{3})", "", answer)
    solution = re.sub(r"<<[^<>]*>>", "", solution).strip()
    return {**row, "solution": solution or row["solution"], "answer": answer}


# An answer at the end of a text, in GSM8K's notation: `#### 72`. Other sets use it as well.
_HASHED = re.compile(r"####[ \t]*\S[^\n]*\s*\Z")
# MetaMathQA's notation, below GSM8K's or alone: `The answer is: 72`.
_STATED = re.compile(r"(?:####.*\n)?The answer is:[ \t]*((?!.*\\boxed)\S.*?)\.?\s*\Z")
# Characters below which a text is no worked solution.
_SHORT = 40


def _boxed_answer(row: Fields) -> Fields:
    r"""Read the answer column, or else the last `\boxed{}` of the solution or response.

    A solution that is only a number is the answer: some sets name the column so. A worked solution
    in either column may end in `#### 72` or `The answer is: 72`, or have a box, which is then the
    answer; but an answer with several boxes, or with one inside an expression, is left as it is.
    """
    solution = row["solution"]
    text = row["answer"] or solution or row["response"]
    if text is None:
        raise ValueError("the answer is empty")
    text = _STATED.sub(r"#### \1", text)
    is_hashed = _HASHED.search(text) is not None
    boxed = extract(text, BOXED)
    box_is_answer = row["answer"] is None or (_has_one_box(text) and not is_hashed)
    if boxed.answer is not None and box_is_answer:
        # A text that is little more than the box is no worked solution.
        if not solution and len(text) >= _SHORT and not re.match(r"\W*boxed\b", text):
            solution = text
        return {**row, "answer": boxed.answer, "solution": solution or None}
    if is_hashed:
        return _gsm8k({**row, "answer": text})
    is_short_number = len(text) < _SHORT and is_number(tidy(text))
    if row["answer"] is None and not is_short_number:
        tagged = extract(text, RESPONSE_CONTRACT)
        if tagged.answer is None:
            raise ValueError(f"no answer, and in the solution: {boxed.reason}")
        # The text has the tags of a format already, as an assistant's turn may have.
        return {**row, "answer": tagged.answer, "solution": None, "response": text}
    if (solution or "").strip() == text.strip():
        solution = None
    return {**row, "answer": text, "solution": solution}


def _has_one_box(text: str) -> bool:
    r"""Tell whether a text has one `\boxed`, outside all braces."""
    text_before_box, *boxes = text.split("\\boxed")
    return len(boxes) == 1 and text_before_box.count("{") == text_before_box.count("}")


def _without_thinking_tags(row: Fields) -> Fields:
    """Keep the thoughts without their tags; a prompt format has tags of its own."""
    solution = re.sub(r"</?think>", "", row["solution"] or "").strip()
    return _boxed_answer({**row, "solution": solution or None})


def _prompt_response(row: Fields) -> Fields:
    """Take the question out of a whole prompt, and the response as it is to be trained.

    A prompt that follows no known template is the question, and is trained word for word.
    """
    fields = dict(row)
    prompt = row["question"] or ""
    response = row["response"] or ""
    question_and_prefix = read_prompt(prompt)
    if question_and_prefix is None:
        if not response.strip():
            raise ValueError("the response is empty")
        fields["solution"] = response.strip()
        fields["prompt"] = prompt
    else:
        question, opened = question_and_prefix
        response = read_response(response, opened=opened)
        # The text before the answer, for users who need the working alone.
        working, _, _ = response.partition("</think>")
        fields["question"] = question
        fields["solution"] = working.strip() or response.strip()
        fields["response"] = response
    fields["answer"] = row["answer"] or _answer_of(response)
    return fields


def _answer_of(response: str) -> str:
    """Extract the answer of a response.

    Raises:
        ValueError: it has none.
    """
    extracted = extract(response, RESPONSE_CONTRACT)
    if extracted.answer is None:
        extracted = extract(response, BOXED)
    if extracted.answer is None:
        raise ValueError(f"no reference answer, and in the response: {extracted.reason}")
    return extracted.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One kind of problem set: a row of `sources.yaml`, which describes each field.

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


# Functions for rows that column names cannot describe.
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
    for name, row in load_table("grouper.data", "sources.yaml").items()
}


def choose_columns(
    source: Source, named: Mapping[str, str], rows: Collection[Row], *, where: str
) -> dict[str, tuple[str, ...]]:
    """Choose the columns that a recipe names, and for other fields those that the source knows.

    Args:
        source: the source, whose column names are looked for.
        named: our field -> column, from the recipe.
        rows: some rows of the set.
        where: the set, for errors.

    Raises:
        DataError: every missing column.
    """
    present = {name for row in rows for name in row}

    def is_present(column: str) -> bool:
        outer_column, _, _ = column.partition(".")
        return column in present or outer_column in present

    errors: list[DataError] = []
    chosen: dict[str, tuple[str, ...]] = {}
    for field, column in named.items():
        chosen[field] = (column,)
        if not is_present(column):
            errors.append(
                DataError(
                    f"there is no column {column!r} for `{field}`",
                    where=where,
                    fix=did_you_mean(column, present),
                )
            )
    named_columns = set(named.values())
    for field, candidates in source.columns.items():
        if field in chosen:
            continue
        columns = tuple(
            name for name in candidates if is_present(name) and name not in named_columns
        )
        if columns:
            chosen[field] = columns

    missing = ""
    if "question" not in chosen:
        missing = "question"
    elif not {"answer", "solution", "response"} & chosen.keys():
        missing = "answer"
    if missing:
        names = ", ".join(sorted(present))
        fix = f"Name it as `columns: {{{missing}: ...}}`. Columns: {names}."
        errors.append(DataError(f"no column holds the {missing}", where=where, fix=fix))
    raise_all(errors)
    return chosen


def read_fields(row: Row, columns: Columns) -> Fields:
    """Read our fields of one row.

    Raises:
        ValueError: a column is neither text nor a number.
    """
    fields: Fields = dict.fromkeys(FIELDS)
    for field, candidates in columns.items():
        fields[field] = None
        empty_values = _NO_ANSWER if field == "answer" else {None}
        for name in candidates:
            value = _text(_look_up(row, name), name)
            if value not in empty_values:
                fields[field] = value
                break
    question = fields["question"] or ""
    body = (fields.pop("body", None) or "").strip()
    # Rows that `write_problems` wrote have the body in front already.
    if question and not question.startswith(body):
        stop = "" if body.endswith((".", "?", "!", ",")) else "."
        fields["question"] = f"{body}{stop} {question}".strip()
    return fields


def _look_up(row: Row, column: str) -> Any:
    """Return a column, or a value inside one.

    `reward_model.ground_truth` reaches into a column, `messages.-1.content` into a list, too.
    """
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        if isinstance(value, list):
            positions = range(-len(value), len(value))
            value = {str(position): value[position] for position in positions}
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


# Texts that pandas writes for a missing value.
_MISSING = {"", "nan", "NaN", "NAN"}
# Texts that NuminaMath-1.5 writes where there is no answer.
_NO_ANSWER = {None, "proof", "notfound"}


def _text(value: Any, column: str) -> str | None:
    """Return text as it is, numbers in their shortest form (145.0 is `145`), None if it is missing.

    A list is its elements with commas; OlympiadBench has lists of one. verl's prompts are lists of
    the user's message; of a conversation the recipe must name a turn, which may not be the first.

    Raises:
        ValueError: the value is something else, or its text cannot be encoded.
    """
    if isinstance(value, Mapping) and value.get("role") == "user":
        value = value.get("content")
    if isinstance(value, list) and value:
        return _text_of_list(value, column)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        if int(value) == value:
            return str(int(value))
        return f"{value:f}".rstrip("0") if isinstance(value, Decimal) else str(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:  # no tokenizer and no file takes it
            half = value[error.start]
            raise ValueError(f"column {column!r} holds {half!a}, half of a character") from error
        return None if value.strip() in _MISSING else value
    fix = ""
    if isinstance(value, Mapping) and value:
        names = ", ".join(f"`{column}.{name}`" for name in value)
        fix = f"; name a part of it: {names}"
    raise ValueError(f"column {column!r} holds a {type(value).__name__}, not text or a number{fix}")


def _text_of_list(values: list[Any], column: str) -> str | None:
    """Join the elements of a list; see `_text`."""
    roles = [value.get("role") if isinstance(value, Mapping) else None for value in values]
    if len(roles) > 1 and "user" in roles:
        last_question = -1 - roles[::-1].index("user")
        raise ValueError(
            f"column {column!r} holds a conversation: name a turn of it; "
            f"`{column}.{last_question}.content` asks"
        )
    texts = [_text(value, f"{column}.{position}") for position, value in enumerate(values)]
    return ", ".join(text for text in texts if text is not None) or None
