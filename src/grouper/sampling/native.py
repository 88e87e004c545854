"""The native sampler: continuous batching over the module being trained.

One loop: fill free slots from the queue, take a stretch of steps with all slots, hand out what has
finished. On a CPU a stretch is one token; on a GPU it is several, so that the host looks at what
was drawn, and waits for it, only every few tokens. The tokens are the same whatever its length.
The model runs behind an `Engine`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from grouper.errors import PromptError
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest
from grouper.sampling.compiled_decode import compiled_decode, has_compiled
from grouper.sampling.decode_kernel import has_kernel, kernel_decode
from grouper.sampling.engines import Engine, PlainEngine, SlotEngine
from grouper.sampling.graphs import StaticEngine
from grouper.sampling.replay import CudaGraphs, OpByOp, Replay, Tapes, allows_replay
from grouper.sampling.stops import StopStrings
from grouper.sampling.times import SampleTimes
from grouper.sampling.weights import SamplingWeights
from grouper.sampling.writing import Block, Journal, Rows, Written
from grouper.types import Completion, FinishReason, SamplingParams

STRETCH = {"cuda": 8}
"""Tokens between two looks of the host at what was drawn, by type of device; elsewhere one."""


class NativeSampler:
    """Samples from the policy's own weights.

    Args:
        weights: what to sample from.
        tokenizer: for decoding and stop strings.
        stop_token_ids: ids that end a completion.
        max_slots: sequences decoded at the same time.
        max_length: the longest sequence the model takes (prompt and completion), or None.
        stretch: tokens drawn between two looks of the host at them; None: what suits the device.
        engine: makes what runs the model, from the policy, the slots, and the tokens of the longest
            prompt and completion.
    """

    def __init__(
        self,
        weights: SamplingWeights,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int],
        max_slots: int = 256,
        max_length: int | None = None,
        stretch: int | None = None,
        engine: Callable[[Policy, int, int, int], Engine] | None = None,
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
        self._stretch = stretch
        self.engine = engine or choose_engine
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
        run = _Run(
            policy,
            requests,
            slots=min(self._max_slots, len(requests)),
            stretch=self._stretch or STRETCH.get(policy.device.type, 1),
            stop_ids=sorted(self._stop_ids),
            sampler=self,
        )
        try:
            while run.unfinished:
                for index, written, reason in run.step():
                    params = requests[index].params
                    yield index, self._completion(params, written, reason, policy.version)
        finally:
            run.engine.release()

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

    def _completion(
        self,
        params: SamplingParams,
        written: Written,
        reason: FinishReason,
        version: int,
    ) -> Completion:
        ids, watcher = written.token_ids, self.watcher(params.stop)
        text = watcher.text(ids[:-1] if reason is FinishReason.STOP_TOKEN else ids)
        if reason is FinishReason.STOP_STRING:
            cut = watcher.cut(text, include_stop=params.include_stop)
            text = text if cut is None else cut
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(written.logprobs),
            text=text,
            finish_reason=reason,
            policy_version=version,
            entropies=tuple(written.entropies),
        )

    def watcher(self, stops: tuple[str, ...]) -> StopStrings:
        """What finds these stop strings; one for each set of them."""
        if stops not in self._watchers:
            self._watchers[stops] = StopStrings(self._tokenizer, stops)
        return self._watchers[stops]


class _Run:
    """One call of `sample`: who is in which slot, and what comes next.

    Args:
        policy: the model.
        requests: what to draw.
        slots: sequences at the same time.
        stretch: tokens between two looks of the host.
        stop_ids: ids that end a completion.
        sampler: knows stop strings and counts times.
    """

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[SampleRequest],
        *,
        slots: int,
        stretch: int,
        stop_ids: Sequence[int],
        sampler: NativeSampler,
    ) -> None:
        longest = max(r.params.max_new_tokens for r in requests)
        vocabulary = _vocabulary(policy)
        self._requests = requests
        self._slots = slots
        self._stretch = stretch
        self._times = sampler.times
        self._device = policy.device
        prompt = max(len(r.prompt.token_ids) for r in requests)
        self.engine = sampler.engine(policy, slots, prompt, longest)
        self._rows = Rows(requests, slots, vocabulary, stop_ids, policy.device)
        self._journal = Journal(
            slots=slots,
            longest=longest,
            stretch=stretch,
            vocabulary=vocabulary,
            stop_ids=stop_ids,
            watcher=sampler.watcher,
        )
        # What may take longest begins first, so that the last ones to end are short ones.
        order = sorted(
            range(len(requests)), key=lambda i: requests[i].params.max_new_tokens, reverse=True
        )
        self._queue = deque(order)
        self._held: list[int | None] = []
        """The request that each slot in use holds; None: it is closed."""

    @property
    def unfinished(self) -> bool:
        return bool(self._queue or self._held)

    @torch.no_grad()
    def step(self) -> list[tuple[int, Written, FinishReason]]:
        """Fill free slots or take a stretch: (request, what it drew, reason) of who finished."""
        free = self._free()
        if free:
            ended = self._journal.write(self._admit(free), free)
        else:
            early = self._journal.early()
            ended = self._journal.write(self.engine.advance(self._rows, self._stretch, early=early))
        return self._retire(ended) if ended else []

    def _free(self) -> list[int]:
        """Slots that can be filled now, as many as are asked for."""
        if not self._queue or (self._held and not self.engine.refills):
            return []
        free = [slot for slot, request in enumerate(self._held) if request is None]
        free += range(len(self._held), self._slots)
        return free[: len(self._queue)]

    def _admit(self, free: list[int]) -> Block:
        """Fill these slots from the queue and draw the first token of each."""
        newcomers = [self._queue.popleft() for _ in free]
        requests = [self._requests[i] for i in newcomers]
        prompts: dict[tuple[int, ...], int] = {}
        owners = [prompts.setdefault(r.prompt.token_ids, len(prompts)) for r in requests]
        with self._times.prefill(self._device):
            logits = self.engine.prefill(list(prompts), free, owners)
        self._rows.fill(free, requests)
        self._journal.begin(free, requests)
        self._held += [None] * (max(free) + 1 - len(self._held))
        for slot, request in zip(free, newcomers, strict=True):
            self._held[slot] = request
        places = torch.tensor(free, device=self._device)
        drawn = self._rows.draw(logits, early=self._journal.early(), places=places)
        tokens, logprobs, entropies = (part[None] for part in drawn)
        return tokens, logprobs, entropies

    def _retire(
        self, ended: list[tuple[int, FinishReason]]
    ) -> list[tuple[int, Written, FinishReason]]:
        """Close the slots of those that have ended, and move the others together if it pays."""
        finished = []
        for slot, reason in ended:
            index = self._held[slot]
            assert index is not None
            finished.append((index, self._journal.written(slot), reason))
            self._held[slot] = None
            self.engine.close(slot)
        self._rows.close([slot for slot, _ in ended])
        kept = [slot for slot, request in enumerate(self._held) if request is not None]
        refill = bool(self._queue) and self.engine.refills
        if not kept or (not refill and self.engine.crowded(len(kept), len(self._held))):
            kept = _closed_up(kept)
            if kept:
                self.engine.keep(kept)
            self._rows.keep(kept)
            self._journal.keep(kept)
            self._held = [self._held[slot] for slot in kept]
        return finished


def _closed_up(kept: Sequence[int]) -> list[int]:
    """These slots, as many places from the first on: who is there stays, the others fill holes.

    >>> _closed_up([1, 2, 5, 7])
    [5, 1, 2, 7]
    """
    places, live = range(len(kept)), set(kept)
    movers = iter([slot for slot in kept if slot >= len(kept)])
    return [place if place in live else next(movers) for place in places]


def choose_engine(policy: Policy, slots: int, prompt: int, completion: int) -> Engine:
    """What runs the model: our slots where its attention goes through us, or a plain cache.

    Args:
        policy: the model.
        slots: sequences at the same time.
        prompt: tokens of the longest prompt.
        completion: tokens of the longest completion.
    """
    if not policy.native:
        return PlainEngine(policy)
    sizes = {"slots": slots, "prompt": prompt, "completion": completion}
    steady = allows_replay(policy.model.config)
    device, dtype = policy.device, next(policy.parameters()).dtype
    name = type(policy.model).__name__
    # A step that can be played back pays only where there is a kernel for it.
    if has_kernel(device, dtype):
        replay: Replay = CudaGraphs(device, name) if steady else OpByOp()
        return StaticEngine(policy, **sizes, attend=kernel_decode, replay=replay)
    if steady and has_compiled(device, dtype):
        pays = completion >= Tapes.fewest
        replay = Tapes(name) if pays else OpByOp()
        return StaticEngine(policy, **sizes, attend=compiled_decode, replay=replay)
    return SlotEngine(policy, **sizes)


def _vocabulary(policy: Policy) -> int:
    """Number of token ids that the head scores."""
    head = policy.model.get_output_embeddings()
    return int(getattr(head, "out_features", 0) or policy.model.config.get_text_config().vocab_size)
