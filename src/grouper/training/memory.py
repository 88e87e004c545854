"""When memory runs out in the middle of a step: the step is run again in smaller slices.

A slice whose backward broke off has left part of its gradient behind, so the whole gradient of
the step is thrown away and made anew; that needs no second copy of it. Slices add up to the same
gradient however the step is cut, so nothing but time and the last bits of a sum changes.

Several processes agree on it before the slice that brings their gradients together: until then
none of them waits for another.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from grouper.algorithms.batching import TrainBatch, micro_batches
from grouper.errors import ModelError
from grouper.models.policy import Policy
from grouper.models.team import Team
from grouper.training.parallel import Replica

__all__ = ["is_out_of_memory", "split_event", "with_enough_memory"]

log = logging.getLogger(__name__)

Result = TypeVar("Result")

SIGNS = ("MPS backend out of memory", "DefaultCPUAllocator: can't allocate memory")
"""What allocators that have no exception of their own say."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or any(s in str(error) for s in SIGNS)


def with_enough_memory(
    replica: Replica,
    batch: TrainBatch,
    token_budget: int,
    run: Callable[[Sequence[TrainBatch], Callable[[], None]], Result],
) -> Result:
    """Run a step over its slices; where memory runs out, again over smaller ones.

    The budget that fits is kept in `policy.token_limit`, so that later steps start from it.

    Args:
        replica: whose memory it is; every process of its team calls this for the same step.
        batch: the step.
        token_budget: tokens in one slice, before anything has been learnt.
        run: does the whole step from the beginning, whatever an earlier try left behind. It gets
            the slices and what it has to call once, where processes begin to wait for each other.

    Raises:
        ModelError: a slice of one row is too large; or memory ran out where other processes are
            waiting: in any slice of weights that are split, else in the last one of a process.
    """
    policy, team = replica.policy, replica.team
    while True:
        budget = min(token_budget, policy.token_limit or token_budget)
        watch = _Watch(micro_batches(batch, budget, shared_prompts=policy.native), replica)
        try:
            return run(watch, watch.meet)
        except _AnotherLimitError as told:
            limit, reason = told.limit, ""
        except RuntimeError as error:
            if not is_out_of_memory(error) or watch.current is None:
                raise
            limit, reason = None, str(error).splitlines()[0]
            if not watch.may_be_repeated:
                raise _while_others_wait(watch.current, policy, reason) from error
        # Outside the handler: the traceback would keep the tensors of the broken try alive.
        policy.zero_grad(set_to_none=True)
        _release(policy.device)
        policy.token_limit = limit or _agreed(team, _smaller(watch.current, policy, reason))


def _smaller(part: TrainBatch | None, policy: Policy, reason: str) -> int | ModelError:
    """Half the tokens of a slice that did not fit."""
    assert part is not None, "memory ran out in a slice"
    if part.rows == 1:
        return _too_large(part, policy, reason)
    limit = max(1, _tokens(part, shared=policy.native) // 2)
    log.warning(
        "Out of memory in a slice of %d rows (%s). The step is run again with at most %d "
        "tokens a slice, and so are later ones; the gradient is the same.",
        part.rows,
        reason,
        limit,
    )
    return limit


def _agreed(team: Team, mine: int | ModelError | None) -> int | None:
    """The least limit that a process of the team asks for, or None.

    Raises:
        ModelError: on every process: one of them cannot go on.
    """
    told = team.gather(mine)
    for problem in told:
        if isinstance(problem, ModelError):
            raise problem
    return min((limit for limit in told if isinstance(limit, int)), default=None)


class _AnotherLimitError(Exception):
    """Memory ran out on another process."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class _Watch(Sequence[TrainBatch]):
    """Slices in order, knowing which one was handed out last."""

    def __init__(self, parts: Sequence[TrainBatch], replica: Replica) -> None:
        self._parts = parts
        self._team = replica.team
        self.current: TrainBatch | None = None
        self.may_be_repeated = replica.team.size == 1 or not replica.split
        """False where other processes may be waiting in the middle of what this one does."""

    def meet(self) -> None:
        """All processes have come here; from now on they wait for each other.

        Raises:
            _AnotherLimitError: memory has run out on one of them.
        """
        if self.may_be_repeated:
            limit = _agreed(self._team, None)
            if limit is not None:
                raise _AnotherLimitError(limit)
        self.may_be_repeated = self._team.size == 1

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


def _while_others_wait(part: TrainBatch, policy: Policy, reason: str) -> ModelError:
    half = max(1, _tokens(part, shared=policy.native) // 2)
    return ModelError(
        f"memory ran out in a slice of {part.rows} rows while other processes waited for it, so "
        f"the step cannot be run again: {reason}",
        where="tokens_per_micro_batch",
        fix=f"Set it to {half} and go on with --resume --allow-changes; `grouper plan` says what "
        "a slice takes.",
    )


def _too_large(part: TrainBatch, policy: Policy, reason: str) -> ModelError:
    tokens = _tokens(part, shared=policy.native)
    return ModelError(
        f"one row of {tokens} tokens does not fit into the memory of {policy.device}: {reason}",
        where="tokens_per_micro_batch",
        fix="In the order of what they usually save: shorter rows (sampling.max_new_tokens, "
        "prompt.max_prompt_tokens), model.gradient_checkpointing: true, model.lora or "
        "optimizer.name: adamw_8bit, model.compute_dtype: bfloat16. `grouper plan` says what each "
        "part takes.",
    )
