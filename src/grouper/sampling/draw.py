"""Sampling tokens: addressed uniform numbers, truncation, and the inverse of the distribution."""

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

# The increment and the multipliers of SplitMix64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(key: int, count: int) -> np.ndarray:
    """Return the first `count` uniform numbers in [0, 1) of the stream `key`, float32.

    Number i is a pure function of (key, i): SplitMix64's output function (Steele, Lea and Flood,
    2014) on a counter, of which the 24 highest bits are kept.

    >>> bool((uniforms(5, 4)[:2] == uniforms(5, 2)).all())
    True
    """
    counter = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
        z = np.uint64(key) + counter * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        z ^= z >> np.uint64(31)
    # A float32 holds 24 bits exactly, so no number is rounded up to 1.
    highest_bits = (z >> np.uint64(40)).astype(np.float32)
    return highest_bits * np.float32(2.0**-24)


class DrawFlags(NamedTuple):
    """Features that at least one row needs; a flag set needlessly costs time, not correctness."""

    truncated: bool
    """Sampling from less than the full distribution."""
    top_k: bool
    top_p: bool
    greedy: bool
    """Taking the most likely token."""
    minimum: bool
    """Sampling no stop token before `min_new_tokens`."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> DrawFlags:
        """Return the flags that rows with these parameters need."""
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
        """Return the settings of one row per entry of `params`."""

        def column(name: str) -> Tensor:
            values = [getattr(param, name) for param in params]
            return torch.tensor(values, device=device)

        return cls(
            temperature=column("temperature").float(),
            top_p=column("top_p").float(),
            top_k=column("top_k"),
            min_p=column("min_p").float(),
            minimum=column("min_new_tokens"),
            flags=DrawFlags.of(params),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the fields."""
        return self.temperature, self.top_p, self.top_k, self.min_p, self.minimum

    def at(self, rows: slice | Tensor) -> DrawSettings:
        """Return the settings of some of the rows; a slice shares their memory."""
        return DrawSettings(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            minimum=self.minimum[rows],
            flags=self.flags,
        )


def draw_tokens(
    logits: Tensor, uniform: Tensor, settings: DrawSettings, early: Tensor | None, stops: Tensor
) -> Drawn:
    """Sample one token per row like `draw`, by a kernel where there is one for these logits.

    The sums of a kernel may differ from those of `draw` in the last bits.

    Args:
        logits: [n, V].
        uniform: [n] in [0, 1).
        settings: of each row.
        early: [n] bool, rows that may not sample stop tokens; None: all rows may.
        stops: [V] bool, the stop tokens.

    Returns:
        The same as `draw`.
    """
    # The kernels have no truncation.
    if not settings.flags.truncated:
        arguments = (logits, uniform, settings.temperature, early, stops)
        if ops.draw_serves(logits):
            return ops.draw(*arguments)
        if draws_here(logits):
            with contextlib.suppress(Refused):
                return kernel_draw(*arguments)
    banned = None
    if early is not None:
        banned = early[:, None] & stops
    return draw(logits, uniform, settings, banned)


def draw(
    logits: Tensor, uniform: Tensor, settings: DrawSettings, banned: Tensor | None = None
) -> Drawn:
    """Sample one token per row, whatever the other rows, their bans and the flags are.

    Args:
        logits: [n, V] float32, not changed.
        uniform: [n] in [0, 1).
        settings: temperature 0 takes the highest logit.
        banned: [n, V] bool, tokens that must not be sampled (stop tokens before
            `min_new_tokens`), or None.

    Returns:
        Token ids [n] int64, their log-probs [n] float32, and the entropy [n] float32 in nats of
        the distribution, both at the row's temperature (1 for greedy rows) over the whole
        vocabulary, before truncation and bans.
    """
    greedy = settings.temperature == 0
    # No `where`: it would copy the number to the device, which a captured step may not.
    temperature = settings.temperature.masked_fill(greedy, 1.0)
    scaled = logits / temperature[:, None]
    normalized = scaled.log_softmax(-1)
    shares = normalized.exp()
    if banned is None:
        allowed = normalized
        probabilities = shares
    else:
        allowed = normalized.masked_fill(banned, -torch.inf)
        # If a banned token is nearly certain, the probabilities of all others underflow to 0. They
        # are taken relative to the most likely of them instead; `_inverse_cdf` divides by their
        # total. Rows without a ban are left as they are.
        best = allowed.amax(-1, keepdim=True)
        has_ban = banned.any(-1, keepdim=True)
        best = best.masked_fill(~has_ban, 0.0)
        probabilities = (allowed - best).exp()
    if settings.flags.truncated:
        probabilities = truncate(probabilities, settings)
    tokens = _inverse_cdf(probabilities, uniform)
    if settings.flags.greedy:
        best_tokens = allowed.argmax(-1)
        tokens = torch.where(greedy, best_tokens, tokens)
    logprobs = normalized.gather(1, tokens[:, None])[:, 0]
    entropies = torch.special.entr(shares).sum(-1)
    return tokens, logprobs, entropies


def _inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token of each row whose cumulative probability exceeds its threshold.

    Args:
        probabilities: [n, V], not normalized.
        uniform: [n], the threshold as a share of the row's total.

    Returns:
        [n] int64.
    """
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1]
    # Rounding may carry u * total up to the total itself, past the last token of the distribution.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform * total, below_total)
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    # Logits of NaN would lead past the vocabulary, and such an id ends the process on a GPU.
    last_token = cumulative.shape[1] - 1
    return tokens.clamp_(max=last_token)


def truncate(probabilities: Tensor, settings: DrawSettings) -> Tensor:
    """Zero the tokens that top-k, then top-p, then min-p leave out.

    The most likely token always stays. A token stays if the more likely ones are fewer than k, and
    together less than p. So there is a smallest probability that stays, and all tokens of just
    that probability stay. It is searched for by bisection, without sorting: on a GPU a sort takes
    longer than the model if the vocabulary is large.

    Args:
        probabilities: [n, V], not normalized.
        settings: of each row.

    Returns:
        [n, V].
    """
    top_p = settings.top_p[:, None]
    top_k = settings.top_k[:, None]
    min_p = settings.min_p[:, None]
    if settings.flags.top_k:
        limit = top_k.masked_fill(top_k == 0, probabilities.shape[1])

        def few(above: Tensor) -> Tensor:
            return above.sum(-1, keepdim=True) < limit

        probabilities = _from_least(probabilities, few)
    if settings.flags.top_p:
        before_top_p = probabilities
        share = top_p * before_top_p.sum(-1, keepdim=True)

        def light(above: Tensor) -> Tensor:
            return (before_top_p * above).sum(-1, keepdim=True) < share

        nucleus = _from_least(before_top_p, light)
        probabilities = torch.where(top_p < 1, nucleus, before_top_p)
    least = min_p * probabilities.amax(-1, keepdim=True)
    stays = probabilities >= least
    return probabilities * stays


def _from_least(values: Tensor, holds: Callable[[Tensor], Tensor]) -> Tensor:
    """Zero the values below the smallest one for which `holds` is true of all greater values.

    Args:
        values: [n, V], 0 or more.
        holds: takes a mask [n, V] of values and says for each row [n, 1] whether they are few
            enough. It has to be true of the empty mask, and to stay true if a mask shrinks.

    Returns:
        [n, V].
    """
    # The bits of floats that are not negative, read as integers, have the order of the floats. So
    # the bisection is over integers, and 31 halvings find the exact value.
    bits = values.view(torch.int32)
    high = bits.amax(-1, keepdim=True)
    low = torch.zeros_like(high)
    for _ in range(31):
        middle = (low + high) // 2
        enough = holds(bits > middle)
        low = torch.where(enough, low, middle + 1)
        high = torch.where(enough, middle, high)
    stays = bits >= high
    return values * stays
