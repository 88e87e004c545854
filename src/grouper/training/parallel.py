"""Several processes: how they connect, and the copy of the policy that each of them holds.

Every process runs forward and backward over its own slices of a step. Gradients are then summed,
not averaged, because the token weights of a batch are those of the whole step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.pytorch_utils import Conv1D

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
        for number in range(rank, rounds * size, size):
            if number < len(batches):
                yield Slice(number=number, batch=batches[number], own=True)
            elif self.split:
                stand_in = batches[0].without_weight()
                yield Slice(number=number, batch=stand_in, own=False)

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

    Parameters, gradients and optimizer state are DTensors. Layers are gathered one after the other,
    for the forward and again for the backward, and their gradients are summed over the processes
    as soon as the backward has left the layer: a process never holds all gradients of a slice.
    Embedding, last norm and head are gathered for the whole slice.

    Where products are in half precision, the weights of linear layers are rounded before they are
    gathered, which halves what is sent. Autocast would round them after it, so the numbers are the
    same. Gradients are summed in float32, or in float64 if the weights are.
    """

    split = True

    def __init__(self, policy: Policy, processes: ProcessGroup) -> None:
        super().__init__(policy, processes)
        # Without a mesh FSDP moves the weights to a GPU, even in a run with device=cpu.
        mesh = init_device_mesh(policy.device.type, (processes.size,))
        sums = torch.promote_types(policy.model.dtype, torch.float32)
        exact = MixedPrecisionPolicy(reduce_dtype=sums, cast_forward_inputs=False)
        rounded = exact
        if policy.compute_dtype in {torch.bfloat16, torch.float16}:
            rounded = replace(exact, param_dtype=policy.compute_dtype)
        layer_names = getattr(policy.model, "_no_split_modules", None) or ()
        layers = [module for module in policy.modules() if type(module).__name__ in layer_names]
        for layer in layers:  # a list: sharding changes the modules
            unrounded = unrounded_modules(layer)
            if rounded is not exact and unrounded:
                fully_shard(unrounded, mesh=mesh, mp_policy=exact)
            fully_shard(layer, mesh=mesh, mp_policy=rounded)
        # Not rounded: hidden states and the gradients of embedding and head are kept in float32.
        self._sharded = fully_shard(policy, mesh=mesh, mp_policy=exact)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # FSDP averages over processes; the gradient of a step is a sum.
                module.set_gradient_divide_factor(1.0)
                # Otherwise the factor is an operation of NCCL's own, which gloo does not have.
                module.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self) -> None:
        """Do nothing: FSDP has done it in every backward."""

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


def unrounded_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer whose own weights autocast does not round: all but linear ones.

    Norms are computed in the dtype of their weights, and PyTorch's refuse weights in a coarser one.
    """
    modules = []
    for module in layer.modules():
        has_weights = any(True for _ in module.parameters(recurse=False))
        if has_weights and not isinstance(module, (nn.Linear, Conv1D)):
            modules.append(module)
    return modules


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
