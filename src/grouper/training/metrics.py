"""The metrics of a step: what its rollouts were like, and where its seconds went (`time.*`).

Model FLOPs are 2 N a token forward and 4 N backward, with N parameters in the matrices (Kaplan et
al., arXiv 2001.08361, section 2.1; 2 (N + N') backward where only N' are trained). The head is run
on the tokens of completions alone. The products of queries and keys are not among them, nor what is
computed twice or padded. A prompt counts once for its completions.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.benchmark import Timer

from grouper.algorithms.batching import TrainBatch
from grouper.models.policy import Policy
from grouper.types import RolloutGroup, Tally, Verdict

_MEASURED_SECONDS = 0.1
# The unit in which the system counts the memory of a process, in bytes.
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
# Names under which model configurations keep the number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class StepClock:
    """Times one step after the other, and turns times and token counts into metrics.

    Args:
        policy: the model whose FLOPs are counted.
        processes: number of processes that share a step, each with a device of its own.
    """

    def __init__(self, policy: Policy, processes: int = 1) -> None:
        self._device = policy.device
        self._matrices = matrices_of(policy)
        config: Any = policy.model.config.get_text_config()
        self._is_mixture = any(getattr(config, name, None) for name in _EXPERTS)
        dtype = policy.products_dtype
        self._rate = processes * matrix_rate(self._device, dtype, torch.get_num_threads())
        self.begin()

    def begin(self) -> None:
        """Begin a new step."""
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """Seconds spent on the activities of the step, named as the metrics `time.*` are."""

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Count the time of a `with` block as the update."""
        started = time.perf_counter()
        yield
        if self._device.type in ("cuda", "mps"):  # the CPU computes synchronously
            torch.accelerator.synchronize(self._device)
        self.seconds["update"] = time.perf_counter() - started

    def tallies(
        self,
        drawn: Sequence[RolloutGroup] = (),
        scored: Sequence[TrainBatch] = (),
        trained: Sequence[TrainBatch] = (),
    ) -> dict[str, Tally]:
        """Return the metrics of the step that has just ended.

        `time.prefill`, `time.decode`, `time.grade` (waiting for grades and rewards),
        `time.update` and `time.other` add up to `time.step`; `time.sample` is the first two.
        `memory.peak_gib` is that of the run so far.

        Args:
            drawn: the groups that were sampled in the step.
            scored: batches that went through a forward alone.
            trained: batches that went through a forward and a backward.
        """
        step_seconds = time.perf_counter() - self._started
        other_seconds = step_seconds - math.fsum(self.seconds.values())
        seconds = {**self.seconds, "other": other_seconds}
        if "prefill" in seconds:
            seconds["sample"] = seconds["prefill"] + seconds["decode"]
        sampled_tokens = 0
        for group in drawn:
            for rollout in group.rollouts:
                sampled_tokens += len(rollout.completion.token_ids)
        trained_tokens = sum(int(batch.mask.sum()) for batch in trained)
        prompt_tokens = sum(len(group.prompt.token_ids) for group in drawn)
        sample_flops = self._flops(prompt_tokens, sampled_tokens)
        update_flops = sum(self._batch_flops(batch) for batch in scored)
        update_flops += sum(self._batch_flops(batch, backward=True) for batch in trained)
        values = {**seconds, "step": step_seconds}
        # Speed and utilization are reported for the activities that took place in this step.
        is_timed = False
        if seconds.get("sample") and sampled_tokens:
            is_timed = True
            values["sampled_tokens_per_second"] = sampled_tokens / seconds["sample"]
            if not self._is_mixture:
                values["mfu_sample"] = sample_flops / (seconds["sample"] * self._rate)
        if seconds.get("update") and trained_tokens:
            is_timed = True
            values["trained_tokens_per_second"] = trained_tokens / seconds["update"]
            if not self._is_mixture:
                values["mfu_update"] = update_flops / (seconds["update"] * self._rate)
        if is_timed and not self._is_mixture:
            values["mfu"] = (sample_flops + update_flops) / (step_seconds * self._rate)
        peak_gib = self._peak_bytes() / 2**30
        tallies = {f"time.{name}": Tally.of([value]) for name, value in values.items()}
        tallies["memory.peak_gib"] = Tally.of([peak_gib])
        return tallies

    def _peak_bytes(self) -> int:
        """Return the peak memory of the run: allocated on a CUDA GPU, else of the process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES

    def _batch_flops(self, batch: TrainBatch, *, backward: bool = False) -> int:
        """Return the FLOPs of a pass over a batch."""
        prompt_tokens = int(batch.prompt_lengths.sum())
        completion_tokens = int(batch.completion_lengths.sum())
        return self._flops(prompt_tokens, completion_tokens, backward=backward)

    def _flops(self, prompts: int, completions: int, *, backward: bool = False) -> int:
        """Return the FLOPs of a pass over tokens; the head scores those of completions alone.

        Args:
            prompts: tokens of prompts, each prompt counted once.
            completions: tokens of completions.
            backward: whether a backward follows the forward.
        """
        body, trained_body, head, trained_head = self._matrices
        tokens = prompts + completions
        forward = 2 * (body * tokens + head * completions)
        if not backward:
            return forward
        return 2 * forward + 2 * (trained_body * tokens + trained_head * completions)


class Matrices(NamedTuple):
    """Numbers of parameters in the matrices of a model that a token is multiplied with."""

    body: int
    """Parameters of the layers, without embeddings: these are looked up."""
    trained_body: int
    head: int
    """Hidden size times vocabulary, tied or not."""
    trained_head: int


def matrices_of(policy: Policy) -> Matrices:
    """Count the matrix parameters of a policy's model; of a mixture all experts, used or not."""
    config: Any = policy.model.config.get_text_config()
    body = 0
    trained_body = 0
    for module in policy.decoder.modules():
        for size, is_trained in _matrices(module):
            body += size
            if is_trained:
                trained_body += size
    head = int(config.hidden_size) * int(config.vocab_size)
    output = policy.model.get_output_embeddings()
    head_is_trained = any(parameter.requires_grad for parameter in output.parameters())
    return Matrices(
        body=body,
        trained_body=trained_body,
        head=head,
        trained_head=head if head_is_trained else 0,
    )


def _matrices(module: nn.Module) -> list[tuple[int, bool]]:
    """Return (size, whether it is trained) of each matrix that a module itself multiplies with."""
    if isinstance(module, nn.Embedding):
        return []
    if isinstance(module, nn.Linear):  # the shape of packed, quantized weights is another one
        return [(module.in_features * module.out_features, module.weight.requires_grad)]
    return [
        (parameter.numel(), parameter.requires_grad)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    ]


@functools.cache
def matrix_rate(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Measure the FLOP/s of a device at products of large square matrices, in about 0.2 s.

    Args:
        device: the device to measure.
        dtype: of the matrices.
        threads: of the CPU; each number is measured separately.
    """
    # Large enough for the full rate, small enough to fit beside a model that fills a GPU.
    largest = 1024 if device.type == "cpu" else 4096
    size = 256
    timer = _timer_of_product(size, device, dtype, threads)
    # A CPU without products of bfloat16 takes a minute for what others do in a second: there, and
    # wherever the next size (8 times the work) would not fit into the time, the size stays.
    while size < largest and 8 * timer.timeit(1).mean < _MEASURED_SECONDS:
        size *= 2
        timer = _timer_of_product(size, device, dtype, threads)
    measurement = timer.blocked_autorange(min_run_time=_MEASURED_SECONDS)
    return 2 * size**3 / min(measurement.times)


def _timer_of_product(size: int, device: torch.device, dtype: torch.dtype, threads: int) -> Timer:
    """Return a timer of the product of two square matrices.

    It multiplies before it measures, and synchronizes with the device before it reads the clock.
    """
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(size, size, device=device, dtype=dtype, generator=generator)
    return Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=threads)


# --- the rollouts of a step ----------------------------------------------------------------------


def rollout_tallies(
    groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]]
) -> dict[str, Tally]:
    """Return the metrics of a step's rollouts.

    Means are over rollouts, `groups/*` over groups, and `policy/*` over all tokens sampled.

    Args:
        groups: the groups of the step.
        advantages: of each group, one per scored rollout.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    completions = [rollout.completion for rollout in rollouts]
    entropies: list[float] = []
    logprobs: list[float] = []
    for completion in completions:
        entropies += itertools.compress(completion.entropies, completion.sampled)
        logprobs += itertools.compress(completion.logprobs, completion.sampled)
    rewards = [rollout.reward.total for rollout in rollouts]
    is_timeout = [rollout.grade.verdict is Verdict.TIMEOUT for rollout in rollouts]
    is_all_right = [group.solved == len(group.rollouts) for group in groups]
    is_all_wrong = [group.solved == 0 for group in groups]
    is_mixed = [group.mixed for group in groups]
    has_signal = [any(group_advantages) for group_advantages in advantages]
    diversities = [group.diversity for group in groups if group.solved < len(group.rollouts)]
    magnitudes = [abs(value) for group_advantages in advantages for value in group_advantages]
    values: dict[str, Sequence[float]] = {
        "reward/total": [reward for reward in rewards if reward is not None],
        "solve_rate": [rollout.grade.correct for rollout in rollouts],
        "groups/all_right": is_all_right,
        "groups/all_wrong": is_all_wrong,
        "groups/mixed": is_mixed,
        "frac_groups_with_signal": has_signal,
        "completion/tokens": [sum(completion.sampled) for completion in completions],
        "completion/truncated": [completion.truncated for completion in completions],
        "completion/repetition": [repetition(completion.token_ids) for completion in completions],
        "completion/unique": diversities,
        "policy/entropy": entropies,
        "policy/logprob": logprobs,
        "advantage/abs": magnitudes,
        "rollouts/not_scored": [reward is None for reward in rewards],
        "grader/timeouts": is_timeout,
    }
    tool_tokens = [len(c.token_ids) - sum(c.sampled) for c in completions]
    if any(tool_tokens):
        values["tools/tokens"] = tool_tokens
        values["tools/calls"] = [len(completion.tool_spans) for completion in completions]
    for name in rollouts[0].reward.components:
        scores = [rollout.reward.components[name] for rollout in rollouts]
        values[f"reward/{name}"] = [score for score in scores if score is not None]
    return {name: Tally.of(numbers) for name, numbers in values.items()}


def repetition(token_ids: Sequence[int], n: int = 4) -> float:
    """Return the share of a completion's n-grams that repeat an earlier one.

    >>> repetition([1, 2, 3, 4, 5]), repetition([1, 2, 1, 2, 1, 2, 1]), repetition([7])
    (0.0, 0.5, 0.0)
    """
    if len(token_ids) < n:
        return 0.0
    # A set of tuples is several times as fast as sorting rows, which matters with small models.
    shifted = [token_ids[start:] for start in range(n)]
    distinct = len(set(zip(*shifted, strict=False)))
    return 1 - distinct / (len(token_ids) - n + 1)


def status_of(groups: Sequence[RolloutGroup], *, signal: bool, applied: bool, tried: bool) -> str:
    """Return one word for a step: `learning`, or the reason why nothing was learned.

    An update alone is not learning: a KL to the reference or an entropy bonus has a gradient
    whatever the rewards are, and holds or scatters a policy that nothing is taught.

    Args:
        groups: the groups of the step.
        signal: whether the rewards of some group differ in a way that teaches, or worked solutions
            or a teacher do.
        applied: whether the weights were updated.
        tried: whether there was anything to compute a gradient from.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    grader_errors = {Verdict.TIMEOUT, Verdict.CRASH, Verdict.NOT_SCORED}
    # The first reason that holds is the status.
    reasons = {
        "learning": applied and signal,
        "skipped:not-finite": tried and not applied,
        "no-signal:truncated": all(r.completion.truncated for r in rollouts),
        "no-signal:grader-error": all(r.grade.verdict in grader_errors for r in rollouts),
        "no-signal:not-scored": all(r.reward.total is None for r in rollouts),
        "no-signal:all-wrong": not any(group.solved for group in groups),
        "no-signal:all-right": all(group.solved == len(group.rollouts) for group in groups),
        "no-signal:equal-rewards": True,
    }
    return next(status for status, holds in reasons.items() if holds)
