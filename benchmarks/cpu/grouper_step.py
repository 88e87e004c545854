"""Grouper's side of the step comparison: a real session and the trainer's own GRPO step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.cpu.mixed_reward import SEEN, even_share
from benchmarks.workload import Case, lengths_of, prompts_of, text_of
from grouper.algorithms.batching import rollout_rows, step_batches
from grouper.algorithms.weighting import token_mean
from grouper.config.loading import load_recipe
from grouper.runs.progress import Progress
from grouper.sampling.base import Sampler, SampleRequest
from grouper.training.assemble import advantages_of
from grouper.training.observe import take_step
from grouper.training.parallel import ParallelPolicy
from grouper.training.pipeline import fresh_state
from grouper.training.run import Run
from grouper.training.update import accumulate_gradient, grpo_objective
from grouper.types import (
    Completion,
    FinishReason,
    Grade,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    Verdict,
)

__all__ = ["GrouperSteps"]

HERE = Path(__file__).parent


class _AtLengths:
    """The sampler, whose completions end where they are told to."""

    def __init__(self, sampler: Sampler, lengths: Sequence[int]) -> None:
        self._sampler = sampler
        self._lengths = lengths

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        cut = [
            replace(r, params=replace(r.params, min_new_tokens=n, max_new_tokens=n))
            for r, n in zip(requests, self._lengths, strict=True)
        ]
        yield from self._sampler.sample(cut)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _write_recipe(case: Case, model: Path, folder: Path, *, budget: int, threads: int) -> Path:
    # The session takes the case's own prompts later on; these only give it problems.
    rows = [{"question": f"Question {i}?", "answer": "1"} for i in range(case.prompts)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "step",
        "output_dir": str(folder),
        "threads": threads,
        "skip_sft": True,
        "model": {"path": str(model), "dtype": case.dtype},
        "prompt": {"format": "compact", "template": "plain"},
        "data": {"train": {"source": "file", "path": str(folder / "train.jsonl")}},
        "grading": {"symbolic": False},
        "rewards": [{"name": f"{HERE / 'mixed_reward.py'}:even_share"}],
        "sampling": {"max_new_tokens": case.new_tokens, "min_new_tokens": case.new_tokens},
        "grpo": {
            "steps": 10_000,
            "prompts_per_step": case.prompts,
            "group_size": case.group,
            "allow_truncation": True,
            "require_correct_in_group": False,
            "tokens_per_micro_batch": budget,
        },
    }
    file = folder / "step.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    return file


class GrouperSteps:
    """Steps of `grouper run`, one at a time: sampling, grading, rewards, rollout files, update.

    Args:
        case: what to run.
        model: the saved model.
        folder: for the run.
        budget: `tokens_per_micro_batch`.
        threads: of PyTorch.
    """

    def __init__(
        self, case: Case, model: Path, folder: Path, *, budget: int, threads: int = 2
    ) -> None:
        folder.mkdir()
        recipe = load_recipe(_write_recipe(case, model, folder, budget=budget, threads=threads))
        self._case = case
        self._session = Run(recipe, Progress(quiet=True))
        torch.set_num_threads(threads)
        run = self._session
        if case.ragged:
            plain = run.models.sampler
            run.models.sampler = lambda policy: _AtLengths(plain(policy), lengths_of(case))  # type: ignore[method-assign]  # what a step asks
        problems = [problem for problem, _ in run.prepared.train]
        items = tuple(
            (problem, Prompt(problem_id=problem.id, text=text_of(case, ids), token_ids=tuple(ids)))
            for problem, ids in zip(problems, prompts_of(case), strict=True)
        )
        run.prepared.train = items
        policy = run.models.load(str(model))
        self._state = fresh_state(run, "grpo", policy, str(model))

    def step(self) -> dict[str, Any]:
        """One step: its seconds, and what there is to compare."""
        SEEN.clear()
        started = time.perf_counter()
        report = take_step(self._session, self._state)
        seconds = time.perf_counter() - started
        assert report.status == "learning", report.status
        tallies = report.tallies
        return {
            "seconds": seconds,
            "split": {
                name.removeprefix("time."): round(tally.mean, 3)
                for name, tally in tallies.items()
                if name.startswith("time.")
            },
            "tokens": int(tallies["completion/tokens"].sum),
            "grad_norm": tallies["grad_norm"].mean,
        }

    def gradient_norm(self, prompts: Sequence[str], completions: Sequence[Sequence[int]]) -> float:
        """Of the policy as it is now, on rollouts that another trainer drew from it."""
        case, config = self._case, self._session.recipe.grpo
        known = {prompt.text: (problem, prompt) for problem, prompt in self._session.prepared.train}
        rewards = even_share(list(prompts), list(completions), [list(c) for c in completions])
        groups = []
        for first in range(0, len(prompts), case.group):
            problem, prompt = known[prompts[first]]
            part = range(first, first + case.group)
            assert {prompts[i] for i in part} == {prompt.text}, "groups come one after the other"
            rollouts = tuple(_rollout(completions[i], rewards[i]) for i in part)
            groups.append(
                RolloutGroup(
                    problem=problem,
                    prompt=prompt,
                    params=self._session.prepared.training_params(),
                    rollouts=rollouts,
                )
            )
        rows = rollout_rows(groups)
        assert rows is not None
        flat = torch.tensor([a for part in advantages_of(groups, config) for a in part])
        (batch,) = step_batches(replace(rows, advantages=flat), token_mean)
        policy = self._state.replica.policy
        accumulate_gradient(
            ParallelPolicy(policy),
            batch,
            grpo_objective(config),
            token_budget=config.tokens_per_micro_batch,
        )
        norms = [p.grad.float().norm() for p in policy.parameters() if p.grad is not None]
        policy.zero_grad(set_to_none=True)
        return float(torch.stack(norms).norm())

    def __enter__(self) -> Self:
        self._session.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._session.__exit__(*raised)


def _rollout(ids: Sequence[int], reward: float) -> Rollout:
    return Rollout(
        completion=Completion(
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            text="",
            finish_reason=FinishReason.LENGTH,
            policy_version=0,
        ),
        grade=Grade(verdict=Verdict.INCORRECT, extracted="", stage="", reason=""),
        reward=Reward(components={"r": reward}, weights={"r": 1.0}),
    )
