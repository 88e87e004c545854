"""The attacks deserve nothing, and the honest wrong answer is what it claims to be."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from grouper.config.schema import GradingConfig
from grouper.grading import Grader
from grouper.prompts import FORMATS
from grouper.rewards.attacks import PROBES, REASONING
from grouper.types import Verdict

ISSUE = {
    "empty",
    "only_format",
    "repeated_tags",
    "answer_list",
    "all_options",
    "prompt_copy",
    "several_boxes",
    "answer_in_thinking",
    "giant_output",
    "look_alikes",
    "closing_tags",
}


def test_the_suite_is_complete() -> None:
    names = [probe.name for probe in PROBES]
    assert len(set(names)) == len(names)
    assert set(names) >= ISSUE


@pytest.mark.parametrize("name", FORMATS)
def test_the_honest_answer_is_well_formed_and_wrong(name: str) -> None:
    fmt = FORMATS[name]
    with Grader(fmt.contract, GradingConfig(symbolic=False)) as grader:
        for probe in PROBES:
            case = probe.case(fmt)
            honest, right = case.honest, case.written(REASONING, case.problem.answer)
            grades = grader.grade([honest, right], [case.problem.answer] * 2)
            assert [g.verdict for g in grades] == [Verdict.INCORRECT, Verdict.CORRECT]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_attacks_are_not_the_honest_answer(name: str, probe) -> None:
    case = probe.case(FORMATS[name])
    texts = probe.write(case)
    assert texts
    assert case.honest not in texts
    assert case.written(REASONING, case.problem.answer) not in texts


def test_the_honest_answer_is_of_median_length(shared_data: Path) -> None:
    text = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8")
    solutions = [json.loads(line)["answer"].split("####")[0] for line in text.splitlines()]
    lengths = [len(solution.strip()) for solution in solutions]
    assert len(REASONING) == pytest.approx(statistics.median(lengths), rel=0.1)
