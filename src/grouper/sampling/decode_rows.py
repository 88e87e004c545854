"""The state of the sampler's slots, on the device and on the host.

`DecodeRows` is on the device: tensors that never move, so that a recorded step can read and change
them. `HostLog` is on the host: the sampled tokens of each slot, and which sequences are finished.
One block of tokens and log-probs is copied from the first to the second every few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """A completed sequence, with one entry per token in each list."""

    slot: int
    request: int
    """The number of the request."""
    reason: FinishReason
    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]


class Unfinished(NamedTuple):
    """A sequence so far, with one entry per token in each list."""

    request: int
    """The number of the request."""
    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]


class DecodeRows:
    """The state of the slots that sampling a token needs, all of it on the device.

    A free slot keeps sampling from whatever it computes; its tokens are never read, and it stays at
    its first token.

    Args:
        size: number of concurrent sequences, and their lengths.
        vocabulary: number of token ids.
        stop_ids: ids that must not be sampled before `min_new_tokens`.
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
        """[slots]: number of tokens sampled so far, at most the budget."""
        self.budgets = torch.ones_like(self.tokens)
        """[slots]: `max_new_tokens` of each."""
        self.prompts = torch.ones_like(self.tokens)
        """[slots]: length of each prompt in tokens."""
        # [slots, longest completion]: every number that a sequence will use is computed when it
        # starts, so that a decoding step needs nothing from the host.
        shape = (size.slots, size.completion)
        self._uniforms = torch.zeros(shape, device=device)
        defaults = [SamplingParams()] * size.slots
        self.settings = DrawSettings.of(defaults, device)
        """Sampling parameters of each slot; the flags hold for all requests of this call."""
        self._stops = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._stops[_ids_below(vocabulary, stop_ids)] = True

    def begin(self, requests: Sequence[SampleRequest]) -> None:
        """Free all slots; these requests come next."""
        self.compact([])
        flags = DrawFlags.of([request.params for request in requests])
        self.settings = replace(self.settings, flags=flags)

    def fill(self, slots: Sequence[int], requests: Sequence[SampleRequest]) -> None:
        """Start one request in each of these slots."""
        device = self.tokens.device
        completion = self._uniforms.shape[1]
        params = []
        budgets = []
        prompt_lengths = []
        streams = []
        for request in requests:
            remaining = request.remaining
            params.append(remaining)
            budgets.append(remaining.max_new_tokens)
            prompt_lengths.append(len(request.context))
            # The numbers of tokens that have been sampled already are used up.
            stream = uniforms(request.key, request.count_before + completion)
            streams.append(stream[request.count_before :])

        places = self._integers(slots)
        self.drawn[places] = 0
        self.budgets[places] = self._integers(budgets)
        self.prompts[places] = self._integers(prompt_lengths)
        uniform = torch.from_numpy(np.stack(streams))
        self._uniforms[places] = uniform.to(device)
        # Written in place: a recorded step reads these tensors at their addresses.
        columns = self.settings.tensors()
        new_columns = DrawSettings.of(params, device).tensors()
        for column, values in zip(columns, new_columns, strict=True):
            column[places] = values
        last_slot = max(slots)
        self.count = max(self.count, last_slot + 1)

    def _integers(self, values: Sequence[int]) -> Tensor:
        """Return [len(values)] int64 on the device, also where there are none."""
        return torch.tensor(values, dtype=torch.long, device=self.tokens.device)

    def free(self, slots: Sequence[int]) -> None:
        """Mark these slots as finished."""
        places = self._integers(slots)
        # With a budget of one token that is used up, the position of a free slot does not grow.
        self.drawn[places] = 1
        self.budgets[places] = 1

    def compact(self, slots: Sequence[int]) -> None:
        """Move these slots to the front, in order, and free all others."""
        places = self._integers(slots)
        previous_count = self.count
        self.count = len(slots)
        state = (self.tokens, self.drawn, self.budgets, self.prompts, self._uniforms)
        for tensor in state + self.settings.tensors():
            tensor[: self.count] = tensor[places]
        self.drawn[self.count : previous_count] = 1
        self.budgets[self.count : previous_count] = 1

    def positions(self, count: int) -> Tensor:
        """Return [count]: the position of each slot's last token in its sequence."""
        return self.prompts[:count] + self.drawn[:count] - 1

    def draw(self, logits: Tensor, places: Tensor | None = None) -> Drawn:
        """Sample the next token of the first slots, or of those at `places`.

        Args:
            logits: [rows, V].
            places: [rows].

        Returns:
            Token ids, log-probs and entropies, [rows] each.
        """
        # A slice shares the memory of the settings; an index tensor copies them.
        rows: slice | Tensor = slice(logits.shape[0])
        if places is not None:
            rows = places
        drawn = self.drawn[rows]
        settings = self.settings.at(rows)
        # The i-th token of a sequence uses the i-th number of its stream. A finished row may run on
        # until the host checks, so its column is kept within the stream.
        last_column = self._uniforms.shape[1] - 1
        column = drawn.clamp(max=last_column)[:, None]
        streams = self._uniforms[rows]
        uniform = streams.gather(1, column)[:, 0]
        early = None
        if settings.flags.minimum:
            early = drawn < settings.minimum
        sampled = draw_tokens(logits, uniform, settings, early, self._stops)
        self.tokens[rows] = sampled[0]
        # A sequence that ends before the host checks does not write beyond its budget.
        budgets = self.budgets[rows]
        self.drawn[rows] = torch.minimum(drawn + 1, budgets)
        return sampled


def _ids_below(vocabulary: int, token_ids: Sequence[int]) -> list[int]:
    """Return the ids that the model can score; a tokenizer may have more than the model."""
    return [token for token in token_ids if token < vocabulary]


class HostLog:
    """The sampled tokens of each slot, and whether they end its sequence.

    Args:
        slots: number of concurrent sequences.
        longest: tokens of the longest completion.
        steps: maximum number of tokens per slot and block.
        vocabulary: number of token ids.
        stop_ids: ids that end a completion.
        watcher: finds stop strings.
    """

    def __init__(
        self,
        *,
        slots: int,
        longest: int,
        steps: int,
        vocabulary: int,
        stop_ids: Sequence[int],
        watcher: Callable[[tuple[str, ...]], StopStrings],
    ) -> None:
        # A sequence may end anywhere in a block, and the rest of the block is written, too.
        shape = (slots, longest + steps)
        self.live = np.zeros(slots, dtype=bool)
        """[slots]: whether the slot holds an unfinished sequence."""
        self._requests = np.zeros(slots, dtype=np.int64)
        self._tokens = np.zeros(shape, dtype=np.int64)
        self._logprobs = np.zeros(shape)
        self._entropies = np.zeros(shape)
        self._counts = np.zeros(slots, dtype=np.int64)
        """[slots]: number of tokens recorded."""
        self._counts_before = np.zeros(slots, dtype=np.int64)
        """[slots]: those of them that had been sampled before."""
        self._budgets = np.ones(slots, dtype=np.int64)
        self._watcher = watcher
        self._stop_ids = frozenset(stop_ids)
        is_stop = np.zeros(vocabulary, dtype=bool)
        is_stop[_ids_below(vocabulary, stop_ids)] = True
        self._may_end = is_stop[None]
        """[sets of stop strings, V]: tokens that may end a sequence with that set."""
        self._stop_sets: list[tuple[str, ...]] = [()]
        """The sets of stop strings seen so far; the first is the empty one."""
        self._set_of = np.zeros(slots, dtype=np.int64)
        """[slots]: the index of its set of stop strings."""

    def begin(self, slot: int, number: int, request: SampleRequest) -> None:
        """Put a request into a slot, with the tokens that have been sampled already."""
        params = request.params
        before = request.count_before
        self.live[slot] = True
        self._requests[slot] = number
        self._counts[slot] = before
        self._counts_before[slot] = before
        self._budgets[slot] = params.max_new_tokens
        if request.partial is not None:
            self._tokens[slot, :before] = request.partial.token_ids
            self._logprobs[slot, :before] = request.partial.logprobs
            self._entropies[slot, :before] = request.partial.entropies
        if params.stop not in self._stop_sets:
            self._add_stop_set(params.stop)
        self._set_of[slot] = self._stop_sets.index(params.stop)

    def _add_stop_set(self, stops: tuple[str, ...]) -> None:
        """Add a row for a new set of stop strings to the table of tokens that may end a sequence.

        An id beyond the tokenizer's has no text to look at, so it counts as one that may.
        """
        vocabulary = self._may_end.shape[1]
        may_end = np.ones(vocabulary, dtype=bool)
        candidates = self._watcher(stops).candidates[:vocabulary]
        may_end[: len(candidates)] = candidates
        row = self._may_end[0] | may_end
        self._may_end = np.vstack([self._may_end, row])
        self._stop_sets.append(stops)

    def drawn_so_far(self, slot: int) -> list[int]:
        """Return the ids of an unfinished sequence, or an empty list if there is none."""
        token_ids: list[int] = []
        if self.live[slot]:
            count = self._counts[slot]
            token_ids = self._tokens[slot, :count].tolist()
        return token_ids

    def longest(self) -> int:
        """Return the most tokens of an unfinished sequence that its slot has sampled."""
        counts = self._counts - self._counts_before
        return int(counts[self.live].max())

    def unfinished(self) -> Iterator[Unfinished]:
        """Yield what has been sampled of each sequence that has not ended."""
        for slot in np.flatnonzero(self.live):
            count = self._counts[slot]
            yield Unfinished(
                request=int(self._requests[slot]),
                token_ids=self._tokens[slot, :count].tolist(),
                logprobs=self._logprobs[slot, :count].tolist(),
                entropies=self._entropies[slot, :count].tolist(),
            )

    def write(self, block: Drawn, places: np.ndarray) -> list[Finished]:
        """Record a block of tokens and return the sequences that it completes.

        Tokens sampled after the end of a sequence are discarded.

        Args:
            block: token ids, log-probs and entropies, [steps, places] each.
            places: [places] the slots that they belong to.
        """
        tokens, logprobs, entropies = (tensor.cpu().numpy() for tensor in block)
        steps = len(tokens)
        live = self.live[places]
        # [steps, places]: where each token goes in the row of its slot.
        step_numbers = np.arange(steps)[:, None]
        columns = self._counts[places] + step_numbers
        # Nobody reads a free slot, so its tokens may all overwrite the last column.
        last_column = self._tokens.shape[1] - 1
        columns[:, ~live] = last_column
        self._tokens[places, columns] = tokens
        self._logprobs[places, columns] = logprobs
        self._entropies[places, columns] = entropies

        # The table finds candidates at the cost of a lookup; only they are decoded to text.
        lengths = columns + 1
        may_end = lengths >= self._budgets[places]
        stop_sets = self._set_of[places]
        may_end |= self._may_end[stop_sets, tokens]
        may_end &= live
        self._counts[places] += np.where(live, steps, 0)
        finished = []
        for column in np.flatnonzero(may_end.any(0)):
            slot = int(places[column])
            candidates = lengths[may_end[:, column], column]
            sequence = self._finish(slot, candidates.tolist())
            if sequence is not None:
                finished.append(sequence)
        return finished

    def _finish(self, slot: int, lengths: list[int]) -> Finished | None:
        """End a sequence at the first of these lengths that ends it; None if none does."""
        for length in lengths:
            reason = self._reason(slot, length)
            if reason is not None:
                self._counts[slot] = length
                self.live[slot] = False
                return Finished(
                    slot=slot,
                    request=int(self._requests[slot]),
                    reason=reason,
                    token_ids=self._tokens[slot, :length].tolist(),
                    logprobs=self._logprobs[slot, :length].tolist(),
                    entropies=self._entropies[slot, :length].tolist(),
                )
        return None

    def _reason(self, slot: int, length: int) -> FinishReason | None:
        """Return why a sequence ends at this length, or None if it does not."""
        token_ids = self._tokens[slot, :length]
        if int(token_ids[-1]) in self._stop_ids:
            return FinishReason.STOP_TOKEN
        stops = self._stop_sets[self._set_of[slot]]
        if stops:
            watcher = self._watcher(stops)
            if watcher.completed(token_ids.tolist()):
                return FinishReason.STOP_STRING
        if length >= self._budgets[slot]:
            return FinishReason.LENGTH
        return None

    def compact(self, slots: Sequence[int]) -> None:
        """Move these slots to the front, in order, and free all others."""
        count = len(slots)
        sources = list(slots)
        per_token = (self._tokens, self._logprobs, self._entropies)
        numbers = (self._requests, self._counts, self._counts_before, self._budgets, self._set_of)
        for array in (*per_token, self.live, *numbers):
            array[:count] = array[sources]
        self.live[count:] = False
