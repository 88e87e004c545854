"""A step recorded once and replayed: the CPU's counterpart of a CUDA graph.

A decoding step of a small model is a few hundred operations of microseconds each, and much of its
time is spent between them: in the model's Python code, in PyTorch's dispatcher, in allocations. A
step that reads and writes tensors at fixed addresses performs the same operations every time, on
new contents. So one normal run is observed, and every operation that reaches PyTorch's dispatcher
and every call of our own kernels is recorded. In a replay each is one call from a list, and views
cost nothing. Intermediate results share one block of memory, whose regions are reused once they are
no longer read. Products with bfloat16 weights read a packed copy of them (`PackedWeights`).

As with CUDA graphs, decisions made on the host are fixed at recording. A step that reads a value on
the host, or whose shapes depend on values, is not recorded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tag, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from grouper.kernels.cpu.library import Tensors, function, library, listened, packed

ALIGNMENT = 64
"""Bytes of a cache line."""
MOST_PACKED = 1 << 30
"""Maximum number of bytes of weights that are kept as a second copy."""

_aten = torch.ops.aten
ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
COPIES = frozenset({_aten._to_copy.default, _aten.clone.default})  # noqa: SLF001 - torch names it so
PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""Ways to read a CPU tensor that bypass the dispatcher."""


Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A call of one of our kernels."""

    name: str
    tensors: Tensors
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Operation:
    """A call of one of PyTorch's operations; `results`: its new tensors, none if in place."""

    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]


@dataclass(slots=True)
class _Life:
    """The first and the last entry that use a block of memory, both included."""

    size: int
    first: int
    last: int
    offset: int = 0


def packable(weights: Iterable[Tensor]) -> list[Tensor]:
    """The bfloat16 weights [n, k] that a recording packs; none if their sum is too large.

    Args:
        weights: of linear layers.
    """
    halves = [w.detach() for w in weights if w.dtype is torch.bfloat16 and w.dim() == 2]
    served = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch leaves it so
    served = served and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 - no public name
    small = sum(w.numel() * w.element_size() for w in halves) <= MOST_PACKED
    return halves if served and small else []


class PackedWeights:
    """Weights in the layout that oneDNN multiplies by, packed when first needed.

    Otherwise a product with few rows spends up to half its time converting the weight.
    The weights must not change while this is in use.

    Args:
        weights: those of a model, on the CPU.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        self._weights = {w.data_ptr(): w for w in packable(weights)}
        self._packed: dict[int, Tensor] = {}

    def product(self, args: Any, kwargs: Any) -> Callable[[], Tensor] | None:
        """The same product with a packed weight; None if the weight is not packed."""
        *added, x, turned = args
        place = turned.data_ptr()
        weight = self._weights.get(place)
        # More than a bias is added for adapters, or the product is scaled.
        linear = not kwargs and all(bias.dim() == 1 for bias in added)
        if weight is None or not linear or turned.shape != weight.T.shape:
            return None
        if turned.stride() != weight.T.stride():
            return None
        if place not in self._packed:
            self._packed[place] = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))  # noqa: SLF001 - no public name
        multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - no public name
        return partial(multiply, x, self._packed[place], *(added or [None]), "none", [], "")


class _Recorder(TorchDispatchMode):
    """Runs every operation as usual and records it, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.entries: list[_Kernel | _Operation] = []
        self.lives: dict[int, _Life] = {}
        """Memory that the step itself allocates, by the address of its storage."""
        self.refused = False
        """Whether an operation ran that cannot be replayed."""
        self._held: list[Tensor] = []
        """Keeps tensors alive, so that no address is reused while the step is recorded."""

    def kernel(self, name: str, tensors: Tensors, numbers: tuple[float, ...]) -> None:
        """Record a call of one of our kernels."""
        self._add(_Kernel(name, tensors, numbers), [t for t in tensors if t is not None])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = func(*args, **(kwargs or {}))
        taken, made = list(_tensors((args, kwargs))), list(_tensors(given))
        known = {_address(t) for t in taken}
        fresh = [t for t in made if _address(t) not in known]
        opaque = any(_address(t) == 0 < t.numel() for t in fresh)
        changes = func._schema.is_mutable  # noqa: SLF001 - torch has no public name for it
        # In a replay an operation either modifies its arguments or fills its results.
        both = changes and bool(fresh)
        self.refused |= opaque or both or _depends_on_contents(func, args)
        for tensor in fresh:
            size = tensor.untyped_storage().nbytes()
            self.lives.setdefault(_address(tensor), _Life(size, len(self.entries), -1))
        self._held += fresh
        if func not in ALLOCATIONS and (fresh or changes):  # a view stays at its address
            results = () if changes else tuple(made)
            self._add(_Operation(func, args, kwargs or {}, results), taken + made)
        return given

    def _add(self, entry: _Kernel | _Operation, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if life := self.lives.get(_address(tensor)):
                life.last = len(self.entries)
                life.first = min(life.first, life.last)
        self._held += tensors
        self.entries.append(entry)


class _Overheard(TorchFunctionMode):
    """Detects that the step reads contents on the host."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self._recorder.refused |= func in READS
        return func(*args, **(kwargs or {}))


def _depends_on_contents(call: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape of a result depends on the contents of its arguments."""
    if call is _aten.index.Tensor:
        return any(t.dtype in {torch.bool, torch.uint8} for t in _tensors(args[1]))
    return bool({Tag.data_dependent_output, Tag.dynamic_output_shape} & set(call.tags))


def record(step: Step, weights: PackedWeights | None = None) -> Step | None:
    """Run a step once and return a graph that repeats it; None if it cannot be replayed.

    Args:
        step: reads and writes existing CPU tensors, without gradients and without other effects.
        weights: packed copies for products to read; sums may then be rounded in another order.
    """
    recorder = _Recorder()
    with _Overheard(recorder), recorder, listened(recorder.kernel):
        step()
    if recorder.refused or library() is None:
        return None
    return _Graph(recorder, weights or PackedWeights()).play


class _Graph:
    """A recorded step.

    Args:
        recorder: holds the recorded entries.
        weights: as in `record`.
    """

    def __init__(self, recorder: _Recorder, weights: PackedWeights) -> None:
        self._weights = weights
        lives = {address: life for address, life in recorder.lives.items() if life.last >= 0}
        # PyTorch aligns what it allocates to cache lines.
        block = torch.empty(_arranged(list(lives.values())), dtype=torch.uint8)
        self._lives = lives
        self._storage = block.untyped_storage()
        self._moved: dict[int, Tensor] = {}
        self._kept: list[Tensors] = []
        """Keeps the tensors alive that kernels point to."""
        self._runs = [self._run(entry) for entry in recorder.entries]

    def play(self) -> None:
        """Replay the step."""
        for run in self._runs:
            run()

    def _place(self, given: Any) -> Any:
        """The graph's own copy of a tensor; anything else unchanged."""
        if not isinstance(given, Tensor):
            return given
        life = self._lives.get(_address(given))
        if life is None:
            return given
        if id(given) not in self._moved:
            offset = life.offset + given.storage_offset() * given.element_size()
            moved = torch.empty(0, dtype=given.dtype).set_(
                self._storage, offset // given.element_size(), given.shape, given.stride()
            )
            self._moved[id(given)] = moved
        return self._moved[id(given)]

    def _run(self, entry: _Kernel | _Operation) -> Callable[[], object]:
        """The call that replays an entry."""
        if isinstance(entry, _Kernel):
            tensors = tuple(self._place(t) for t in entry.tensors)
            self._kept.append(tensors)
            arguments = ctypes.create_string_buffer(packed(tensors, entry.numbers))
            return partial(function(entry.name), arguments)
        args, kwargs = tree_map(self._place, (entry.args, entry.kwargs))
        results = [self._place(t) for t in entry.results]
        if not results:
            return partial(entry.call, *args, **kwargs)
        if entry.call in COPIES:
            return partial(results[0].copy_, args[0])
        if entry.call in PRODUCTS and (product := self._weights.product(args, kwargs)):
            return partial(_copy, product, results)
        into = _into(entry.call) if len(results) == 1 else None
        if into is not None:
            return partial(into, *args, **kwargs, out=results[0])
        return partial(_copy, partial(entry.call, *args, **kwargs), results)


def _tensors(given: Any) -> Iterator[Tensor]:
    """All tensors nested in tuples, lists and dictionaries."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple | list):
        for part in given:
            yield from _tensors(part)
    elif isinstance(given, dict):
        yield from _tensors(tuple(given.values()))


def _copy(call: Callable[[], Any], places: Sequence[Tensor]) -> None:
    for place, tensor in zip(places, _tensors(call()), strict=True):
        place.copy_(tensor)


@cache
def _into(call: Any) -> Any | None:
    """The same operation with its result as an argument `out`."""
    wanted = [(a.name, str(a.type)) for a in call._schema.arguments]  # noqa: SLF001 - torch has no public name for it
    packet = call.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        arguments = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]  # noqa: SLF001 - as above
        outs = [a.name for a in other._schema.arguments if a.is_out]  # noqa: SLF001 - as above
        if outs == ["out"] and arguments == wanted:
            return other
    return None


def _address(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 if it is opaque (oneDNN's layouts)."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _arranged(lives: Sequence[_Life]) -> int:
    """Assign offsets so that no two lifetimes that overlap share memory; returns the bytes needed.

    The largest are placed first, each at the lowest offset that is free for its whole lifetime.
    """
    placed: list[_Life] = []
    for life in sorted(lives, key=lambda life: -life.size):
        others = [p for p in placed if p.first <= life.last and life.first <= p.last]
        life.offset = 0
        for other in sorted(others, key=lambda p: p.offset):
            if life.offset + life.size <= other.offset:
                break
            end = other.offset + other.size
            life.offset = max(life.offset, -(-end // ALIGNMENT) * ALIGNMENT)
        placed.append(life)
    return max((p.offset + p.size for p in placed), default=0)
