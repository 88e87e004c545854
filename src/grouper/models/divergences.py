"""Divergences of a policy's next-token distributions from those of a teacher, in chunks of tokens.

Neither model's logits [tokens, vocabulary] are kept: a chunk is computed in the forward and again
in the backward. With p the policy and q the teacher, both at the temperature of the batch:

- `reverse`: KL(p || q) = sum_v p (log p - log q), what on-policy distillation minimizes;
- `forward`: KL(q || p) = sum_v q (log q - log p);
- `sampled`: (log p - log q)^2 / 2 of the sampled token alone, whose gradient is, on the policy's
  own samples, that of `reverse` in expectation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.utils.checkpoint import checkpoint

from grouper.algorithms.losses import kl_k2
from grouper.models.token_scores import token_chunks


class LanguageModel(Protocol):
    """A model with a head, as a policy is."""

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, V] of hidden states [n, H]."""
        ...

    def score(
        self, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies [n] of tokens [n] from hidden states [n, H]."""
        ...


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """`sum_v p (log p - log q)` of each row.

    >>> p = torch.tensor([[0.5, 0.5]])
    >>> q = torch.tensor([[0.25, 0.75]])
    >>> reverse_kl(p.log(), q.log()).tolist()       # 0.5 ln 2 + 0.5 ln(2/3)
    [0.143...]
    """
    return (logprobs.exp() * (logprobs - teacher_logprobs)).sum(-1)


def forward_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """`sum_v q (log q - log p)` of each row.

    >>> p = torch.tensor([[0.5, 0.5]])
    >>> q = torch.tensor([[0.25, 0.75]])
    >>> forward_kl(p.log(), q.log()).tolist()       # 0.25 ln(1/2) + 0.75 ln(3/2)
    [0.130...]
    """
    return reverse_kl(teacher_logprobs, logprobs)


def top_and_rest(logprobs: Tensor, top: Tensor) -> Tensor:
    """Merge all tokens but some into one: [n, V] log-probs, [n, k] their ids -> [n, k + 1].

    A KL between merged distributions is never above that between the whole ones, and 0 where these
    agree.

    >>> logprobs = torch.tensor([[0.5, 0.25, 0.25]]).log()
    >>> top_and_rest(logprobs, torch.tensor([[0]])).exp().tolist()
    [[0.5, 0.5]]
    """
    kept = logprobs.gather(1, top)
    others = logprobs.scatter(1, top, -torch.inf)
    return torch.cat([kept, others.logsumexp(-1, keepdim=True)], dim=1)


def normalized(logits: Tensor, temperature: float) -> Tensor:
    """Turn logits [n, V] into log-probs at a temperature."""
    if temperature != 1.0:
        logits = logits / temperature
    return log_softmax(logits, dim=-1)


# Tensors [n, V] in float32 that a chunk needs at most, and those that one of the head alone does,
# for which chunks are made (`token_scores.BYTES_PER_LOGIT`).
TENSORS = 7
HEAD_TENSORS = 3

# (log-probs, log-probs of the teacher) -> divergence per token: of whole distributions [n, V], and
# of the sampled tokens [n].
KL_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse": reverse_kl,
    "forward": forward_kl,
}
SAMPLED_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sampled": kl_k2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lecture:
    """What one teacher says about some of the completion tokens of a slice."""

    teacher: LanguageModel
    hidden: Tensor
    """[n, H]: its last hidden states, which predict the tokens."""
    tokens: Tensor
    """[n] int64: which tokens, among all completion tokens of the slice in their order."""

    @torch.no_grad()
    def distributions(self, chunk: slice, vocabulary: int, temperature: float) -> Tensor:
        """Compute the teacher's log-probs [n, vocabulary] of every token at some places."""
        return normalized(self.teacher.logits(self.hidden[chunk])[:, :vocabulary], temperature)

    @torch.no_grad()
    def logprobs(self, targets: Tensor, temperature: float) -> Tensor:
        """Compute the teacher's log-probs [n] of the sampled tokens [n] int64."""
        logprobs, _ = self.teacher.score(
            self.hidden, targets.to(self.hidden.device), temperature, entropy_gradient=False
        )
        return logprobs.to(targets.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """What the teachers of a slice say, and how the policy is compared with them."""

    lectures: tuple[Lecture, ...]
    """One per teacher that has rows in the slice."""
    kl: str
    """A row of `KL_DIVERGENCES` or `SAMPLED_DIVERGENCES`."""
    top_k: int = 0
    """Only the teacher's most likely tokens are told apart, the others are one; 0: all are."""

    def divergences(
        self,
        policy: LanguageModel,
        hidden: Tensor,
        targets: Tensor,
        logprobs: Tensor,
        temperature: float,
    ) -> Tensor:
        """Compute the divergence [N] of each completion token, in nats; 0 where no teacher reads.

        Args:
            policy: being trained, within its forward.
            hidden: [N, H], its last hidden states.
            targets: [N] int64, the completion tokens.
            logprobs: [N], of the targets.
            temperature: of the batch.
        """
        divergences = torch.zeros_like(logprobs)
        of_samples = SAMPLED_DIVERGENCES.get(self.kl)
        for lecture in self.lectures:
            tokens = lecture.tokens
            if of_samples is not None:
                teacher_logprobs = lecture.logprobs(targets[tokens], temperature)
                values = of_samples(logprobs[tokens], teacher_logprobs.to(logprobs))
            else:
                values = self._of_distributions(policy, hidden[tokens], lecture, temperature)
            divergences = divergences.index_copy(0, tokens, values.to(divergences))
        return divergences

    def _of_distributions(
        self, policy: LanguageModel, hidden: Tensor, lecture: Lecture, temperature: float
    ) -> Tensor:
        """Compute the divergence [n] of whole distributions, a chunk of tokens at a time."""
        divergence = KL_DIVERGENCES[self.kl]
        # Embeddings may be padded to different sizes: only ids that both have are compared.
        vocabulary = min(policy.vocabulary, lecture.teacher.vocabulary)

        def compare(states: Tensor, chunk: slice) -> Tensor:
            logprobs = normalized(policy.logits(states)[:, :vocabulary], temperature)
            teacher_logprobs = lecture.distributions(chunk, vocabulary, temperature)
            teacher_logprobs = teacher_logprobs.to(logprobs)
            if 0 < self.top_k < vocabulary:
                top = teacher_logprobs.topk(self.top_k, dim=-1).indices
                logprobs = top_and_rest(logprobs, top)
                teacher_logprobs = top_and_rest(teacher_logprobs, top)
            return divergence(logprobs, teacher_logprobs)

        largest = max(policy.vocabulary, lecture.teacher.vocabulary)
        largest = largest * TENSORS // HEAD_TENSORS
        values: list[Tensor] = [
            checkpoint(compare, hidden[chunk], chunk, use_reentrant=False)
            for chunk in token_chunks(hidden, largest)
        ]
        return torch.cat(values)
