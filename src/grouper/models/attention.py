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
    """The settings of attention in one layer."""

    layer: int
    scaling: float
    """Factor of the scores before the softmax."""
    window: int | None
    """A token sees itself and the `window - 1` tokens before it; None: all of them."""
    softcap: float | None
    """Scores are limited to (-softcap, softcap) by a tanh; None: they are not."""


class Layout(Protocol):
    """The relation of which tokens attend to which."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend with flat tokens.

        Args:
            query: [1, Hq, N, D].
            key: [1, Hkv, N, D].
            value: [1, Hkv, N, D].
            spec: the settings of the layer.

        Returns:
            [1, Hq, N, D].
        """
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
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as the model's layout says; transformers calls this in place of its own attention.

    Returns:
        [1, N, Hq, D], and None for the attention weights, which are never computed.

    Raises:
        ModelError: the layer needs a feature that layouts do not have.
    """
    if layout is None:
        raise ModelError(
            "the model was called directly while Grouper's attention is switched on",
            fix="Call it outside of `policy.native_attention()`.",
        )
    features = {name: value for name, value in options.items() if name not in _HARMLESS}
    features["a mask of its own"] = attention_mask is not None
    features["attention dropout"] = dropout > 0
    features["attention in both directions"] = not getattr(module, "is_causal", True)
    unknown = []
    for name, setting in features.items():
        if setting is not None and setting is not False:
            unknown.append(name)
    if unknown:
        raise ModelError(
            f"{type(module).__name__} asks for attention features that Grouper's own attention "
            f"does not have: {', '.join(unknown)}",
            fix="Set model.attention: sdpa (or eager).",
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    spec = AttentionSpec(
        layer=int(getattr(module, "layer_idx", 0)),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    out = layout.attend(query, key, value, spec)
    # Contiguous, since some models call `view` on the result.
    return out.transpose(1, 2).contiguous(), None


# No mask function is registered under this name, so models build no mask: the layout is the mask.
AttentionInterface.register(NAME, _entry)


def attend(  # noqa: PLR0917 - tensors by position
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    span: ops.VisibleSpan | None = None,
) -> Tensor:
    """Attend with rows of queries to rows of keys and values.

    Query heads are grouped as in transformers: head h uses key head h // (Hq / Hkv).

    Args:
        query: [B, Hq, Q, D].
        key: [B, Hkv, K, D].
        value: [B, Hkv, K, D].
        mask: bool, broadcastable to [B, 1, Q, K]; None: causal, with Q = K.
        spec: the settings of the layer.
        span: the mask in numbers, which our own kernel takes; None: PyTorch's operations run.

    Returns:
        [B, Hq, Q, D].
    """
    if span is not None and spec.softcap is None and ops.attention_serves(query, key, value):
        return ops.attend(query, key, value, mask, span, spec.scaling)
    # Two ways take no grouped heads, so keys and values are repeated for them: the plain product
    # below, and CUDA's memory-efficient kernel, which is the one that takes a mask. Without that
    # kernel, all scores [B, Hq, Q, K] would be kept for the backward.
    on_cuda = device_type(query) == "cuda"
    repeats = spec.softcap is not None or (mask is not None and on_cuda)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and repeats:
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
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
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, lowest)
    accurate = scores if scores.dtype == torch.float64 else scores.float()
    shares = accurate.softmax(-1).to(value.dtype)
    return torch.matmul(shares, value)


# --- rows and flat tokens ------------------------------------------------------------------------


def _moved(tensor: Tensor, places: Tensor, shape: Sequence[int] | None) -> Tensor:
    """Move heads as `move_heads` does, without a gradient."""
    _, heads, _, dim = tensor.shape
    if shape is None:
        flat = tensor.transpose(0, 1).reshape(heads, -1, dim)
        return flat.index_select(1, places)[None]
    count, length = shape
    flat = tensor.new_zeros(heads, count * length, dim)
    flat.index_copy_(1, places, tensor[0])
    return flat.view(heads, count, length, dim).transpose(0, 1)


class _Moved(torch.autograd.Function):
    """The operation `_moved`, whose gradient is moved back the same way.

    Autograd would do more: it would add gradients token by token, since an index might name a place
    twice, and keep tensors that are only copied.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: Tensor, shape: Sequence[int] | None) -> Tensor:
        ctx.places = places
        # The gradient goes the other way: to rows of this shape, or to flat tokens.
        ctx.shape = None
        if shape is None:
            ctx.shape = (tensor.shape[0], tensor.shape[2])
        return _moved(tensor, places, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _moved(grad, ctx.places, ctx.shape), None, None


def move_heads(tensor: Tensor, places: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Move flat heads to rows padded with zeros; without a shape, move such rows to flat heads.

    Padding brings no gradient to flat heads, and gets a gradient of zero.

    Args:
        tensor: flat heads [1, H, N, D], or rows [B, H, L, D].
        places: [N] int64, the place (row times L plus column) of each flat token.
        shape: (B, L) of the rows to return; None: return flat heads.

    Returns:
        Rows [B, H, L, D], or flat heads [1, H, N, D].
    """
    out: Tensor = _Moved.apply(tensor, places, shape)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


class _SharedRows(torch.autograd.Function):
    """The operation of `shared_rows` for half-precision dtypes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.index = index
        ctx.rows = len(tensor)
        ctx.dtype = tensor.dtype
        return tensor.to(dtype).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shape = (ctx.rows, *grad.shape[1:])
        total = grad.new_zeros(shape, dtype=torch.float32)
        total.index_add_(0, ctx.index, grad.float())
        return total.to(ctx.dtype), None, None


def shared_rows(tensor: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor[index]` in a dtype, with a gradient that is summed in float32.

    Autograd would sum in the dtype. A prompt's keys go to all of its completions, and in bfloat16
    the sum of their gradients would be off by half a percent.

    Args:
        tensor: [N, ...].
        index: [M] int64; rows may be named more than once.
        dtype: of the result.

    Returns:
        [M, ...].
    """
    if dtype not in HALVES:
        return tensor.to(dtype)[index]
    out: Tensor = _SharedRows.apply(tensor, index, dtype)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


# --- attention without padding on a GPU ----------------------------------------------------------
#
# PyTorch's FlashAttention over ragged sequences. The flat row of `SharedPrompts` holds the queries
# in the order that it needs: every prompt is a sequence, and so are the inputs of every completion.
# The keys of a completion are those of its prompt followed by its own. FlashAttention aligns its
# causal mask and its sliding window to the end of the keys, which is exactly right here.


class RaggedRows:
    """The places of each sequence's keys in the flat row.

    The flat order is prompt 0, prompt 1, ..., then the inputs of completion 0, 1, ...

    Args:
        prompt_lengths: [P].
        prompt_index: [R], the prompt of each completion.
        inputs: [R], tokens of each completion in the flat row; may be 0.
    """

    def __init__(self, prompt_lengths: Tensor, prompt_index: Tensor, inputs: Tensor) -> None:
        prompts = len(prompt_lengths)
        shared = prompt_lengths[prompt_index]
        # [P + R]: the lengths of each sequence, prompts first.
        query_lengths = torch.cat([prompt_lengths, inputs])
        key_lengths = torch.cat([prompt_lengths, shared + inputs])
        # [P + R]: where the tokens of each sequence begin in the flat row.
        starts = _starts(query_lengths)
        # [P + 2 R]: the keys of a prompt are one run of flat tokens; those of a completion are two,
        # its prompt and its own inputs.
        completion_runs = torch.stack([shared, inputs], 1)
        run_lengths = torch.cat([prompt_lengths, completion_runs.flatten()])
        completion_starts = torch.stack([starts[prompt_index], starts[prompts:]], 1)
        run_starts = torch.cat([starts[:prompts], completion_starts.flatten()])
        # Within a run, flat tokens and keys are apart by a constant.
        shift = run_starts - _starts(run_lengths)
        keys = int(run_lengths.sum())
        self.key_index = torch.arange(keys, device=run_lengths.device)
        """[keys] int64: the flat token of each key, sequence by sequence."""
        self.key_index += shift.repeat_interleave(run_lengths)
        self.query_ends = _borders(query_lengths)
        """[P + R + 1] int32: where each sequence's queries begin, and the end of all."""
        self.key_ends = _borders(key_lengths)
        """[P + R + 1] int32: where each sequence's keys begin, and the end of all."""
        self.longest_query = int(query_lengths.max())
        self.longest_key = int(key_lengths.max())

    def serves(self, query: Tensor) -> bool:
        """Tell whether `attend` takes these heads: CUDA, half precision, a size with kernels."""
        if device_type(query) != "cuda" or heads_dtype(query) not in HALVES:
            return False
        dim = query.shape[-1]
        if dim % 8 != 0 or dim > 256:
            return False
        # For single queries the kernel folds heads in a way that its backward does not support.
        if self.longest_query <= 1:
            return False
        # A dry run has no device to try it on, and assumes that it works.
        return not has_memory(query) or _flash_learns(query.device, heads_dtype(query), dim)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend as `Layout.attend`, without soft-capping."""
        dtype = heads_dtype(query)
        # Not `heads[0]`: its backward would write the gradient into a new tensor of zeros.
        queries = query.squeeze(0).transpose(0, 1)
        keys = key.squeeze(0).transpose(0, 1)
        values = value.squeeze(0).transpose(0, 1)
        # Our window counts the token itself, theirs only the tokens to its left.
        left = -1 if spec.window is None else spec.window - 1
        out = ragged_attention(
            queries.to(dtype),
            shared_rows(keys, self.key_index, dtype),
            shared_rows(values, self.key_index, dtype),
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_key,
            scale=spec.scaling,
            window_size=(left, 0),
        )
        return out.transpose(0, 1)[None]


def ragged_attention(*tensors: Any, **options: Any) -> Tensor:
    """Call `torch.nn.attention.varlen.varlen_attn`, with grouped heads if there are any."""
    from torch.nn.attention.varlen import varlen_attn  # registers operators, which takes a moment

    # Before PyTorch 2.12 there is no such option, and grouped heads are always taken.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        query, key = tensors[:2]
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    out = varlen_attn(*tensors, **options)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _flash_learns(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Tell whether FlashAttention has a backward for heads of this size; warn once if not."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    heads = torch.zeros(2, 1, dim, dtype=dtype, device=device, requires_grad=True)
    ends = torch.tensor([0, 2], dtype=torch.int32, device=device)
    try:
        with torch.enable_grad():
            tensors = (heads, heads, heads, ends, ends)
            out = ragged_attention(*tensors, 2, 2, scale=1.0, window_size=(-1, 0))
            torch.autograd.grad(out.sum(), heads)
    except RuntimeError as error:
        log.warning(
            "FlashAttention does not take heads of %d dimensions on this device (%s): rows are "
            "padded, which is slower.",
            dim,
            error,
        )
        return False
    return True


def heads_dtype(heads: Tensor) -> torch.dtype:
    """Return the dtype that products of these heads are computed in.

    Under autocast it may be another than their own: rotary embeddings leave heads in float32, and
    the products round them.
    """
    device = heads.device.type
    if not heads.is_meta and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return heads.dtype


def as_multiplied(heads: Tensor) -> Tensor:
    """Return heads in the dtype of their products, so that all of a layer have the same one."""
    return heads.to(heads_dtype(heads))


def _widened(rows: Tensor, multiple: int) -> Tensor:
    """Add zeros to rows [B, L] so that they are as long as a multiple of a number."""
    added = -rows.shape[1] % multiple
    return torch.nn.functional.pad(rows, (0, added)) if added else rows


def _starts(lengths: Tensor) -> Tensor:
    """Return [n]: where each of n sequences of these lengths begins."""
    return lengths.cumsum(0) - lengths


def _borders(lengths: Tensor) -> Tensor:
    """Return [n + 1] int32: where each of n sequences begins, and the end of the last."""
    ends = lengths.cumsum(0)
    return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


# --- the layout of an update ---------------------------------------------------------------------


class SharedPrompts:
    """P prompts and R completions as one flat row of N tokens, each prompt once.

    The flat order is prompt 0, prompt 1, ..., then the *inputs* of completion 0, 1, ...: all tokens
    but the last one, which predicts nothing. Exact for every model whose attention goes through
    the attention interface, with and without sliding windows.

    Linear layers run over the flat row. Attention on a GPU does so, too (`RaggedRows`); elsewhere
    it pads: prompts to [P, Tp], and the inputs to rows [R, T - 1], where a row attends to the keys
    of its prompt and to its own.

    Args:
        batch: prompts [P, Tp] and completions [R, T]; a completion may be a single token.
        multiple: the flat row is as long as a multiple of it; what is added changes no result.
        width_multiple: the same of the padded rows of attention, whose backward has products.
    """

    def __init__(self, batch: TrainBatch, *, multiple: int = 1, width_multiple: int = 1) -> None:
        self.prompt_index = batch.prompt_index
        """[R] int64: the prompt of each completion."""
        self._prompt_lengths = batch.prompt_lengths
        self._prompts_of_rows = self._prompt_lengths[self.prompt_index]
        """[R] int64: the length of each completion's prompt."""
        self._inputs = batch.completion_lengths - 1
        """[R] int64: tokens of each completion in the flat row."""
        prompt_ids = _widened(batch.prompt_ids, width_multiple)
        completion_inputs = _widened(batch.completion_ids[:, :-1], width_multiple)
        prompt_columns = torch.arange(prompt_ids.shape[1], device=prompt_ids.device)
        input_columns = torch.arange(completion_inputs.shape[1], device=prompt_ids.device)
        # [P, Tp] and [R, T - 1]: where the padded rows hold tokens.
        prompt_mask = prompt_columns < self._prompt_lengths[:, None]
        input_mask = input_columns < self._inputs[:, None]
        self._prompt_live = prompt_mask[self.prompt_index]
        """[R, Tp] bool: the mask of each completion's prompt."""
        self._prompt_shape = prompt_mask.shape
        self._shape = input_mask.shape
        # [tokens] each, for `move_heads`.
        self._prompt_places = prompt_mask.reshape(-1).nonzero().flatten()
        self._places = input_mask.reshape(-1).nonzero().flatten()

        prompt_tokens = prompt_ids[prompt_mask]
        input_tokens = completion_inputs[input_mask]
        tokens = torch.cat([prompt_tokens, input_tokens])[None]
        self.token_ids = _widened(tokens, multiple)
        """[1, N] int64."""
        self._added = self.token_ids.shape[1] - tokens.shape[1]
        """Tokens at the end of the flat row that belong to nothing."""
        self._row_positions = self._prompts_of_rows[:, None] + input_columns
        """[R, T - 1] int64: the positions of inputs in their sequences."""
        prompt_positions = prompt_columns.expand_as(prompt_mask)[prompt_mask]
        input_positions = self._row_positions[input_mask]
        positions = torch.cat([prompt_positions, input_positions])[None]
        self.position_ids = _widened(positions, multiple)
        """[1, N] int64: each prompt from 0, each completion from the length of its prompt."""

        # The first token of a completion is predicted by the last one of its prompt, and each
        # further one by the input before it.
        last_of_prompts = self._prompt_lengths.cumsum(0) - 1
        first_source = last_of_prompts[self.prompt_index][:, None]
        input_starts = self._prompt_lengths.sum() + _starts(self._inputs)
        further_sources = input_starts[:, None] + input_columns
        sources = torch.cat([first_source, further_sources], dim=1)
        columns = torch.arange(sources.shape[1], device=sources.device)
        completion_mask = columns < batch.completion_lengths[:, None]
        self.sources = sources[completion_mask]
        """[targets] int64: the flat token whose hidden state predicts each completion token."""

        self._masks: dict[int | None, tuple[Tensor | None, Tensor]] = {}
        self._ragged: RaggedRows | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend as `Layout.attend`: without padding on a GPU, else over padded rows."""
        if device_type(query) == "cuda" and spec.softcap is None:
            ragged = self.ragged()
            if ragged.serves(query):
                return ragged.attend(query, key, value, spec)
        prompt_mask, mask = self.mask(spec.window)
        # The flat row is split into the tokens of prompts and the inputs of completions.
        sizes = [self._prompt_places.numel(), self._places.numel()]
        if self._added:
            sizes.append(self._added)
        flat_prompt_query, flat_query, *_ = torch.split(query, sizes, dim=2)
        flat_prompt_key, flat_key, *_ = torch.split(key, sizes, dim=2)
        flat_prompt_value, flat_value, *_ = torch.split(value, sizes, dim=2)

        prompt_query = move_heads(flat_prompt_query, self._prompt_places, self._prompt_shape)
        prompt_key = move_heads(flat_prompt_key, self._prompt_places, self._prompt_shape)
        prompt_value = move_heads(flat_prompt_value, self._prompt_places, self._prompt_shape)
        no_prefix = torch.zeros_like(self._prompt_lengths)
        span = ops.VisibleSpan(no_prefix, self._prompt_lengths, 0, spec.window)
        prompt_rows = attend(
            as_multiplied(prompt_query),
            as_multiplied(prompt_key),
            as_multiplied(prompt_value),
            prompt_mask,
            spec,
            span,
        )
        prompt_out = move_heads(prompt_rows, self._prompt_places)
        if self._places.numel() == 0:
            return self._filled(prompt_out)

        row_query = move_heads(flat_query, self._places, self._shape)
        row_key = self._with_prompts(prompt_key, as_multiplied(flat_key))
        row_value = self._with_prompts(prompt_value, as_multiplied(flat_value))
        prompt_width = self._prompt_shape[1]
        span = ops.VisibleSpan(self._prompts_of_rows, self._inputs, prompt_width, spec.window)
        rows = attend(as_multiplied(row_query), row_key, row_value, mask, spec, span)
        out = move_heads(rows, self._places)
        return self._filled(torch.cat([prompt_out, out], dim=2))

    def _filled(self, out: Tensor) -> Tensor:
        """Add zeros [1, H, added, D] for the tokens that belong to nothing."""
        if self._added == 0:
            return out
        return torch.nn.functional.pad(out, (0, 0, 0, self._added))

    def _with_prompts(self, prompts: Tensor, flat: Tensor) -> Tensor:
        """Return each completion's keys or values, after those of its prompt.

        Args:
            prompts: [P, Hkv, Tp, D].
            flat: [1, Hkv, N, D] of the inputs.

        Returns:
            [R, Hkv, Tp + T - 1, D].
        """
        rows = move_heads(flat, self._places, self._shape)
        shared = shared_rows(prompts, self.prompt_index, rows.dtype)
        return torch.cat([shared, rows], 2)

    def ragged(self) -> RaggedRows:
        """Return the same layout without padding, computed when a GPU first needs it."""
        if self._ragged is None:
            self._ragged = RaggedRows(self._prompt_lengths, self.prompt_index, self._inputs)
        return self._ragged

    def convert(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `change` of it.

        `mask` and `ragged` read the values of tensors: if `change` returns tensors without memory,
        they have to be called before.
        """
        layouts: list[object] = [self]
        if self._ragged is not None:
            layouts.append(self._ragged)
        for layout in layouts:
            for name, value in vars(layout).items():
                setattr(layout, name, tree_map_only(Tensor, change, value))

    def mask(self, window: int | None) -> tuple[Tensor | None, Tensor]:
        """Return the masks of prompts and of rows.

        Padded keys of a prompt are hidden. Padded queries see some real token, so that no row of
        the softmax is empty; their results are thrown away.

        Args:
            window: of the layer; see `AttentionSpec`.

        Returns:
            [1, 1, Tp, Tp] bool, where None means causal, and [R, 1, T - 1, Tp + T - 1] bool.
        """
        if window not in self._masks:
            self._masks[window] = self._compute_masks(window)
        return self._masks[window]

    def _compute_masks(self, window: int | None) -> tuple[Tensor | None, Tensor]:
        """Compute the masks that `mask` returns."""
        device = self._prompt_live.device
        count, prompt_width = self._prompt_live.shape
        width = self._row_positions.shape[1]
        prompt_mask = None
        # Inputs see each other causally, and all tokens of their prompt.
        among_inputs = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        to_prompt = self._prompt_live[:, None, :].expand(-1, width, -1)
        if window is not None:
            positions = torch.arange(prompt_width, device=device)
            distance = positions[:, None] - positions
            prompt_mask = ((distance >= 0) & (distance < window))[None, None]
            within_window = torch.ones_like(among_inputs).triu(1 - window)
            among_inputs = among_inputs & within_window
            prompt_distance = self._row_positions[:, :, None] - positions
            to_prompt = to_prompt & (prompt_distance < window)
        among_inputs = among_inputs.expand(count, -1, -1)
        mask = torch.cat([to_prompt, among_inputs], dim=2)
        return prompt_mask, mask[:, None]
