"""Collecting: every request answered once, addressed by occurrence, graded while sampling."""

from __future__ import annotations

from concurrent.futures import Future

from tiny_models import make_prompt

from grouper.config import PromptConfig, RewardConfig
from grouper.prompts import make_format
from grouper.rewards import build_rewards
from grouper.sampling.base import SampleRequest
from grouper.sampling.scripted import ScriptedSampler
from grouper.training.rollouts import collect
from grouper.types import Grade, Problem, SamplingParams, Verdict


class InstantGrader:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def submit(self, text: str, reference: str) -> Future[Grade]:
        self.seen.append((text, reference))
        future: Future[Grade] = Future()
        verdict = Verdict.CORRECT if text == reference else Verdict.INCORRECT
        future.set_result(Grade(verdict=verdict, extracted=text, rung="text", reason=""))
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
    layout = make_format(PromptConfig()).layout
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
