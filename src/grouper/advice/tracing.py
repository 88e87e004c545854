"""The peak of a forward and backward, measured on tensors that have shapes and no content.

The model's own code runs, with our attention, our head, LoRA and checkpointing, on `FakeTensor`s:
every operation returns the shape it would return and computes nothing. Each storage is counted
from the operation that makes it until nothing refers to it any more, the way an allocator without
rounding would.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # torch's own shape engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grouper.algorithms.batching import Rows, TrainBatch
from grouper.kernels.switch import planned, switched_off
from grouper.models.attention import SharedPrompts
from grouper.models.policy import Policy


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Bytes of all storages that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.bytes = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls, slow if dispatched
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

        def gone(_: object) -> None:
            self.bytes -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)


class Tracer:
    """Traces updates of one policy.

    Args:
        policy: on the meta device; its tensors are replaced.
        device: the kind of device to count for: it decides which attention kernel runs.
    """

    def __init__(self, policy: Policy, device: str) -> None:
        self.policy = policy
        self._device = device
        self.mode = FakeTensorMode()
        # Give every parameter and buffer a device; shared ones stay shared.
        made: dict[int, Tensor] = {}
        for tensor in (*policy.parameters(), *policy.buffers()):
            fake: Tensor = FakeTensor(self.mode, tensor.detach(), torch.device("cpu"))
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            made[id(tensor)] = fake
        for part in policy.modules():
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)  # noqa: SLF001 - tied weights stay tied
            for table in tables:
                table.update({name: made[id(t)] for name, t in table.items() if t is not None})
        self._owned = list(made.values())

    def update(self, rows: Rows, *, accumulated: bool) -> tuple[int, int]:
        """One slice of an update.

        Args:
            rows: the slice.
            accumulated: whether earlier slices of the step have left their gradient.

        Returns:
            Bytes that the forward leaves for the backward, and the most there are at a time beside
            the weights and the gradients of earlier slices.
        """
        hidden_states = self._prepared(rows.batch(self.policy.vocabulary))
        with self._run() as live:
            trainable = list(self.policy.trainable().values())
            for parameter in trainable:
                parameter.grad = torch.zeros_like(parameter) if accumulated else None
            base = live.bytes
            hidden = hidden_states()
            targets = torch.empty(rows.count * rows.completion, dtype=torch.int64)
            logprobs, _ = self.policy.score(hidden, targets, 1.0, entropy_gradient=False)
            del hidden
            kept = live.bytes - base
            (logprobs * torch.empty_like(logprobs)).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return kept, live.peak - base

    def forward(self, rows: Rows) -> int:
        """The peak in bytes beside the weights of running prompts without a gradient."""
        hidden_states = self._prepared(rows.batch(self.policy.vocabulary))
        with self._run() as live, torch.no_grad():
            base = live.bytes
            hidden_states()
        return live.peak - base

    def _prepared(self, batch: TrainBatch) -> Callable[[], Tensor]:
        """What gives the hidden states of all targets.

        Everything that depends on contents is worked out here, on real tensors.
        """
        policy = self.policy
        if not policy.native:
            last = int(batch.completion_lengths.max())
            shape = (batch.rows, int(batch.prompt_lengths.max()) + last)

            def padded() -> Tensor:
                ids = torch.empty(shape, dtype=torch.int64)
                with policy.autocast():
                    output = policy.decoder(input_ids=ids, position_ids=ids, use_cache=False)
                states: Tensor = output.last_hidden_state
                return states[:, -last:].flatten(0, 1)

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
    def _run(self) -> Iterator[_Live]:
        live = _Live()
        fused = switched_off() if self._device == "mps" else contextlib.nullcontext()
        with planned(self._device), fused, self.mode, live:
            for tensor in self._owned:
                live.count(tensor)
            yield live
