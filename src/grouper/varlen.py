"""The update's attention without padding, by PyTorch's FlashAttention over ragged sequences.

The flat row of `attention.SharedPrompts` is the queries as they are: every prompt is a sequence of
its own, and so are the inputs of every completion. A completion's keys are its prompt's followed by
its own, so that a causal mask aligned to the end of the keys, and a sliding window counted from
there, say exactly who sees whom.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from grouper.attention import AttentionSpec

__all__ = ["RaggedRows", "serves"]

HALVES = frozenset({torch.bfloat16, torch.float16})
LARGEST_HEAD = 256


class RaggedRows:
    """Where the keys of each sequence lie in the flat row.

    The flat order is prompt 0, prompt 1, ..., then the inputs of completion 0, 1, ...

    Args:
        prompt_lengths: [P].
        prompt_index: [R], the prompt of each completion.
        inputs: [R], tokens of each completion in the flat row; may be 0.
    """

    def __init__(self, prompt_lengths: Tensor, prompt_index: Tensor, inputs: Tensor) -> None:
        device = prompt_lengths.device
        starts = _starts(prompt_lengths)
        shared = torch.cat([prompt_lengths, prompt_lengths[prompt_index]])
        own = torch.cat([torch.zeros_like(prompt_lengths), inputs])
        shared_start = torch.cat([starts, starts[prompt_index]])
        own_start = torch.cat([starts, prompt_lengths.sum() + _starts(inputs)])
        queries, keys = torch.cat([prompt_lengths, inputs]), shared + own
        sequence = torch.repeat_interleave(torch.arange(len(keys), device=device), keys)
        place = torch.arange(len(sequence), device=device) - _starts(keys)[sequence]
        before = shared[sequence]
        self.key_index = torch.where(
            place < before, shared_start[sequence] + place, own_start[sequence] + place - before
        )
        """[keys] int64: the flat token of each key, sequence by sequence."""
        self.query_ends = _borders(queries)
        """[P + R + 1] int32: where each sequence's queries begin, and the end of all."""
        self.key_ends = _borders(keys)
        self.longest_query, self.longest_key = (int(n.max()) for n in (queries, keys))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Queries [1, Hq, N, D], key and value [1, Hkv, N, D] -> [1, Hq, N, D]."""
        dtype = _compute_dtype(query)
        flat = query[0].transpose(0, 1).to(dtype)
        keys, values = (
            heads[0].transpose(0, 1).to(dtype).index_select(0, self.key_index)
            for heads in (key, value)
        )
        # Ours counts the token itself, theirs only the tokens to its left.
        left = -1 if spec.window is None else spec.window - 1
        out = ragged_attention(
            flat,
            keys,
            values,
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_key,
            scale=spec.scaling,
            window_size=(left, 0),
        )
        return out.transpose(0, 1)[None]


def serves(query: Tensor, rows: RaggedRows, spec: AttentionSpec) -> bool:
    """Whether `RaggedRows.attend` can take this: CUDA, half precision, heads it has kernels for."""
    dim = query.shape[-1]
    return (
        query.device.type == "cuda"
        and _compute_dtype(query) in HALVES
        and spec.softcap is None
        and dim % 8 == 0
        and dim <= LARGEST_HEAD
        # For single queries the kernel folds heads in a way that its backward does not know.
        and rows.longest_query > 1
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def ragged_attention(*tensors: Any, **options: Any) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`; grouped heads have to be asked for since 2.12."""
    from torch.nn.attention.varlen import varlen_attn  # registers operators, which takes a moment

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = tensors[0].shape[1] != tensors[1].shape[1]
    out = varlen_attn(*tensors, **options)
    assert isinstance(out, Tensor)
    return out


def _compute_dtype(query: Tensor) -> torch.dtype:
    """Under autocast rotary embeddings leave queries and keys in float32."""
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return query.dtype


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _borders(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
