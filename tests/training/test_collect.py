"""Collecting: every request answered once, addressed by occurrence, graded while sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore

from tiny_models import ScriptedSampler, make_prompt

from grouper.config.schema import PromptConfig, RewardConfig
from grouper.prompts import make_format
from grouper.rewards import build_rewards
from grouper.sampling.base import SampleRequest
from grouper.training.collect import collect
from grouper.types import (
    Completion,
    Grade,
    Problem,
    SamplingParams,
    Verdict,
)

# --- collecting: every request answered once, addressed by occurrence, graded while sampling


class InstantGrader:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def submit(self, text: str, reference: str) -> Future[Grade]:
        self.seen.append((text, reference))
        future: Future[Grade] = Future()
        verdict = Verdict.CORRECT if text == reference else Verdict.INCORRECT
        future.set_result(Grade(verdict=verdict, extracted=text, stage="text", reason=""))
        return future


def test_groups_keep_their_problem_and_draws_their_address() -> None:
    problems = [
        Problem(id=f"p/{i}", question="q", answer=str(i), source="s", columns={"row": i})
        for i in (3, 4, 3)
    ]
    keys: list[int] = []

    def script(request: SampleRequest, index: int) -> str:
        keys.append(request.key)
        return request.prompt.problem_id[-1] if index % 2 else "wrong"

    grader = InstantGrader()
    layout = make_format(PromptConfig())
    collected = collect(
        [(p, make_prompt(int(p.answer))) for p in problems],
        sampler=ScriptedSampler(script),
        grader=grader,
        rewards=build_rewards([RewardConfig(name="correctness")], layout),
        params=SamplingParams(max_new_tokens=20),
        group_size=2,
        key=(0, "grpo", 1),
    )
    assert [g.problem.id for g in collected.groups] == ["p/3", "p/4", "p/3"]
    assert [g.solved for g in collected.groups] == [1, 1, 1]
    assert [r.reward.total for r in collected.groups[0].rollouts] == [0.0, 1.0]
    # A problem that comes twice in a step is drawn anew: its occurrence is in the address.
    assert len(set(keys)) == 6
    assert grader.seen[:2] == [("wrong", "3"), ("3", "3")]


class ThreadGrader:
    """Grades in a thread of its own, and says how many it has."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1)
        self.graded = Semaphore(0)

    def submit(self, text: str, reference: str) -> Future[Grade]:
        return self._worker.submit(self._grade, text, reference)

    def _grade(self, text: str, reference: str) -> Grade:
        self.graded.release()
        verdict = Verdict.CORRECT if text == reference else Verdict.INCORRECT
        return Grade(verdict=verdict, extracted=text, stage="text", reason="")


class PatientSampler:
    """Draws the next completion only once the one before it has been graded."""

    def __init__(self, grader: ThreadGrader) -> None:
        self._grader = grader

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        for index, completion in ScriptedSampler(lambda *_: "1").sample(requests):
            yield index, completion
            assert self._grader.graded.acquire(timeout=10), "grading waits for the last completion"


def test_grading_goes_on_while_the_next_completions_are_drawn() -> None:
    grader = ThreadGrader()
    collected = collect(
        [(Problem(id="p/1", question="q", answer="1", source="s"), make_prompt(1))],
        sampler=PatientSampler(grader),
        grader=grader,
        rewards=build_rewards([RewardConfig(name="correctness")], make_format(PromptConfig())),
        params=SamplingParams(max_new_tokens=20),
        group_size=4,
        key=(0, "grpo", 1),
    )
    assert collected.groups[0].solved == 4
