"""A rollout on the console: every part of it, and nothing that steers the terminal."""

from __future__ import annotations

from grouper.runs.samples import END, format_sample
from grouper.types import (
    Completion,
    FinishReason,
    Grade,
    Problem,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
)


def group(text: str, extracted: str | None, format_value: float | None) -> RolloutGroup:
    rollouts = [
        Rollout(
            completion=Completion(
                token_ids=(1,),
                logprobs=(0.0,),
                text=written,
                finish_reason=FinishReason.STOP_TOKEN,
                policy_version=0,
            ),
            grade=Grade(verdict=Verdict.CORRECT, extracted=extracted, stage="text", reason=""),
            reward=Reward(
                components={"right": 1.0, "format": format_value},
                weights={"right": 2.0, "format": 0.5},
            ),
        )
        for written in (text, "another one")
    ]
    return RolloutGroup(
        problem=Problem(id="a/7", question="2 + 2\x1b[2J?", answer="4", source="a"),
        prompt=Prompt(problem_id="a/7", text="2 + 2?", token_ids=(1,)),
        params=SamplingParams(max_new_tokens=4),
        rollouts=tuple(rollouts),
    )


def test_question_end_of_the_completion_answer_verdict_and_reward():
    text = "<b>\nso \x1b]0;title\x07 4"
    assert format_sample(group(text, "4", 0.5), 12).splitlines() == [
        "Sample of grpo step 12 (a/7)",
        "Question: 2 + 2\\x1b[2J?",
        "Completion: <b>",
        "so \\x1b]0;title\\x07 4",
        "Answer: 4",
        "Verdict: correct, the reference is 4",
        "Reward: 2.25 (right 1, format 0.5)",
    ]
    long = format_sample(group("x" * 1000 + "the end", "4", 0.5), 12).splitlines()[2]
    assert long == f"Completion: ... {'x' * (END - 7)}the end"


def test_what_is_not_there_is_said():
    lines = format_sample(group("", None, None), 1).splitlines()
    assert lines[-3] == "Answer: none"
    assert lines[-1] == "Reward: not scored (right 1, format not scored)"
