"""Engines run the model for the sampler: slots over our cache, or padded rows over a plain cache.

The decoding step needs nothing from the host, so it is recorded where that pays and replayed. It
reads and writes tensors that never move: the last tokens, how many each row has drawn, the column
of the ring, the block of new tokens. It is recorded once per bucket of rows, and again when a
tensor has to grow.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grouper.errors import ModelError, as_model_error, first_line, is_out_of_memory
from grouper.kernels.cpu import graph
from grouper.kernels.cpu.graph import Step
from grouper.models.attention_check import bound_of, short_windows
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest
from grouper.sampling.decode_attention import Decode, DecodeState, Prefill, has_kernel
from grouper.sampling.decode_rows import DecodeRows
from grouper.sampling.draw import DrawFlags, Drawn
from grouper.sampling.kv_cache import CacheSize, KVCache, Tokens, fitting_size, prompts_at_once

# Initial columns of the ring: a kernel reads only live ones, so the others cost memory but no time;
# plain operations read all of them.
KERNEL_WIDTH = 512
PLAIN_WIDTH = 32


class BaseEngine(ABC):
    """Slots that hold sequences: prompts and what has been drawn.

    Args:
        policy: the model.
        size: the capacity.
        stop_ids: what must not be drawn before `min_new_tokens`.
    """

    refills = True
    """Whether a finished slot can be refilled while others go on."""
    keeps = False
    """Whether recorded steps are worth their memory until the sampler is called again."""

    def __init__(self, policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> None:
        self.policy = policy
        self.slots = size.slots
        self.asked = size
        """The capacity wanted; if memory is short, there are fewer slots."""
        self.captured: list[float] = []
        """Seconds that recording took, per step."""
        self._storage = _storage(policy)
        # Heads may score more ids than there are embeddings.
        head: Any = policy.model.get_output_embeddings()
        self.rows = DecodeRows(size, len(head.weight), stop_ids, policy.device)

    def serves(self, policy: Policy, size: CacheSize) -> bool:
        """Whether it can sample from this policy with this capacity."""
        enough = all(asked <= held for asked, held in zip(size, self.asked, strict=True))
        return policy is self.policy and enough and self._storage == _storage(policy)

    def begin(self, requests: Sequence[SampleRequest]) -> None:
        """All slots are free, and these will be asked."""
        self.rows.begin(requests)

    def admit(self, requests: Sequence[SampleRequest], slots: Sequence[int]) -> Drawn:
        """Start requests in free slots: run each prompt once, draw the first tokens [1, slots].

        Args:
            requests: one for each slot.
            slots: free ones.
        """
        prompts: dict[Tokens, int] = {}
        owners = [prompts.setdefault(r.prompt.token_ids, len(prompts)) for r in requests]
        logits = self._prefill(list(prompts), slots, owners)
        self.rows.fill(slots, requests)
        places = torch.tensor(slots, device=self.policy.device)
        tokens, logprobs, entropies = self.rows.draw(logits, places)
        return tokens[None], logprobs[None], entropies[None]

    @abstractmethod
    def _prefill(
        self, prompts: list[Tokens], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        """Run each prompt once and assign it to its slots; logits [len(slots), V] in float32."""

    @abstractmethod
    def advance(self, steps: int, longest: int) -> Drawn:
        """Draw `steps` more tokens in every slot in use.

        Args:
            steps: decoding steps.
            longest: tokens drawn by the longest unfinished sequence.
        """

    def free(self, slots: Sequence[int]) -> None:
        """Mark these slots as finished; they keep running until refilled or compacted away."""
        self.rows.free(slots)

    @abstractmethod
    def should_compact(self, live: int) -> bool:
        """Whether so few slots are live that `compact` pays."""

    def compact(self, slots: Sequence[int]) -> None:
        """Move these slots to the front, in order; drop the others."""
        self.rows.compact(slots)

    def release(self) -> None:  # noqa: B027 - what is held here goes with the engine
        """Free what only sampling needs."""


class Engine(BaseEngine):
    """The model's own code over our cache: no padding, prompts run once, slots refilled.

    Args:
        policy: the model.
        size: the capacity.
        stop_ids: as in `BaseEngine`.
        graphs: how steps are repeated; None: what suits the model and its device.
    """

    def __init__(
        self,
        policy: Policy,
        size: CacheSize,
        stop_ids: Sequence[int],
        graphs: OpByOp | None = None,
    ) -> None:
        super().__init__(policy, size, stop_ids)
        device = policy.device
        self._graphs = graphs or choose_graphs(policy, size.completion)
        self.keeps = self._graphs.keeps
        self._recorded: dict[tuple[int, DrawFlags], Step] = {}
        """Recorded steps, by everything that a step decides on the host."""
        self._shapes = (0, 0, 0)
        """Places, columns of the ring, and most rows of a prompt, as recorded."""
        self._cache = KVCache(size, KERNEL_WIDTH if has_kernel(policy) else PLAIN_WIDTH, device)
        self._prompts: dict[Tokens, int] = {}
        """Prompt -> its place in the cache."""
        self._last: dict[Tokens, Tensor] = {}
        """Prompt -> hidden state [H] of its last token."""
        self._owners: list[int | None] = []
        """The place of each slot's prompt; None: the slot is free."""
        none = torch.zeros(self.slots, dtype=torch.long, device=device)
        self._state = DecodeState(
            column=self._cache.column,
            lengths=self.rows.drawn,
            owners=none,
            prompt_lengths=none[:0],
            members=none.view(self.slots, 1)[:0],
        )
        """Of all slots."""
        self._settled = False
        """Whether `_state` has the current owners and members."""
        self._bucket = 0
        """Rows in a step."""
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        """[1]: steps since the host last read the block."""
        self._block: Drawn | None = None
        """[steps, slots]: what has been drawn; no later call asks for more steps than the first."""

    def begin(self, requests: Sequence[SampleRequest]) -> None:
        super().begin(requests)
        # The weights may have changed, so cached prompts are stale.
        self._prompts, self._last, self._owners, self._bucket = {}, {}, [], 0

    def _prefill(
        self, prompts: list[Tokens], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        device = self.policy.device
        places = self._place(prompts, set(slots))
        fresh = [p for p in prompts if p not in self._last]
        self._cache.make_places(len(self._prompts))
        count = prompts_at_once(max(map(len, prompts)))
        for part in (fresh[start : start + count] for start in range(0, len(fresh), count)):
            entries = torch.tensor([self._prompts[p] for p in part], device=device)
            layout = Prefill(self._cache, part, entries)
            hidden = self.policy.hidden_states(layout, layout.token_ids, layout.position_ids)
            self._last |= zip(part, hidden.index_select(0, layout.sources), strict=True)
        self._owners += [None] * (max(slots) + 1 - len(self._owners))
        for slot, owner in zip(slots, owners, strict=True):
            self._owners[slot] = places[owner]
        if len(self._owners) > self._bucket:
            self._resize_bucket()
        self._settled = False
        last = torch.stack([self._last[p] for p in prompts])
        return self.policy.logits(last)[torch.tensor(owners, device=device)]

    def _place(self, prompts: list[Tokens], slots: set[int]) -> list[int]:
        """The place of each prompt; new ones take places no longer read, or further ones."""
        known = self._prompts
        read = {owner for slot, owner in enumerate(self._owners) if slot not in slots}
        read |= {known[p] for p in prompts if p in known}
        unread = [p for p, place in known.items() if place not in read]
        for prompt in prompts:
            if prompt not in known and unread:
                old = unread.pop()
                self._last.pop(old, None)
                known[prompt] = known.pop(old)
            known.setdefault(prompt, len(known))
        return [known[p] for p in prompts]

    def advance(self, steps: int, longest: int) -> Drawn:
        # The last token drawn is not in the ring yet.
        self._cache.make_columns(longest - 1 + steps)
        self._settle()
        if self._block is None:
            tokens = self._cursor.new_zeros(steps, self.slots)
            logprobs = torch.zeros(tokens.shape, device=tokens.device)
            self._block = (tokens, logprobs, torch.zeros_like(logprobs))
        self._cursor.zero_()
        for _ in range(steps):
            self._run_step()
        tokens, logprobs, entropies = (part[:steps, : self.rows.count] for part in self._block)
        return tokens, logprobs, entropies

    def free(self, slots: Sequence[int]) -> None:
        super().free(slots)
        for slot in slots:
            self._owners[slot] = None

    def should_compact(self, live: int) -> bool:
        return live <= self._graphs.share * self._bucket

    def compact(self, slots: Sequence[int]) -> None:
        """Rows move within their tensors and prompts stay, so recorded steps remain valid."""
        super().compact(slots)
        self._cache.compact(slots)
        self._owners = [self._owners[slot] for slot in slots]
        self._resize_bucket()
        self._settled = False

    def _resize_bucket(self) -> None:
        self._bucket = min(self.slots, self._graphs.bucket(len(self._owners)))

    def release(self) -> None:
        # Recorded steps refer to this engine and it to them: break the cycle.
        self._recorded.clear()
        self._cache.layers.clear()
        self._graphs = OpByOp()

    def _settle(self) -> None:
        """Write into `_state` which rows continue which prompt."""
        if self._settled:
            return
        state, places = self._state, self._cache.places
        groups: list[list[int]] = [[] for _ in range(places)]
        for row, place in enumerate(self._owners):
            if place is not None:
                groups[place].append(row)
        largest = max(map(len, groups))
        size = max(state.members.shape[1], 1 << (largest - 1).bit_length())
        if state.members.shape != (places, size):
            members = self._cursor.new_zeros(places, size)
            self._state = state = replace(state, members=members, prompt_lengths=members[:, 0] + 1)
        lengths = {place: len(prompt) for prompt, place in self._prompts.items()}
        owners = [place or 0 for place in self._owners] + [0] * (self.slots - len(self._owners))
        state.members.copy_(torch.tensor([g + [-1] * (size - len(g)) for g in groups]))
        state.prompt_lengths.copy_(torch.tensor([lengths.get(p, 1) for p in range(places)]))
        state.owners.copy_(torch.tensor(owners))
        self._settled = True

    def _run_step(self) -> None:
        shapes = (self._cache.places, self._cache.width, self._state.members.shape[1])
        if shapes != self._shapes:  # tensors have moved
            self._recorded.clear()
            self._shapes = shapes
        key = (self._bucket, self.rows.settings.flags)
        if key in self._recorded:
            self._recorded[key]()
            return
        started = time.perf_counter()
        recorded = self._graphs.record(self._step)
        self.captured.append(time.perf_counter() - started)
        if recorded is None:
            self._graphs, recorded = OpByOp(), self._step
        self._recorded[key] = recorded

    def _step(self) -> None:
        """Feed every row its last token and draw the next; no operation waits for the device."""
        assert self._block is not None
        rows, count, state = self.rows, self._bucket, self._state
        state.column.add_(1).remainder_(self._cache.width)
        state = replace(state, lengths=state.lengths[:count], owners=state.owners[:count])
        tokens, positions = rows.tokens[None, :count], rows.positions(count)[None]
        hidden = self.policy.hidden_states(Decode(self._cache, state), tokens, positions)
        drawn = rows.draw(self.policy.logits(hidden))
        for held, new in zip(self._block, drawn, strict=True):
            held[:, :count].index_copy_(0, self._cursor, new[None].to(held.dtype))
        self._cursor.add_(1)


class PaddedEngine(BaseEngine):
    """Left-padded rows over transformers' own cache, for models without the attention interface."""

    refills = False

    def __init__(self, policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> None:
        super().__init__(policy, size, stop_ids)
        self._cache: Any = None
        self._mask = torch.empty(0)
        known = inspect.signature(policy.decoder.forward).parameters
        # The first is what all are called from transformers 5.24 on.
        caches = (n for n in ("cache", "past_key_values", "cache_params") if n in known)
        self._cache_name = next(caches, "")
        self._require_sound(size.prompt + size.completion)

    @torch.no_grad()
    def _require_sound(self, longest: int) -> None:
        """Compare the logits of padded rows over the cache with those of whole texts.

        Some models count positions over the padding, and some layers the cache cannot hold.

        Args:
            longest: tokens of a text.

        Raises:
            ModelError: they differ, or there are none.
        """
        policy, rows = self.policy, torch.arange(4, device=self.policy.device)
        ids = (torch.arange(56, device=rows.device).view(4, 14) * 7919 + 11) % policy.vocabulary
        lengths = torch.tensor([11, 6, 7, 9], device=rows.device)
        prompts = [tuple(ids[row, :length].tolist()) for row, length in enumerate(lengths)]
        what = f"{type(policy.model).__name__} cannot be sampled from in padded rows"
        fix = "Use another model, or model.attention: native where it has that."
        with as_model_error(what, fix=fix), short_windows(policy.model, longest):
            if not self._cache_name:
                raise ValueError("it takes no cache of transformers' usual kind")
            with policy.autocast():
                whole = policy.decoder(input_ids=ids, use_cache=False).last_hidden_state
            found = [self._prefill(prompts, range(4), range(4))]
            found += [self._feed(ids[rows, at], at) for at in (lengths, lengths + 1)]
        expected = policy.logits(whole[rows, torch.stack([lengths - 1, lengths, lengths + 1])])
        gaps = (torch.stack(found) - expected).abs().amax(-1) / expected.abs().max()
        # Of the padded rows, the one that moves least: rounding may choose an expert.
        share = float(gaps[:, 1:].amin(1).max())
        if not share <= bound_of(policy):  # nor is it where it is no number
            why = f"logits differ by {share:.2g} of their size from those of whole texts"
            raise ModelError(f"{what}: {why}", fix=fix)

    def _prefill(
        self, prompts: list[Tokens], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        device = self.policy.device
        assert list(slots) == list(range(len(slots))), "a plain cache is filled all at once"
        width = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        live = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        self._mask = torch.tensor(live, device=device)
        self._cache = DynamicCache(config=self.policy.model.config)
        logits = self._forward(ids, (self._mask.cumsum(1) - 1).clamp(min=0))
        owner = torch.tensor(owners, device=device)
        self._select(owner)
        return logits[owner]

    def advance(self, steps: int, longest: int) -> Drawn:
        del longest
        rows, n = self.rows, self.rows.count
        drawn = [rows.draw(self._feed(rows.tokens[:n], rows.positions(n))) for _ in range(steps)]
        tokens, logprobs, entropies = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        return tokens, logprobs, entropies

    def _feed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run one more token of every row: logits [rows, V]."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        return self._forward(tokens[:, None], positions[:, None])

    def should_compact(self, live: int) -> bool:
        return live <= OpByOp.share * self.rows.count

    def compact(self, slots: Sequence[int]) -> None:
        super().compact(slots)
        self._select(torch.tensor(slots, dtype=torch.long, device=self._mask.device))

    def _select(self, rows: Tensor) -> None:
        self._cache.reorder_cache(rows)
        self._mask = self._mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        # Without attention, what came before is in the cache alone.
        mask = None if ids.shape[1] == 1 and all(self._cache.is_linear) else self._mask
        with self.policy.autocast():
            output = self.policy.decoder(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{self._cache_name: self._cache},
            )
        return self.policy.logits(output.last_hidden_state[:, -1])


def make_engine(policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> BaseEngine:
    """The engine for this model, with as many of the slots as a GPU's free memory allows.

    Args:
        policy: the model.
        size: the capacity wanted.
        stop_ids: as in `BaseEngine`.
    """
    room = fitting_size(policy, size)
    made = (Engine if policy.native else PaddedEngine)(policy, room, stop_ids)
    made.asked = size
    return made


def _storage(policy: Policy) -> list[int]:
    """Addresses of the weights, which recorded steps read."""
    return [parameter.data_ptr() for parameter in policy.parameters()]


# --- how a decoding step is repeated --------------------------------------------------------------

log = logging.getLogger(__name__)

# Rotary embeddings that read the longest position on the host in every forward.
SIZED_BY_LENGTH = frozenset({"dynamic", "longrope"})

WHY = (
    "The decoding step of %s cannot be recorded%s, so sampling starts every operation from the "
    "host, which is slower%s"
)


class OpByOp:
    """Steps run as they are written; the subclasses record them."""

    share = 0.875
    """Rows are compacted once the live ones are at most this share of a bucket."""
    keeps = False
    """Whether recorded steps are worth their memory until the sampler is called again."""

    def bucket(self, live: int) -> int:
        """Rows to record a step for, given the number of live ones."""
        return live

    def record(self, step: Step) -> Step | None:
        """Run the step once; returns what repeats it, or None if it cannot be recorded."""
        step()
        return step


class CpuGraphs(OpByOp):
    """Steps whose kernels are called without Python in between, with packed weights.

    Args:
        model: the model, whose weights must not change meanwhile.
    """

    # Recording costs as much as some steps of a small model; rows that are not read cost their
    # share of every product. At 25 M parameters and ragged lengths, 0.5 to 0.8 are within 6 %.
    share = 0.7
    # Tokens of a completion from which on it pays; estimated from what recording a step of the
    # 0.5 M model takes, some ten steps' savings.
    fewest = 12

    def __init__(self, model: nn.Module) -> None:
        self._model = type(model).__name__
        self._weights = graph.PackedWeights(multiplied(model))

    def record(self, step: Step) -> Step | None:
        played = graph.record(step, self._weights)
        if played is None:
            log.info(WHY, self._model, "", ".")
        return played


class CudaGraphs(OpByOp):
    """Steps as CUDA graphs, which share one pool of memory and are captured on one stream.

    Args:
        device: where they run.
        model: the model's name, for a warning.
    """

    # Estimated, not measured: capturing takes as long as some steps op by op.
    share = 0.25
    keeps = True

    def __init__(self, device: torch.device, model: str) -> None:
        self._device = device
        self._model = model
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pool: Any = torch.cuda.graph_pool_handle()

    def bucket(self, live: int) -> int:
        return 1 << (live - 1).bit_length()

    def record(self, step: Step) -> Step | None:
        here = torch.cuda.current_stream(self._device)
        self._side.wait_stream(here)
        try:
            with torch.cuda.stream(self._side):
                step()  # a warm-up, and the step itself
                return self._captured(step)
        finally:
            here.wait_stream(self._side)

    def _captured(self, step: Step) -> Step | None:
        # Not `torch.cuda.graph`: where a capture fails it leaves its own stream current, and it
        # empties the allocator's cache every time.
        captured = torch.cuda.CUDAGraph()
        try:
            captured.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:  # whatever it is, the stream must not go on capturing
                with contextlib.suppress(RuntimeError):  # a broken capture says so once more
                    captured.capture_end()
                raise
            captured.capture_end()
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            log.warning(WHY, self._model, " as a CUDA graph", f": {first_line(problem)}")
            return None
        replay: Step = captured.replay
        return replay


def choose_graphs(policy: Policy, completion: int) -> OpByOp:
    """How the steps of this model are repeated.

    Args:
        policy: the model.
        completion: tokens of the longest completion.
    """
    name, device = type(policy.model).__name__, policy.device
    if SIZED_BY_LENGTH & {rope.get("rope_type") for rope in policy.ropes}:
        return OpByOp()
    if device.type == "cuda":
        return CudaGraphs(device, name)
    # Plain attention reads all columns, and little time passes between operations.
    if has_kernel(policy) and completion >= CpuGraphs.fewest:
        return CpuGraphs(policy.model)
    return OpByOp()


def multiplied(model: nn.Module) -> list[Tensor]:
    """The weights of a model's linear layers."""
    return [m.weight for m in model.modules() if type(m) is nn.Linear]
