"""Log-probs and entropies of tokens straight from hidden states; the logits are never kept.

A chunk of [tokens, vocabulary] exists at a time, in the forward and again in the backward, which
makes it anew: between the two only hidden states and one number per token are held.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from grouper.kernels.switch import device_type, has_memory, representative
from grouper.kernels.triton import head as fused
from grouper.kernels.triton.language import Refused, serves
from grouper.models.device import free_memory, machine_memory

# Logits held at a time: 128 MiB in float32. The backward holds three such chunks at most.
CHUNK_ELEMENTS = 2**25
# Every chunk adds to the gradient of the whole head, so that a chunk of few tokens reads and writes
# more than it computes. On a CPU a head of 262,144 x 640 takes 18 % less time, backward included,
# with 512 tokens than with the 128 that CHUNK_ELEMENTS gives. Twice as many bring another 8 % for
# twice the memory (benchmarks/results/head_chunks.json).
CPU_ROWS = 512
# The share of a machine's memory that the backward of such a chunk may take.
CPU_MEMORY_SHARE = 1 / 12
# The same on CUDA: 1 GiB. Every chunk reads the head's matrix three times and adds to its gradient.
CUDA_CHUNK_ELEMENTS = 2**28
# Of the memory that is free there, what a chunk and its gradient may take.
CHUNK_SHARE = 0.25
# Bytes that the backward holds for each logit at most.
BYTES_PER_LOGIT = 12


def chunk_rows(vocabulary: int, device: str = "cpu", free: int | None = None) -> int:
    """Tokens whose logits are held at a time on a type of device.

    Args:
        vocabulary: logits of a token.
        device: its type.
        free: bytes that are free there; None: enough.
    """
    usual = max(1, CHUNK_ELEMENTS // vocabulary)
    if device == "cpu":
        # A share of all memory, not of what is free: a repeated run has to round its sums alike.
        fitting = int(machine_memory() * CPU_MEMORY_SHARE) // (BYTES_PER_LOGIT * vocabulary)
        return max(usual, min(CPU_ROWS, 1 << max(0, fitting.bit_length() - 1)))
    if device != "cuda":
        return usual
    most = CUDA_CHUNK_ELEMENTS // vocabulary
    if free is not None:
        fitting = int(free * CHUNK_SHARE) // (BYTES_PER_LOGIT * vocabulary)
        # A power of two: the same, mostly, in a run that is repeated.
        most = min(most, 1 << max(0, fitting.bit_length() - 1))
    return max(usual, most)


def head_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Hidden [n, H] times weight [V, H], plus a bias: in float32 where CUDA can give it.

    A product of half precision sums in float32; rounding its results would cost a log-prob of a
    token up to 0.06 nats.
    """
    halves = hidden.dtype in {torch.bfloat16, torch.float16} and hidden.dtype == weight.dtype
    plain = bias is not None or torch.is_grad_enabled() or hidden.dim() != 2
    on_cuda = halves and not plain and device_type(hidden) == "cuda"
    # A device that is only planned is taken for one that can.
    if on_cuda and (not has_memory(hidden) or _widens(hidden.device, hidden.dtype)):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return torch.nn.functional.linear(hidden, weight, bias)


@functools.cache
def _widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this type can come out in float32 here."""
    square = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(square, square.T, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """What model families apply after their head: `z = cap tanh(factor x / cap)`.

    `logit_scale` multiplies (Cohere), `logits_scaling` divides (Granite), and
    `final_logit_softcapping` caps (Gemma 2).
    """

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
        """Read from a transformers configuration."""
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        factor, divisor, cap = (getattr(config.get_text_config(), name, None) for name in names)
        return cls(factor=(factor or 1.0) / (divisor or 1.0), cap=cap)

    def __call__(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """Logits at a temperature, in float32 or higher, of what the head gives; differentiable."""
        logits = accurate(logits)
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits if temperature == 1.0 else logits / temperature

    def curve(self, temperature: float) -> fused.Curve:
        """The same over a temperature, as the kernels take it."""
        if self.cap is None:
            return self.factor / temperature, 0.0
        return self.factor / self.cap, self.cap / temperature


def accurate(tensor: Tensor) -> Tensor:
    """In float32 or higher."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _scores(
    logits: Tensor, targets: Tensor, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of `targets` [n] under `logits` [n, V], normalisers and entropies [n], in nats.

    Entropies make one tensor of [n, V], or two where their gradient is recorded.
    """
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - normaliser
    recorded = entropy_gradient and torch.is_grad_enabled()
    with torch.set_grad_enabled(recorded):
        probabilities = (logits - normaliser[:, None]).exp_()
        # Logits are finite: a probability of zero meets no infinity.
        parts = probabilities * logits if recorded else probabilities.mul_(logits)
        return logprobs, normaliser, normaliser - parts.sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHead:
    """A head that is a plain matrix, and what comes after it; its logits are never kept.

    Same numbers and gradients as `plain_token_scores`; the backward makes the logits of a chunk
    anew and turns them into their own gradient in place.
    """

    scaling: LogitScaling
    temperature: float
    # Of the matrix products.
    dtype: torch.dtype
    # Whether a gradient flows through the entropies.
    entropy_gradient: bool

    def scores(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N], natural, in float32 or higher.

        Args:
            hidden: [N, H].
            weight: [V, H].
            bias: [V], or None.
            targets: [N] int64.
        """
        # There is no autocast for tensors without memory.
        with torch.autocast("cpu" if hidden.is_meta else hidden.device.type, enabled=False):
            scores: tuple[Tensor, Tensor] = _TokenScores.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                hidden, weight, bias, targets, self
            )
        return scores

    def gradient(self, products: Tensor, *of_tokens: Tensor) -> Tensor:
        """The gradient [n, V] at the head's products, which are used up.

        With p the probabilities and z the logits at the temperature: d logp_t / dz_i =
        [i = t] - p_i, and dH / dz_i = -p_i (log p_i + H).

        Args:
            products: [n, V].
            of_tokens: [n] each: targets, normalisers, entropies, and the gradients at log-probs
                and entropies.
        """
        if serves(products):
            curve = self.scaling.curve(self.temperature)
            with contextlib.suppress(Refused):
                return fused.gradient(
                    products, of_tokens, curve, self.dtype, entropies=self.entropy_gradient
                )
        logits = self.scaling(products, self.temperature)
        targets, normaliser, entropies, to_logprobs, to_entropies = (t[:, None] for t in of_tokens)
        factor, cap = self.scaling.factor, self.scaling.cap
        # d/dx cap tanh(x / cap) = 1 - tanh(x / cap)^2
        bend = None if cap is None else 1 - (logits * self.temperature / cap).square_()
        logprobs = logits.sub_(normaliser)
        if not self.entropy_gradient:
            gradient = logprobs.exp_().mul_(-to_logprobs)
        else:
            slope = (logprobs + entropies).mul_(to_entropies).add_(to_logprobs)
            gradient = logprobs.exp_().mul_(slope.neg_())
        gradient.scatter_add_(1, targets, to_logprobs)
        if self.temperature != 1.0:
            gradient /= self.temperature
        if bend is not None:
            gradient *= bend
        if factor != 1.0:
            gradient *= factor
        return gradient


class _TokenScores(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], bias [V], targets [N]) -> log-probs [N], entropies [N]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any
    ) -> tuple[Tensor, Tensor]:
        targets, head = others
        matrix, offset = weight.to(head.dtype), None if bias is None else bias.to(head.dtype)
        logprobs, normalisers, entropies = (
            torch.empty(len(hidden), dtype=accurate(hidden[:0]).dtype, device=hidden.device)
            for _ in range(3)
        )
        for part in representative(_chunks(hidden, len(weight)), hidden):
            products = head_product(hidden[part].to(head.dtype), matrix, offset)
            scores = None
            if serves(products):
                with contextlib.suppress(Refused):
                    curve = head.scaling.curve(head.temperature)
                    scores = fused.scores(products, targets[part], curve)
            if scores is None:
                logits = head.scaling(products, head.temperature)
                scores = _scores(logits, targets[part], entropy_gradient=False)
            for whole, of_part in zip((logprobs, normalisers, entropies), scores, strict=True):
                whole[part] = of_part
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.head = head
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor, to_entropies: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, *scores = ctx.saved_tensors
        of_tokens = (*scores, to_logprobs, to_entropies)
        head: LinearHead = ctx.head
        inputs = (hidden, weight, bias)
        to_hidden, to_weight, to_bias = (
            torch.zeros_like(t, dtype=accurate(t[:0]).dtype) if needed and t is not None else None
            for t, needed in zip(inputs, ctx.needs_input_grad, strict=False)
        )
        matrix, offset = weight.to(head.dtype), None if bias is None else bias.to(head.dtype)
        for part in representative(_chunks(hidden, len(weight)), hidden):
            rows = hidden[part].to(head.dtype)
            products = head_product(rows, matrix, offset)
            gradient = head.gradient(products, *(tensor[part] for tensor in of_tokens))
            if to_bias is not None:
                to_bias += gradient.sum(0, dtype=to_bias.dtype)
            gradient = gradient.to(head.dtype)
            if to_hidden is not None:
                to_hidden[part] = gradient @ matrix
            if to_weight is not None:
                if to_weight.dtype == head.dtype:
                    to_weight.addmm_(gradient.T, rows)
                else:
                    to_weight += gradient.T @ rows
        grads = (
            None if grad is None else grad.to(t.dtype)
            for grad, t in zip((to_hidden, to_weight, to_bias), inputs, strict=True)
        )
        return *grads, None, None


def _chunks(hidden: Tensor, vocabulary: int) -> list[slice]:
    """The tokens of each chunk."""
    device = device_type(hidden)
    free = free_memory(hidden.device) if device == "cuda" and has_memory(hidden) else None
    rows = chunk_rows(vocabulary, device, free)
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def plain_token_scores(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """The same for any head, through torch's own checkpointing: for heads that are no plain matrix.

    Args:
        logits_of: hidden states [n, H] -> logits [n, V], in float32 or higher.
        hidden: [N, H].
        targets: [N] int64.
        vocabulary: V, from which the size of a chunk follows.
        temperature: logits are divided by this.
        entropy_gradient: whether a gradient flows through the entropies.
    """

    def score(part: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(part)
        logits = logits if temperature == 1.0 else logits / temperature
        logprobs, _, entropies = _scores(logits, wanted, entropy_gradient=entropy_gradient)
        return logprobs, entropies

    pieces = [
        checkpoint(score, hidden[part], targets[part], use_reentrant=False)
        for part in _chunks(hidden, vocabulary)
    ]
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])
