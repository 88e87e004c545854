"""The native sampler: continuous batching over the module being trained.

One loop: draw a token for every live slot, hand out what has finished, refill or close finished
slots, run one decode step. Each verb is a method; the model runs behind an `Engine`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grouper.errors import PromptError
from grouper.sampling.base import SampleRequest
from grouper.sampling.draw import DrawSettings, draw, uniforms
from grouper.sampling.engines import Engine, PlainEngine, SlotEngine
from grouper.sampling.stops import StopStrings
from grouper.sampling.times import SampleTimes
from grouper.sampling.weights import SamplingWeights
from grouper.types import Completion, FinishReason

__all__ = ["NativeSampler"]

COMPACT_SHARE = 0.125
"""Finished slots are closed once they are this share of all: moving a cache costs, too."""


class _Sequence:
    """One completion while it is being written."""

    __slots__ = ("ids", "index", "logprobs", "request", "uniforms")

    def __init__(self, index: int, request: SampleRequest) -> None:
        self.index = index
        self.request = request
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.uniforms: np.ndarray = uniforms(request.key, request.params.max_new_tokens)

    @property
    def position(self) -> int:
        """The cache column of the last token drawn."""
        return len(self.request.prompt.token_ids) + len(self.ids) - 1


class NativeSampler:
    """Samples from the policy's own weights.

    Args:
        weights: what to sample from.
        tokenizer: for decoding and stop strings.
        stop_token_ids: ids that end a completion.
        max_slots: sequences decoded at the same time.
        max_length: the longest sequence the model takes (prompt and completion), or None.
    """

    def __init__(
        self,
        weights: SamplingWeights,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int],
        max_slots: int = 256,
        max_length: int | None = None,
    ) -> None:
        if not stop_token_ids:
            raise PromptError(
                "no stop token is known", fix="Name one in the tokenizer's eos_token."
            )
        self._weights = weights
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_token_ids)
        self._max_slots = max_slots
        self._max_length = max_length
        self._watchers: dict[tuple[str, ...], StopStrings] = {}
        self.times = SampleTimes()

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        """Yield (request index, completion) as each finishes. Zero requests yield nothing.

        Raises:
            PromptError: a prompt and its completion may not fit the model's context.
        """
        if not requests:
            return
        self._check_lengths(requests)
        policy = self._weights.current()
        version = policy.version
        slots = min(self._max_slots, len(requests))
        engine: Engine = PlainEngine(policy)
        if policy.native:
            engine = SlotEngine(
                policy,
                slots=slots,
                prompt=max(len(r.prompt.token_ids) for r in requests),
                completion=max(r.params.max_new_tokens for r in requests),
            )
        queue = deque(_Sequence(i, request) for i, request in enumerate(requests))
        live: list[_Sequence | None] = []
        logits = torch.empty(0, device=policy.device)
        while queue or live:
            logits = self._admit(engine, queue, live, slots, logits)
            self._append(live, logits, policy.device)
            for slot, sequence in enumerate(live):
                if sequence is not None and (reason := self._finished(sequence)) is not None:
                    live[slot] = None
                    engine.close(slot)
                    yield sequence.index, self._completion(sequence, reason, version)
            live, logits = self._advance(engine, live, queue, policy.device)

    def _check_lengths(self, requests: Sequence[SampleRequest]) -> None:
        if self._max_length is None:
            return
        for request in requests:
            need = len(request.prompt.token_ids) + request.params.max_new_tokens
            if need > self._max_length:
                raise PromptError(
                    f"a prompt of {len(request.prompt.token_ids)} tokens and "
                    f"{request.params.max_new_tokens} new ones do not fit the model's context of "
                    f"{self._max_length}",
                    where=request.prompt.problem_id,
                    fix="Lower sampling.max_new_tokens or prompt.max_prompt_tokens.",
                )

    @torch.no_grad()
    def _admit(
        self,
        engine: Engine,
        queue: deque[_Sequence],
        live: list[_Sequence | None],
        slots: int,
        logits: Tensor,
    ) -> Tensor:
        """Fill free slots from the queue; returns the logits [slots, V] of all live slots."""
        if not queue or (live and not engine.refills):
            return logits
        free = [slot for slot, sequence in enumerate(live) if sequence is None]
        free += list(range(len(live), slots))
        free = free[: len(queue)]
        if not free:
            return logits
        newcomers = [queue.popleft() for _ in free]
        prompts: dict[tuple[int, ...], int] = {}
        owners = [prompts.setdefault(s.request.prompt.token_ids, len(prompts)) for s in newcomers]
        with self.times.prefill(logits.device):
            fresh = engine.prefill(list(prompts), free, owners)
        live += [None] * (max(free) + 1 - len(live))
        for slot, sequence in zip(free, newcomers, strict=True):
            live[slot] = sequence
        merged = fresh.new_zeros(len(live), fresh.shape[1])
        if logits.numel():
            merged[: logits.shape[0]] = logits
        merged[free] = fresh
        return merged

    @torch.no_grad()
    def _append(self, live: list[_Sequence | None], logits: Tensor, device: torch.device) -> None:
        """Draw the next token of every live slot."""
        rows = [slot for slot, sequence in enumerate(live) if sequence is not None]
        sequences = [sequence for sequence in live if sequence is not None]
        params = [s.request.params for s in sequences]
        uniform = torch.tensor([s.uniforms[len(s.ids)] for s in sequences], device=device)
        picked = logits if len(rows) == logits.shape[0] else logits[rows]
        tokens, logprobs = draw(
            picked,
            uniform,
            DrawSettings.of(params, device),
            self._banned(sequences, logits.shape[1], device),
        )
        for sequence, token, logprob in zip(
            sequences, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)

    def _banned(
        self, sequences: list[_Sequence], vocabulary: int, device: torch.device
    ) -> Tensor | None:
        """[n, V]: stop tokens of the sequences that have not reached `min_new_tokens`."""
        early = [len(s.ids) < s.request.params.min_new_tokens for s in sequences]
        if not any(early):
            return None
        stops = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        stops[[i for i in self._stop_ids if i < vocabulary]] = True
        return torch.tensor(early, device=device)[:, None] & stops

    def _finished(self, sequence: _Sequence) -> FinishReason | None:
        params = sequence.request.params
        if sequence.ids[-1] in self._stop_ids:
            return FinishReason.STOP_TOKEN
        if params.stop and self._watcher(params.stop).completed(sequence.ids):
            return FinishReason.STOP_STRING
        return FinishReason.LENGTH if len(sequence.ids) >= params.max_new_tokens else None

    def _completion(self, sequence: _Sequence, reason: FinishReason, version: int) -> Completion:
        params = sequence.request.params
        watcher = self._watcher(params.stop)
        text = watcher.text(
            sequence.ids[:-1] if reason is FinishReason.STOP_TOKEN else sequence.ids
        )
        if reason is FinishReason.STOP_STRING:
            cut = watcher.cut(text, include_stop=params.include_stop)
            text = text if cut is None else cut
        return Completion(
            token_ids=tuple(sequence.ids),
            logprobs=tuple(sequence.logprobs),
            text=text,
            finish_reason=reason,
            policy_version=version,
        )

    def _watcher(self, stops: tuple[str, ...]) -> StopStrings:
        if stops not in self._watchers:
            self._watchers[stops] = StopStrings(self._tokenizer, stops)
        return self._watchers[stops]

    @torch.no_grad()
    def _advance(
        self,
        engine: Engine,
        live: list[_Sequence | None],
        queue: deque[_Sequence],
        device: torch.device,
    ) -> tuple[list[_Sequence | None], Tensor]:
        """Close finished slots where it pays, then decode one step; logits [slots, V]."""
        kept = [slot for slot, sequence in enumerate(live) if sequence is not None]
        if not kept:
            return [], torch.empty(0, device=device)
        refill = bool(queue) and engine.refills
        if not refill and len(live) - len(kept) >= COMPACT_SHARE * len(live):
            engine.keep(kept)
            live = [live[slot] for slot in kept]
        # A closed slot that is still in the way repeats token 0 at column 0; nobody reads it.
        tokens = [0 if s is None else s.ids[-1] for s in live]
        positions = [0 if s is None else s.position for s in live]
        return live, engine.decode(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        )
