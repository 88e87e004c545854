"""Counts the kernels of a computation and the bytes they move, without running it.

The tensors have shapes and dtypes and no memory (`meta` or fake). Every operation that PyTorch
would start as a kernel counts as one, with what it reads and what it writes; so does every launch
of a Triton kernel. Views and bare allocations cost nothing. Caches on the chip do not count: what
one kernel writes and the next one reads is moved twice.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grouper.kernels.switch import planned
from grouper.kernels.triton.language import launches

# Operations by their names without overloads. A result of the first is not written yet, or is a
# view although its schema does not say so.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
FREE |= {"lift_fresh", "set_", "resize_"}
# What they are given first is only looked at, or overwritten.
WRITING = {"zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros"}
WRITING |= {"new_ones", "new_full", "fill_", "zero_", "copy_"}
# Of a table, a cache or a vocabulary these touch what they name and not the rest.
READING_PARTS = {"embedding", "index_select", "gather", "index"}
WRITING_PARTS = {"index_copy_", "index_copy", "index_put_", "scatter_", "index_fill_"}
# Products of matrices: what a card computes fast, and everything else does not belong to.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}


Share = Callable[[str, Tensor], float]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel."""

    name: str
    bytes: int


class TensorCosts(TorchDispatchMode):
    """What runs inside the block.

    Args:
        share: of a tensor that a Triton kernel of this name is given, the part that it touches;
            left out: all of it.
    """

    def __init__(self, share: Share = lambda *_: 1.0) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self._share = share

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes for kernel in self.kernels)

    def bytes_of(self, wanted: Callable[[str], bool]) -> int:
        """Those of the kernels with such a name."""
        return sum(kernel.bytes for kernel in self.kernels if wanted(kernel.name))

    def table(self) -> str:
        """Kernels by name, those that move most first: for a message."""
        sizes: Counter[str] = Counter()
        for kernel in self.kernels:
            sizes[kernel.name] += kernel.bytes
        counts = Counter(kernel.name for kernel in self.kernels)
        lines = (f"{n / 1e9:9.3f} GB {counts[name]:6} x {name}" for name, n in sizes.most_common())
        return "\n".join(["", *lines])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        written = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        # Of fake tensors their device and the like are asked here as well.
        if written and name not in FREE and not _is_view(func):
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.kernels.append(Kernel(name, _moved(name, read, written)))
        return result

    def launched(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        """A listener of `language.launches`."""
        self.kernels.append(Kernel(name, int(sum(self._share(name, t) * size(t) for t in tensors))))


def _is_view(func: Any) -> bool:
    """Whether results share the memory of what is given, unchanged."""
    aliases = [r.alias_info for r in func._schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _moved(name: str, read: list[Tensor], written: list[Tensor]) -> int:
    out = sum(map(size, written))
    if name in WRITING:
        source = read[1:] if name == "copy_" else []
        return out + sum(map(size, source))
    if name in READING_PARTS:
        # The indices, and each element that is picked, once from there and once to here.
        return 2 * out + sum(size(t) for t in read if not t.is_floating_point())
    if name in WRITING_PARTS:
        return 2 * size(read[-1]) + sum(size(t) for t in read[1:-1])
    return out + sum(map(size, read))


def size(tensor: Tensor) -> int:
    """Bytes of a tensor; what is only repeated (a stride of 0) counts once."""
    count = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride or not length else 1
    return count


@contextlib.contextmanager
def costs_on_cuda(share: Share = lambda *_: 1.0) -> Iterator[TensorCosts]:
    """What a computation on tensors without memory would cost on a CUDA device.

    Args:
        share: as in `TensorCosts`.
    """
    costs = TensorCosts(share)
    with planned("cuda"), launches(costs.launched), costs:
        yield costs
