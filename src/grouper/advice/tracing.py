"""Peak memory of a forward and backward, traced on tensors that have shapes and no content.

The model's code runs, with Grouper's attention and head, LoRA and checkpointing, on `FakeTensor`s:
every operation returns the shape it would return and computes nothing. Each storage is counted
from the operation that makes it until nothing refers to it any more, as an allocator without
rounding would count it.

Weights that are split over processes are traced in a process group of PyTorch's that has no other
members: FSDP2 itself runs, gathers layers of the right shape and frees them again.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # torch's own shape engine
from torch.testing._internal.distributed.fake_pg import FakeStore  # no public module has it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grouper.algorithms.batching import Rows, TrainBatch
from grouper.kernels.switch import planned, switched_off
from grouper.models.attention import SharedPrompts
from grouper.models.merging import own_shard, unsharded
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.training.parallel import FullySharded


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the bytes of all storages that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.bytes = 0
        self.peak = 0
        self._counted: dict[int, weakref.ref[Any]] = {}
        """Id of each live storage -> a reference that reports its end."""
        self._sizes: dict[int, int] = {}
        """Id of each live storage -> its bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two thirds of all calls, slow if dispatched
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return result

    def __enter__(self) -> Self:
        # FSDP frees gathered weights by resizing their storage, which no operation reports.
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if id(storage) in self._counted:
                self._resized(id(storage), size)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]  # put back below
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # as before

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, or of this process's shard of it, until it is freed."""
        storage = own_shard(tensor).untyped_storage()
        key = id(storage)
        if key in self._counted:
            return

        def subtract(_: object) -> None:
            self._resized(key, 0)
            del self._counted[key]
            del self._sizes[key]

        self._counted[key] = weakref.ref(storage, subtract)
        self._sizes[key] = 0
        self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int) -> None:
        """Count a storage with its present size."""
        self.bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.bytes)


class OneOf(ProcessGroup):
    """The first of several processes of which the others do not exist: there are only shapes."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size


@contextlib.contextmanager
def pretended_processes(size: int) -> Iterator[ProcessGroup]:
    """Be the first of `size` processes inside this block, for traces of split weights."""
    if size == 1:
        yield ProcessGroup()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield OneOf(size)
    finally:
        dist.destroy_process_group()


class Tracer:
    """Traces updates of one policy.

    Args:
        policy: on the meta device; its tensors are replaced.
        device: type of the device to count for, which decides which attention kernel runs.
    """

    def __init__(self, policy: Policy, device: str) -> None:
        self.policy = policy
        self._device = device
        self.mode = FakeTensorMode()
        # Give every parameter and buffer a device; shared ones stay shared.
        fakes: dict[int, Tensor] = {}
        for tensor in (*policy.parameters(), *policy.buffers()):
            fake: Tensor = FakeTensor(self.mode, tensor.detach(), torch.device("cpu"))
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = fake
        for module in policy.modules():
            _replace(module._parameters, fakes)  # noqa: SLF001 - tied weights stay tied
            _replace(module._buffers, fakes)  # noqa: SLF001 - as above
        self._tensors = list(fakes.values())

    def split(self, processes: ProcessGroup) -> None:
        """Split the weights over processes, as a run does. To be called once.

        Args:
            processes: those of `pretended_processes`.
        """
        FullySharded(self.policy, processes)
        shards = [own_shard(parameter) for parameter in self.policy.parameters()]
        self._tensors = [*shards, *self.policy.buffers()]

    @property
    def weights(self) -> int:
        """Bytes of the weights and buffers that a process holds between forwards."""
        # Of storages: the last process's shard is filled up to the size of the others.
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors)

    def update(self, rows: Rows, *, accumulated: bool) -> tuple[int, int]:
        """Trace one slice of an update.

        Args:
            rows: the slice.
            accumulated: whether earlier slices of the step have left their gradient.

        Returns:
            Bytes that the forward leaves for the backward, and peak bytes without the weights and
            the gradients of earlier slices.
        """
        hidden_states = self._prepare(rows.batch(self.policy.vocabulary))

        def scores(targets: Tensor) -> tuple[Tensor, Tensor]:
            hidden = hidden_states()
            return self.policy.score(hidden, targets, 1.0, entropy_gradient=False)

        # In the place of the module's own, so that a call gathers split weights.
        self.policy.forward = scores  # type: ignore[method-assign,assignment]  # no batch
        with self._run() as live:
            trainable = list(self.policy.trainable().values())
            for parameter in trainable:
                parameter.grad = torch.zeros_like(parameter) if accumulated else None
            base = live.bytes
            targets = torch.empty(rows.count * rows.completion, dtype=torch.int64)
            with warnings.catch_warnings():
                # It warns of views among the outputs, which nothing here changes in place.
                warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
                logprobs, _ = self.policy(targets)
            for_backward = live.bytes - base
            loss = (logprobs * torch.empty_like(logprobs)).sum()
            loss.backward()
        return for_backward, live.peak - base

    def gathering(self) -> int:
        """Trace gathering the largest split weight in one piece; return the peak in bytes."""
        largest = max(self.policy.trainable().values(), key=lambda parameter: parameter.nbytes)
        with self._run() as live, torch.no_grad():
            base = live.bytes
            unsharded(largest)
        return live.peak - base

    def forward(self, rows: Rows) -> int:
        """Trace running prompts without a gradient; return the peak in bytes without weights."""
        hidden_states = self._prepare(rows.batch(self.policy.vocabulary))
        with self._run() as live, torch.no_grad():
            base = live.bytes
            hidden_states()
        return live.peak - base

    def _prepare(self, batch: TrainBatch) -> Callable[[], Tensor]:
        """Return a function that computes the hidden states of all targets.

        Everything that depends on contents is computed here, on real tensors.
        """
        policy = self.policy
        if not policy.native:
            completion = int(batch.completion_lengths.max())
            prompt = int(batch.prompt_lengths.max())
            shape = (batch.rows, prompt + completion)

            def padded() -> Tensor:
                ids = torch.empty(shape, dtype=torch.int64)
                with policy.autocast():
                    output = policy.decoder(input_ids=ids, position_ids=ids, use_cache=False)
                states: Tensor = output.last_hidden_state
                return states[:, -completion:].flatten(0, 1)

            return padded

        layout = SharedPrompts(batch)
        config: Any = policy.model.config.get_text_config()
        for window in {None, getattr(config, "sliding_window", None)}:
            layout.mask(window)
        if self._device == "cuda":
            layout.ragged()
        layout.convert(self.mode.from_tensor)

        def shared() -> Tensor:
            hidden = policy.hidden_states(layout, layout.token_ids, layout.position_ids)
            return hidden.index_select(0, layout.sources)

        return shared

    @contextlib.contextmanager
    def _run(self) -> Iterator[Live]:
        """Run a `with` block on fake tensors as on the device, and count its storages."""
        live = Live()
        fused = switched_off() if self._device == "mps" else contextlib.nullcontext()
        with planned(self._device), fused, self.mode, live:
            for tensor in self._tensors:
                live.count(tensor)
            yield live


def _replace(table: dict[str, Any], fakes: dict[int, Tensor]) -> None:
    """Replace the tensors of a module by their fakes."""
    for name, tensor in table.items():
        if tensor is not None:
            table[name] = fakes[id(tensor)]
