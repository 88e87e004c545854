"""Several processes: how they connect, and the copy of the policy that each of them holds.

Every process runs forward and backward over its own slices of a step. Gradients are then summed,
not averaged, because the token weights of a batch are those of the whole step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from grouper.algorithms.batching import TrainBatch, micro_batches
from grouper.errors import GrouperError
from grouper.models.device import find_device
from grouper.models.merging import unsharded
from grouper.models.policy import Policy, TokenOutputs
from grouper.models.process_group import ProcessGroup

# --- the processes that torchrun started ---------------------------------------------------------


Value = TypeVar("Value")


class TorchProcessGroup(ProcessGroup):
    """The processes of `torch.distributed`'s default group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._alone = False

    def sum_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def gather(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def on_rank0(self, work: Callable[[], Value]) -> Value:
        if self._alone:  # nested in other work, whose result the other processes are waiting for
            return work()
        outcome: list[Any] = [None, None]  # the result of the work, and its error
        if self.rank == 0:
            self._alone = True
            try:
                outcome[0] = work()
            except GrouperError as error:
                outcome[1] = error
            finally:
                self._alone = False
        # User errors are raised on every process, so that none is left waiting.
        dist.broadcast_object_list(outcome, src=0)
        result: Value
        result, failure = outcome
        if failure is not None:
            raise failure
        return result


def join_processes() -> ProcessGroup:
    """Connect to the other processes that torchrun started, if it did.

    A process waits half an hour for another before it gives up.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return ProcessGroup()
    if not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(find_device("auto"))
            backend = "cpu:gloo,cuda:nccl"
        # In a thread: its wait in C++ would ignore Ctrl-C, which may have ended the others.
        connecting = ThreadPoolExecutor(1).submit(
            dist.init_process_group, backend, timeout=timedelta(minutes=30)
        )
        connecting.result()
    return TorchProcessGroup()


# Process groups that were left, and objects that used them: kept alive, see `leave_processes`.
_LEFT: list[Any] = []


def leave_processes(*users: object) -> None:
    """Leave the process group, if this process is in one.

    Args:
        users: objects that have used the group (a replica). They are kept alive until the process
            exits: the group's destructor waits for its threads while holding the GIL, and one of
            them may be waiting for the GIL.
    """
    if dist.is_available() and dist.is_initialized():
        _LEFT.extend((*users, dist.group.WORLD))
        dist.destroy_process_group()


# --- the policy on each process ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One forward and backward of a step."""

    number: int
    """Number within the step, over all processes."""
    batch: TrainBatch
    own: bool
    """False for a stand-in."""
    last: bool
    """True in the last round of the step, after which split weights sum their gradients."""


class ParallelPolicy:
    """The policy on a process that holds all weights; there may be other such processes.

    Args:
        policy: loaded with the same weights on every process.
        processes: the processes that hold it.
    """

    split = False
    """Whether weights and optimizer state are split over the processes."""

    def __init__(self, policy: Policy, processes: ProcessGroup | None = None) -> None:
        self.policy = policy
        self.processes = processes or ProcessGroup()

    def slices(self, batch: TrainBatch, budget: int) -> Iterator[Slice]:
        """Yield this process's slices of a step, in order.

        Split weights need equally many forwards on every process. A process with fewer slices runs
        a stand-in without weight, whose gradient is zero and whose tallies must not be counted.

        Args:
            batch: the step.
            budget: tokens in one slice; fewer if the step would not reach every process.
        """
        rank = self.processes.rank
        size = self.processes.size
        tokens = int(batch.prompt_lengths.sum() + batch.completion_lengths.sum())
        budget = min(budget, self.policy.token_limit or budget, -(-tokens // size))
        batches = micro_batches(batch, budget, shared_prompts=self.policy.native)
        rounds = -(-len(batches) // size)
        last_round = (rounds - 1) * size  # number of its first slice
        for number in range(rank, rounds * size, size):
            if number < len(batches):
                is_last = number >= last_round
                yield Slice(number=number, batch=batches[number], own=True, last=is_last)
            elif self.split:
                stand_in = batches[0].without_weight()
                yield Slice(number=number, batch=stand_in, own=False, last=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a slice's loss to this process's gradients."""
        del last
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def sum_gradients(self) -> None:
        """Sum the gradients of all processes, after each has run its slices of a step."""
        for parameter in self.policy.trainable().values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.processes.sum_(parameter.grad)

    @torch.no_grad()
    def score(self, batch: TrainBatch, weights: dict[str, Tensor] | None = None) -> TokenOutputs:
        """Run one forward without a gradient.

        Args:
            batch: the rows.
            weights: used in place of the trainable ones; from `snapshot` or `shard`.
        """
        outputs: TokenOutputs = torch.func.functional_call(self.policy, weights or {}, (batch,))
        return outputs

    def shard(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Split unsharded trainable weights as the weights of this process are."""
        return weights

    def whole_weights(self) -> dict[str, Tensor] | None:
        """Return all weights unsharded for saving, or None if the model holds them unsharded."""
        return None


class FullySharded(ParallelPolicy):
    """The policy on a process that holds a shard of each weight: PyTorch's FSDP2.

    Parameters, gradients and optimizer state are DTensors.
    """

    split = True

    def __init__(self, policy: Policy, processes: ProcessGroup) -> None:
        super().__init__(policy, processes)
        # Without a mesh FSDP moves the weights to a GPU, even in a run with device=cpu.
        mesh = init_device_mesh(policy.device.type, (processes.size,))
        # The decoder layers are gathered one after the other.
        layer_names = getattr(policy.model, "_no_split_modules", None) or ()
        layers = [module for module in policy.modules() if type(module).__name__ in layer_names]
        for layer in layers:  # a list: sharding changes the modules
            fully_shard(layer, mesh=mesh)
        self._sharded = fully_shard(policy, mesh=mesh)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._sharded.set_requires_gradient_sync(last)
        # FSDP averages over processes; the gradient of a step is a sum.
        super().backward(loss * self.processes.size, last=last)

    def sum_gradients(self) -> None:
        """Do nothing: FSDP has done it in the last backward."""

    @torch.no_grad()
    def score(self, batch: TrainBatch, weights: dict[str, Tensor] | None = None) -> TokenOutputs:
        # FSDP gathers the values of its parameters, so these are replaced, and restored exactly.
        parameters = self.policy.trainable()
        replacements = weights or {}
        originals = {name: parameters[name].clone() for name in replacements}
        for name, value in replacements.items():
            parameters[name].copy_(value)
        try:
            outputs = super().score(batch)
            # The root keeps the gathered weights until a backward, and there is none here.
            self._sharded.reshard()
            return outputs
        finally:
            for name, value in originals.items():
                parameters[name].copy_(value)

    def shard(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        parameters = self.policy.trainable()
        return {name: split_as(value, parameters[name]) for name, value in weights.items()}

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor] | None:
        # Every process takes part in gathering; only rank 0 keeps the result.
        weights = {}
        for name, parameter in self.policy.model.named_parameters():
            value = unsharded(parameter.detach())
            if self.processes.rank == 0:
                weights[name] = value.cpu()
        return weights


def split_as(value: Tensor, parameter: Any) -> Tensor:
    """Shard a tensor of a parameter's shape like that parameter."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,  # every process has the whole tensor, so none needs to send it
    )


def make_parallel(policy: Policy, processes: ProcessGroup, parallel: str) -> ParallelPolicy:
    """Return the policy as this group of processes runs it.

    Args:
        policy: loaded with the same weights on every process.
        processes: the processes.
        parallel: `ddp` or `fsdp`; ignored for a single process.
    """
    if parallel == "fsdp" and processes.size > 1:
        return FullySharded(policy, processes)
    return ParallelPolicy(policy, processes)
