"""Drawing tokens: addressed uniform numbers, truncation, and the inverse of the distribution."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from grouper.kernels.cpu import ops
from grouper.kernels.triton.draw import draws_here, kernel_draw
from grouper.kernels.triton.language import Refused
from grouper.types import SamplingParams

Drawn = tuple[Tensor, Tensor, Tensor]
"""Token ids [n] or [steps, n] int64, their log-probs and the entropies in nats, both float32."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(key: int, count: int) -> np.ndarray:
    """`count` uniform numbers in [0, 1) of the stream `key`, float32.

    Number i is a pure function of (key, i): SplitMix64's output function (Steele, Lea and Flood,
    2014) on a counter, of which the 24 highest bits are kept.

    >>> bool((uniforms(5, 4)[:2] == uniforms(5, 2)).all())
    True
    """
    with np.errstate(over="ignore"):
        z = np.uint64(key) + (np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


class DrawFlags(NamedTuple):
    """What some rows need; true of too many, they cost time and change no token."""

    truncated: bool
    """To draw from less than the full distribution."""
    top_k: bool
    top_p: bool
    greedy: bool
    """The most likely token."""
    minimum: bool
    """No stop token before `min_new_tokens`."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> DrawFlags:
        return cls(
            truncated=any(p.truncated for p in params),
            top_k=any(p.top_k > 0 for p in params),
            top_p=any(p.top_p < 1 for p in params),
            greedy=any(p.temperature == 0 for p in params),
            minimum=any(p.min_new_tokens > 0 for p in params),
        )


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """The sampling parameters of n rows as tensors [n], so that rows may differ."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    minimum: Tensor
    """`min_new_tokens`."""
    flags: DrawFlags

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> DrawSettings:
        def column(name: str) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], device=device)

        return cls(
            temperature=column("temperature").float(),
            top_p=column("top_p").float(),
            top_k=column("top_k"),
            min_p=column("min_p").float(),
            minimum=column("min_new_tokens"),
            flags=DrawFlags.of(params),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_p, self.top_k, self.min_p, self.minimum

    def at(self, rows: slice | Tensor) -> DrawSettings:
        """The same of some of the rows; a slice shares their memory."""
        temperature, top_p, top_k, min_p, minimum = (column[rows] for column in self.tensors())
        return DrawSettings(temperature, top_p, top_k, min_p, minimum, self.flags)


def draw_tokens(
    logits: Tensor, uniform: Tensor, settings: DrawSettings, early: Tensor | None, stops: Tensor
) -> Drawn:
    """As `draw`, by a kernel where one takes these; rounded sums may then differ in the last bits.

    Args:
        logits: [n, V].
        uniform: [n] in [0, 1).
        settings: of each row.
        early: [n] bool, rows that may not draw stop tokens; None: none of them.
        stops: [V] bool.
    """
    if not settings.flags.truncated:
        rows = (logits, uniform, settings.temperature, early, stops)
        if ops.draw_serves(logits):
            return ops.draw(*rows)
        if draws_here(logits):
            with contextlib.suppress(Refused):
                return kernel_draw(*rows)
    banned = None if early is None else early[:, None] & stops
    return draw(logits, uniform, settings, banned)


def draw(
    logits: Tensor, uniform: Tensor, settings: DrawSettings, banned: Tensor | None = None
) -> Drawn:
    """One token per row; no row's depends on the other rows, on bans of theirs or on the flags.

    Args:
        logits: [n, V] float32, untouched.
        uniform: [n] in [0, 1).
        settings: temperature 0 takes the highest logit.
        banned: [n, V] bool, tokens that must not be drawn here (stop tokens before
            `min_new_tokens`), or None.

    Returns:
        Token ids [n] int64, their log-probs [n] float32, and the entropy [n] float32 in nats of
        the distribution, both at the row's temperature (1 for greedy rows) over the whole
        vocabulary, before truncation and bans.
    """
    greedy = settings.temperature == 0
    # No `where`: it would copy the number to the device, which a captured step may not.
    scaled = logits / settings.temperature.masked_fill(greedy, 1.0)[:, None]
    normalised = scaled.log_softmax(-1)
    shares = normalised.exp()
    allowed = normalised if banned is None else normalised.masked_fill(banned, -torch.inf)
    probabilities = shares
    if banned is not None:
        # Beside a stop token that is all but certain, the others would be nothing: they are made
        # relative to the most likely one, and the inverse takes its share of their total.
        best = allowed.amax(-1, keepdim=True).masked_fill(~banned.any(-1, keepdim=True), 0.0)
        probabilities = (allowed - best).exp()
    if settings.flags.truncated:
        probabilities = truncate(probabilities, settings)
    tokens = _inverse_cdf(probabilities, uniform)
    if settings.flags.greedy:
        tokens = torch.where(greedy, allowed.argmax(-1), tokens)
    logprobs = normalised.gather(1, tokens[:, None])[:, 0]
    return tokens, logprobs, torch.special.entr(shares).sum(-1)


def _inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `uniform` of the total. [n]."""
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1]
    # Rounding may carry u * total up to the total itself, past the last token that can be drawn.
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    # Logits that are no numbers would lead past the vocabulary; a GPU does not survive such an id.
    return found.clamp_(max=cumulative.shape[1] - 1)


def truncate(probabilities: Tensor, settings: DrawSettings) -> Tensor:
    """Zero what top-k, then top-p, then min-p leave out; the most likely token always stays.

    Without sorting, which on a GPU takes longer than the model where the vocabulary is large.

    A token stays if those above it are fewer than k, and together less than p. So there is a least
    probability that stays, and tokens as likely as the last one stay with it.
    """
    _, top_p, top_k, min_p, _ = (column[:, None] for column in settings.tensors())
    kept = probabilities
    if settings.flags.top_k:
        few = top_k.masked_fill(top_k == 0, kept.shape[1])
        kept = _from_least(kept, lambda above: above.sum(-1, keepdim=True) < few)
    if settings.flags.top_p:
        least = top_p * kept.sum(-1, keepdim=True)
        nucleus = _from_least(kept, lambda above: (kept * above).sum(-1, keepdim=True) < least)
        kept = torch.where(top_p < 1, nucleus, kept)
    return kept * (kept >= min_p * kept.amax(-1, keepdim=True))


def _from_least(values: Tensor, holds: Callable[[Tensor], Tensor]) -> Tensor:
    """Zero all but those of which it holds of all greater ones, which shrink as a value grows.

    Args:
        values: [n, V], 0 or more.
        holds: of a mask [n, V], for each row [n, 1]; of the empty one always.
    """
    bits = values.view(torch.int32)  # in the order of the numbers that they stand for
    high = bits.amax(-1, keepdim=True)
    low = torch.zeros_like(high)
    for _ in range(31):
        middle = (low + high) // 2
        enough = holds(bits > middle)
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return values * (bits >= high)
