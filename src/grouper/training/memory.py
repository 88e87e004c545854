"""When memory runs out in the middle of a step: the step is run again in smaller slices.

A slice whose backward broke off has left part of its gradient behind, so the whole gradient of
the step is thrown away and made anew; that needs no second copy of it. Slices add up to the same
gradient however the step is cut, so nothing but time and the last bits of a sum changes.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from grouper.batching import TrainBatch, micro_batches
from grouper.errors import ModelError
from grouper.planning.advice import memory_advice
from grouper.planning.rows import Rows
from grouper.policy import Policy

__all__ = ["is_out_of_memory", "split_event", "with_enough_memory"]

log = logging.getLogger(__name__)

Result = TypeVar("Result")

SIGNS = ("MPS backend out of memory", "DefaultCPUAllocator: can't allocate memory")
"""What allocators that have no exception of their own say."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or any(s in str(error) for s in SIGNS)


def with_enough_memory(
    policy: Policy,
    batch: TrainBatch,
    token_budget: int,
    run: Callable[[Sequence[TrainBatch]], Result],
    *,
    retry: bool = True,
) -> Result:
    """Run a step over its slices; where memory runs out, again over smaller ones.

    The budget that fits is kept in `policy.token_limit`, so that later steps start from it.

    Args:
        policy: whose memory it is.
        batch: the step.
        token_budget: tokens in one slice, before anything has been learnt.
        run: does the whole step from the beginning, whatever an earlier try left behind.
        retry: False where other processes take part in the step: they cannot know of it.

    Raises:
        ModelError: a slice of one row is too large.
    """
    while True:
        budget = min(token_budget, policy.token_limit or token_budget)
        watch = _Watch(micro_batches(batch, budget, shared_prompts=policy.native))
        try:
            return run(watch)
        except RuntimeError as error:
            if not (retry and is_out_of_memory(error)) or watch.current is None:
                raise
            reason = str(error).splitlines()[0]
        # Outside the handler: the traceback would keep the tensors of the broken try alive.
        policy.zero_grad(set_to_none=True)
        _release(policy.device)
        if watch.current.rows == 1:
            raise _too_large(watch.current, policy, reason)
        policy.token_limit = max(1, _tokens(watch.current, shared=policy.native) // 2)
        log.warning(
            "Out of memory in a slice of %d rows (%s). The step is run again with at most %d "
            "tokens a slice, and so are later ones; the gradient is the same.",
            watch.current.rows,
            reason,
            policy.token_limit,
        )


class _Watch(Sequence[TrainBatch]):
    """Slices in order, knowing which one was handed out last."""

    def __init__(self, parts: Sequence[TrainBatch]) -> None:
        self._parts = parts
        self.current: TrainBatch | None = None

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        return self._parts[index]

    def __iter__(self) -> Iterator[TrainBatch]:
        for part in self._parts:
            self.current = part
            yield part


def _tokens(part: TrainBatch, *, shared: bool) -> int:
    """Tokens of a slice as `micro_batches` counts them."""
    prompts = part.prompt_lengths if shared else part.prompt_lengths[part.prompt_index]
    return int(prompts.sum() + part.completion_lengths.sum())


def _release(device: torch.device) -> None:
    """Give what the broken try held back to the allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def split_event(before: int | None, after: int | None) -> tuple[str, ...]:
    """What a step report says where the limit changed during a step."""
    if before == after:
        return ()
    return (f"nondeterministic_event: memory split, at most {after} tokens a slice from now on",)


def _too_large(part: TrainBatch, policy: Policy, reason: str) -> ModelError:
    tokens = _tokens(part, shared=policy.native)
    rows = Rows(
        prompt=int(part.prompt_lengths.max()),
        completion=int(part.completion_lengths.max()),
        count=part.rows,
    )
    takes, helps = memory_advice(policy, rows)
    return ModelError(
        f"one row of {tokens} tokens does not fit into the memory of {policy.device}: {reason}. "
        f"{takes}",
        where="tokens_per_micro_batch",
        fix=helps,
    )
