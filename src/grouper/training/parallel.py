"""Several processes: how they meet, and the policy as each of them holds it.

Gradients are summed over processes, never averaged: the weights of a batch are those of the whole
step. PyTorch's engines average, so each process multiplies its loss by their number.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from grouper.algorithms.batching import TrainBatch
from grouper.errors import GrouperError
from grouper.models.policy import Policy, TokenOutputs
from grouper.models.process_group import ProcessGroup, SingleProcess

# --- the processes that torchrun started ---------------------------------------------------------


Value = TypeVar("Value")


class TorchProcessGroup:
    """The processes of `torch.distributed`'s default group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def sum_(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def on_rank0(self, work: Callable[[], Value]) -> Value:
        box: list[Any] = [None, None]  # what it returns, and what it raises
        if self.rank == 0:
            try:
                box[0] = work()
            except GrouperError as error:
                box[1] = error
        # What the user can put right is raised by all, so that none is left waiting for a word.
        dist.broadcast_object_list(box, src=0)
        result: Value
        result, problem = box
        if problem is not None:
            raise problem
        return result


def join_processes() -> ProcessGroup:
    """Meet the other processes that torchrun started, or work alone where it did not.

    One process waits for another for half an hour before it gives up.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return SingleProcess()
    if not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    return TorchProcessGroup()


_LEFT: list[Any] = []


def leave_processes(*held: object) -> None:
    """End the process group, if this process is in one.

    Args:
        held: what has used the group (a replica). It is kept alive until the process ends: the
            group's destructor waits for its threads while it holds Python's lock, and one of
            them may be waiting for that lock.
    """
    if dist.is_available() and dist.is_initialized():
        _LEFT.extend((*held, dist.group.WORLD))
        dist.destroy_process_group()


# --- the policy as the update runs it ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One forward and backward of a step."""

    number: int
    """Within the step, over all processes."""
    batch: TrainBatch
    own: bool
    """False for a stand-in."""
    last: bool
    """Whether it is this process's last one of the step."""


class ParallelPolicy:
    """One process, one policy.

    Args:
        policy: the policy; calling the replica calls it.
        processes: the processes that hold it.
    """

    def __init__(self, policy: Policy, processes: ProcessGroup | None = None) -> None:
        self.policy = policy
        self.processes = processes or SingleProcess()
        self.split = False
        """Whether weights and optimizer state are split over the processes."""
        self._module: nn.Module = policy

    def __call__(self, batch: TrainBatch, *, entropy_gradient: bool = False) -> TokenOutputs:
        outputs: TokenOutputs = self._module(batch, entropy_gradient=entropy_gradient)
        return outputs

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around one forward and backward; gradients are brought together in the last one."""
        del last
        return nullcontext()

    def token_budget(self, batch: TrainBatch, budget: int) -> int:
        """Tokens in one slice, small enough that every process gets a part of the step."""
        tokens = int(batch.prompt_lengths.sum() + batch.completion_lengths.sum())
        return min(budget, -(-tokens // self.processes.size))

    def share(self, parts: Sequence[TrainBatch]) -> Iterator[Slice]:
        """This process's slices of a step, one after the other.

        The engines need equally many forwards on every process. Who has fewer runs a stand-in
        without weight: its gradient is zero and what it says of itself is not to be counted.
        """
        rank, size = self.processes.rank, self.processes.size
        rounds = -(-len(parts) // size)
        own = 0
        for number, part in enumerate(parts):
            if number % size == rank:
                own += 1
                yield Slice(number=number, batch=part, own=True, last=own == rounds)
        if own < rounds:
            blank = replace(parts[0], weights=torch.zeros_like(parts[0].weights))
            yield Slice(number=len(parts) + rank, batch=blank, own=False, last=True)

    @torch.no_grad()
    def score(self, batch: TrainBatch) -> TokenOutputs:
        """One forward without a gradient."""
        return self(batch)

    def reference_logprobs(self, weights: dict[str, Tensor], batch: TrainBatch) -> Tensor:
        """Log-probs [R, T] under other trainable weights, from `snapshot` or `shard`."""
        return self.policy.logprobs_with(weights, batch)

    def shard(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole trainable weights, as this replica holds its own."""
        return weights

    def whole_weights(self) -> dict[str, Tensor] | None:
        """All weights in one piece for saving, or None where the model has them so itself."""
        return None

    def whole(self, tensor: Tensor) -> Tensor:
        """A weight or gradient in one piece; every process takes part."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def clip_grad_norm(self, bound: float) -> float:
        """Scale the whole gradient down to a 2-norm of at most `bound`; returns what it was."""
        norm = nn.utils.clip_grad_norm_(self.policy.trainable().values(), bound)
        return float(self.whole(norm))


class DataParallel(ParallelPolicy):
    """Every process holds all weights: PyTorch's DistributedDataParallel."""

    def __init__(self, policy: Policy, processes: ProcessGroup | None = None) -> None:
        super().__init__(policy, processes)
        with warnings.catch_warnings():
            # The newest torch renames the option, the oldest supported one lacks the new name.
            warnings.simplefilter("ignore", FutureWarning)
            # Buffers are constants (rotary frequencies): nothing to bring together.
            self._ddp = DistributedDataParallel(policy, broadcast_buffers=False)
        self._module = self._ddp

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()


class FullySharded(ParallelPolicy):
    """Every process holds a share of each weight: PyTorch's FSDP2.

    Parameters, gradients and optimizer state are DTensors from here on.
    """

    def __init__(self, policy: Policy, processes: ProcessGroup | None = None) -> None:
        super().__init__(policy, processes)
        # The decoder layers are gathered one after the other.
        layers = getattr(policy.model, "_no_split_modules", None) or ()
        for module in [m for m in policy.modules() if type(m).__name__ in layers]:
            fully_shard(module)
        self._sharded = fully_shard(policy)
        self.split = True

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        self._sharded.set_requires_gradient_sync(last)
        return nullcontext()

    @torch.no_grad()
    def score(self, batch: TrainBatch) -> TokenOutputs:
        outputs = self(batch)
        # The root keeps what it gathered until a backward that does not come here.
        self._sharded.reshard()
        return outputs

    @torch.no_grad()
    def reference_logprobs(self, weights: dict[str, Tensor], batch: TrainBatch) -> Tensor:
        # The engine gathers what its parameters hold, so the values go there and exactly back.
        own = self.policy.snapshot()
        parameters = self.policy.trainable()
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        try:
            return self.score(batch).logprobs
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(own[name])

    def shard(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        parameters: dict[str, Any] = dict(self.policy.trainable())
        return {
            name: distribute_tensor(
                value.to(parameters[name].device),
                parameters[name].device_mesh,
                parameters[name].placements,
                src_data_rank=None,  # every process has the whole: none needs to send anything
            )
            for name, value in weights.items()
        }

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor] | None:
        # Every process takes part in gathering; only the first one keeps the result.
        weights = {}
        for name, parameter in self.policy.model.named_parameters():
            value = self.whole(parameter.detach())
            if self.processes.rank == 0:
                weights[name] = value.cpu()
        return weights


def make_parallel(policy: Policy, processes: ProcessGroup, parallel: str) -> ParallelPolicy:
    """The policy as this group of processes runs it.

    Args:
        policy: loaded with equal weights on every process.
        processes: the processes.
        parallel: `ddp` or `fsdp`; of no meaning to a single process.
    """
    if processes.size == 1:
        return ParallelPolicy(policy, processes)
    return {"ddp": DataParallel, "fsdp": FullySharded}[parallel](policy, processes)
