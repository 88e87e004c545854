"""Real references: spoiled a little, all are refused; written otherwise, all are accepted."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grouper.config.schema import GradingConfig
from grouper.grading import Grader
from grouper.types import AnswerContract, AnswerKind

Change = Callable[[str, random.Random], str | None]
"""From a reference to another text, or None where there is nothing to change."""

TAG = AnswerContract(kind=AnswerKind.TAG, open="<a>", close="</a>")


def another_digit(text: str, rng: random.Random) -> str | None:
    # `1_7` is `1_9`, and `1^2` is `1^3`.
    places = [m.start() for m in re.finditer(r"\d", text)]
    if not places or re.search(r"_|1 ?\^", text):
        return None
    at = rng.choice(places)
    digit = rng.choice([d for d in "123456789" if d != text[at]])
    return text[:at] + digit + text[at + 1 :]


def another_sign(text: str, rng: random.Random) -> str | None:
    places = [m.start() for m in re.finditer(r"[-+](?! ?0)", text)]
    if not places:
        return None
    at = rng.choice(places)
    return text[:at] + ("+" if text[at] == "-" else "-") + text[at + 1 :]


def turned_over(text: str, _: random.Random) -> str | None:
    match = re.search(r"frac\{([^{}]+)\}\{([^{}]+)\}", text)
    if match is None or match[1] == match[2]:
        return None
    swapped = rf"frac{{{match[2]}}}{{{match[1]}}}"
    return text[: match.start()] + swapped + text[match.end() :]


def a_term_less(text: str, rng: random.Random) -> str | None:
    terms = list(re.finditer(r"(?<=[\w}]) ?[-+] ?[1-9a-z][\w^]*(?![\w{}\\])", text))
    if not terms:
        return None
    term = rng.choice(terms)
    return text[: term.start()] + text[term.end() :]


def a_part_less(text: str, _: random.Random) -> str | None:
    parts = text.split(",")
    return ",".join(parts[:-1]) if len(parts) > 1 and not re.search(r"[(\[{}!]", text) else None


def another_variable(text: str, rng: random.Random) -> str | None:
    places = [m.start() for m in re.finditer(r"(?<![A-Za-z\\])[a-z](?![A-Za-z])", text)]
    if not places:
        return None
    at = rng.choice(places)
    return text[:at] + rng.choice("uvw".replace(text[at], "")) + text[at + 1 :]


SPOILED: tuple[Change, ...] = (
    another_digit,
    another_sign,
    turned_over,
    a_term_less,
    a_part_less,
    another_variable,
)


def _if_plain(pattern: str, replacement: str) -> Change:
    return lambda text, _: re.sub(pattern, replacement, text) if re.search(pattern, text) else None


def named(text: str, _: random.Random) -> str | None:
    return (
        None if re.search(r"[=x,<>]|text|mbox|\\(?:le|ge|in|pm|cup|begin)", text) else f"x = {text}"
    )


REWRITTEN: tuple[Change, ...] = (
    _if_plain(r"\\frac", r"\\dfrac"),
    _if_plain(r"\^(\w)", r"^{\1}"),
    _if_plain(r"\\sqrt\{(\w+)\}", r"(\1)^{1/2}"),
    _if_plain(r"\\(?:text|mbox)\{([^{}]*)\}", r" \1 "),
    _if_plain(r" \+ ", "+"),
    lambda text, _: rf"\( {text} \)",
    lambda text, _: rf"\boxed{{{text}}}.",
    lambda text, _: f"${text}$" if "$" not in text else None,
    named,
)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(TAG, GradingConfig(timeout_seconds=20), workers=2) as grader:
        yield grader


def _pairs(folder: Path, changes: tuple[Change, ...], count: int) -> list[tuple[str, str]]:
    """(changed text, reference) for sampled references of MATH."""
    rows = [json.loads(line) for line in (folder / "math/train.jsonl").open(encoding="utf-8")]
    answers = sorted({row["answer"] for row in rows} - {""})
    rng = random.Random(0)
    pairs = []
    for answer in rng.sample(answers, count):
        for change in changes:
            changed = change(answer, rng)
            if changed and changed != answer:
                pairs.append((changed, answer))
    return pairs


def _accepted(grader: Grader, pairs: list[tuple[str, str]]) -> list[bool]:
    grades = grader.grade([f"<a>{changed}</a>" for changed, _ in pairs], [a for _, a in pairs])
    return [grade.correct for grade in grades]


SAMPLES = [60, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("count", SAMPLES)
def test_a_spoiled_reference_is_refused(shared_data: Path, grader: Grader, count: int) -> None:
    pairs = _pairs(shared_data, SPOILED, count)
    assert len(pairs) > count
    verdicts = _accepted(grader, pairs)
    assert [pair for pair, accepted in zip(pairs, verdicts, strict=True) if accepted] == []


@pytest.mark.parametrize("count", SAMPLES)
def test_a_rewritten_reference_is_accepted(shared_data: Path, grader: Grader, count: int) -> None:
    pairs = _pairs(shared_data, REWRITTEN, count)
    assert len(pairs) > 3 * count
    verdicts = _accepted(grader, pairs)
    assert [pair for pair, accepted in zip(pairs, verdicts, strict=True) if not accepted] == []
