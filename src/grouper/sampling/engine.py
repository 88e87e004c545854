"""Engines run the model for the sampler: slots over our cache, or padded rows over a plain cache.

The decoding step needs nothing from the host, so it is recorded and replayed where that is faster.
It reads and writes tensors that never move: the last tokens, the number of tokens of each row, the
column of the ring, the block of new tokens. It is recorded once per bucket of rows, and again when
a tensor has to grow.
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
    """Slots that hold sequences: prompts and the tokens sampled so far.

    Args:
        policy: the model.
        size: the capacity.
        stop_ids: ids that must not be sampled before `min_new_tokens`.
    """

    refills = True
    """Whether a finished slot can be refilled while others continue."""
    keeps = False
    """Whether recorded steps are worth their memory until the sampler is called again."""

    def __init__(self, policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> None:
        self.policy = policy
        self.slots = size.slots
        self.capacity = size
        """The capacity requested; if memory is short, there are fewer slots."""
        self.captured: list[float] = []
        """Seconds that recording took, per step."""
        self._storage = _storage(policy)
        # Heads may score more ids than there are embeddings.
        head: Any = policy.model.get_output_embeddings()
        vocabulary = len(head.weight)
        self.rows = DecodeRows(size, vocabulary, stop_ids, policy.device)

    def serves(self, policy: Policy, size: CacheSize) -> bool:
        """Tell whether it can sample from this policy with this capacity."""
        if policy is not self.policy:
            return False
        for needed, available in zip(size, self.capacity, strict=True):
            if needed > available:
                return False
        return self._storage == _storage(policy)

    def begin(self, requests: Sequence[SampleRequest]) -> None:
        """Free all slots; these requests come next."""
        self.rows.begin(requests)

    def admit(self, requests: Sequence[SampleRequest], slots: Sequence[int]) -> Drawn:
        """Start requests in free slots: run each prompt once and sample the first tokens.

        Args:
            requests: one for each slot.
            slots: free ones.

        Returns:
            Token ids, log-probs and entropies, [1, slots] each.
        """
        prompts: dict[Tokens, int] = {}
        owners = []
        for request in requests:
            # What has been sampled of a request is run like a part of its prompt.
            owner = prompts.setdefault(request.context, len(prompts))
            owners.append(owner)
        logits = self._prefill(list(prompts), slots, owners)
        self.rows.fill(slots, requests)
        places = torch.tensor(slots, device=self.policy.device)
        tokens, logprobs, entropies = self.rows.draw(logits, places)
        return tokens[None], logprobs[None], entropies[None]

    @abstractmethod
    def _prefill(
        self, prompts: list[Tokens], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        """Run each prompt once and assign it to its slots.

        Args:
            prompts: distinct ones.
            slots: the slots to fill.
            owners: for each slot, the index of its prompt in `prompts`.

        Returns:
            Logits of the first new token, [slots, V] float32.
        """

    @abstractmethod
    def advance(self, steps: int, longest: int) -> Drawn:
        """Sample `steps` more tokens in every slot in use.

        Args:
            steps: decoding steps.
            longest: tokens of the longest unfinished sequence.

        Returns:
            Token ids, log-probs and entropies, [steps, slots] each.
        """

    def free(self, slots: Sequence[int]) -> None:
        """Mark these slots as finished; they keep running until refilled or compacted away."""
        self.rows.free(slots)

    @abstractmethod
    def should_compact(self, live: int) -> bool:
        """Tell whether so few slots are live that compacting them saves time."""

    def compact(self, slots: Sequence[int]) -> None:
        """Move these slots to the front, in order; drop the others."""
        self.rows.compact(slots)

    def release(self) -> None:  # noqa: B027 - this class has nothing to free
        """Free the memory that only sampling needs."""


class Engine(BaseEngine):
    """The model's own code over our cache: no padding, prompts run once, slots refilled.

    Args:
        policy: the model.
        size: the capacity.
        stop_ids: as in `BaseEngine`.
        graphs: how steps are repeated; None: chosen by `choose_graphs`.
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
        """Recorded steps, by the values that a step decides on the host: rows and flags."""
        self._shapes = (0, 0, 0)
        """Places, columns of the ring, and most rows of a prompt, as recorded."""
        width = PLAIN_WIDTH
        if has_kernel(policy):
            width = KERNEL_WIDTH
        self._cache = KVCache(size, width, device)
        self._prompts: dict[Tokens, int] = {}
        """Prompt -> its place in the cache."""
        self._last: dict[Tokens, Tensor] = {}
        """Prompt -> hidden state [H] of its last token."""
        self._owners: list[int | None] = []
        """The place of each slot's prompt; None: the slot is free."""
        owners = torch.zeros(self.slots, dtype=torch.long, device=device)
        self._state = DecodeState(
            column=self._cache.column,
            lengths=self.rows.drawn,
            owners=owners,
            prompt_lengths=owners[:0],
            members=owners.view(self.slots, 1)[:0],
        )
        """The state of all slots."""
        self._settled = False
        """Whether `_state` has the current owners and members."""
        self._bucket = 0
        """Rows in a step."""
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        """[1]: steps since the host last read the block."""
        self._block: Drawn | None = None
        """The sampled tokens, log-probs and entropies, [steps, slots] each.

        Allocated by the first call of `advance`; no later one has more steps.
        """

    def begin(self, requests: Sequence[SampleRequest]) -> None:
        super().begin(requests)
        # The weights may have changed, so cached prompts are stale.
        self._prompts = {}
        self._last = {}
        self._owners = []
        self._bucket = 0

    def _prefill(
        self, prompts: list[Tokens], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        places = self._place(prompts, set(slots))
        new_prompts = [prompt for prompt in prompts if prompt not in self._last]
        self._cache.make_places(len(self._prompts))
        longest = max(len(prompt) for prompt in prompts)
        count = prompts_at_once(longest)
        for start in range(0, len(new_prompts), count):
            self._run_prompts(new_prompts[start : start + count])

        new_slots = max(slots) + 1 - len(self._owners)
        self._owners += [None] * new_slots
        for slot, owner in zip(slots, owners, strict=True):
            self._owners[slot] = places[owner]
        if len(self._owners) > self._bucket:
            self._resize_bucket()
        self._settled = False
        # The head runs once per prompt; slots that share a prompt share its logits.
        last_states = [self._last[prompt] for prompt in prompts]
        hidden = torch.stack(last_states)
        logits = self.policy.logits(hidden)
        rows = torch.tensor(owners, device=self.policy.device)
        return logits[rows]

    def _run_prompts(self, prompts: list[Tokens]) -> None:
        """Run prompts in one forward; store their keys, values and last hidden states."""
        places = [self._prompts[prompt] for prompt in prompts]
        entries = torch.tensor(places, device=self.policy.device)
        layout = Prefill(self._cache, prompts, entries, multiple=self.policy.size_multiple)
        hidden = self.policy.hidden_states(layout, layout.token_ids, layout.position_ids)
        last_states = hidden.index_select(0, layout.sources)
        for prompt, state in zip(prompts, last_states, strict=True):
            self._last[prompt] = state

    def _place(self, prompts: list[Tokens], slots: set[int]) -> list[int]:
        """Return the place of each prompt in the cache, assigning places to new ones.

        Args:
            prompts: distinct ones.
            slots: free ones, which read no place any more.
        """
        places = self._prompts
        # Places in use: those that a running slot reads, and those of prompts that come again.
        in_use: set[int | None] = set()
        for slot, place in enumerate(self._owners):
            if slot not in slots:
                in_use.add(place)
        for prompt in prompts:
            if prompt in places:
                in_use.add(places[prompt])
        replaceable = [prompt for prompt, place in places.items() if place not in in_use]
        for prompt in prompts:
            if prompt in places:
                continue
            if replaceable:
                old = replaceable.pop()
                self._last.pop(old, None)
                places[prompt] = places.pop(old)
            else:
                places[prompt] = len(places)
        return [places[prompt] for prompt in prompts]

    def advance(self, steps: int, longest: int) -> Drawn:
        # The last token sampled is not in the ring yet.
        self._cache.make_columns(longest - 1 + steps)
        self._settle()
        if self._block is None:
            tokens = self._cursor.new_zeros(steps, self.slots)
            logprobs = torch.zeros(tokens.shape, device=tokens.device)
            entropies = torch.zeros_like(logprobs)
            self._block = (tokens, logprobs, entropies)
        self._cursor.zero_()
        for _ in range(steps):
            self._run_step()
        count = self.rows.count
        tokens, logprobs, entropies = (tensor[:steps, :count] for tensor in self._block)
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
        bucket = self._graphs.bucket(len(self._owners))
        self._bucket = min(self.slots, bucket)

    def release(self) -> None:
        # Recorded steps refer to this engine and it to them: break the cycle.
        self._recorded.clear()
        self._cache.layers.clear()
        self._graphs = OpByOp()

    def _settle(self) -> None:
        """Write into `_state` which rows continue which prompt."""
        if self._settled:
            return
        places = self._cache.places
        # The slots that continue each prompt.
        groups: list[list[int]] = [[] for _ in range(places)]
        # Free slots read the first place: their output is not used.
        owners = [0] * self.slots
        for row, place in enumerate(self._owners):
            if place is not None:
                groups[place].append(row)
                owners[row] = place
        largest = max(len(group) for group in groups)
        # A power of two that never shrinks: a new shape makes recorded steps useless.
        power = 1 << (largest - 1).bit_length()
        recorded_size = self._state.members.shape[1]
        size = max(recorded_size, power)
        if self._state.members.shape != (places, size):
            members = self._cursor.new_zeros(places, size)
            prompt_lengths = members[:, 0] + 1
            self._state = replace(self._state, members=members, prompt_lengths=prompt_lengths)

        lengths = [1] * places
        for prompt, place in self._prompts.items():
            lengths[place] = len(prompt)
        padded_groups = []
        for group in groups:
            padding = [-1] * (size - len(group))
            padded_groups.append(group + padding)
        self._state.members.copy_(torch.tensor(padded_groups))
        self._state.prompt_lengths.copy_(torch.tensor(lengths))
        self._state.owners.copy_(torch.tensor(owners))
        self._settled = True

    def _run_step(self) -> None:
        """Replay the step that was recorded for these rows and flags, or record it now."""
        members = self._state.members.shape[1]
        shapes = (self._cache.places, self._cache.width, members)
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
            # No later step will be recorded either.
            self._graphs = OpByOp()
            recorded = self._step
        self._recorded[key] = recorded

    def _step(self) -> None:
        """Feed every row its last token and sample the next; no operation waits for the device."""
        assert self._block is not None
        rows = self.rows
        count = self._bucket
        column = self._state.column
        column.add_(1).remainder_(self._cache.width)
        lengths = self._state.lengths[:count]
        owners = self._state.owners[:count]
        state = replace(self._state, lengths=lengths, owners=owners)
        # One flat row [1, count], as everywhere in the model's own code.
        tokens = rows.tokens[None, :count]
        positions = rows.positions(count)[None]
        layout = Decode(self._cache, state)
        hidden = self.policy.hidden_states(layout, tokens, positions)
        logits = self.policy.logits(hidden)
        sampled = rows.draw(logits)
        for block, values in zip(self._block, sampled, strict=True):
            in_use = block[:, :count]
            row = values[None].to(block.dtype)
            in_use.index_copy_(0, self._cursor, row)
        self._cursor.add_(1)


# From transformers 5.24 on, every model has the first.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


class PaddedEngine(BaseEngine):
    """Left-padded rows over transformers' own cache, for models without the attention interface."""

    refills = False

    def __init__(self, policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> None:
        super().__init__(policy, size, stop_ids)
        self._cache: Any = None
        self._mask = torch.empty(0)
        parameters = inspect.signature(policy.decoder.forward).parameters
        self._cache_name = ""
        """The argument of the model's forward that takes the cache; empty if it has none."""
        for name in _CACHE_NAMES:
            if name in parameters:
                self._cache_name = name
                break
        self._require_sound(size.prompt + size.completion)

    @torch.no_grad()
    def _require_sound(self, longest: int) -> None:
        """Compare the logits of padded rows over the cache with those of whole texts.

        Some models count positions over the padding, and some layers the cache cannot hold.

        Args:
            longest: tokens of a text.

        Raises:
            ModelError: the logits differ, or the model takes no cache.
        """
        policy = self.policy
        device = policy.device
        # Four texts of 14 arbitrary ids, cut into prompts of different lengths.
        rows = torch.arange(4, device=device)
        numbers = torch.arange(56, device=device).view(4, 14)
        ids = (numbers * 7919 + 11) % policy.vocabulary
        lengths = torch.tensor([11, 6, 7, 9], device=device)
        prompts = []
        for row, length in enumerate(lengths):
            token_ids = ids[row, :length]
            prompts.append(tuple(token_ids.tolist()))
        problem = f"{type(policy.model).__name__} cannot be sampled from in padded rows"
        fix = "Use another model, or model.attention: native where it has that."
        with as_model_error(problem, fix=fix), short_windows(policy.model, longest):
            if not self._cache_name:
                raise ValueError("it takes no cache of transformers' usual kind")
            with policy.autocast():
                hidden = policy.decoder(input_ids=ids, use_cache=False).last_hidden_state
            # The last token of each prompt and the two after it, over the cache.
            padded = [self._prefill(prompts, range(4), range(4))]
            for position in (lengths, lengths + 1):
                logits = self._feed(ids[rows, position], position)
                padded.append(logits)
        columns = torch.stack([lengths - 1, lengths, lengths + 1])
        expected = policy.logits(hidden[rows, columns])
        # [3, 4]: the first row has no padding, since it is the longest.
        differences = (torch.stack(padded) - expected).abs()
        gaps = differences.amax(-1) / expected.abs().max()
        # Rounding may send a token to another expert, so only the padded row that differs least
        # in each step counts.
        smallest_gaps = gaps[:, 1:].amin(1)
        share = float(smallest_gaps.max())
        if not share <= bound_of(policy):  # written so that a NaN is an error, too
            reason = f"logits differ by {share:.2g} of their size from those of whole texts"
            raise ModelError(f"{problem}: {reason}", fix=fix)

    def _prefill(
        self, prompts: list[Tokens], slots: Sequence[int], owners: Sequence[int]
    ) -> Tensor:
        device = self.policy.device
        all_slots = list(range(len(slots)))
        assert list(slots) == all_slots, "a plain cache is filled all at once"
        width = max(len(prompt) for prompt in prompts)
        padded_ids = []
        mask = []
        for prompt in prompts:
            padding = [0] * (width - len(prompt))
            padded_ids.append(padding + list(prompt))
            mask.append(padding + [1] * len(prompt))
        ids = torch.tensor(padded_ids, device=device)
        self._mask = torch.tensor(mask, device=device)
        self._cache = DynamicCache(config=self.policy.model.config)
        # Positions count the tokens, not the padding.
        positions = self._mask.cumsum(1) - 1
        positions = positions.clamp(min=0)
        logits = self._forward(ids, positions)
        rows = torch.tensor(owners, device=device)
        self._select(rows)
        return logits[rows]

    def advance(self, steps: int, longest: int) -> Drawn:
        del longest  # the cache grows by itself
        rows = self.rows
        count = rows.count
        sampled = []
        for _ in range(steps):
            positions = rows.positions(count)
            # Logits have no name: those of this step must not be in memory during the next one.
            sampled.append(rows.draw(self._feed(rows.tokens[:count], positions)))
        columns = zip(*sampled, strict=True)
        tokens, logprobs, entropies = (torch.stack(per_step) for per_step in columns)
        return tokens, logprobs, entropies

    def _feed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run one more token of every row and return logits [rows, V]."""
        new_column = self._mask.new_ones(len(tokens), 1)
        self._mask = torch.cat([self._mask, new_column], dim=1)
        ids = tokens[:, None]
        return self._forward(ids, positions[:, None])

    def should_compact(self, live: int) -> bool:
        return live <= OpByOp.share * self.rows.count

    def compact(self, slots: Sequence[int]) -> None:
        super().compact(slots)
        device = self._mask.device
        rows = torch.tensor(slots, dtype=torch.long, device=device)
        self._select(rows)

    def _select(self, rows: Tensor) -> None:
        """Let these rows of the cache, in this order, be all of it."""
        self._cache.reorder_cache(rows)
        self._mask = self._mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run tokens [rows, L] at positions [rows, L]; return the last ones' logits [rows, V]."""
        mask: Tensor | None = self._mask
        is_step = ids.shape[1] == 1
        if is_step and all(self._cache.is_linear):
            # A recurrence has its past in its state: there are no earlier tokens to mask.
            mask = None
        with self.policy.autocast():
            output = self.policy.decoder(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{self._cache_name: self._cache},
            )
        last_states = output.last_hidden_state[:, -1]
        return self.policy.logits(last_states)


def make_engine(policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> BaseEngine:
    """Return the engine for this model, with as many slots as a GPU's free memory allows.

    Args:
        policy: the model.
        size: the capacity to aim at.
        stop_ids: as in `BaseEngine`.
    """
    fitting = fitting_size(policy, size)
    engine: BaseEngine
    if policy.native:
        engine = Engine(policy, fitting, stop_ids)
    else:
        engine = PaddedEngine(policy, fitting, stop_ids)
    engine.capacity = size
    return engine


def _storage(policy: Policy) -> list[int]:
    """Return the addresses of the weights, which recorded steps read."""
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
        """Return the number of rows to record a step for, given the number of live ones."""
        return live

    def record(self, step: Step) -> Step | None:
        """Run the step once; return a function that repeats it, or None if there can be none."""
        step()
        return step


class CpuGraphs(OpByOp):
    """Steps whose kernels are called without Python in between, with packed weights.

    Args:
        model: the model, whose weights must not change meanwhile.
    """

    # A trade-off: recording costs as much as some steps of a small model, and rows that are not
    # read cost their share of every product. At 25 M parameters and ragged lengths, the times for
    # 0.5 to 0.8 are within 6 %.
    share = 0.7
    # Tokens of the shortest completion that is worth recording for. An estimate: recording a step
    # of the 0.5 M model takes as long as some ten recorded steps save.
    fewest = 12

    def __init__(self, model: nn.Module) -> None:
        self._model = type(model).__name__
        self._weights = graph.PackedWeights(multiplied(model))

    def record(self, step: Step) -> Step | None:
        replay = graph.record(step, self._weights)
        if replay is None:
            log.info(WHY, self._model, "", ".")
        return replay


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
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):
                # This is the step itself, and the warm-up that a capture needs.
                step()
                return self._captured(step)
        finally:
            current.wait_stream(self._side)

    def _captured(self, step: Step) -> Step | None:
        """Capture the step without running it; return its replay, or None if that fails."""
        # Not `torch.cuda.graph`: where a capture fails it leaves its own stream current, and it
        # empties the allocator's cache every time.
        captured = torch.cuda.CUDAGraph()
        whole = False
        try:
            captured.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:  # whatever it is, the stream must not go on capturing
                with contextlib.suppress(RuntimeError):  # a broken capture says so once more
                    captured.capture_end()
                raise
            captured.capture_end()
            whole = True
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            log.warning(WHY, self._model, " as a CUDA graph", f": {first_line(problem)}")
            return None
        finally:
            if not whole:
                self._leave_pool()
        replay: Step = captured.replay
        return replay

    def _leave_pool(self) -> None:
        """Have the allocator leave the pool of a capture that has failed.

        PyTorch ends the capture of the stream first. Where that raises, the allocator is not told,
        and everything allocated later would stay in the pool for good.
        """
        # Builds without CUDA have no such function.
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)  # noqa: SLF001 - there is no public name
        if end is not None:
            with contextlib.suppress(RuntimeError):  # it has left the pool already
                end(self._device.index or 0, self._pool)


def choose_graphs(policy: Policy, completion: int) -> OpByOp:
    """Choose how the steps of this model are repeated.

    Args:
        policy: the model.
        completion: tokens of the longest completion.
    """
    rope_types = {rope.get("rope_type") for rope in policy.ropes}
    if SIZED_BY_LENGTH & rope_types:
        return OpByOp()
    if policy.device.type == "cuda":
        return CudaGraphs(policy.device, type(policy.model).__name__)
    # Plain attention reads all columns, and little time passes between operations.
    if has_kernel(policy) and completion >= CpuGraphs.fewest:
        return CpuGraphs(policy.model)
    return OpByOp()


def multiplied(model: nn.Module) -> list[Tensor]:
    """Return the weights of a model's linear layers, without subclasses of `nn.Linear`."""
    return [module.weight for module in model.modules() if type(module) is nn.Linear]
