"""The state of the sampler's slots, on the device and on the host.

`DecodeRows` is on the device: tensors that never move, so that a recorded step can read and change
them. `HostLog` is on the host: what has been drawn, and which sequences are finished. One block of
tokens and log-probs is copied from the first to the second every few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from grouper.sampling.base import SampleRequest, StopStrings
from grouper.sampling.draw import DrawFlags, Drawn, DrawSettings, draw_tokens, uniforms
from grouper.sampling.kv_cache import CacheSize
from grouper.types import FinishReason, SamplingParams


class Finished(NamedTuple):
    """A completed sequence: one entry per token."""

    slot: int
    request: int
    """Its number."""
    reason: FinishReason
    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]


class DecodeRows:
    """Everything that drawing needs of the slots, all of it on the device.

    A free slot keeps drawing from whatever it computes; its tokens are never read, and it stays at
    its first token.

    Args:
        size: number of concurrent sequences, and their lengths.
        vocabulary: number of token ids.
        stop_ids: what must not be drawn before `min_new_tokens`.
        device: of the model.
    """

    def __init__(
        self, size: CacheSize, vocabulary: int, stop_ids: Sequence[int], device: torch.device
    ) -> None:
        self.count = 0
        """Number of slots in use, free ones between them included; they come first."""
        self.vocabulary = vocabulary
        self.tokens = torch.zeros(size.slots, dtype=torch.long, device=device)
        """[slots]: the last token of each."""
        self.drawn = torch.ones_like(self.tokens)
        """[slots]: number of tokens drawn so far, at most the budget."""
        self.budgets = torch.ones_like(self.tokens)
        self.prompts = torch.ones_like(self.tokens)
        """[slots]: length of each prompt in tokens."""
        self._uniforms = torch.zeros(size.slots, size.completion, device=device)
        self.settings = DrawSettings.of([SamplingParams()] * size.slots, device)
        """Of each slot; the flags hold for all requests of this call."""
        self._stops = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._stops[[i for i in stop_ids if i < vocabulary]] = True

    def begin(self, requests: Sequence[SampleRequest]) -> None:
        """Free all slots; these requests come next."""
        self.compact([])
        self.settings = replace(self.settings, flags=DrawFlags.of([r.params for r in requests]))

    def fill(self, slots: Sequence[int], requests: Sequence[SampleRequest]) -> None:
        """Start one request in each of these slots."""
        device = self.tokens.device
        places = torch.tensor(slots, device=device)
        params = [request.params for request in requests]

        self.drawn[places] = 0
        self.budgets[places] = torch.tensor([p.max_new_tokens for p in params], device=device)
        lengths = [len(request.prompt.token_ids) for request in requests]
        self.prompts[places] = torch.tensor(lengths, device=device)
        streams = [uniforms(request.key, self._uniforms.shape[1]) for request in requests]
        self._uniforms[places] = torch.from_numpy(np.stack(streams)).to(device)
        fresh = DrawSettings.of(params, device)
        for held, given in zip(self.settings.tensors(), fresh.tensors(), strict=True):
            held[places] = given
        self.count = max(self.count, max(slots) + 1)

    def free(self, slots: Sequence[int]) -> None:
        """Mark these slots as finished."""
        places = torch.tensor(slots, device=self.tokens.device)
        self.drawn[places] = 1
        self.budgets[places] = 1

    def compact(self, slots: Sequence[int]) -> None:
        """Move these slots to the front, in order, and free all others."""
        places = torch.tensor(slots, dtype=torch.long, device=self.tokens.device)
        before, self.count = self.count, len(slots)
        held = (self.tokens, self.drawn, self.budgets, self.prompts, self._uniforms)
        for tensor in (*held, *self.settings.tensors()):
            tensor[: self.count] = tensor[places]
        self.drawn[self.count : before] = 1
        self.budgets[self.count : before] = 1

    def positions(self, count: int) -> Tensor:
        """[count]: the position of each slot's last token in its sequence."""
        return self.prompts[:count] + self.drawn[:count] - 1

    def draw(self, logits: Tensor, places: Tensor | None = None) -> Drawn:
        """The next token of the first slots, or of those at `places`: [rows] each.

        Args:
            logits: [rows, V].
            places: [rows].
        """
        rows = slice(logits.shape[0]) if places is None else places
        drawn, settings = self.drawn[rows], self.settings.at(rows)
        column = drawn.clamp(max=self._uniforms.shape[1] - 1)[:, None]
        uniform = self._uniforms[rows].gather(1, column)[:, 0]
        early = drawn < settings.minimum if settings.flags.minimum else None
        found = draw_tokens(logits, uniform, settings, early, self._stops)
        self.tokens[rows] = found[0]
        # A sequence that ends before the host checks does not write beyond its budget.
        self.drawn[rows] = torch.minimum(drawn + 1, self.budgets[rows])
        return found


class HostLog:
    """What each slot has drawn, and whether that ends its sequence.

    Args:
        size: number of concurrent sequences, and their lengths.
        steps: maximum number of tokens per slot and block.
        vocabulary: number of token ids.
        stop_ids: ids that end a completion.
        watcher: finds stop strings.
    """

    def __init__(
        self,
        size: CacheSize,
        *,
        steps: int,
        vocabulary: int,
        stop_ids: Sequence[int],
        watcher: Callable[[tuple[str, ...]], StopStrings],
    ) -> None:
        slots, width = size.slots, size.completion + steps
        self.live = np.zeros(slots, dtype=bool)
        """[slots]: whether the slot holds an unfinished sequence."""
        self._requests = np.zeros(slots, dtype=np.int64)
        self._tokens = np.zeros((slots, width), dtype=np.int64)
        self._logprobs = np.zeros((slots, width), dtype=np.float64)
        self._entropies = np.zeros_like(self._logprobs)
        self._counts = np.zeros(slots, dtype=np.int64)
        self._budgets = np.ones(slots, dtype=np.int64)
        self._watcher = watcher
        self._stop_ids = frozenset(stop_ids)
        table = np.zeros(vocabulary, dtype=bool)
        table[[i for i in stop_ids if i < vocabulary]] = True
        self._tables = table[None]
        """[sets of stop strings, V]: tokens that may end a sequence with that set."""
        self._sets: list[tuple[str, ...]] = [()]
        """Of stop strings."""
        self._set = np.zeros(slots, dtype=np.int64)

    def begin(self, slot: int, number: int, params: SamplingParams) -> None:
        """Put a request into a slot."""
        self.live[slot], self._requests[slot], self._counts[slot] = True, number, 0
        self._budgets[slot] = params.max_new_tokens
        if params.stop not in self._sets:
            self._sets.append(params.stop)
            may = np.ones(self._tables.shape[1], dtype=bool)  # as may an id without text
            known = self._watcher(params.stop).candidates[: len(may)]
            may[: len(known)] = known
            self._tables = np.vstack([self._tables, self._tables[0] | may])
        self._set[slot] = self._sets.index(params.stop)

    def drawn_so_far(self, slot: int) -> list[int]:
        """The ids of an unfinished sequence."""
        ids: list[int] = self._tokens[slot, : self._counts[slot]].tolist()
        return ids if self.live[slot] else []

    def longest(self) -> int:
        """Number of tokens drawn by the longest unfinished sequence."""
        return int(self._counts[self.live].max())

    def write(self, block: Drawn, places: np.ndarray) -> list[Finished]:
        """Record a block [steps, places] drawn by these slots; returns the sequences it completes.

        Tokens drawn after the end of a sequence are discarded.
        """
        tokens, logprobs, entropies = (part.cpu().numpy() for part in block)
        live = self.live[places]
        columns = self._counts[places] + np.arange(len(tokens))[:, None]
        # A free slot's last column is of no interest either.
        columns[:, ~live] = self._tokens.shape[1] - 1
        self._tokens[places, columns] = tokens
        self._logprobs[places, columns] = logprobs
        self._entropies[places, columns] = entropies
        ends = columns + 1 >= self._budgets[places]
        ends |= self._tables[self._set[places], tokens]
        ends &= live
        self._counts[places] += len(tokens) * live
        finished = []
        for row in np.flatnonzero(ends.any(0)):
            slot = int(places[row])
            for length in (columns[ends[:, row], row] + 1).tolist():
                reason = self._reason(slot, length)
                if reason is not None:
                    self._counts[slot], self.live[slot] = length, False
                    held = (self._tokens, self._logprobs, self._entropies)
                    drawn = (array[slot, :length].tolist() for array in held)
                    finished.append(Finished(slot, int(self._requests[slot]), reason, *drawn))
                    break
        return finished

    def _reason(self, slot: int, length: int) -> FinishReason | None:
        """Why a sequence ends at this length, or None if it does not."""
        if int(self._tokens[slot, length - 1]) in self._stop_ids:
            return FinishReason.STOP_TOKEN
        stops = self._sets[self._set[slot]]
        if stops and self._watcher(stops).completed(self._tokens[slot, :length].tolist()):
            return FinishReason.STOP_STRING
        return FinishReason.LENGTH if length >= self._budgets[slot] else None

    def compact(self, slots: Sequence[int]) -> None:
        """Move these slots to the front, in order, and free all others."""
        count = len(slots)
        drawn = (self._tokens, self._logprobs, self._entropies, self._requests)
        for array in (*drawn, self._counts, self._budgets, self.live, self._set):
            array[:count] = array[list(slots)]
        self.live[count:] = False
