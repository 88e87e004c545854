r"""Model FLOPs: what the arithmetic of a model needs, whatever the code that runs it does.

A multiplication and an addition count as two. With N parameters in the matrices of the layers
(embeddings are looked up, so they are not among them), h = hidden size x vocabulary in the head,
and d = heads x head dimension in each of the layers:

    forward  = 2 N tokens + 2 h scored + 4 d pairs
    update   = forward + backward,  backward = 2 (N + N') tokens + 2 (h + h') scored + 8 d pairs

where `scored` positions are those whose logits are needed, `pairs` are the (query, key) pairs of
all layers that a causal mask and its window let through, and N' and h' are what is trained: with
all of it, an update is 6 N a token. Kaplan et al. (arXiv 2001.08361, section 2.1) count so, and
PaLM's model FLOP utilization (arXiv 2204.02311, appendix B) with 6 N + 12 L H Q T a token, where
the head is within N and masked pairs count, too.

A prompt counts once for all of its completions, and the last token of a completion is never run.
What memory made a system compute twice (recomputed activations) is not counted, and padding is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grouper.models.policy import Policy
from grouper.training.metrics import matrices_of

__all__ = [
    "ModelShape",
    "Row",
    "forward_flops",
    "sampling_flops",
    "seen_pairs",
    "shape_of",
    "update_flops",
]

Row = tuple[int, Sequence[int]]
"""Tokens of a prompt, and of each of its completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model its FLOPs depend on.

    Example: `ModelShape(body=1000, trained_body=1000, head=320, trained_head=320, attention=32,
    windows=(None, None))`.
    """

    body: int
    """Parameters in the matrices of the layers."""
    trained_body: int
    head: int
    """Hidden size times vocabulary, tied or not."""
    trained_head: int
    attention: int
    """Query heads times head dimension."""
    windows: tuple[int | None, ...]
    """One a layer: the last tokens that a token sees, itself among them; None: all."""


@dataclass(frozen=True, slots=True)
class _Count:
    tokens: int
    pairs: int
    scored: int


def seen_pairs(start: int, stop: int, window: int | None = None) -> int:
    """Keys that the tokens at positions `start` to `stop - 1` see: all before them and themselves.

    >>> seen_pairs(0, 4), seen_pairs(2, 4), seen_pairs(0, 4, window=2)
    (10, 7, 7)
    """
    edge = stop if window is None else min(max(start, window), stop)
    causal = (edge * (edge + 1) - start * (start + 1)) // 2
    return causal + (stop - edge) * (window or 0)


def _count(shape: ModelShape, rows: Iterable[Row], *, heads_of_prompts: bool) -> _Count:
    tokens = pairs = scored = 0
    windows = Counter(shape.windows)
    for prompt, completions in rows:
        ends = Counter(prompt + length - 1 for length in completions)
        tokens += prompt + sum((end - prompt) * n for end, n in ends.items())
        for window, layers in windows.items():
            seen = seen_pairs(0, prompt, window)
            seen += sum(seen_pairs(prompt, end, window) * n for end, n in ends.items())
            pairs += layers * seen
        scored += sum(completions)
        if heads_of_prompts:  # all completions draw their first token from one row of logits
            scored += 1 - len(completions)
    return _Count(tokens, pairs, scored)


def _forward(shape: ModelShape, count: _Count) -> int:
    return (
        2 * shape.body * count.tokens
        + 2 * shape.head * count.scored
        + 4 * shape.attention * count.pairs
    )


def sampling_flops(shape: ModelShape, rows: Iterable[Row]) -> int:
    """FLOPs of drawing completions: each prompt once, then a token at a time.

    >>> shape = ModelShape(
    ...     body=10, trained_body=10, head=3, trained_head=3, attention=1, windows=(None,)
    ... )
    >>> sampling_flops(shape, [(2, [3])])  # 4 tokens, 3 rows of logits, 3 + 3 + 4 pairs
    138
    """
    return _forward(shape, _count(shape, rows, heads_of_prompts=True))


def forward_flops(shape: ModelShape, rows: Iterable[Row]) -> int:
    """FLOPs of scoring completions that are there already."""
    return _forward(shape, _count(shape, rows, heads_of_prompts=False))


def update_flops(shape: ModelShape, rows: Iterable[Row]) -> int:
    """FLOPs of a forward and its backward.

    >>> shape = ModelShape(
    ...     body=10, trained_body=10, head=3, trained_head=3, attention=1, windows=(None,)
    ... )
    >>> update_flops(shape, [(2, [3])]) == 3 * forward_flops(shape, [(2, [3])])
    True
    """
    count = _count(shape, rows, heads_of_prompts=False)
    backward = (
        2 * (shape.body + shape.trained_body) * count.tokens
        + 2 * (shape.head + shape.trained_head) * count.scored
        + 8 * shape.attention * count.pairs
    )
    return _forward(shape, count) + backward


def shape_of(policy: Policy) -> ModelShape:
    """The shape of a policy's model, which is no mixture of experts."""
    config: Any = policy.model.config.get_text_config()
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    return ModelShape(
        **matrices_of(policy)._asdict(), attention=heads * int(width), windows=_windows(config)
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    layers = int(config.num_hidden_layers)
    if window is None or kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
