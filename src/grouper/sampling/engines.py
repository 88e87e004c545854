"""What runs the model inside the sampler's loop: our slot cache, or a plain cache as fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from grouper.policy import Policy
from grouper.sampling.slots import Decode, Prefill, SlotCache

__all__ = ["Engine", "PlainEngine", "SlotEngine"]


class Engine(Protocol):
    """Slots that hold sequences; logits come back in float32 for the last token of each."""

    refills: bool
    """Whether a finished slot can be refilled while others go on."""

    def prefill(
        self, prompts: list[tuple[int, ...]], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        """Run each prompt once and give it to its slots; logits [len(slots), V]."""
        ...

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Append tokens [rows] at columns [rows] of the first slots; logits [rows, V]."""
        ...

    def keep(self, slots: Sequence[int], columns: int) -> None:
        """Move these slots to the front, in order; the others are gone."""
        ...


class SlotEngine:
    """The model's own code over our slot cache: no padding, prompts run once, slots refilled."""

    refills = True

    def __init__(self, policy: Policy, *, slots: int, capacity: int) -> None:
        self._policy = policy
        self._cache = SlotCache(slots, capacity)

    def prefill(
        self, prompts: list[tuple[int, ...]], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        device = self._policy.device
        owner = torch.tensor(owners, device=device)
        layout = Prefill(self._cache, prompts, torch.tensor(slots, device=device), owner)
        hidden = self._policy.hidden_states(layout, layout.token_ids, layout.position_ids)
        return self._policy.logits(hidden[layout.last])[owner]

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        layout = Decode(self._cache, positions)
        hidden = self._policy.hidden_states(layout, tokens[None], positions[None])
        return self._policy.logits(hidden)

    def keep(self, slots: Sequence[int], columns: int) -> None:
        self._cache.keep(torch.tensor(slots, device=self._policy.device), columns)


class PlainEngine:
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

    def keep(self, slots: Sequence[int], columns: int) -> None:
        del columns
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
