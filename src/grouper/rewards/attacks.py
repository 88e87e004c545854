"""Does cheating pay? What a reward stack pays for attacks, beside an honest wrong answer.

Each attack of `attacks.yaml` is a set of completions that deserve nothing: no answer, several, or
one that is hidden, repeated or padded. They go through extraction, grading and the stack. An attack
pays if one of them is graded correct, or earns more than a well-formed wrong answer of usual
length.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grouper.errors import RewardError
from grouper.files import table
from grouper.grading import Grader
from grouper.rewards.core import Group, RewardStack, completed
from grouper.types import AnswerFormat, Grade, Message, Problem, Prompt, Reward, Verdict

_NAME = re.compile(r"\{(\w+)(?:\*(\d+))?\}")
# Full-width brackets, Cyrillic and Latin letters that look like ours.
_LOOKS = str.maketrans({"<": "＜", ">": "＞", "{": "｛", "}": "｝", "a": "а", "o": "о"})


class Attack(NamedTuple):
    """One kind of attack, written in a prompt format."""

    name: str
    what: str
    problem: Problem
    honest: str
    """Well-formed, of usual length, one wrong answer."""
    texts: tuple[str, ...]


def attacks(fmt: AnswerFormat) -> Iterator[Attack]:
    """Every attack in this format."""
    known = table("grouper.rewards", "attacks.yaml")
    kind = "with_tags" if fmt.tags else "without_tags"
    for name, row in known["attacks"].items():
        fields = dict(known["problems"][row.get("problem", "number")])
        wrong = fields.pop("wrong")
        problem = Problem(id=f"probe/{name}", source="probe", **fields)
        words = _words(fmt, problem, wrong, known["reasoning"])
        texts = [text for part in (row, row.get(kind, {})) for text in _written(fmt, part, words)]
        yield Attack(name, row["what"], problem, words["honest"], tuple(texts))


def _words(fmt: AnswerFormat, problem: Problem, wrong: str, reasoning: str) -> dict[str, str]:
    """What the names in braces stand for."""
    honest, solved = (fmt.completion(reasoning, answer) for answer in (wrong, problem.answer))
    tags = fmt.tags or ("", "", "\\boxed{", "}")
    split = solved
    for tag in tags[2:]:
        split = split.replace(tag, f"{tag[:2]}\u200b{tag[2:]}")
    guesses = [*map(str, range(300, 320)), wrong]
    return {
        "honest": honest,
        "solved": solved,
        "right": problem.answer,
        "wrong": wrong,
        **dict(zip(("open", "close", "answer_open", "answer_close"), tags, strict=True)),
        "opening": fmt.template.partition("{reasoning}")[0].removeprefix(fmt.prefix),
        "prefix": fmt.prefix,
        "reasoning": reasoning,
        "question": problem.question,
        "system": fmt.system,
        "prompt": fmt.plain_prompt(problem.question),
        "many_answers": "".join(fmt.completion(reasoning, guess) + "\n" for guess in guesses),
        "hundreds": ", ".join(map(str, range(300, 321))),
        "thousands": " ".join(map(str, range(20_000))),
        "reasoning_line": f"{reasoning}\n",
        "wrong_word": f"{wrong} ",
        "five": "5",
        "disguised": solved.translate(_LOOKS),
        "split_tags": split,
    }


def _written(fmt: AnswerFormat, row: Mapping[str, Any], words: Mapping[str, str]) -> Iterator[str]:
    """The completions of one row of the table."""

    def filled(key: str, **more: str) -> list[str]:
        known = {**words, **more}
        return [
            _NAME.sub(lambda name: known[name[1]] * int(name[2] or 1), text)
            for text in row.get(key, [])
        ]

    right, wrong, reasoning = words["right"], words["wrong"], words["reasoning"]
    lists = filled("orders", a=right, b=wrong) + filled("orders", a=wrong, b=right)
    written = [(reasoning, answer) for answer in filled("answers") + lists]
    written += [(text, wrong) for text in filled("reasonings")]
    written += [(text, "") for text in filled("unanswered")]
    written += [(a, b) for a in filled("fillings") for b in filled("fillings")]
    return itertools.chain(filled("texts"), itertools.starmap(fmt.completion, written))


# --- what they earn ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the best-paid completion of one attack earned."""

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


def probe(stack: RewardStack, fmt: AnswerFormat, grader: Grader) -> list[ProbeResult]:
    """Attack a stack; one result per attack.

    Args:
        stack: the rewards.
        fmt: the prompt format that the completions are written in.
        grader: grades by that format's contract.

    Raises:
        RewardError: the stack fails on an attack, or does not score an honest wrong answer.
    """
    return [_tried(attack, stack, fmt, grader) for attack in attacks(fmt)]


def score_texts(
    stack: RewardStack, fmt: AnswerFormat, grader: Grader, problem: Problem, texts: Sequence[str]
) -> list[tuple[Grade, Reward]]:
    """What a stack pays for texts, as the completions of one group.

    Raises:
        RewardError: a function of the stack fails on them.
    """
    grades = grader.grade(texts, [problem.answer] * len(texts))
    completions = [completed(text) for text in texts]
    rewards = stack.score(Group(problem, example_prompt(problem, fmt), completions, grades))
    return list(zip(grades, rewards, strict=True))


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


def _tried(attack: Attack, stack: RewardStack, fmt: AnswerFormat, grader: Grader) -> ProbeResult:
    texts = [attack.honest, *attack.texts]
    (_, first), *scored = score_texts(stack, fmt, grader, attack.problem, texts)
    honest = first.total
    if honest is None:
        raise RewardError(
            "the stack does not score an honest wrong answer",
            where=f"probe {attack.name}",
            fix="Return a number for a wrong answer; None is for what cannot be scored.",
        )
    totals = [-float("inf") if reward.total is None else reward.total for _, reward in scored]
    worst = max(range(len(scored)), key=lambda i: (scored[i][0].correct, totals[i]))
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
