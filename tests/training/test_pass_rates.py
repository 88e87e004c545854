"""Pass rates: counted per problem, gone on with after a stop, never mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_prompt

from grouper.config.schema import GradingConfig
from grouper.errors import RunFolderError
from grouper.grading import Grader
from grouper.sampling.base import SampleRequest
from grouper.sampling.scripted import ScriptedSampler
from grouper.training import pass_rates
from grouper.training.pass_rates import PassRates, measure_pass_rates
from grouper.types import AnswerContract, AnswerKind, Problem, Prompt, SamplingParams


def items(count: int) -> list[tuple[Problem, Prompt]]:
    return [
        (Problem(id=f"p/{i}", question="q", answer=str(i), source="test"), make_prompt(i))
        for i in range(count)
    ]


class Answers(ScriptedSampler):
    """Right in the first `i` samples of problem i."""

    def __init__(self) -> None:
        self.drawn = 0
        super().__init__(self._answer)

    def _answer(self, request: SampleRequest, index: int) -> str:
        self.drawn += 1
        sample = index % 4
        number = int(request.prompt.problem_id.split("/")[1])
        return f"<a>{number}</a>" if sample < number else "<a>x</a>"


def wanted(path: Path, **changes: Any) -> PassRates:
    settings: dict[str, Any] = {
        "samples": 4,
        "params": SamplingParams(max_new_tokens=40),
        "model": "m",
        "seed": 0,
    }
    return PassRates(path=path, **{**settings, **changes})


@pytest.fixture
def grader() -> Grader:
    contract = AnswerContract(kind=AnswerKind.TAG, open="<a>", close="</a>")
    return Grader(contract, GradingConfig(symbolic=False))


def test_every_problem_is_counted(tmp_path: Path, grader: Grader) -> None:
    seen: list[tuple[int, int]] = []
    found = measure_pass_rates(
        wanted(tmp_path / "deep" / "rates.jsonl"),
        items(4),
        sampler=Answers(),
        grader=grader,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found == {f"p/{i}": (i, 4) for i in range(4)}
    assert seen == [(4, 4)]


def test_a_stopped_measurement_goes_on(
    tmp_path: Path, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_rates, "CHUNK", 1)
    path = tmp_path / "rates.jsonl"
    whole = measure_pass_rates(wanted(path), items(4), sampler=Answers(), grader=grader)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:9])  # killed in the middle of a line
    again = Answers()
    assert measure_pass_rates(wanted(path), items(4), sampler=again, grader=grader) == whole
    assert again.drawn == 2 * 4
    assert path.read_text() == "".join(lines)


@pytest.mark.parametrize(
    "changes", [{"model": "other"}, {"samples": 8}, {"seed": 1}, {"params": SamplingParams()}]
)
def test_other_settings_are_not_mixed_in(
    changes: dict[str, object], tmp_path: Path, grader: Grader
) -> None:
    path = tmp_path / "rates.jsonl"
    measure_pass_rates(wanted(path), items(2), sampler=Answers(), grader=grader)
    with pytest.raises(RunFolderError, match="another model"):
        measure_pass_rates(wanted(path, **changes), items(3), sampler=Answers(), grader=grader)
    assert all(json.loads(line)["completions"] == 4 for line in path.read_text().splitlines())
