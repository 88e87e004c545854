"""What runs the model inside the sampler's loop: our slot cache, or a plain cache as fallback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from grouper.kernels.cpu.packing import pack
from grouper.models.policy import Policy
from grouper.sampling.layouts import Decode, Groups, Prefill
from grouper.sampling.slots import SlotCache
from grouper.sampling.writing import Block, Rows

COMPACT_SHARE = 0.125
"""Finished slots are closed once they are this share of all: moving a cache costs, too."""


class Engine(Protocol):
    """Slots that hold sequences; logits come back in float32 for the last token of each."""

    refills: bool
    """Whether a finished slot can be refilled while others go on."""

    def prefill(
        self, prompts: list[tuple[int, ...]], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        """Run each prompt once and give it to its slots; logits [len(slots), V]."""
        ...

    def advance(self, rows: Rows, steps: int, *, early: bool) -> Block:
        """So many tokens more in every slot in use.

        Args:
            rows: where the tokens come from and go to.
            steps: of decoding and drawing.
            early: whether a sequence may be before its `min_new_tokens`.
        """
        ...

    def close(self, slot: int) -> None:
        """What this slot holds is finished; until the slot is filled or goes, it runs along."""
        ...

    def crowded(self, live: int, slots: int) -> bool:
        """Whether so many live ones of the slots in use are worth `keep`."""
        ...

    def keep(self, slots: Sequence[int]) -> None:
        """Move these slots to the front, in order; the others and their room are gone."""
        ...

    def release(self) -> None:
        """Nothing more is asked: give back what sampling alone needs."""
        ...


class Eager(ABC):
    """Steps one after the other, each op started by the host as it comes."""

    @abstractmethod
    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Append tokens [rows] at positions [rows] of the first slots; logits [rows, V]."""

    def advance(self, rows: Rows, steps: int, *, early: bool) -> Block:
        count = rows.count
        drawn = [
            rows.draw(self.decode(rows.tokens[:count], rows.positions(count)), early=early)
            for _ in range(steps)
        ]
        tokens, logprobs, entropies = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        return tokens, logprobs, entropies

    def crowded(self, live: int, slots: int) -> bool:
        return slots - live >= COMPACT_SHARE * slots

    def release(self) -> None:  # noqa: B027 - what an engine holds goes with it
        """Nothing is held beside the engine itself."""


CLOSED = -1


class SlotEngine(Eager):
    """The model's own code over our slot cache: no padding, prompts run once, slots refilled.

    Args:
        policy: the model.
        slots: sequences at the same time.
        prompt: tokens of the longest prompt.
        completion: tokens of the longest completion.
    """

    refills = True

    def __init__(self, policy: Policy, *, slots: int, prompt: int, completion: int) -> None:
        self._policy = policy
        self._cache = SlotCache(slots, prompt, completion)
        self._packed = pack(policy.model, rows=slots, completion=completion)
        self._prompts: list[tuple[int, ...] | None] = []
        """By place in the cache; None: free."""
        self._last: dict[int, Tensor] = {}
        """Place -> hidden state [H] of the prompt's last token."""
        self._owners: list[int] = []
        """The place of each slot's prompt."""
        self._lengths: list[int] = []
        """Completion tokens each slot has written; `CLOSED` once nobody reads it."""
        self._groups: Groups | None = None

    def prefill(
        self, prompts: list[tuple[int, ...]], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        device = self._policy.device
        places = self._place(prompts, set(slots))
        self._run(
            [
                (p, place)
                for p, place in zip(prompts, places, strict=True)
                if place not in self._last
            ]
        )
        missing = max(slots) + 1 - len(self._owners)
        self._owners += [places[0]] * missing
        self._lengths += [0] * missing
        for slot, owner in zip(slots, owners, strict=True):
            self._owners[slot], self._lengths[slot] = places[owner], 0
        self._groups = None
        hidden = torch.stack([self._last[place] for place in places])
        return self._policy.logits(hidden)[torch.tensor(owners, device=device)]

    def _place(self, prompts: list[tuple[int, ...]], slots: set[int]) -> list[int]:
        """Where each prompt lies, or is to be put: where nobody reads any more, or after all."""
        read = {owner for slot, owner in enumerate(self._owners) if slot not in slots}
        known = {p: i for i, p in enumerate(self._prompts) if p is not None}
        wanted = {known[p] for p in prompts if p in known}
        free = [i for i in range(len(self._prompts)) if i not in read | wanted]
        for prompt in prompts:
            if prompt in known:
                continue
            place = free.pop() if free else len(self._prompts)
            if place == len(self._prompts):
                self._prompts.append(None)
            self._prompts[place] = prompt
            self._last.pop(place, None)
            known[prompt] = place
        return [known[p] for p in prompts]

    def _run(self, fresh: list[tuple[tuple[int, ...], int]]) -> None:
        if not fresh:
            return
        self._cache.make_room(len(self._prompts))
        places = torch.tensor([place for _, place in fresh], device=self._policy.device)
        layout = Prefill(self._cache, [prompt for prompt, _ in fresh], places)
        with self._packed.used():
            hidden = self._policy.hidden_states(layout, layout.token_ids, layout.position_ids)
        last = hidden.index_select(0, layout.last)
        self._last |= {place: last[i] for i, (_, place) in enumerate(fresh)}

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        device = self._policy.device
        if len(self._owners) > len(tokens):  # all had finished, and fewer were left to begin
            self._owners, self._lengths = self._owners[: len(tokens)], self._lengths[: len(tokens)]
            self._groups = None
        self._cache.turn(max(self._lengths))
        self._lengths = [n if n == CLOSED else n + 1 for n in self._lengths]
        if self._groups is None:
            self._groups = Groups(self._owners, len(self._prompts), device)
        sizes = [len(prompt or ()) for prompt in self._prompts]
        # A closed row sees what it writes itself: a softmax over nothing would not be finite.
        lengths = [max(n, 1) for n in self._lengths]
        layout = Decode(self._cache, self._groups, lengths, sizes, device)
        with self._packed.used():
            hidden = self._policy.hidden_states(layout, tokens[None], positions[None])
        return self._policy.logits(hidden)

    def close(self, slot: int) -> None:
        self._lengths[slot] = CLOSED

    def keep(self, slots: Sequence[int]) -> None:
        self._owners = [self._owners[slot] for slot in slots]
        self._lengths = [self._lengths[slot] for slot in slots]
        places = sorted(set(self._owners))
        self._prompts = [self._prompts[place] for place in places]
        self._last = {}
        self._owners = [places.index(owner) for owner in self._owners]
        self._groups = None
        self._cache.keep(slots, places, max(self._lengths))


class PlainEngine(Eager):
    """Left-padded rows over transformers' own cache, for models without the interface."""

    refills = False

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._cache: Any = None
        self._mask = torch.empty(0)

    def prefill(
        self, prompts: list[tuple[int, ...]], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        device = self._policy.device
        assert list(slots) == list(range(len(slots))), "a plain cache is filled all at once"
        width = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
        self._cache = DynamicCache(config=self._policy.model.config)
        self._mask = mask
        logits = self._forward(ids, (mask.cumsum(1) - 1).clamp(min=0))
        owner = torch.tensor(owners, device=device)
        self._cache.batch_select_indices(owner)
        self._mask = self._mask[owner]
        return logits[owner]

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(tokens.shape[0], 1)], dim=1)
        return self._forward(tokens[:, None], positions[:, None])

    def close(self, slot: int) -> None:
        """Its row runs along."""

    def keep(self, slots: Sequence[int]) -> None:
        index = torch.tensor(slots, device=self._mask.device)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        with self._policy.autocast():
            output = self._policy.decoder(
                input_ids=ids,
                attention_mask=self._mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
            )
        return self._policy.logits(output.last_hidden_state[:, -1])
