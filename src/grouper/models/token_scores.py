"""Log-probs and entropies of tokens directly from hidden states, without keeping the logits.

Logits [tokens, vocabulary] are computed chunk by chunk, in the forward and once more in the
backward. Between the two, only hidden states and a few numbers per token are kept.
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

# Logits of one chunk: 128 MiB in float32. The backward needs at most three such tensors at a time.
CHUNK_ELEMENTS = 2**25
# Tokens of one chunk on a CPU. Every chunk adds to the gradient of the whole head, so a chunk of
# few tokens reads and writes more than it computes. A head of 262,144 x 640 takes 18 % less time,
# backward included, with 512 tokens than with the 128 that CHUNK_ELEMENTS gives. Twice as many
# bring another 8 % for twice the memory (benchmarks/results/head_chunks.json).
CPU_ROWS = 512
# The share of a machine's memory that the backward of a chunk may take on a CPU.
CPU_MEMORY_SHARE = 1 / 12
# Logits of one chunk on CUDA: 1 GiB. Every chunk reads the head's matrix three times and adds to
# its gradient, so larger chunks are faster.
CUDA_CHUNK_ELEMENTS = 2**28
# The share of a GPU's free memory that a chunk and its gradient may take.
CHUNK_SHARE = 0.25
# Bytes that the backward needs for each logit at most.
BYTES_PER_LOGIT = 12


def chunk_rows(vocabulary: int, device: str = "cpu", free: int | None = None) -> int:
    """Return the number of tokens whose logits are computed at a time.

    Args:
        vocabulary: logits of a token.
        device: the type of the device.
        free: bytes of its free memory; None: no limit.
    """
    smallest = max(1, CHUNK_ELEMENTS // vocabulary)
    if device == "cpu":
        # A share of all memory, not of free memory: a repeated run has to use the same chunks, so
        # that its sums are rounded in the same way.
        fitting = _rows_that_fit(machine_memory() * CPU_MEMORY_SHARE, vocabulary)
        return max(smallest, min(CPU_ROWS, fitting))
    if device != "cuda":
        return smallest
    rows = CUDA_CHUNK_ELEMENTS // vocabulary
    if free is not None:
        fitting = _rows_that_fit(free * CHUNK_SHARE, vocabulary)
        rows = min(rows, fitting)
    return max(smallest, rows)


def _rows_that_fit(memory: float, vocabulary: int) -> int:
    """Return the tokens of a chunk whose backward fits into this many bytes.

    A power of two, so that a repeated run, with a little more or less memory, mostly uses the same.
    """
    rows = int(memory) // (BYTES_PER_LOGIT * vocabulary)
    return 1 << max(0, rows.bit_length() - 1)


def head_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute logits [n, V], in float32 if CUDA offers that.

    A product in half precision is summed in float32 anyway. Rounding its results would change the
    log-prob of a token by up to 0.06 nats.

    Args:
        hidden: [n, H].
        weight: [V, H].
        bias: [V], or None.
    """
    if _gives_float32(hidden, weight, bias):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return torch.nn.functional.linear(hidden, weight, bias)


def _gives_float32(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether the product of these tensors in half precision can be returned in float32."""
    half_precision = hidden.dtype in {torch.bfloat16, torch.float16}
    if not half_precision or hidden.dtype != weight.dtype:
        return False
    if bias is not None or torch.is_grad_enabled() or hidden.dim() != 2:
        return False
    if device_type(hidden) != "cuda":
        return False
    # A dry run has no device to try it on, and assumes that it works.
    return not has_memory(hidden) or _widens(hidden.device, hidden.dtype)


@functools.cache
def _widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether products in this dtype can be returned in float32 on this device."""
    square = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(square, square.T, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """The function that a model family applies after its head: `z = cap tanh(factor x / cap)`.

    `logit_scale` multiplies (Cohere), `logits_scaling` divides (Granite), and
    `final_logit_softcapping` caps (Gemma 2).
    """

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
        """Read the function from a transformers configuration."""
        text_config = config.get_text_config()
        factor = getattr(text_config, "logit_scale", None) or 1.0
        divisor = getattr(text_config, "logits_scaling", None) or 1.0
        cap = getattr(text_config, "final_logit_softcapping", None)
        return cls(factor=factor / divisor, cap=cap)

    def __call__(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """Turn the head's products into logits at a temperature, in float32 or higher."""
        logits = accurate(logits)
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits if temperature == 1.0 else logits / temperature

    def curve(self, temperature: float) -> fused.Curve:
        """Return the function at a temperature in the form that the kernels take."""
        if self.cap is None:
            return self.factor / temperature, 0.0
        return self.factor / self.cap, self.cap / temperature


def accurate(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 or higher."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _scores(
    logits: Tensor, targets: Tensor, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probs, normalizers and entropies [n], in nats.

    With z the logits and Z = log sum exp z, a log-prob is z - Z and the entropy Z - sum p z.

    Args:
        logits: [n, V]; not changed.
        targets: [n] int64, the tokens of the log-probs.
        entropy_gradient: record a gradient of the entropies. They need one more tensor of [n, V],
            and two if it is recorded.
    """
    normalizer = logits.logsumexp(-1)
    target_logits = logits.gather(1, targets[:, None])[:, 0]
    logprobs = target_logits - normalizer
    recorded = entropy_gradient and torch.is_grad_enabled()
    with torch.set_grad_enabled(recorded):
        probabilities = (logits - normalizer[:, None]).exp_()
        # Logits are finite, so a probability of zero is never multiplied with an infinity.
        products = probabilities * logits if recorded else probabilities.mul_(logits)
        entropies = normalizer - products.sum(-1)
        return logprobs, normalizer, entropies


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHead:
    """A head that is a plain matrix with a scaling after it; its logits are never kept.

    Numbers and gradients are those of `plain_token_scores`. The backward computes the logits of a
    chunk once more and turns them into their own gradient in place.
    """

    scaling: LogitScaling
    temperature: float
    dtype: torch.dtype
    """Dtype of the matrix products."""
    entropy_gradient: bool
    """Whether a gradient flows through the entropies."""

    def scores(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probs and entropies of tokens.

        Args:
            hidden: [N, H].
            weight: [V, H].
            bias: [V], or None.
            targets: [N] int64.

        Returns:
            Log-probs [N] and entropies [N] in nats, in float32 or higher.
        """
        # There is no autocast for tensors without memory.
        device = "cpu" if hidden.is_meta else hidden.device.type
        with torch.autocast(device, enabled=False):
            scores: tuple[Tensor, Tensor] = _TokenScores.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                hidden, weight, bias, targets, self
            )
        return scores

    def gradient(self, products: Tensor, *of_tokens: Tensor) -> Tensor:
        """Compute the gradient at the head's products.

        With p the probabilities and z the logits at the temperature: d logp_t / dz_i =
        [i = t] - p_i, and dH / dz_i = -p_i (log p_i + H).

        Args:
            products: [n, V]; overwritten.
            of_tokens: [n] each: targets, normalizers, entropies, and the gradients at log-probs
                and entropies.

        Returns:
            [n, V].
        """
        if serves(products):
            curve = self.scaling.curve(self.temperature)
            with contextlib.suppress(Refused):
                return fused.gradient(
                    products, of_tokens, curve, self.dtype, entropies=self.entropy_gradient
                )
        # From here on, one tensor [n, V] is turned from products into their gradient in place.
        logits = self.scaling(products, self.temperature)
        columns = (tensor[:, None] for tensor in of_tokens)
        targets, normalizer, entropies, to_logprobs, to_entropies = columns
        factor = self.scaling.factor
        cap = self.scaling.cap
        cap_slope = None
        if cap is not None:
            # d/dx cap tanh(x / cap) = 1 - tanh(x / cap)^2
            cap_slope = 1 - (logits * self.temperature / cap).square_()
        logprobs = logits.sub_(normalizer)
        if not self.entropy_gradient:
            gradient = logprobs.exp_().mul_(-to_logprobs)
        else:
            slope = (logprobs + entropies).mul_(to_entropies).add_(to_logprobs)
            gradient = logprobs.exp_().mul_(slope.neg_())
        gradient.scatter_add_(1, targets, to_logprobs)
        if self.temperature != 1.0:
            gradient /= self.temperature
        if cap_slope is not None:
            gradient *= cap_slope
        if factor != 1.0:
            gradient *= factor
        return gradient


class _TokenScores(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], bias [V], targets [N]) -> log-probs [N], entropies [N]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *targets_and_head: Any
    ) -> tuple[Tensor, Tensor]:
        targets, head = targets_and_head
        matrix = weight.to(head.dtype)
        offset = None if bias is None else bias.to(head.dtype)
        dtype = accurate(hidden[:0]).dtype
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs)
        for chunk in representative(token_chunks(hidden, len(weight)), hidden):
            products = head_product(hidden[chunk].to(head.dtype), matrix, offset)
            scores = None
            if serves(products):
                with contextlib.suppress(Refused):
                    curve = head.scaling.curve(head.temperature)
                    scores = fused.scores(products, targets[chunk], curve)
            if scores is None:
                logits = head.scaling(products, head.temperature)
                scores = _scores(logits, targets[chunk], entropy_gradient=False)
            logprobs[chunk], normalizers[chunk], entropies[chunk] = scores
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropies)
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
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        to_hidden = _zero_gradient(hidden, needs_hidden)
        to_weight = _zero_gradient(weight, needs_weight)
        to_bias = _zero_gradient(bias, needs_bias)
        matrix = weight.to(head.dtype)
        offset = None if bias is None else bias.to(head.dtype)
        for chunk in representative(token_chunks(hidden, len(weight)), hidden):
            rows = hidden[chunk].to(head.dtype)
            products = head_product(rows, matrix, offset)
            gradient = head.gradient(products, *(tensor[chunk] for tensor in of_tokens))
            if to_bias is not None:
                to_bias += gradient.sum(0, dtype=to_bias.dtype)
            gradient = gradient.to(head.dtype)
            if to_hidden is not None:
                to_hidden[chunk] = gradient @ matrix
            if to_weight is not None:
                if to_weight.dtype == head.dtype:
                    # Without a tensor [V, H] for the product.
                    to_weight.addmm_(gradient.T, rows)
                else:
                    to_weight += gradient.T @ rows
        return (
            None if to_hidden is None else to_hidden.to(hidden.dtype),
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            None,
            None,
        )


def _zero_gradient(tensor: Tensor | None, needed: bool) -> Tensor | None:
    """Return zeros like a tensor, to sum its gradient in float32 or higher; None if not needed."""
    if not needed or tensor is None:
        return None
    return torch.zeros_like(tensor, dtype=accurate(tensor[:0]).dtype)


def token_chunks(hidden: Tensor, vocabulary: int) -> list[slice]:
    """Return the tokens of each chunk of hidden states [N, H]."""
    device = device_type(hidden)
    free = None
    if device == "cuda" and has_memory(hidden):
        free = free_memory(hidden.device)
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
    """Compute log-probs and entropies [N] for a head that is no plain matrix.

    Chunks are computed again in the backward by torch's own checkpointing.

    Args:
        logits_of: hidden states [n, H] -> logits [n, V], in float32 or higher.
        hidden: [N, H].
        targets: [N] int64.
        vocabulary: V, from which the size of a chunk follows.
        temperature: logits are divided by this.
        entropy_gradient: whether a gradient flows through the entropies.
    """

    def score(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(states)
        if temperature != 1.0:
            logits = logits / temperature
        logprobs, _, entropies = _scores(logits, tokens, entropy_gradient=entropy_gradient)
        return logprobs, entropies

    logprobs = []
    entropies = []
    for chunk in token_chunks(hidden, vocabulary):
        scores = checkpoint(score, hidden[chunk], targets[chunk], use_reentrant=False)
        logprobs.append(scores[0])
        entropies.append(scores[1])
    return torch.cat(logprobs), torch.cat(entropies)
