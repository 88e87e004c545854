"""Attacks on a reward stack, and what it pays for them compared with an honest wrong answer.

Each attack of `attacks.yaml` is a set of completions that deserve nothing: no answer, several, or
one that is hidden, repeated or padded. They go through extraction, grading and the stack. An attack
pays if one of them is graded correct, or earns more than a well-formed wrong answer of usual
length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grouper.errors import RewardError
from grouper.files import load_table
from grouper.grading import Grader
from grouper.rewards.core import Group, RewardStack, completed
from grouper.types import AnswerFormat, AnswerKind, Grade, Message, Problem, Prompt, Reward, Verdict

# A name in braces, with the number of times it is repeated: `{honest*20}`.
_NAME = re.compile(r"\{(\w+)(?:\*(\d+))?\}")
# Full-width brackets, Cyrillic and Latin letters that look like ours.
_LOOK_ALIKES = str.maketrans({"<": "＜", ">": "＞", "{": "｛", "}": "｝", "a": "а", "o": "о"})
# Splits a tag without being seen.
_ZERO_WIDTH_SPACE = "\u200b"


class Attack(NamedTuple):
    """Completions of one kind that deserve nothing, written in a prompt format."""

    name: str
    what: str
    problem: Problem
    honest: str
    """A well-formed completion of usual length with one wrong answer."""
    texts: tuple[str, ...]


def attacks(fmt: AnswerFormat) -> Iterator[Attack]:
    """Yield every attack in this format."""
    suite = load_table("grouper.rewards", "attacks.yaml")
    extra_key = "with_tags" if fmt.tags else "without_tags"
    for name, row in suite["attacks"].items():
        fields = dict(suite["problems"][row.get("problem", "number")])
        wrong = fields.pop("wrong")
        problem = Problem(id=f"probe/{name}", source="probe", **fields)
        words = _words(fmt, problem, wrong, suite["reasoning"])
        texts = _attack_texts(fmt, row, words)
        texts += _attack_texts(fmt, row.get(extra_key, {}), words)
        yield Attack(name, row["what"], problem, words["honest"], tuple(texts))


def _words(fmt: AnswerFormat, problem: Problem, wrong: str, reasoning: str) -> dict[str, str]:
    """Return the text that each name in braces stands for."""
    solved = fmt.completion(reasoning, problem.answer)
    tags = fmt.tags or ("", "", "\\boxed{", "}")
    split_tags = solved
    for tag in tags[2:]:
        split_tags = split_tags.replace(tag, f"{tag[:2]}{_ZERO_WIDTH_SPACE}{tag[2:]}")
    guesses = [str(number) for number in range(300, 320)]
    guesses.append(wrong)
    guess_lines = [fmt.completion(reasoning, guess) + "\n" for guess in guesses]
    opening, _, _ = fmt.template.partition("{reasoning}")
    words = {
        "honest": fmt.completion(reasoning, wrong),
        "solved": solved,
        "right": problem.answer,
        "wrong": wrong,
        "opening": opening.removeprefix(fmt.prefix),
        "prefix": fmt.prefix,
        "reasoning": reasoning,
        "question": problem.question,
        "system": fmt.system,
        "prompt": fmt.plain_prompt(problem.question),
        "many_answers": "".join(guess_lines),
        "hundreds": ", ".join(map(str, range(300, 321))),
        "thousands": " ".join(map(str, range(20_000))),
        "reasoning_line": f"{reasoning}\n",
        "wrong_word": f"{wrong} ",
        "five": "5",
        "disguised": solved.translate(_LOOK_ALIKES),
        "split_tags": split_tags,
    }
    words.update(zip(("open", "close", "answer_open", "answer_close"), tags, strict=True))
    return words


def _attack_texts(fmt: AnswerFormat, row: Mapping[str, Any], words: Mapping[str, str]) -> list[str]:
    """Return the completions that one row of the table describes."""
    right = words["right"]
    wrong = words["wrong"]
    reasoning = words["reasoning"]

    answers = _fill(row.get("answers", []), words)
    orders = row.get("orders", [])
    if fmt.contract.kind is AnswerKind.PROGRAM:
        # By its contract the last line that a program prints is its one answer.
        orders = [order for order in orders if "\n" not in order]
    answers += _fill(orders, {**words, "a": right, "b": wrong})
    answers += _fill(orders, {**words, "a": wrong, "b": right})

    # Pairs of reasoning and answer.
    pairs = [(reasoning, answer) for answer in answers]
    pairs += [(text, wrong) for text in _fill(row.get("reasonings", []), words)]
    pairs += [(text, "") for text in _fill(row.get("unanswered", []), words)]
    fillings = _fill(row.get("fillings", []), words)
    pairs += [(reasoning, answer) for reasoning in fillings for answer in fillings]

    texts = _fill(row.get("texts", []), words)
    for pair in pairs:
        texts.append(fmt.completion(*pair))
    return texts


def _fill(templates: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """Replace the names in braces, each as many times as it says."""

    def replacement(name: re.Match[str]) -> str:
        times = int(name[2] or 1)
        return words[name[1]] * times

    return [_NAME.sub(replacement, template) for template in templates]


# --- what they earn ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The best-paid completion of one attack, and what it earned."""

    name: str
    what: str
    """The attack in one line."""
    earned: float | None
    """The highest total; None where the stack scored none of them."""
    honest: float
    """The total of the honest wrong answer to the same problem."""
    verdict: Verdict
    text: str
    """The completion that earned it."""
    passed: bool


def probe(stack: RewardStack, fmt: AnswerFormat, grader: Grader) -> list[ProbeResult]:
    """Attack a stack; one result per attack.

    Args:
        stack: the rewards.
        fmt: the prompt format that the completions are written in.
        grader: grades by that format's contract.

    Raises:
        RewardError: the stack fails on an attack, or does not score an honest wrong answer.
    """
    return [_run_attack(attack, stack, fmt, grader) for attack in attacks(fmt)]


def score_texts(
    stack: RewardStack, fmt: AnswerFormat, grader: Grader, problem: Problem, texts: Sequence[str]
) -> list[tuple[Grade, Reward]]:
    """Grade texts and score them with a stack, as the completions of one group.

    Raises:
        RewardError: a function of the stack fails on them.
    """
    grades = grader.grade(texts, [problem.answer] * len(texts))
    completions = [completed(text) for text in texts]
    group = Group(problem, example_prompt(problem, fmt), completions, grades)
    rewards = stack.score(group)
    return list(zip(grades, rewards, strict=True))


def example_prompt(problem: Problem, fmt: AnswerFormat) -> Prompt:
    """Write the prompt without a tokenizer: a chat where the format can be one, and no real ids."""
    messages: tuple[Message, ...] | None = None
    if fmt.chat != "plain":
        user = Message(role="user", content=problem.question)
        messages = (user,)
        if fmt.system:
            system = Message(role="system", content=fmt.system)
            messages = (system, user)
    return Prompt(
        problem_id=problem.id,
        text=fmt.plain_prompt(problem.question),
        token_ids=(0,),
        messages=messages,
        prefix=fmt.prefix,
    )


def _run_attack(
    attack: Attack, stack: RewardStack, fmt: AnswerFormat, grader: Grader
) -> ProbeResult:
    texts = [attack.honest, *attack.texts]
    (_, honest_reward), *scored = score_texts(stack, fmt, grader, attack.problem, texts)
    honest = honest_reward.total
    if honest is None:
        raise RewardError(
            "the stack does not score an honest wrong answer",
            where=f"probe {attack.name}",
            fix="Return a number for a wrong answer; None is for what cannot be scored.",
        )
    totals = [-math.inf if reward.total is None else reward.total for _, reward in scored]

    def severity(index: int) -> tuple[bool, float]:
        # A completion graded correct is worse than any that is merely paid too much.
        grade, _ = scored[index]
        return grade.correct, totals[index]

    worst = max(range(len(scored)), key=severity)
    grade, reward = scored[worst]
    return ProbeResult(
        name=attack.name,
        what=attack.what,
        earned=reward.total,
        honest=honest,
        verdict=grade.verdict,
        text=attack.texts[worst],
        passed=not grade.correct and totals[worst] <= honest + 1e-9,
    )
