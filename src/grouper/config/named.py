"""Names in a recipe that stand for several settings: algorithms, and stacks of rewards.

`grpo.algorithm: dapo` is a row of `presets.yaml`, `{name: "stack:gsm8k-xml"}` among the rewards one
of `stacks.yaml`. Both are expanded when a recipe is read, so that the resolved recipe has every
part. In Python: `GRPOConfig(algorithm="dapo")`, `stack("gsm8k-xml")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grouper.errors import RewardError, require_known
from grouper.files import table

PREFIX = "stack:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Rewards that belong together; see `stacks.yaml`."""

    description: str
    format: str
    rewards: Sequence[dict[str, Any]]
    fails: Sequence[str] = ()


# Algorithm -> the settings of `grpo` that it stands for.
PRESETS: dict[str, dict[str, Any]] = table("grouper.config", "presets.yaml")
STACKS = {name: Stack(**row) for name, row in table("grouper.config", "stacks.yaml").items()}


def named_stack(name: str) -> Stack:
    """The stack of that name.

    Raises:
        RewardError: there is none.
    """
    require_known("stack", name, STACKS, where="rewards", error=RewardError)
    return STACKS[name]


def expand_stacks(entries: Any) -> Any:
    """A recipe's raw `rewards` with every name and every `stack:name` expanded.

    A reward may be its name alone, and so may the whole list. The weight of a stack scales all of
    its rewards. Anything else is left to the schema.

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
    rows = named_stack(name.removeprefix(PREFIX)).rewards
    return [{**row, "weight": weight * row.get("weight", 1.0)} for row in rows]
