"""Decoding as one captured CUDA graph: a step that needs nothing of the host.

What a step reads and writes lies in tensors that stay where they are: the tokens, how many each
row has drawn, the ring's column, the tokens drawn so far. The step is captured once for each
bucket of rows, and again where the ring has to grow; then it is only replayed. Without a GPU the
same step runs op by op, which is how it is tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grouper.attention import AttentionSpec
from grouper.policy import Policy
from grouper.sampling.decode_kernel import Cache, DecodeState, Pair, kernel_decode
from grouper.sampling.engines import CLOSED, SlotEngine
from grouper.sampling.slots import SlotCache
from grouper.sampling.writing import Block, Rows

__all__ = ["StaticEngine", "allows_capture"]

log = logging.getLogger(__name__)

FIRST_WIDTH = 512
"""Columns of the ring to begin with. Columns that nobody has written cost memory and no time."""

SHRINK = 4
"""Rows are moved together once a bucket is filled to this part: a capture costs what it saves in
some hundred steps."""

SIZED_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that look at the longest position on the host in every forward."""

Attend = Callable[[Tensor, Pair, Cache, DecodeState, AttentionSpec], Tensor]


class _Layout:
    """One new token in each of the first rows (an `attention.Layout`)."""

    def __init__(self, cache: SlotCache, state: DecodeState, attend: Attend) -> None:
        self._cache = cache
        self._state = state
        self._attend = attend

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        layer = self._cache.layer(spec.layer, key, value)
        (keys, values), (own_keys, own_values) = layer.prompts, layer.own
        query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
        cache = ((keys.data, values.data), (own_keys.data, own_values.data))
        out = self._attend(query, (key, value), cache, self._state, spec)
        return out.transpose(0, 1)[None]


class StaticEngine(SlotEngine):
    """Slots whose decoding step can be replayed.

    Args:
        policy: the model.
        slots: sequences at the same time.
        prompt: tokens of the longest prompt.
        completion: tokens of the longest completion.
        attend: the attention of a step.
        graphs: whether to capture steps; None: on a GPU, for models that allow it.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        prompt: int,
        completion: int,
        attend: Attend = kernel_decode,
        graphs: bool | None = None,
    ) -> None:
        super().__init__(policy, slots=slots, prompt=prompt, completion=completion)
        device = policy.device
        self._attend = attend
        self._slots = slots
        self._completion = completion
        if graphs is None:
            graphs = device.type == "cuda" and allows_capture(policy.model.config)
        self._captures = graphs
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        """By (rows, whether stop tokens may be banned), for the tensors as they are now."""
        self._pool: Any = None
        self._cache.width = min(FIRST_WIDTH, completion)
        self._column = torch.full((1,), -1, device=device)
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        """[1]: the step of the stretch."""
        self._block: Block | None = None
        self._places = torch.zeros(slots, dtype=torch.long, device=device)
        """[slots]: the place of each row's prompt."""
        self._prompt_lengths = torch.ones(0, dtype=torch.long, device=device)
        self._members = torch.zeros(0, 0, dtype=torch.long, device=device)
        self._bucket = slots
        """Rows that a step runs."""
        self._settled = False
        """Whether the tensors above say who is where."""

    def prefill(
        self, prompts: list[tuple[int, ...]], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        room = self._cache.prompts
        logits = super().prefill(prompts, slots, owners)
        if self._cache.prompts != room:
            self._graphs.clear()
        self._settled = False
        return logits

    def keep(self, slots: Sequence[int]) -> None:
        """Rows move within their tensors, prompts stay: what was captured remains true."""
        self._owners = [self._owners[slot] for slot in slots]
        self._lengths = [self._lengths[slot] for slot in slots]
        index = torch.tensor(slots, device=self._policy.device)
        for layer in self._cache.layers.values():
            for store in layer.own:
                store.data[: len(slots)] = store.data.index_select(0, index)
        self._bucket = min(self._slots, 1 << (len(slots) - 1).bit_length())
        self._settled = False

    def crowded(self, live: int, slots: int) -> bool:
        del slots
        return live * SHRINK <= self._bucket

    def advance(self, rows: Rows, steps: int, *, early: bool) -> Block:
        count = rows.count
        self._owners, self._lengths = self._owners[:count], self._lengths[:count]
        if count > self._bucket:
            self._bucket = self._slots
        self._make_room(max(self._lengths) + steps)
        self._settle()
        tokens, logprobs = self._block_of(steps)
        self._cursor.zero_()
        for _ in range(steps):
            self._run_step(rows, early)
        self._cache.column = (self._cache.column + steps) % self._cache.width
        self._lengths = [n if n == CLOSED else n + steps for n in self._lengths]
        return tokens[:steps, :count], logprobs[:steps, :count]

    def release(self) -> None:
        self._graphs.clear()
        self._pool = None

    def _block_of(self, steps: int) -> Block:
        """Where the tokens of a stretch go."""
        if self._block is None or self._block[0].shape[0] < steps:
            self._graphs.clear()
            device = self._policy.device
            tokens = torch.zeros(steps, self._slots, dtype=torch.long, device=device)
            self._block = (tokens, torch.zeros(steps, self._slots, device=device))
        return self._block

    def _make_room(self, longest: int) -> None:
        """Let the ring have room for the longest sequence at the end of the stretch."""
        cache = self._cache
        wanted = min(longest, self._completion)  # a row writes no further than its budget
        if wanted <= cache.width:
            return
        self._graphs.clear()
        by_age = [(cache.column + 1 + i) % cache.width for i in range(cache.width)]
        cache.column = cache.width - 1
        self._column.fill_(cache.column)
        cache.width = min(max(wanted, 2 * cache.width), self._completion)
        for layer in cache.layers.values():
            for store in layer.own:
                store.resize(width=cache.width, columns=by_age)

    def _settle(self) -> None:
        """Say in tensors who continues which prompt."""
        if self._settled:
            return
        device, places = self._policy.device, self._cache.prompts
        groups: list[list[int]] = [[] for _ in range(places)]
        for row, place in enumerate(self._owners):
            groups[place].append(row)
        size = max(self._members.shape[1], *(1 << (len(g) - 1).bit_length() for g in groups if g))
        if self._members.shape != (places, size):
            self._graphs.clear()
            self._members = torch.zeros(places, size, dtype=torch.long, device=device)
            self._prompt_lengths = torch.ones(places, dtype=torch.long, device=device)
        self._members.copy_(torch.tensor([g + [-1] * (size - len(g)) for g in groups]))
        lengths = [len(prompt or (0,)) for prompt in self._prompts]
        self._prompt_lengths[: len(lengths)] = torch.tensor(lengths, device=device)
        owners = self._owners + [0] * (self._slots - len(self._owners))
        self._places.copy_(torch.tensor(owners))
        self._settled = True

    def _run_step(self, rows: Rows, early: bool) -> None:
        if not self._captures:
            self._step(rows, early)
            return
        key = (self._bucket, early)
        if key not in self._graphs:
            self._step_captured(rows, early)
        else:
            self._graphs[key].replay()

    def _step_captured(self, rows: Rows, early: bool) -> None:
        """Run a step once to warm it up, then capture it; the step itself has been done."""
        device = self._policy.device
        side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        here = torch.cuda.current_stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            self._step(rows, early)
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(rows, early)
        except RuntimeError as problem:
            log.warning(
                "%s cannot be captured as a CUDA graph, so sampling starts every op from the "
                "host, which is slower: %s",
                type(self._policy.model).__name__,
                problem,
            )
            self._captures = False
            return
        self._graphs[self._bucket, early] = graph

    def _step(self, rows: Rows, early: bool) -> None:
        """Feed every row its last token, and draw the next; no op waits for the device."""
        assert self._block is not None
        count = self._bucket
        self._column.add_(1).remainder_(self._cache.width)
        state = DecodeState(
            column=self._column,
            lengths=rows.drawn[:count],
            owners=self._places[:count],
            prompt_lengths=self._prompt_lengths,
            members=self._members,
        )
        layout = _Layout(self._cache, state, self._attend)
        hidden = self._policy.hidden_states(
            layout, rows.tokens[None, :count], rows.positions(count)[None]
        )
        drawn = rows.draw(self._policy.logits(hidden), early=early)
        for held, new in zip(self._block, drawn, strict=True):
            held[:, :count].index_copy_(0, self._cursor, new[None].to(held.dtype))
        self._cursor.add_(1)


def allows_capture(config: Any) -> bool:
    """Whether a forward of a model with this configuration never asks for a value on the host."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type")} | {
        part.get("rope_type") for part in rope.values() if isinstance(part, dict)
    }
    return not kinds & SIZED_BY_LENGTH
