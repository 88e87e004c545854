"""Several processes: how they meet, and the policy as each of them holds it.

Gradients are summed over processes, never averaged: the weights of a batch are those of the whole
step. PyTorch's engines average, so each process multiplies its loss by their number.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grouper.algorithms.batching import TrainBatch
from grouper.errors import GrouperError
from grouper.models.policy import Policy, TokenOutputs
from grouper.models.process_group import ProcessGroup, SingleProcess

__all__ = [
    "PARALLEL_POLICIES",
    "DataParallel",
    "FullySharded",
    "ParallelPolicy",
    "Slice",
    "TorchProcessGroup",
    "join_processes",
    "leave_processes",
    "make_parallel",
    "started_by_torchrun",
]


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
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = work()
            except GrouperError as error:
                box[1] = error
        # What the user can put right is told to all, so that none is left waiting for a word.
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise box[1]
        result: Value = box[0]
        return result


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun (or a cluster) started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_processes(*, minutes: float = 30.0) -> ProcessGroup:
    """Meet the other processes that torchrun started, or work alone where it did not.

    Args:
        minutes: how long one process waits for another before it gives up.
    """
    if not started_by_torchrun():
        return SingleProcess()
    if not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(minutes=minutes))
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

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Around one forward and backward; gradients are brought together in the last one."""
        del last
        yield

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
        return tensor

    def clip_grad_norm(self, bound: float) -> float:
        """Scale the whole gradient down to a 2-norm of at most `bound`; returns what it was."""
        return float(nn.utils.clip_grad_norm_(self.policy.trainable().values(), bound))


class DataParallel(ParallelPolicy):
    """Every process holds all weights: PyTorch's DistributedDataParallel."""

    def __init__(self, policy: Policy, processes: ProcessGroup | None = None) -> None:
        super().__init__(policy, processes)
        from torch.nn.parallel import DistributedDataParallel

        with warnings.catch_warnings():
            # The newest torch renames the option, the oldest supported one lacks the new name.
            warnings.simplefilter("ignore", FutureWarning)
            # Buffers are constants (rotary frequencies): nothing to bring together.
            self._ddp = DistributedDataParallel(policy, broadcast_buffers=False)
        self._module = self._ddp

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            yield


class FullySharded(ParallelPolicy):
    """Every process holds a share of each weight: PyTorch's FSDP2.

    Parameters, gradients and optimizer state are DTensors from here on.
    """

    def __init__(self, policy: Policy, processes: ProcessGroup | None = None) -> None:
        super().__init__(policy, processes)
        from torch.distributed.fsdp import fully_shard

        for layer in _blocks(policy):
            fully_shard(layer)
        fully_shard(policy)
        self.split = True

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        module: Any = self.policy
        module.set_requires_gradient_sync(last)
        yield

    def clip_grad_norm(self, bound: float) -> float:
        norm: Any = nn.utils.clip_grad_norm_(self.policy.trainable().values(), bound)
        return float(norm.full_tensor())

    @torch.no_grad()
    def score(self, batch: TrainBatch) -> TokenOutputs:
        outputs = self(batch)
        # The root keeps what it gathered until a backward that does not come here.
        module: Any = self.policy
        module.reshard()
        return outputs

    @torch.no_grad()
    def reference_logprobs(self, weights: dict[str, Tensor], batch: TrainBatch) -> Tensor:
        # The engine gathers what its parameters hold, so the values go there and exactly back.
        parameters = self.policy.trainable()
        own = {name: p.detach().clone() for name, p in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        try:
            return self.score(batch).logprobs
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(own[name])

    def shard(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        from torch.distributed.tensor import distribute_tensor

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

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _blocks(policy: Policy) -> list[nn.Module]:
    """The decoder layers: the units that are gathered one after the other."""
    names = set(getattr(policy.model, "_no_split_modules", None) or ())
    return [m for m in policy.modules() if type(m).__name__ in names]


PARALLEL_POLICIES: dict[str, Callable[[Policy, ProcessGroup], ParallelPolicy]] = {
    "ddp": DataParallel,
    "fsdp": FullySharded,
}


def make_parallel(policy: Policy, processes: ProcessGroup, parallel: str) -> ParallelPolicy:
    """The policy as this group of processes runs it.

    Args:
        policy: loaded with equal weights on every process.
        processes: the processes.
        parallel: a name of `PARALLEL_POLICIES`; of no meaning to a single process.
    """
    make = ParallelPolicy if processes.size == 1 else PARALLEL_POLICIES[parallel]
    return make(policy, processes)
