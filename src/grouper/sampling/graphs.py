"""Decoding as one recorded step, which is played back: it needs nothing of the host.

What a step reads and writes lies in tensors that stay where they are: the tokens, how many each
row has drawn, the ring's column, the tokens drawn so far. The step is recorded once for each
bucket of rows, and again where the ring has to grow (`replay.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from grouper.models.attention import AttentionSpec
from grouper.models.policy import Policy
from grouper.sampling.decode_kernel import Cache, DecodeState, Pair
from grouper.sampling.engines import CLOSED, SlotEngine
from grouper.sampling.replay import OpByOp, Replay
from grouper.sampling.slots import SlotCache
from grouper.sampling.writing import Block, Rows

FIRST_WIDTH = 512
"""Columns of the ring to begin with. Columns that nobody has written cost memory and no time."""

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
        replay: records steps.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        prompt: int,
        completion: int,
        attend: Attend,
        replay: Replay,
    ) -> None:
        super().__init__(policy, slots=slots, prompt=prompt, completion=completion)
        device = policy.device
        self._attend = attend
        self._slots = slots
        self._completion = completion
        self._replay = replay
        self._recorded: dict[tuple[int, bool], Callable[[], None]] = {}
        """By (rows, whether stop tokens may be banned), for the tensors as they are now."""
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
            self._recorded.clear()
        self._settled = False
        return logits

    def keep(self, slots: Sequence[int]) -> None:
        """Rows move within their tensors, prompts stay: what was captured remains true."""
        self._owners = [self._owners[slot] for slot in slots]
        self._lengths = [self._lengths[slot] for slot in slots]
        device = self._policy.device
        moves = [(place, slot) for place, slot in enumerate(slots) if place != slot]
        places, sources = torch.tensor(moves, dtype=torch.long, device=device).view(-1, 2).unbind(1)
        for layer in self._cache.layers.values() if moves else ():
            for store in layer.own:
                store.data[places] = store.data[sources]
        self._bucket = min(self._slots, self._replay.bucket(len(slots)))
        self._settled = False

    def crowded(self, live: int, slots: int) -> bool:
        del slots
        return live <= self._replay.share * self._bucket

    def advance(self, rows: Rows, steps: int, *, early: bool) -> Block:
        count = rows.count
        self._owners, self._lengths = self._owners[:count], self._lengths[:count]
        if count > self._bucket:
            self._bucket = self._slots
        self._make_room(max(self._lengths) + steps)
        self._settle()
        tokens, logprobs, entropies = (part[:steps, :count] for part in self._block_of(steps))
        self._cursor.zero_()
        for _ in range(steps):
            self._run_step(rows, early)
        self._cache.column = (self._cache.column + steps) % self._cache.width
        self._lengths = [n if n == CLOSED else n + steps for n in self._lengths]
        return tokens, logprobs, entropies

    def release(self) -> None:
        self._recorded.clear()
        self._replay = OpByOp()

    def _block_of(self, steps: int) -> Block:
        """Where the tokens of a stretch go."""
        if self._block is None or self._block[0].shape[0] < steps:
            self._recorded.clear()
            device = self._policy.device
            tokens = torch.zeros(steps, self._slots, dtype=torch.long, device=device)
            logprobs = torch.zeros(steps, self._slots, device=device)
            self._block = (tokens, logprobs, torch.zeros_like(logprobs))
        return self._block

    def _make_room(self, longest: int) -> None:
        """Let the ring have room for the longest sequence at the end of the stretch."""
        cache = self._cache
        wanted = min(longest, self._completion)  # a row writes no further than its budget
        if wanted <= cache.width:
            return
        self._recorded.clear()
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
            self._recorded.clear()
            self._members = torch.zeros(places, size, dtype=torch.long, device=device)
            self._prompt_lengths = torch.ones(places, dtype=torch.long, device=device)
        self._members.copy_(torch.tensor([g + [-1] * (size - len(g)) for g in groups]))
        lengths = [len(prompt or (0,)) for prompt in self._prompts]
        self._prompt_lengths[: len(lengths)] = torch.tensor(lengths, device=device)
        owners = self._owners + [0] * (self._slots - len(self._owners))
        self._places.copy_(torch.tensor(owners))
        self._settled = True

    def _run_step(self, rows: Rows, early: bool) -> None:
        key = (self._bucket, early)
        if key in self._recorded:
            self._recorded[key]()
            return
        step = partial(self._step, rows, early)
        recorded = self._replay.record(step)
        if recorded is None:
            self._replay, recorded = OpByOp(), step
        self._recorded[key] = recorded

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
        tokens, positions = rows.tokens[None, :count], rows.positions(count)[None]
        with self._packed.used():
            hidden = self._policy.hidden_states(layout, tokens, positions)
        drawn = rows.draw(self._policy.logits(hidden), early=early)
        for held, new in zip(self._block, drawn, strict=True):
            held[:, :count].index_copy_(0, self._cursor, new[None].to(held.dtype))
        self._cursor.add_(1)
