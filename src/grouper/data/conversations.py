"""Rows that hold a conversation, in the layouts of other trainers' data.

    messages        [{role, content}, ...]                 OpenAI, TRL, chat sets on the Hub
    prompt          the same, with or without `completion`     TRL's and verl's prompts
    conversations   [{from, value}, ...]                       ShareGPT
    instruction     with `input`, `output`, `system`, `history`    Alpaca

The last turn of the user is the question, and the assistant's answer to it the worked solution. The
turns before them, a system message first, are kept: the chat template renders them in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grouper.types import Message

Row = Mapping[str, Any]

# ShareGPT's names of speakers, and the usual ones.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
}
# Columns that hold a question as text: a row that has one is no conversation to be read.
QUESTIONS = ("question", "Question", "problem", "Problem")
TURNS = ("messages", "conversations", "conversation", "prompt")
"""Columns that may hold a list of turns, in the order in which they are looked for."""

EARLIER = "earlier"
"""The column in which the turns before the question are written and read back."""


def is_conversation(value: object) -> bool:
    """Tell whether a value is a list of turns, each with a role and a text."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(_is_turn(element) for element in value)


def _is_turn(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return {"role", "content"} <= value.keys() or _is_sharegpt(value)


def _is_sharegpt(turn: Mapping[str, Any]) -> bool:
    return {"from", "value"} <= turn.keys()


def with_question(row: Row) -> tuple[Row, tuple[Message, ...]]:
    """Take `question` and `solution` of a row out of its conversation.

    Returns:
        The row with both, and the turns before the question. A row that has a question as text, or
        none of the layouts, comes back as it is.

    Raises:
        ValueError: the reason why a conversation cannot be read.

    >>> row = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant",
    ...     "content": "2"}]}
    >>> read, earlier = with_question(row)
    >>> read["question"], read["solution"], earlier
    ('1+1?', '2', ())
    """
    if _has_question(row):
        earlier = row.get(EARLIER)
        return row, _turns(earlier, EARLIER) if earlier else ()
    for name in TURNS:
        if is_conversation(row.get(name)):
            return _from_turns(row, name)
    if isinstance(row.get("instruction"), str) and "output" in row:
        return _from_alpaca(row)
    return row, ()


def _has_question(row: Row) -> bool:
    for name in QUESTIONS:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return True
    # verl's question, without the instruction that its prompt has.
    extra_info = row.get("extra_info")
    return isinstance(extra_info, Mapping) and isinstance(extra_info.get("question"), str)


def before_turn(row: Row, column: str) -> tuple[Message, ...] | None:
    """Return the turns before the one that a column names, as `messages.-2.content` does.

    None where it names no turn.

    Raises:
        ValueError: a turn before it cannot be rendered.
    """
    name, _, path = column.partition(".")
    position, _, field = path.partition(".")
    if not position.removeprefix("-").isdecimal() or field not in {"content", "value"}:
        return None
    turns = row.get(name)
    if turns is None or not is_conversation(turns):
        return None
    return _turns(turns[: int(position)], name)


def _from_turns(row: Row, name: str) -> tuple[Row, tuple[Message, ...]]:
    """Take question and solution from the last turns of a list."""
    turns = _turns(row[name], name)
    completion = row.get("completion")
    if name == "prompt" and is_conversation(completion):
        turns += _turns(completion, "completion")
    elif name == "prompt" and isinstance(completion, str):
        turns += (Message(role="assistant", content=completion),)
    solution = None
    if turns[-1]["role"] == "assistant":
        solution = turns[-1]["content"]
        turns = turns[:-1]
    if not turns or turns[-1]["role"] != "user":
        raise ValueError(
            f"column {name!r} holds a conversation whose last question is not from a user"
        )
    read_row = {**row, "question": turns[-1]["content"]}
    if solution is not None:
        read_row["solution"] = solution
    return read_row, turns[:-1]


def _from_alpaca(row: Row) -> tuple[Row, tuple[Message, ...]]:
    """Take question and solution from Alpaca's columns.

    `history` is a list of pairs of a question and its answer, as LLaMA-Factory writes it.
    """
    earlier: list[Message] = []
    system = str(row.get("system") or "").strip()
    if system:
        earlier.append(Message(role="system", content=system))
    for pair in row.get("history") or ():
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError("column 'history' holds something other than pairs of texts")
        question, answer = pair
        earlier.append(Message(role="user", content=str(question)))
        earlier.append(Message(role="assistant", content=str(answer)))
    texts = [row["instruction"], row.get("input")]
    paragraphs = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
    read_row = {**row, "question": "\n\n".join(paragraphs), "solution": row["output"]}
    return read_row, tuple(earlier)


def _turns(values: Any, column: str) -> tuple[Message, ...]:
    """Read the turns of a list, with the usual names of roles.

    Raises:
        ValueError: a role that no prompt has, a turn without text, or a system message that is not
            the first.
    """
    if not is_conversation(values) and values:
        raise ValueError(f"column {column!r} holds something other than turns of a conversation")
    turns = []
    for number, value in enumerate(values):
        if _is_sharegpt(value):
            speaker = value["from"]
            text = value["value"]
        else:
            speaker = value["role"]
            text = value["content"]
        role = ROLES.get(str(speaker).lower())
        if role is None:
            raise ValueError(
                f"column {column!r} holds a turn of {speaker!r}: only system, user and assistant "
                "are rendered"
            )
        if isinstance(text, Sequence) and not isinstance(text, str):
            # A list of texts and images.
            text = _join_texts(text, column)
        if not isinstance(text, str):
            raise ValueError(f"column {column!r} holds a turn without text")  # noqa: TRY004 - a reason for a row
        if role == "system" and number > 0:
            raise ValueError(f"column {column!r} holds a system message after the first turn")
        turns.append(Message(role=role, content=text))
    return tuple(turns)


def _join_texts(elements: Sequence[Any], column: str) -> str:
    texts = []
    for element in elements:
        if not isinstance(element, Mapping) or element.get("type") != "text":
            raise ValueError(f"column {column!r} holds a turn with something other than text")
        texts.append(str(element.get("text", "")))
    return "".join(texts)
