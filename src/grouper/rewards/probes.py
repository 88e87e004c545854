"""The attack suite: what a reward stack pays for cheating, beside an honest wrong answer.

Each probe writes completions that deserve nothing: no answer, several, or one that is hidden,
repeated or padded. They go through extraction, grading and the stack. A probe fails where one of
them earns more than a well-formed wrong answer of usual length, or is graded correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from grouper.errors import RewardError
from grouper.rewards.attacks import PROBES, Probe
from grouper.rewards.stack import RewardStack
from grouper.types import (
    AnswerFormat,
    Completion,
    FinishReason,
    Grade,
    Message,
    Problem,
    Prompt,
    Reward,
    Verdict,
)


class _Grades(Protocol):
    def grade(self, texts: Sequence[str], references: Sequence[str]) -> list[Grade]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the best-paid completion of one probe earned."""

    name: str
    what: str
    """What the attack is, in one line."""
    earned: float | None
    """The highest total; None where the stack scored none of them."""
    honest: float
    """The total of the honest wrong answer to the same problem."""
    verdict: Verdict
    text: str
    """The completion that earned it."""
    passed: bool


def probe(
    stack: RewardStack, fmt: AnswerFormat, grader: _Grades, probes: Sequence[Probe] = PROBES
) -> list[ProbeResult]:
    """Attack a stack, one result a probe.

    Args:
        stack: the rewards.
        fmt: the prompt format that the completions are written in.
        grader: grades by that format's contract.
        probes: the attacks.

    Raises:
        RewardError: the stack fails on an attack, or does not score an honest wrong answer.
    """
    return [_run(item, stack, fmt, grader) for item in probes]


def score_text(
    stack: RewardStack, fmt: AnswerFormat, grader: _Grades, *, problem: Problem, text: str
) -> tuple[Grade, Reward]:
    """What a stack pays for one text.

    Raises:
        RewardError: a function of the stack fails on it.
    """
    grades, rewards = _score(stack, fmt, grader, problem, [text])
    return grades[0], rewards[0]


def _score(
    stack: RewardStack, fmt: AnswerFormat, grader: _Grades, problem: Problem, texts: Sequence[str]
) -> tuple[list[Grade], list[Reward]]:
    """Grades and rewards of texts as completions of one group; no failure is contained here."""
    grades = grader.grade(texts, [problem.answer] * len(texts))
    rewards = stack.score(
        problem=problem,
        prompt=example_prompt(problem, fmt),
        completions=[_completion(text) for text in texts],
        grades=grades,
    )
    failed = stack.take_events()
    if failed:
        raise RewardError(
            failed[0],
            where="rewards",
            fix="The problem here has no columns of a data source: only answer, solution, "
            "question, reference_answer and reference_solution.",
        )
    return grades, rewards


def example_prompt(problem: Problem, fmt: AnswerFormat) -> Prompt:
    """The prompt without a tokenizer: a chat where the format can be one, and no real ids."""
    system = [Message(role="system", content=fmt.system)] if fmt.system else []
    user = Message(role="user", content=problem.question)
    return Prompt(
        problem_id=problem.id,
        text=fmt.plain_prompt(problem.question),
        token_ids=(0,),
        messages=None if fmt.chat == "plain" else (*system, user),
        prefix=fmt.prefix,
    )


def _run(item: Probe, stack: RewardStack, fmt: AnswerFormat, grader: _Grades) -> ProbeResult:
    case = item.case(fmt)
    texts = [case.honest, *item.write(case)]
    grades, rewards = _score(stack, fmt, grader, case.problem, texts)
    honest, *totals = [reward.total for reward in rewards]
    if honest is None:
        raise RewardError(
            "the stack does not score an honest wrong answer",
            where=f"probe {item.name}",
            fix="Return a number for a wrong answer; None is for what cannot be scored.",
        )
    worst = max(range(len(totals)), key=lambda i: _rank(totals[i], grades[i + 1]))
    earned, grade = totals[worst], grades[worst + 1]
    return ProbeResult(
        name=item.name,
        what=item.what,
        earned=earned,
        honest=honest,
        verdict=grade.verdict,
        text=texts[worst + 1],
        passed=not grade.correct and (earned is None or earned <= honest + 1e-9),
    )


def _rank(total: float | None, grade: Grade) -> tuple[bool, float]:
    return grade.correct, float("-inf") if total is None else total


def _completion(text: str) -> Completion:
    """A completion of about four characters a token, ended by itself."""
    size = len(text) // 4 + 1
    return Completion(
        token_ids=(0,) * size,
        logprobs=(0.0,) * size,
        text=text,
        finish_reason=FinishReason.STOP_TOKEN,
        policy_version=0,
    )
