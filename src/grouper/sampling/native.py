"""The native sampler: continuous batching over the module being trained.

One loop: fill free slots from the queue, run a few steps with all slots, yield the sequences that
have finished. Requests may be admitted to the queue while others are drawn. On a CPU the host
checks every token; on a GPU only every few steps, as each check waits for the device. The tokens do
not depend on that. An engine runs the model. If memory runs out, unfinished requests are sampled
again in half the slots: each random number has an address, so the tokens are the same.
"""

from __future__ import annotations

import functools
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from grouper.errors import ModelError, PromptError, first_line, is_out_of_memory
from grouper.models.policy import Policy
from grouper.sampling.base import (
    Admission,
    PartialCompletion,
    SampleRequest,
    StopStrings,
    check_lengths,
)
from grouper.sampling.decode_rows import Finished, HostLog
from grouper.sampling.draw import Drawn
from grouper.sampling.engine import BaseEngine, make_engine
from grouper.sampling.kv_cache import CacheSize, slots_for
from grouper.sampling.weights import SamplingWeights
from grouper.types import Completion

log = logging.getLogger(__name__)

# Tokens between two checks by the host, by type of device; 1 on all others.
STEPS_PER_SYNC = {"cuda": 8}

# Free slots are refilled once they are this share of all: every refill runs prompts op by op.
REFILL_SHARE = 0.125


class NativeSampler:
    """Samples from the policy's own weights.

    Args:
        weights: the policy to sample from.
        tokenizer: for decoding and stop strings.
        stop_token_ids: ids that end a completion.
        max_slots: concurrent sequences.
        max_length: the longest sequence the model takes (prompt and completion), or None.
        steps_per_sync: tokens sampled between two checks by the host; None: by `STEPS_PER_SYNC`.
        engine: creates the engine from the policy, the capacity and the stop ids.
    """

    def __init__(
        self,
        weights: SamplingWeights,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int],
        max_slots: int = 256,
        max_length: int | None = None,
        steps_per_sync: int | None = None,
        engine: Callable[[Policy, CacheSize, Sequence[int]], BaseEngine] = make_engine,
    ) -> None:
        if not stop_token_ids:
            raise PromptError(
                "no stop token is known", fix="Name one in the tokenizer's eos_token."
            )
        self._weights = weights
        self._stop_ids = sorted(set(stop_token_ids))
        self.max_slots = max_slots
        self._max_length = max_length
        self._steps_per_sync = steps_per_sync
        self._make_engine = engine
        self._kept: BaseEngine | None = None
        make_watcher = functools.partial(StopStrings, tokenizer)
        self.watcher = functools.cache(make_watcher)
        """A function from a set of stop strings to the object that finds them."""
        self.on_tokens: Callable[[Sequence[int]], None] | None = None
        """Called with the ids of the first slot's sequence so far, every few tokens."""
        self.seconds = {"prefill": 0.0}
        """Seconds of all sampling so far that were spent on prompts."""
        self.gap = None
        """Always None: the weights are the trainer's own, or a copy made in this process."""
        self.update_share = None
        """Always None: no adapter is merged into weights that are coarser than it."""
        self.captured: list[float] = []
        """Seconds that recording took, one number per step recorded so far."""
        self.unfinished: dict[int, PartialCompletion] = {}
        """As of `AdmittingSampler`."""
        _SAMPLERS.add(self)

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        """Yield (request index, completion) as each finishes.

        Raises:
            PromptError: a prompt and its completion may not fit the model's context.
            ModelError: not even a single sequence fits into memory.
        """
        return self.sample_admitted(requests, _all_of(requests))

    def sample_admitted(
        self, requests: Sequence[SampleRequest], admitted: Admission
    ) -> Generator[tuple[int, Completion]]:
        """Yield (request index, completion) as each finishes, of those that are admitted.

        There are slots for as many as are admitted at the beginning, and a few more.

        Raises:
            PromptError, ModelError: as `sample`.
        """
        # Also without requests: if weights are sharded, every process takes part in the copy.
        policy = self._weights.current()
        check_lengths(requests, self._max_length)
        self.unfinished = {}
        unanswered = dict(enumerate(requests))
        while True:
            limit = admitted(idle=True)
            if limit is None:
                return
            ready = sum(index < limit for index in unanswered)
            if ready == 0:
                return
            slots = min(self.max_slots, slots_for(ready, len(unanswered)))
            size = CacheSize.of(unanswered.values(), slots)
            reason = None
            try:
                engine = self._engine_for(policy, size)
                size = size._replace(slots=min(size.slots, engine.slots))
                answers = self._answers(engine, unanswered.copy(), size, admitted)
                with closing(answers):
                    for index, completion in answers:
                        del unanswered[index]
                        yield index, completion
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            if reason is not None:
                # By now the exception is gone, and with it the tensors that its traceback kept.
                self._halve(policy, size, reason)

    def rest(self) -> None:
        """Do nothing: the next step needs the cache again, and `release_engines` may free it."""

    @property
    def holds_engine(self) -> bool:
        """Whether an engine is kept for the next call."""
        return self._kept is not None

    def release(self) -> None:
        """Free the cache and the recorded steps; the next call creates new ones."""
        if self._kept is not None:
            self._kept.release()
            self._kept = None
        gc.collect()
        torch.cuda.empty_cache()

    def _engine_for(self, policy: Policy, size: CacheSize) -> BaseEngine:
        """Return the engine of the previous call if it can serve this one, else a new one."""
        previous = self._kept
        self._kept = None
        if previous is not None:
            if previous.serves(policy, size):
                return previous
            previous.release()
        return self._make_engine(policy, size, self._stop_ids)

    def _answers(
        self,
        engine: BaseEngine,
        requests: dict[int, SampleRequest],
        size: CacheSize,
        admitted: Admission,
    ) -> Generator[tuple[int, Completion]]:
        """Yield (request number, completion) as each finishes; then keep or release the engine."""
        device_steps = STEPS_PER_SYNC.get(engine.policy.device.type, 1)
        steps = self._steps_per_sync or device_steps
        log = HostLog(
            slots=size.slots,
            longest=max(request.params.max_new_tokens for request in requests.values()),
            steps=steps,
            vocabulary=engine.rows.vocabulary,
            stop_ids=self._stop_ids,
            watcher=self.watcher,
        )
        run = _Run(engine, requests, log, deque(requests), steps, admitted)
        done = False
        try:
            engine.begin(list(requests.values()))
            while run.goes_on():
                if self.on_tokens is not None:
                    self.on_tokens(log.drawn_so_far(0))
                for sequence in run.step():
                    request = requests[sequence.request]
                    params = request.params
                    completion = self.watcher(params.stop).completion(
                        sequence.token_ids,
                        sequence.logprobs,
                        sequence.reason,
                        include_stop=params.include_stop,
                        policy_version=_first_version(request, engine.policy),
                        entropies=tuple(sequence.entropies),
                    )
                    yield sequence.request, completion
            for partial in log.unfinished():
                self.unfinished[partial.request] = PartialCompletion(
                    token_ids=tuple(partial.token_ids),
                    logprobs=tuple(partial.logprobs),
                    entropies=tuple(partial.entropies),
                    policy_version=_first_version(requests[partial.request], engine.policy),
                )
            done = True
        except GeneratorExit:
            # What is still drawn is not needed.
            done = True
            raise
        finally:
            if done and engine.keeps:
                self._kept = engine
            self.seconds["prefill"] += run.prefill_seconds
            self.captured += engine.captured
            engine.captured.clear()
            if self._kept is not engine:
                engine.release()

    def _halve(self, policy: Policy, size: CacheSize, reason: str) -> None:
        """Halve the slots from now on.

        Raises:
            ModelError: there is only one slot.
        """
        if size.slots == 1:
            raise ModelError(
                f"one sequence of {size.prompt + size.completion} tokens cannot be sampled in the "
                f"memory of {policy.device}: {reason}",
                where="sampling.max_new_tokens",
                fix="What helps: fewer tokens (sampling.max_new_tokens, prompt.max_prompt_tokens), "
                "model.compute_dtype: bfloat16, a smaller model. `grouper plan` says what each "
                "part takes.",
            )
        self.max_slots = size.slots // 2
        log.warning(
            "Out of memory while sampling %d sequences at a time (%s). What is unanswered is "
            "sampled again %d at a time, and so are later calls; the tokens are the same.",
            size.slots,
            reason,
            self.max_slots,
        )
        self.release()


def _first_version(request: SampleRequest, policy: Policy) -> int:
    """Return the version of the weights that sampled the first token of a request."""
    if request.partial is not None:
        return request.partial.policy_version
    return policy.version


def _all_of(requests: Sequence[SampleRequest]) -> Admission:
    """Return what admits these requests at once."""

    def admitted(*, idle: bool) -> int:
        del idle  # there is nothing to wait for
        return len(requests)

    return admitted


_SAMPLERS: WeakSet[NativeSampler] = WeakSet()


def release_engines() -> bool:
    """Free what all samplers hold between calls, and tell whether there was anything."""
    holders = [sampler for sampler in _SAMPLERS if sampler.holds_engine]
    for sampler in holders:
        sampler.release()
    return bool(holders)


@dataclass(slots=True)
class _Run:
    """One attempt at some requests: in the slots, in the queue, or not admitted yet."""

    engine: BaseEngine
    requests: dict[int, SampleRequest]
    """Request number -> request."""
    log: HostLog
    later: deque[int]
    """Requests that are not admitted yet, in order."""
    steps: int
    """Tokens between two checks by the host."""
    admitted: Admission
    queue: deque[int] = field(default_factory=deque)
    """Requests that may start."""
    prefill_seconds: float = 0.0

    def goes_on(self) -> bool:
        """Take the requests that are admitted by now, and tell whether there is anything to do."""
        live = bool(self.log.live.any())
        limit = self.admitted(idle=not live and not self.queue)
        if limit is None:
            return False
        new = []
        while self.later and self.later[0] < limit:
            new.append(self.later.popleft())
        # The longest budgets start first, so that the last sequences to finish are short.
        budgets = {number: self.requests[number].remaining.max_new_tokens for number in new}
        self.queue += sorted(new, key=lambda number: -budgets[number])
        return live or bool(self.queue)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Fill free slots, or decode, and return the sequences that have ended."""
        engine = self.engine
        slots = self._slots_to_fill()
        if slots:
            started = time.perf_counter()
            block = self._admit(slots)
            finished = self.log.write(block, np.array(slots))
            self.prefill_seconds += time.perf_counter() - started
        else:
            block = engine.advance(self.steps, self.log.longest())
            slots_in_use = np.arange(engine.rows.count)
            finished = self.log.write(block, slots_in_use)
        if finished:
            engine.free([sequence.slot for sequence in finished])
            self._compact()
        return finished

    def _slots_to_fill(self) -> list[int]:
        """Return the slots to fill now, at most as many as requests are queued."""
        if not self.queue:
            return []
        live = self.log.live
        free: list[int] = np.flatnonzero(~live).tolist()
        # A refill interrupts the live slots, so it waits until enough are free; an engine that
        # cannot refill waits until all are.
        wait = not self.engine.refills or len(free) < REFILL_SHARE * len(live)
        if wait and live.any():
            return []
        return free[: len(self.queue)]

    def _admit(self, slots: list[int]) -> Drawn:
        """Fill these slots from the queue and sample the first token of each."""
        requests = []
        for slot in slots:
            number = self.queue.popleft()
            request = self.requests[number]
            self.log.begin(slot, number, request)
            requests.append(request)
        return self.engine.admit(requests, slots)

    def _compact(self) -> None:
        """Move unfinished sequences together if free slots are not refilled and it saves time."""
        live: list[int] = np.flatnonzero(self.log.live).tolist()
        refills = bool(self.queue) and self.engine.refills
        if not live or (not refills and self.engine.should_compact(len(live))):
            order = _closed_up(live)
            self.engine.compact(order)
            self.log.compact(order)


def _closed_up(live: Sequence[int]) -> list[int]:
    """Return the slot whose sequence goes to each of the first places.

    A sequence that is already in one of them stays; the others fill the gaps, so that as few as
    possible are copied.

    >>> _closed_up([1, 2, 5, 7])
    [5, 1, 2, 7]
    """
    count = len(live)
    occupied = set(live)
    movers = iter([slot for slot in live if slot >= count])
    order = []
    for place in range(count):
        if place in occupied:
            order.append(place)
        else:
            order.append(next(movers))
    return order
