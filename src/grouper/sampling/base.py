"""The interface of every sampler: requests in, completions out as each one finishes."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

from grouper.errors import PromptError
from grouper.types import Completion, FinishReason, Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCompletion:
    """The tokens of a completion that has not ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, as of a `Completion`: of the weights that sampled it."""
    entropies: tuple[float, ...]
    policy_version: int
    """Of the weights that sampled its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One completion to sample.

    Example: `SampleRequest(prompt=prompt, params=SamplingParams(), key=draw_seed(0, "grpo", 3,
    "gsm8k/1", 0))`.
    """

    prompt: Prompt
    params: SamplingParams
    key: int
    """64-bit address of this completion, from `draw_seed`; its position i uses the i-th uniform
    number of the stream that the address names. Equal keys give equal completions."""
    partial: PartialCompletion | None = None
    """What has been sampled of it already, with these or older weights; the rest is to follow."""

    @property
    def count_before(self) -> int:
        """The number of its tokens that have been sampled already."""
        return 0 if self.partial is None else len(self.partial.token_ids)

    @property
    def context(self) -> tuple[int, ...]:
        """The token ids that the next one follows: the prompt, and what has been sampled."""
        if self.partial is None:
            return self.prompt.token_ids
        return self.prompt.token_ids + self.partial.token_ids

    @property
    def remaining(self) -> SamplingParams:
        """The parameters of the tokens that are still to be sampled."""
        if self.partial is None:
            return self.params
        return replace(
            self.params,
            max_new_tokens=self.params.max_new_tokens - self.count_before,
            min_new_tokens=max(0, self.params.min_new_tokens - self.count_before),
        )


@runtime_checkable
class Sampler(Protocol):
    """Source of completions; evaluation and training use nothing but this method."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        """Yield (index of the request, its completion) as each finishes, each index once."""


class Admission(Protocol):
    """Says how many requests may have begun by now; asked again and again while others are drawn.

    The first ones may begin first. With `idle` nothing is drawn: it waits until it knows whether
    another one may begin. None ends the sampling, whatever is being drawn.
    """

    def __call__(self, *, idle: bool) -> int | None: ...


@runtime_checkable
class AdmittingSampler(Sampler, Protocol):
    """A sampler that takes requests while others are drawn."""

    @property
    def unfinished(self) -> Mapping[int, PartialCompletion]:
        """What the last call was drawing when its admission ended it, by request index."""

    def sample_admitted(
        self, requests: Sequence[SampleRequest], admitted: Admission
    ) -> Generator[tuple[int, Completion]]:
        """Yield as `sample` does, of the requests that are admitted before nothing else is drawn.

        Closed early, it drops what it was drawing.
        """


class ModelSampler(Sampler, Protocol):
    """A sampler over a model's weights, always at the trainer's version."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of all sampling so far that were not decoding: `prefill`, `push` of weights."""

    @property
    def gap(self) -> float | None:
        """Distance of the log-probs from the trainer's after the last push of weights.

        In nats per token; None where nothing is pushed.
        """

    @property
    def update_share(self) -> float | None:
        """Share of an adapter's change that is left in merged and rounded weights.

        None where no adapter is merged into weights that are coarser than it.
        """

    def rest(self) -> None:
        """Free memory that an update needs: nothing is sampled before the weights change."""

    def release(self) -> None:
        """Free everything kept between calls; the next call creates it again."""


def check_lengths(requests: Sequence[SampleRequest], limit: int | None) -> None:
    """Check that prompt and completion fit the model's context together.

    Args:
        requests: the completions to sample.
        limit: tokens of the context; None: no limit.

    Raises:
        PromptError: a prompt and its completion may not fit.
    """
    if limit is None:
        return
    for request in requests:
        prompt_tokens = len(request.prompt.token_ids)
        new_tokens = request.params.max_new_tokens
        if prompt_tokens + new_tokens > limit:
            raise PromptError(
                f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones do not fit the "
                f"model's context of {limit}",
                where=request.prompt.problem_id,
                fix="Lower sampling.max_new_tokens or prompt.max_prompt_tokens.",
            )


def draw_seed(*address: int | str) -> int:
    """Compute the 64-bit key of a completion, a pure function of its address.

    By convention the address is (run seed, purpose, step, occurrence within the step, problem id,
    sample index). So a completion does not depend on the slot, batch or process it is sampled in,
    and resuming needs no generator state.

    >>> draw_seed(0, "grpo", 1, "a/1", 0) == draw_seed(0, "grpo", 1, "a/1", 0)
    True
    >>> draw_seed(0, "grpo", 1, "a/1", 0) == draw_seed(0, "grpo", 1, "a/1", 1)
    False
    """
    # repr keeps ("1",) and (1,) apart; the separator keeps ("ab", "c") and ("a", "bc") apart.
    text = "\x1f".join(repr(component) for component in address)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


# --- where a completion ends ----------------------------------------------------------------------


class Decoder(Protocol):
    """The methods of a tokenizer that this file needs."""

    def decode(self, token_ids: Sequence[int], **kwargs: bool) -> str: ...
    def __len__(self) -> int: ...


class StopStrings:
    """Finds any of a few strings in sequences of tokens.

    Decoding every sequence at every token would cost more than a small model. A token can only
    complete a stop string if its own text contains the string's last character (or is a fragment
    of a character), so all other tokens are skipped by a table lookup.

    Args:
        tokenizer: decodes ids to text.
        stops: the strings, none of them empty.
    """

    def __init__(self, tokenizer: Decoder, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)

    @cached_property
    def candidates(self) -> list[bool]:
        """For each token id, whether it may complete a stop string."""
        # U+FFFD marks a token that is only part of a character's bytes.
        last_characters = {"\ufffd"}
        for stop in self._stops:
            last_characters.add(stop[-1])
        candidates = []
        for token in range(len(self._tokenizer)):
            # Twice: some tokenizers leave out the space that a text begins with.
            text = self.text([token, token])
            candidates.append(any(character in text for character in last_characters))
        return candidates

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode ids, special tokens included, so that all of the model's output is visible."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def completed(self, token_ids: Sequence[int]) -> bool:
        """Tell whether the text of these tokens contains a stop string."""
        text = self.text(token_ids)
        return any(stop in text for stop in self._stops)

    def cut(self, text: str, *, include_stop: bool) -> str:
        """Return the text up to the stop string that ends first; it must contain one."""
        spans = []
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                spans.append((start + len(stop), start))
        # Of two that end at the same place, the longer one.
        end, start = min(spans)
        return text[:end] if include_stop else text[:start]

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        reason: FinishReason,
        *,
        include_stop: bool,
        policy_version: int,
        entropies: tuple[float, ...] = (),
    ) -> Completion:
        """Build a completion with its text, which ends before the stop token or stop string.

        Args:
            token_ids: all sampled tokens, the stop token included.
            logprobs: one per token.
            reason: why the completion ended.
            include_stop: keep the stop string in the text.
            policy_version: version of the weights that sampled it.
            entropies: one per token, or none.
        """
        if reason is FinishReason.STOP_TOKEN:
            text = self.text(token_ids[:-1])
        else:
            text = self.text(token_ids)
        if reason is FinishReason.STOP_STRING:
            text = self.cut(text, include_stop=include_stop)
        return Completion(
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            text=text,
            finish_reason=reason,
            policy_version=policy_version,
            entropies=entropies,
        )
