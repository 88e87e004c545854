"""Named stacks: the rewards of a whole system with their weights, as a recipe would list them.

A recipe names one as `rewards: "stack:gsm8k-xml"`, or as an entry of that list; it is written out
when the recipe is read, so that the resolved recipe says every component. In Python:
`Recipe(rewards=stack("gsm8k-xml"))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grouper.config.rewards import RewardConfig
from grouper.errors import RewardError, did_you_mean

PREFIX = "stack:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Rewards that belong together.

    Example: `STACKS["default"].rewards`.
    """

    description: str
    format: str
    """The prompt format it is made for and probed with."""
    rewards: tuple[RewardConfig, ...]
    fails: tuple[str, ...] = ()
    """The probes (`grouper.rewards.probes`) that it pays more than an honest wrong answer."""


def _all(*names: str) -> tuple[RewardConfig, ...]:
    return tuple(RewardConfig(name=name) for name in names)


STACKS: dict[str, Stack] = {
    "default": Stack(
        description="Grouper's own: correctness, with a little for the format",
        format="xml",
        rewards=(
            RewardConfig(name="correctness"),
            RewardConfig(name="format", weight=0.1),
            RewardConfig(name="tag_count", weight=0.1),
        ),
    ),
    "gsm8k-xml": Stack(
        description="system A: correctness 2.0, integer, strict and soft format, tag count",
        format="xml",
        rewards=_all(
            "xml_correctness",
            "xml_integer",
            "xml_strict_format",
            "xml_soft_format",
            "xml_tag_count",
        ),
    ),
    "math-r1-zero": Stack(
        description="system B: the answer where the format holds; the format is only recorded",
        format="r1-zero",
        rewards=(
            RewardConfig(name="r1_zero_answer"),
            RewardConfig(name="r1_zero_format", weight=0.0),
        ),
    ),
    "gsm8k-lite": Stack(
        description="system C: correctness 1.0, numeric answer 0.1, tags present 0.1",
        format="xml",
        rewards=_all("lite_correctness", "lite_numeric", "lite_tags_present"),
    ),
    "openmath-dapo": Stack(
        description="system D: two formats, two ladders of closeness; -6.5 to +12.5",
        format="tags",
        rewards=_all("dapo_exact_format", "dapo_approximate_format", "dapo_answer", "dapo_number"),
        # It pays the first number of the last solution tag, wherever that stands.
        fails=("answer_list", "several_boxes", "answer_in_thinking", "next_turn"),
    ),
    "r1-zero-numina": Stack(
        description="system E: accuracy, format, reasoning steps, cosine, repetition penalty",
        format="think",
        rewards=_all("accuracy", "format", "reasoning_steps", "cosine", "repetition_penalty"),
        # A wrong answer earns more by being longer, and words that look like steps pay.
        fails=(
            "answer_list",
            "all_options",
            "several_boxes",
            "answer_in_thinking",
            "giant_output",
            "step_words",
        ),
    ),
}
"""By name. Only compatibility stacks may have probes that they fail."""


def stack(name: str) -> tuple[RewardConfig, ...]:
    """The rewards of a named stack.

    Raises:
        RewardError: there is none of that name.

    >>> [(r.name, r.weight) for r in stack("default")]
    [('correctness', 1.0), ('format', 0.1), ('tag_count', 0.1)]
    """
    if name not in STACKS:
        raise RewardError(
            f"there is no stack {name!r}", where="rewards", fix=did_you_mean(name, STACKS)
        )
    return STACKS[name].rewards


def expand_stacks(entries: Any) -> Any:
    """A recipe's raw `rewards` with every name and every `stack:name` written out.

    A reward may be its name alone, and so may the whole list. The weight of a stack scales all of
    its rewards. Anything else is left as it is, for the schema to judge.

    Raises:
        RewardError: no such stack, or a setting other than `weight` beside it.

    >>> expand_stacks([{"name": "stack:math-r1-zero", "weight": 2}])
    [{'name': 'r1_zero_answer', 'weight': 2.0}, {'name': 'r1_zero_format', 'weight': 0.0}]
    >>> expand_stacks("accuracy")
    [{'name': 'accuracy'}]
    """
    if isinstance(entries, str):
        entries = [entries]
    if not isinstance(entries, list):
        return entries
    return [row for entry in entries for row in _expanded(entry)]


def _expanded(entry: Any) -> Sequence[Any]:
    if isinstance(entry, str):
        entry = {"name": entry}
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return [entry]
    weight = entry.get("weight", 1.0)
    if entry.keys() - {"name", "weight"} or not isinstance(weight, int | float):
        raise RewardError(
            f"{name} takes a number as its weight and nothing else",
            where="rewards",
            fix=f"`grouper rewards show {name}` prints its entries: copy and change those.",
        )
    rows = []
    for reward in stack(name.removeprefix(PREFIX)):
        row = reward.model_dump(mode="json", exclude_defaults=True)
        rows.append({**row, "weight": weight * reward.weight})
    return rows
