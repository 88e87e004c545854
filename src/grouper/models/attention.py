"""Our attention function, registered with transformers and shared by the update and the sampler.

The model's own code runs everything but attention itself. Tokens are one flat row `[1, N]` without
padding, so linear layers compute nothing in vain. A *layout* object travels through the model's
keyword arguments and says which flat tokens attend to which:

- `SharedPrompts` (the update): each prompt once, its keys and values expanded to its
  completions, with gradient;
- `Prefill` and `Decode` in `sampling/decode_attention.py` (the sampler): the same over its cache.

What a layout does not support is refused, never ignored: sliding windows and soft-capping are
supported, attention sinks and other additions raise `ModelError`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface

from grouper.algorithms.batching import TrainBatch
from grouper.errors import ModelError
from grouper.kernels.cpu import ops
from grouper.kernels.switch import device_type, has_memory

log = logging.getLogger(__name__)

NAME = "grouper"

HALVES = frozenset({torch.bfloat16, torch.float16})

# Keywords that models pass along and that change nothing here: layouts know the positions.
_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "is_causal",
    "return_dict",
    "position_embeddings",
}


@dataclass(slots=True, kw_only=True)
class AttentionSpec:
    """What one layer asks of attention beside its tensors."""

    layer: int
    scaling: float
    # A token sees itself and the `window - 1` tokens before it; None: all of them.
    window: int | None
    softcap: float | None


class Layout(Protocol):
    """Which tokens attend to which."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Queries [1, Hq, N, D], key and value [1, Hkv, N, D] -> [1, Hq, N, D]."""
        ...


def _entry(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls. Returns ([batch, N, Hq, D], no attention weights)."""
    if layout is None:
        raise ModelError(
            "the model was called directly while Grouper's attention is switched on",
            fix="Call it outside of `policy.native_attention()`.",
        )
    asked = {name: value for name, value in others.items() if name not in _HARMLESS} | {
        "a mask of its own": attention_mask is not None,
        "attention dropout": dropout > 0,
        "attention in both directions": not getattr(module, "is_causal", True),
    }
    unknown = [name for name, value in asked.items() if value is not None and value is not False]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} asks for attention features that Grouper's own attention "
            f"does not have: {', '.join(unknown)}",
            fix="Set model.attention: sdpa (or eager).",
        )
    spec = AttentionSpec(
        layer=int(getattr(module, "layer_idx", 0)),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    # Some models view what they get here as other shapes.
    return layout.attend(query, key, value, spec).transpose(1, 2).contiguous(), None


# No mask function is registered under this name, so models build no mask: layouts know better.
AttentionInterface.register(NAME, _entry)


def attend(  # noqa: PLR0917 - tensors by position
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    span: ops.VisibleSpan | None = None,
) -> Tensor:
    """Attention of query [B, Hq, Q, D] over key and value [B, Hkv, K, D] -> [B, Hq, Q, D].

    `mask` is bool, broadcastable to [B, 1, Q, K]; None means causal with Q = K. `span` says the
    same in numbers, for a backward of our own. Query heads are grouped as transformers groups
    them: head h uses key head h // (Hq / Hkv).
    """
    if span is not None and spec.softcap is None and ops.attention_serves(query, key, value):
        return ops.attend(query, key, value, mask, span, spec.scaling)
    # The memory-efficient kernel of CUDA takes a mask but no grouped heads: without it all scores
    # [B, Hq, Q, K] would be held for the backward. Nor does the plain product below take them.
    on_cuda = device_type(query) == "cuda"
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and (spec.softcap is not None or (mask is not None and on_cuda)):
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if spec.softcap is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    scores = torch.matmul(query, key.transpose(2, 3)) * spec.scaling
    scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is None:
        size = query.shape[2]
        mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    accurate = scores if scores.dtype == torch.float64 else scores.float()
    return torch.matmul(accurate.softmax(-1).to(value.dtype), value)


# --- rows and flat tokens ------------------------------------------------------------------------


def _moved(tensor: Tensor, places: Tensor, shape: Sequence[int] | None) -> Tensor:
    heads, dim = tensor.shape[1], tensor.shape[3]
    if shape is None:
        return tensor.transpose(0, 1).reshape(heads, -1, dim).index_select(1, places)[None]
    blocks = tensor.new_zeros(heads, shape[0] * shape[1], dim).index_copy_(1, places, tensor[0])
    return blocks.view(heads, *shape, dim).transpose(0, 1)


class _Moved(torch.autograd.Function):
    """`_moved`, whose gradient moves back.

    Autograd would add gradients up token by token, since an index might name a place twice, and
    keep what is only copied.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: Tensor, shape: Sequence[int] | None) -> Tensor:
        ctx.places = places
        ctx.shape = (tensor.shape[0], tensor.shape[2]) if shape is None else None
        return _moved(tensor, places, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _moved(grad, ctx.places, ctx.shape), None, None


def move_heads(tensor: Tensor, places: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Flat heads as rows padded with zeros; without a shape, padded rows as flat heads.

    Padding brings no gradient to flat heads, and gets one of zero.

    Args:
        tensor: [1, H, N, D], or the rows [B, H, L, D].
        places: [N] int64, the place (row times L plus column) of each flat token.
        shape: (B, L) of the rows to make.
    """
    out: Tensor = _Moved.apply(tensor, places, shape)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


class _SharedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.index, ctx.rows, ctx.dtype = index, len(tensor), tensor.dtype
        return tensor.to(dtype).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.new_zeros((ctx.rows, *grad.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, ctx.index, grad.float()).to(ctx.dtype), None, None


def shared_rows(tensor: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor[index]` in a dtype; the gradients of a row's places are summed in float32.

    Autograd would sum in that dtype, and a prompt's keys go to all of its completions: in bfloat16
    their gradient would be off by half a percent.
    """
    if dtype not in HALVES:
        return tensor.to(dtype)[index]
    out: Tensor = _SharedRows.apply(tensor, index, dtype)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


# --- attention without padding on a GPU ----------------------------------------------------------
#
# PyTorch's FlashAttention over ragged sequences. The flat row of `SharedPrompts` is the queries as
# they are: every prompt is a sequence of its own, and so are the inputs of every completion. A
# completion's keys are its prompt's followed by its own, so that a causal mask aligned to the end
# of the keys, and a sliding window counted from there, say exactly who sees whom.


class RaggedRows:
    """Where the keys of each sequence are in the flat row.

    The flat order is prompt 0, prompt 1, ..., then the inputs of completion 0, 1, ...

    Args:
        prompt_lengths: [P].
        prompt_index: [R], the prompt of each completion.
        inputs: [R], tokens of each completion in the flat row; may be 0.
    """

    def __init__(self, prompt_lengths: Tensor, prompt_index: Tensor, inputs: Tensor) -> None:
        prompts, shared = len(prompt_lengths), prompt_lengths[prompt_index]
        queries = torch.cat([prompt_lengths, inputs])
        keys = torch.cat([prompt_lengths, shared + inputs])
        # The keys of a prompt are one run of flat tokens, those of a completion are two.
        starts = _starts(queries)
        of_rows = torch.stack([starts[prompt_index], starts[prompts:]], 1).flatten()
        runs = torch.cat([prompt_lengths, torch.stack([shared, inputs], 1).flatten()])
        shift = torch.cat([starts[:prompts], of_rows]) - _starts(runs)
        # [keys] int64: the flat token of each key, sequence by sequence.
        self.key_index = torch.arange(int(runs.sum()), device=runs.device)
        self.key_index += shift.repeat_interleave(runs)
        # [P + R + 1] int32: where each sequence's queries and keys begin, and the end of all.
        self.query_ends, self.key_ends = _borders(queries), _borders(keys)
        self.longest_query, self.longest_key = (int(n.max()) for n in (queries, keys))

    def serves(self, query: Tensor) -> bool:
        """Whether `attend` can take this: CUDA, half precision, heads it has kernels for."""
        dim = query.shape[-1]
        return (
            device_type(query) == "cuda"
            and heads_dtype(query) in HALVES
            and dim % 8 == 0
            and dim <= 256
            # For single queries the kernel folds heads in a way that its backward does not know.
            and self.longest_query > 1
            # A device that is only planned is taken for one that can.
            and (not has_memory(query) or _flash_learns(query.device, heads_dtype(query), dim))
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """As `Layout.attend`, without soft-capping."""
        dtype = heads_dtype(query)
        # Not `heads[0]`, whose gradient would be written into zeros once more.
        flat, keys, values = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
        out = ragged_attention(
            flat.to(dtype),
            shared_rows(keys, self.key_index, dtype),
            shared_rows(values, self.key_index, dtype),
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_key,
            scale=spec.scaling,
            # Ours counts the token itself, theirs only the tokens to its left.
            window_size=(-1 if spec.window is None else spec.window - 1, 0),
        )
        return out.transpose(0, 1)[None]


def ragged_attention(*tensors: Any, **options: Any) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`; grouped heads have to be asked for since 2.12."""
    from torch.nn.attention.varlen import varlen_attn  # registers operators, which takes a moment

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = tensors[0].shape[1] != tensors[1].shape[1]
    out = varlen_attn(*tensors, **options)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _flash_learns(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether FlashAttention has a backward for heads of this size here; if not, one warning."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    heads = torch.zeros(2, 1, dim, dtype=dtype, device=device, requires_grad=True)
    ends = torch.tensor([0, 2], dtype=torch.int32, device=device)
    try:
        with torch.enable_grad():
            tensors = (heads, heads, heads, ends, ends, 2, 2)
            out = ragged_attention(*tensors, scale=1.0, window_size=(-1, 0))
            torch.autograd.grad(out.sum(), heads)
    except RuntimeError as error:
        log.warning(
            "FlashAttention does not take heads of %d dimensions on this device (%s): rows are "
            "padded, which is slower.",
            *(dim, error),
        )
        return False
    return True


def heads_dtype(heads: Tensor) -> torch.dtype:
    """The dtype of their products: autocast leaves rotated heads in float32, and rounds them."""
    if not heads.is_meta and torch.is_autocast_enabled(heads.device.type):
        return torch.get_autocast_dtype(heads.device.type)
    return heads.dtype


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _borders(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


# --- the layout of an update ---------------------------------------------------------------------


class SharedPrompts:
    """P prompts and R completions as one flat row; each prompt's forward runs once.

    The flat order is prompt 0, prompt 1, ..., then the *inputs* of completion 0, 1, ... without
    their last token, which predicts nothing. Exact for every model whose attention goes through
    the attention interface, with and without sliding windows.

    Args:
        batch: its prompts and completions; a completion may be a single token.
    """

    def __init__(self, batch: TrainBatch) -> None:
        self.prompt_index, self._prompt_lengths = batch.prompt_index, batch.prompt_lengths
        self._prompts_of_rows = self._prompt_lengths[self.prompt_index]
        self._inputs = batch.completion_lengths - 1
        columns, slots = (
            torch.arange(ids.shape[1], device=ids.device)
            for ids in (batch.prompt_ids, batch.completion_ids)
        )
        prompt_mask = columns < self._prompt_lengths[:, None]
        input_mask = slots[:-1] < self._inputs[:, None]
        self._prompt_live = prompt_mask[self.prompt_index]
        self._prompt_shape, self._shape = prompt_mask.shape, input_mask.shape
        self._prompt_places, self._places = (
            mask.reshape(-1).nonzero().flatten() for mask in (prompt_mask, input_mask)
        )

        flat_ids = [batch.prompt_ids[prompt_mask], batch.completion_ids[:, :-1][input_mask]]
        # [1, N] int64.
        self.token_ids = torch.cat(flat_ids)[None]
        self._row_positions = self._prompts_of_rows[:, None] + slots[:-1]
        positions = [columns.expand_as(prompt_mask)[prompt_mask], self._row_positions[input_mask]]
        # [1, N] int64, each prompt from 0, completions going on from their prompt.
        self.position_ids = torch.cat(positions)[None]
        last_of_prompt = (self._prompt_lengths.cumsum(0) - 1)[self.prompt_index]
        start = self._prompt_lengths.sum() + self._inputs.cumsum(0) - self._inputs
        sources = torch.cat([last_of_prompt[:, None], start[:, None] + slots[:-1]], dim=1)
        # [targets] int64: the flat token whose hidden state predicts each completion token.
        self.sources = sources[slots < batch.completion_lengths[:, None]]

        self._masks: dict[int | None, tuple[Tensor | None, Tensor]] = {}
        self._ragged: RaggedRows | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if device_type(query) == "cuda" and spec.softcap is None:
            ragged = self.ragged()
            if ragged.serves(query):
                return ragged.attend(query, key, value, spec)
        prompt_mask, mask = self.mask(spec.window)
        sizes = [self._prompt_places.numel(), self._places.numel()]
        pairs = [torch.split(t, sizes, dim=2) for t in (query, key, value)]
        prompt_query, prompt_key, prompt_value = (
            move_heads(prompt, self._prompt_places, self._prompt_shape) for prompt, _ in pairs
        )
        none = torch.zeros_like(self._prompt_lengths)
        span = ops.VisibleSpan(none, self._prompt_lengths, 0, spec.window)
        blocks = attend(prompt_query, prompt_key, prompt_value, prompt_mask, spec, span)
        out = move_heads(blocks, self._prompt_places)
        if self._places.numel() == 0:
            return out
        own_query, own_key, own_value = (
            move_heads(own, self._places, self._shape) for _, own in pairs
        )
        rows_key, rows_value = (
            torch.cat([shared_rows(prompt, self.prompt_index, own.dtype), own], 2)
            for prompt, own in ((prompt_key, own_key), (prompt_value, own_value))
        )
        before = self._prompts_of_rows, self._inputs, self._prompt_shape[1]
        span = ops.VisibleSpan(*before, spec.window)
        rows = attend(own_query, rows_key, rows_value, mask, spec, span)
        return torch.cat([out, move_heads(rows, self._places)], dim=2)

    def ragged(self) -> RaggedRows:
        """The same without padding, worked out when a GPU first asks for it."""
        if self._ragged is None:
            self._ragged = RaggedRows(self._prompt_lengths, self.prompt_index, self._inputs)
        return self._ragged

    def convert(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put `change` of every tensor in its place; `mask` and `ragged` need real ones before."""
        for part in (self, self._ragged):
            for name, value in vars(part).items() if part is not None else ():
                setattr(part, name, tree_map_only(Tensor, change, value))

    def mask(self, window: int | None) -> tuple[Tensor | None, Tensor]:
        """Masks of prompts ([1, 1, Tp, Tp]; None: causal) and of rows ([R, 1, T - 1, Tp + T - 1]).

        Padded keys of a prompt are hidden; padded queries see something real, so that no row of
        the softmax is empty, and are thrown away.
        """
        if window not in self._masks:
            device = self._prompt_live.device
            prompt_width, width = self._prompt_live.shape[1], self._row_positions.shape[1]
            positions = torch.arange(prompt_width, device=device)
            prompt_mask = None
            own = torch.ones(width, width, dtype=torch.bool, device=device).tril()
            shared = self._prompt_live[:, None, :].expand(-1, width, -1)
            if window is not None:
                distance = positions[:, None] - positions
                prompt_mask = ((distance >= 0) & (distance < window))[None, None]
                own = own & (torch.ones_like(own).triu(1 - window))
                shared = shared & (self._row_positions[:, :, None] - positions < window)
            mask = torch.cat([shared, own.expand(shared.shape[0], -1, -1)], dim=2)
            self._masks[window] = (prompt_mask, mask[:, None])
        return self._masks[window]
