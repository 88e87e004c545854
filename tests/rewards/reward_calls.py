"""Prompt formats, grades, and calls of reward functions, shared by the tests here."""

from __future__ import annotations

from typing import Any

from grouper.config.schema import PromptConfig, RewardConfig
from grouper.prompts import make_format
from grouper.rewards import REWARDS, RewardStack
from grouper.rewards.call import begin
from grouper.types import AnswerFormat, Grade, Verdict

XML = make_format(PromptConfig(format="xml"))
THINK = make_format(PromptConfig(format="think"))
R1_ZERO = make_format(PromptConfig(format="r1-zero"))
DAPO = make_format(PromptConfig(format="tags"))
BOXED = make_format(PromptConfig(format="boxed"))

HOSTILE = (
    "",
    " \n\t ",
    "\x00" * 50,
    "\u202e٤٢ ⁴² ４２",
    "<reasoning>" * 3_000,
    "</answer>" * 3_000,
    "<answer>" + "9" * 5_000 + "</answer>",
    "<SOLUTION>" + "9," * 5_000 + "</SOLUTION>",
    "<answer>1e999</answer><SOLUTION>nan</SOLUTION>",
    "\\boxed{" * 3_000,
    "<think>\n" + "word " * 20_000 + "\n</think>\n\n<answer>\n5\n</answer>",
    "{}[]()\\" * 2_000,
    "-" * 20_000,
)
"""What no reward may choke on."""


def grade(verdict: Verdict) -> Grade:
    return Grade(verdict=verdict, extracted="4", stage="text", reason="")


RIGHT, WRONG = grade(Verdict.CORRECT), grade(Verdict.INCORRECT)
UNREADABLE = grade(Verdict.NOT_SCORED)


def score(name: str, fmt: AnswerFormat, text: str, *columns: str, **params: Any) -> Any:
    """The value of one completion; `columns` may hold its reference answer."""
    given = {"reference_answer": [columns[0]]} if columns else {}
    (value,) = REWARDS[name](fmt, **params)(prompts=["q"], completions=[text], **given)
    return value


def score_grade(name: str, verdict: Grade, text: str = "x", **params: Any) -> Any:
    """The value of one completion that has been graded."""
    function = REWARDS[name](params.pop("fmt", THINK), **params)
    (value,) = function(prompts=["q"], completions=[text], grades=[verdict])
    return value


def stack_of(**functions: Any) -> RewardStack:
    """A stack of these functions, each with its weight 1 or in a tuple with settings."""
    pairs = [(f, {}) if callable(f) else f for f in functions.values()]
    return RewardStack(
        [
            (RewardConfig(name=name, **settings), function)
            for name, (function, settings) in zip(functions, pairs, strict=True)
        ]
    )


def call(*given: Any) -> list[float | None]:
    """The values that a reward function has for one batch."""
    return begin(*given)[0]()
