"""The metrics of a step: what its rollouts were like, and where its seconds went (`time.*`).

Model FLOPs are 2 N a token forward and 4 N backward, with N parameters in the matrices (Kaplan et
al., arXiv 2001.08361, section 2.1; 2 (N + N') backward where only N' are trained). The head is run
on the tokens of completions alone. The products of queries and keys are not among them, nor what is
computed twice or padded. A prompt counts once for its completions.
"""

from __future__ import annotations

import contextlib
import functools
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
from grouper.types import Rollout, RolloutGroup, Tally, Verdict

_MEASURED_SECONDS = 0.1
# The unit in which the system counts the memory of a process.
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
# Where configurations of a mixture of experts say how many there are.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class StepClock:
    """Takes the time of one step after the other, and turns what it did into metrics.

    Args:
        policy: whose model FLOPs are counted.
        processes: that share the step out, each with a device of its own.
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
        """A new step begins."""
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """Of parts of the step, named as the metrics are."""

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """What happens inside this block is the update."""
        started = time.perf_counter()
        yield
        if self._device.type in ("cuda", "mps"):  # the CPU has done what it was given
            torch.accelerator.synchronize(self._device)
        self.seconds["update"] = time.perf_counter() - started

    def tallies(
        self,
        drawn: Sequence[RolloutGroup] = (),
        scored: Sequence[TrainBatch] = (),
        trained: Sequence[TrainBatch] = (),
    ) -> dict[str, Tally]:
        """The metrics of the step that is over now.

        `time.prefill`, `time.decode`, `time.grade` (waiting for grades and rewards),
        `time.update` and `time.other` add up to `time.step`; `time.sample` is the first two.
        `memory.peak_gib` is that of the run so far.

        Args:
            drawn: the rollouts that were sampled in it.
            scored: what went through a forward in its update.
            trained: what went through a forward and a backward.
        """
        whole = time.perf_counter() - self._started
        seconds = {**self.seconds, "other": whole - math.fsum(self.seconds.values())}
        if "prefill" in seconds:
            seconds["sample"] = seconds["prefill"] + seconds["decode"]
        values = {**seconds, "step": whole}
        tokens = {
            "sample": sum(len(r.completion.token_ids) for group in drawn for r in group.rollouts),
            "update": sum(int(batch.mask.sum()) for batch in trained),
        }
        read = sum(len(group.prompt.token_ids) for group in drawn)
        passes = [*((batch, False) for batch in scored), *((batch, True) for batch in trained)]
        flops = {
            "sample": self._flops(read, tokens["sample"]),
            "update": sum(
                self._flops(
                    int(batch.prompt_lengths.sum()),
                    int(batch.completion_lengths.sum()),
                    backward=backward,
                )
                for batch, backward in passes
            ),
        }
        # Speeds and utilisations of what happened in this step at all.
        done = [part for part in tokens if seconds.get(part) and tokens[part]]
        for part in done:
            name = {"sample": "sampled", "update": "trained"}[part]
            values[f"{name}_tokens_per_second"] = tokens[part] / seconds[part]
            if not self._is_mixture:
                values[f"mfu_{part}"] = flops[part] / (seconds[part] * self._rate)
        if done and not self._is_mixture:
            values["mfu"] = sum(flops.values()) / (whole * self._rate)
        times = {f"time.{name}": Tally.of([value]) for name, value in values.items()}
        # Of a GPU what was allocated; elsewhere what the process held.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        return {**times, "memory.peak_gib": Tally.of([peak / 2**30])}

    def _flops(self, prompts: int, completions: int, *, backward: bool = False) -> int:
        """Of a pass over tokens, each prompt once, of which the head scores those of completions.

        Args:
            prompts: tokens.
            completions: tokens.
            backward: there is one after the forward.
        """
        body, trained_body, head, trained_head = self._matrices
        tokens = prompts + completions
        forward = 2 * (body * tokens + head * completions)
        if not backward:
            return forward
        return 2 * forward + 2 * (trained_body * tokens + trained_head * completions)


class Matrices(NamedTuple):
    """Parameters in the matrices of a model that a token is multiplied with."""

    body: int
    """Of the layers; embeddings are looked up, so they are not among them."""
    trained_body: int
    head: int
    """Hidden size times vocabulary, tied or not."""
    trained_head: int


def matrices_of(policy: Policy) -> Matrices:
    """Those of a policy's model; of a mixture of experts all of them, used or not."""
    config: Any = policy.model.config.get_text_config()
    sizes = [size for module in policy.decoder.modules() for size in _matrices(module)]
    head = int(config.hidden_size) * int(config.vocab_size)
    output = policy.model.get_output_embeddings()
    return Matrices(
        body=sum(size for size, _ in sizes),
        trained_body=sum(size for size, trained in sizes if trained),
        head=head,
        trained_head=head if any(p.requires_grad for p in output.parameters()) else 0,
    )


def _matrices(module: nn.Module) -> list[tuple[int, bool]]:
    """(size, whether it is trained) of the matrices a module multiplies with itself."""
    if isinstance(module, nn.Embedding):
        return []
    if isinstance(module, nn.Linear):  # packed weights of quantised ones tell no size
        return [(module.in_features * module.out_features, module.weight.requires_grad)]
    own = module.parameters(recurse=False)
    return [(p.numel(), p.requires_grad) for p in own if p.ndim == 2]


@functools.cache
def matrix_rate(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of a device at matrix products of large square matrices, measured in about 0.1 s.

    Args:
        device: where.
        dtype: of the matrices.
        threads: of the CPU; another number is measured anew.
    """
    # Enough for the full rate; it must fit beside a model that fills a GPU.
    size = 1024 if device.type == "cpu" else 4096
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(size, size, device=device, dtype=dtype, generator=generator)
    # The timer waits for the device before it looks at the clock.
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=threads)
    return 2 * size**3 / min(timer.blocked_autorange(min_run_time=_MEASURED_SECONDS).times)


# --- what the rollouts of a step were like


def rollout_tallies(
    groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]]
) -> dict[str, Tally]:
    """Everything the rollouts of a step say.

    Means are over rollouts, `groups/*` over groups, and `policy/*` over all tokens sampled.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    completions = [rollout.completion for rollout in rollouts]
    solved = [(group.solved, len(group.rollouts)) for group in groups]
    totals = [r.reward.total for r in rollouts]
    unique = [group.diversity for group in groups if group.solved < len(group.rollouts)]
    tallies = {
        "reward/total": Tally.of([t for t in totals if t is not None]),
        "solve_rate": Tally.of([r.grade.correct for r in rollouts]),
        "groups/all_right": Tally.of([s == n for s, n in solved]),
        "groups/all_wrong": Tally.of([s == 0 for s, n in solved]),
        "groups/mixed": Tally.of([0 < s < n for s, n in solved]),
        "frac_groups_with_signal": Tally.of([any(values) for values in advantages]),
        "completion/tokens": Tally.of([len(r.completion.token_ids) for r in rollouts]),
        "completion/truncated": Tally.of([r.completion.truncated for r in rollouts]),
        "completion/repetition": Tally.of([repetition(r.completion.token_ids) for r in rollouts]),
        "completion/unique": Tally.of(unique),
        "policy/entropy": Tally.of([h for c in completions for h in c.entropies]),
        "policy/logprob": Tally.of([value for c in completions for value in c.logprobs]),
        "advantage/abs": Tally.of([abs(a) for values in advantages for a in values]),
        "rollouts/not_scored": Tally.of([t is None for t in totals]),
        "grader/timeouts": Tally.of([r.grade.verdict is Verdict.TIMEOUT for r in rollouts]),
    }
    for name in rollouts[0].reward.components:
        values = [r.reward.components[name] for r in rollouts]
        tallies[f"reward/{name}"] = Tally.of([v for v in values if v is not None])
    return tallies


def repetition(token_ids: Sequence[int], n: int = 4) -> float:
    """The share of the n-grams of a completion that it has had before.

    >>> repetition([1, 2, 3, 4, 5]), repetition([1, 2, 1, 2, 1, 2, 1]), repetition([7])
    (0.0, 0.5, 0.0)
    """
    if len(token_ids) < n:
        return 0.0
    # A set of tuples: several times as fast as sorting rows, which is felt in a small model's step.
    distinct = len(set(zip(*(token_ids[start:] for start in range(n)), strict=False)))
    return 1 - distinct / (len(token_ids) - n + 1)


def status_of(groups: Sequence[RolloutGroup], *, signal: bool, applied: bool, tried: bool) -> str:
    """One word, and why when nothing was learned.

    An update alone is not learning: a KL to the reference or an entropy bonus has a gradient
    whatever the rewards are, and holds or scatters a policy that nothing is taught.

    Args:
        groups: those that took part in the step.
        signal: whether the rewards of some group differ in a way that teaches.
        applied: whether the weights were updated.
        tried: whether there was anything to compute a gradient from.
    """
    rollouts: list[Rollout] = [r for group in groups for r in group.rollouts]
    broken = {Verdict.TIMEOUT, Verdict.CRASH, Verdict.NOT_SCORED}
    reasons = {
        "learning": applied and signal,
        "skipped:not-finite": tried and not applied,
        "no-signal:truncated": all(r.completion.truncated for r in rollouts),
        "no-signal:grader-error": all(r.grade.verdict in broken for r in rollouts),
        "no-signal:not-scored": all(r.reward.total is None for r in rollouts),
        "no-signal:all-wrong": not any(group.solved for group in groups),
        "no-signal:all-right": all(group.solved == len(group.rollouts) for group in groups),
        "no-signal:equal-rewards": True,
    }
    return next(word for word, holds in reasons.items() if holds)
