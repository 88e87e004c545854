"""Run as a program with the words of `grouper`, on a CUDA device that is not there.

Tensors of the device hold a tensor of the CPU, which every operation computes with; one that mixes
tensors of both devices fails, as it would on a card. CUDA graphs are recorded call by call, undone
at the end of the capture, as a capture computes nothing, and played back. FlashAttention's ragged
rows are attention by the book. `pretend_cuda.cpp` must be preloaded. Prints as JSON how often
graphs and ragged rows were used.
"""

from __future__ import annotations

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any, Self

import safetensors.torch
import torch
import transformers.pytorch_utils
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from grouper.models import attention

aten = torch.ops.aten
# Operations that take tensors of both devices on a card, too.
CROSSING = {
    *(aten.copy_.default, aten._to_copy.default, aten.index.Tensor),
    *(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default),
}
# What the CPU would answer for itself: no fused attention, no pinned memory.
ANSWERS = {aten._fused_sdp_choice.default: 0, aten.is_pinned.default: False}
CARD = SimpleNamespace(
    name="pretended",
    total_memory=24 << 30,
    multi_processor_count=16,
    shared_memory_per_block_optin=101_376,
)
used = {"captures": 0, "replays": 0, "ragged": 0}


class OnDevice(Tensor):
    """A tensor that says it is on the device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cuda:0",
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Tensor:
        made = OnDevice(self.inner.clone(), self.requires_grad)
        return torch.nn.Parameter(made, self.requires_grad) if is_parameter(self) else made

    def tolist(self) -> Any:
        return self.inner.tolist()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()


def is_parameter(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_param", False)


def held(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives, on the device if its tensors are, or if it is asked to be."""
    if func in ANSWERS:
        return ANSWERS[func]
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    here = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
    if there and here and func not in CROSSING:
        raise RuntimeError(f"{func} mixes tensors of the card and of the CPU")
    device = kwargs.get("device")
    goes_there = bool(there) if device is None else torch.device(device).type == "cuda"
    options = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if not there and not goes_there:
        return func(*args, **options)
    if device is not None:
        options["device"] = "cpu"
    args_held, options = tree_map(held, args), tree_map(held, options)
    graph = Graph.current
    result = (func if graph is None else graph.record(func))(*args_held, **options)
    if func is aten.copy_.default:  # the target may be of either device
        return args[0]
    known = {id(tensor.inner): tensor for tensor in there}

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in known and goes_there:
            return known[id(value)]
        return OnDevice(value) if goes_there else value.clone()

    return tree_map(back, result)


class Pretending(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Graph:
    """A CUDA graph: what was called while it was captured."""

    current: Graph | None = None

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._before: dict[int, Any] = {}

    def capture_begin(self, **options: Any) -> None:
        Graph.current = self
        used["captures"] += 1

    def record(self, func: Any) -> Any:
        """The operation, which is noted; what it writes over is kept."""

        def recorded(*args: Any, **options: Any) -> Any:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    storage = value.untyped_storage()
                    self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
            result = func(*args, **options)
            self.calls.append((func, args, options, result))
            return result

        return recorded

    def capture_end(self) -> None:
        Graph.current = None
        for storage, content in self._before.values():
            storage.copy_(content)

    def replay(self) -> None:
        used["replays"] += 1
        for func, args, options, result in self.calls:
            again = func(*args, **options)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Stream:
    def __init__(self, *device: Any) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


def ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *longest: int,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """Causal attention of sequences one after the other, aligned at their ends."""
    used["ragged"] += 1
    out = []
    ends = zip(query_ends.tolist()[1:], key_ends.tolist()[1:], strict=True)
    query_start = key_start = 0
    for query_end, key_end in ends:
        q = query[query_start:query_end].transpose(0, 1)
        k, v = (
            t[key_start:key_end].transpose(0, 1).repeat_interleave(len(q) // t.shape[1], 0)
            for t in (key, value)
        )
        scores = (q @ k.transpose(1, 2)).float() * scale
        columns = torch.arange(k.shape[1], device=q.device)
        places = columns[k.shape[1] - q.shape[1] :, None]
        hidden = columns > places
        if window_size[0] >= 0:
            hidden = hidden | (columns < places - window_size[0])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append((weights.to(v.dtype) @ v).transpose(0, 1))
        query_start, key_start = query_end, key_end
    return torch.cat(out)


def pretend() -> None:
    """Replace what asks the driver, and begin."""
    of_the_driver: dict[str, Any] = {
        "_lazy_init": None,
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": CARD,
        "get_device_capability": (8, 6),
        "is_bf16_supported": True,
        "mem_get_info": (20 << 30, 24 << 30),
        "get_per_process_memory_fraction": 1.0,
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated"), 1 << 30),
        **dict.fromkeys(("reset_peak_memory_stats", "empty_cache", "synchronize"), None),
        **dict.fromkeys(("set_device", "set_rng_state", "manual_seed", "manual_seed_all"), None),
        "get_rng_state": torch.get_rng_state(),
        "current_stream": Stream(),
        "stream": contextlib.nullcontext(),
        "graph_pool_handle": (0, 1),
    }
    for name, answer in of_the_driver.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name, cls in {"Stream": Stream, "CUDAGraph": Graph}.items():
        setattr(torch.cuda, name, cls)
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    torch.accelerator.synchronize = lambda *_: None
    Tensor.pin_memory = lambda self, *_: self
    attention.ragged_attention = ragged
    for name in ("storage_ptr", "storage_size"):
        of_the_cpu = getattr(safetensors.torch, name)
        for module in (safetensors.torch, transformers.pytorch_utils):
            setattr(module, name, lambda t, of_the_cpu=of_the_cpu: of_the_cpu(held(t)))
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)
    Pretending().__enter__()


if __name__ == "__main__":
    from grouper.cli.main import main

    pretend()
    try:
        main(sys.argv[1:])
    finally:
        print(json.dumps(used))
