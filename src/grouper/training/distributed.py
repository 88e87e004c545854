"""A team of several processes, started by torchrun on one machine or many."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grouper.errors import GrouperError
from grouper.models.team import Solo, Team

__all__ = ["ProcessTeam", "join_team", "leave_team", "started_by_torchrun"]

Value = TypeVar("Value")


class ProcessTeam:
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

    def lead(self, work: Callable[[], Value]) -> Value:
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


def join_team(*, minutes: float = 30.0) -> Team:
    """Meet the other processes that torchrun started, or work alone where it did not.

    Args:
        minutes: how long one process waits for another before it gives up.
    """
    if not started_by_torchrun():
        return Solo()
    if not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(minutes=minutes))
    return ProcessTeam()


_LEFT: list[Any] = []


def leave_team(*held: object) -> None:
    """End the process group, if this process is in one.

    Args:
        held: what has used the group (a replica). It is kept alive until the process ends: the
            group's destructor waits for its threads while it holds Python's lock, and one of
            them may be waiting for that lock.
    """
    if dist.is_available() and dist.is_initialized():
        _LEFT.extend((*held, dist.group.WORLD))
        dist.destroy_process_group()
