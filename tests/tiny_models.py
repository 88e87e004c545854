"""Tiny random models and hand-made records that many tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grouper.algorithms.batching import (
    TrainBatch,
    rollout_rows,
    step_batches,
    with_gradient,
)
from grouper.algorithms.weighting import token_mean
from grouper.config.schema import TeacherConfig, ToolsConfig
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest
from grouper.training.teachers import Teachers
from grouper.types import (
    Completion,
    Demonstration,
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

VOCABULARY = 97

# Windows are shorter than the rows of every test, so that sliding attention is really used.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "gemma2": ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}),
}


def tiny_model(
    family: str = "qwen3", *, dtype: torch.dtype = torch.float32, scale: float = 4.0, **changes: Any
) -> PreTrainedModel:
    """A two-layer model whose matrices are scaled up, so that its predictions are far from flat."""
    kind, extra = FAMILIES[family]
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": VOCABULARY,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **extra,
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model.to(dtype).eval()


class ExactNorm(torch.nn.Module):
    """RMSNorm in the dtype of its input; transformers' own computes in float32.

    With float32 norms two float64 gradients of the same step differ by 1e-8, which would hide
    small mistakes. Comparisons at 1e-12 therefore put this in their place.
    """

    def __init__(self, weight: torch.nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(variance + self.eps)


def with_exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every RMSNorm of a Qwen or Llama model."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, ExactNorm(child.weight, child.variance_epsilon))
    return model


class LetterTokenizer:
    """Token i is the character chr(32 + i); enough for samplers and stop strings."""

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return "".join(chr(32 + i) for i in token_ids)

    def __len__(self) -> int:
        return VOCABULARY


class ScriptedSampler:
    """Answers every request from a function of the request and its index.

    A token is a character's code point; 0 ends a completion that does not use up its length.

    Args:
        script: (request, index) -> the completion's text. Deterministic scripts make
            deterministic runs.
    """

    def __init__(self, script: Callable[[SampleRequest, int], str]) -> None:
        self._script = script

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        for index, request in enumerate(requests):
            text = self._script(request, index)
            ids = [*map(ord, text), 0]
            limit = request.params.max_new_tokens
            truncated = len(ids) > limit
            completion = Completion(
                token_ids=tuple(ids[:limit]),
                logprobs=(-1.0,) * min(len(ids), limit),
                text=text[: limit if truncated else None],
                finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP_TOKEN,
                policy_version=0,
            )
            yield index, completion


class LengthTools:
    """A toolbox whose tool says how many characters a turn had; every turn may call it."""

    settings = ToolsConfig(calls=2, output_tokens=16)

    def call(self, text: str) -> Future[str]:
        said: Future[str] = Future()
        said.set_result(str(len(text)))
        return said


def graded_rollouts(completions: Sequence[Completion]) -> tuple[Rollout, ...]:
    """Rollouts of these completions, the reward of each being its place."""
    grade = Grade(verdict=Verdict.CORRECT, extracted="", stage="", reason="")
    return tuple(
        Rollout(
            completion=completion,
            grade=grade,
            reward=Reward(components={"r": float(place)}, weights={"r": 1.0}),
        )
        for place, completion in enumerate(completions)
    )


def tokens(length: int, start: int) -> tuple[int, ...]:
    """Ids in 6..95 that are not stop tokens of any test."""
    return tuple(6 + (start * 31 + i * 17) % 90 for i in range(length))


def make_prompt(number: int, length: int = 5) -> Prompt:
    return Prompt(problem_id=f"p/{number}", text="", token_ids=tokens(length, number))


def make_rollout(
    token_ids: Sequence[int],
    reward: float | None,
    *,
    correct: bool = True,
    truncated: bool = False,
) -> Rollout:
    return Rollout(
        completion=Completion(
            token_ids=tuple(token_ids),
            logprobs=(-1.0,) * len(token_ids),
            text="x",
            finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP_TOKEN,
            policy_version=0,
        ),
        grade=Grade(
            verdict=Verdict.CORRECT if correct else Verdict.INCORRECT,
            extracted="1",
            stage="text",
            reason="",
        ),
        reward=Reward(components={"r": reward}, weights={"r": 1.0}),
    )


def make_group(
    number: int,
    rewards: Sequence[float | None],
    lengths: Sequence[int],
    *,
    prompt_length: int = 5,
    correct: Sequence[bool] | None = None,
    truncated: Sequence[bool] | None = None,
    temperature: float = 1.0,
) -> RolloutGroup:
    cut = truncated or [False] * len(rewards)
    flags = correct or [bool(r and r > 0) for r in rewards]
    return RolloutGroup(
        problem=Problem(id=f"p/{number}", question="q", answer="1", source="test"),
        prompt=make_prompt(number, prompt_length),
        params=SamplingParams(temperature=temperature),
        rollouts=tuple(
            make_rollout(
                tokens(lengths[i], 10 * number + i), reward, correct=flags[i], truncated=cut[i]
            )
            for i, reward in enumerate(rewards)
        ),
    )


def make_batch(
    *, dtype: torch.dtype = torch.float32, weighting: Any = token_mean, constant: float = 0.0
) -> TrainBatch:
    """Three prompts of different lengths, ten rows of 1 to 9 tokens, mixed advantages."""
    groups = [
        make_group(0, [1.0, 0.0, 0.0, 1.0], [3, 7, 1, 5], prompt_length=4),
        make_group(1, [0.0, 1.0, 0.0], [9, 2, 6], prompt_length=7),
        make_group(2, [1.0, 0.0, 1.0], [4, 8, 3], prompt_length=1),
    ]
    advantages = [[0.9, -1.1, -0.7, 0.9], [-0.5, 1.2, -0.6], [0.7, -1.3, 0.6]]
    return one_step(groups, advantages, weighting, constant=constant).to("cpu", dtype)


def taught_step(
    weighting: Any = token_mean, *, constant: float = 0.0, hinted: bool = True
) -> TrainBatch:
    """All three streams in one step, in float64: rewards, worked solutions, and two teachers.

    One of four groups has no solved rollout and a worked solution. Half of the advantages differ
    from token to token. `hinted`: the teachers read longer prompts.
    """
    groups = [
        make_group(0, [1.0, 0.0, 0.0, 1.0], [3, 7, 1, 5], prompt_length=4),
        make_group(1, [0.0, 0.0], [9, 2], prompt_length=7),
        make_group(2, [1.0, 0.0, 1.0], [4, 8, 3], prompt_length=1),
        make_group(3, [1.0, 1.0], [6, 2], prompt_length=3),
    ]
    hints = [tokens(5 + 2 * number, 50 + number) for number in range(len(groups))]
    solution = Demonstration(prompt=groups[1].prompt, token_ids=tokens(6, 77))
    rows = rollout_rows(groups, solutions={1: solution}, teacher_prompts=hints if hinted else None)
    assert rows is not None
    wave = torch.linspace(-1.0, 1.0, rows.mask.numel()).view(rows.mask.shape)
    advantages = torch.where(rows.group_ids[:, None] == 3, 0.0, wave)
    teacher = (rows.group_ids % 2).long()
    rows = replace(rows, advantages=advantages, teacher=teacher).to("cpu", torch.float64)
    (step,) = step_batches(
        rows, weighting, weighting_constant=constant, solution_weight=0.5, teacher_weight=0.25
    )
    return step


def tiny_teachers(kl: str = "reverse", top_k: int = 0) -> Teachers:
    """Two frozen random models in float64, of other sizes than `tiny_model`."""
    policies = []
    for hidden_size in (48, 24):
        model = with_exact_norms(
            tiny_model(dtype=torch.float64, scale=3.0, hidden_size=hidden_size)
        )
        policies.append(Policy(model).requires_grad_(False))
    return Teachers(policies, TeacherConfig(path="nowhere", kl=kl, top_k=top_k))


def one_step(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Sequence[float]],
    weighting: Any = token_mean,
    *,
    constant: float = 0.0,
    keep_flat: bool = False,
) -> TrainBatch:
    """One optimizer step over all scored rollouts; rows without a gradient only on request."""
    rows = rollout_rows(groups)
    assert rows is not None
    rows = replace(rows, advantages=torch.tensor([a for part in advantages for a in part]))
    (step,) = step_batches(rows, weighting, weighting_constant=constant)
    kept = step if keep_flat else with_gradient(step)
    assert kept is not None
    return kept
