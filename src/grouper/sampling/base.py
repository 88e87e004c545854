"""What every sampler promises: requests in, completions out as each one finishes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from grouper.errors import PromptError
from grouper.types import Completion, FinishReason, Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One completion to draw.

    Example: `SampleRequest(prompt=prompt, params=SamplingParams(), key=draw_seed(0, "grpo", 3,
    "gsm8k/1", 0))`.
    """

    prompt: Prompt
    params: SamplingParams
    key: int
    """64-bit address of this draw, from `draw_seed`; position i of the completion uses the i-th
    uniform number of the stream it names. Equal keys give equal completions."""


@runtime_checkable
class Sampler(Protocol):
    """Draws completions; evaluation and training know nothing else of how."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        """Yield (index of the request, its completion) as each finishes, each index once."""


class ModelSampler(Sampler, Protocol):
    """A sampler over a model's weights, always at the trainer's version."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Of all sampling so far, what was not spent on decoding: `prefill`, `push` of weights."""

    @property
    def gap(self) -> float | None:
        """How far log-probs were from the trainer's after the last push of weights.

        In nats per token; None where nothing is pushed.
        """

    @property
    def update_share(self) -> float | None:
        """The part of an adapter's change that merged and rounded weights repeat.

        None where no adapter is merged into weights that are coarser than it.
        """

    def rest(self) -> None:
        """Give back memory that an update needs: nothing is drawn before the weights change."""

    def release(self) -> None:
        """Free what is held between calls; the next call makes it anew."""


def check_lengths(requests: Sequence[SampleRequest], limit: int | None) -> None:
    """Refuse what is longer than the model takes, prompt and completion together.

    Raises:
        PromptError: a prompt and its completion may not fit.
    """
    for request in requests:
        tokens, new = len(request.prompt.token_ids), request.params.max_new_tokens
        if limit is not None and tokens + new > limit:
            raise PromptError(
                f"a prompt of {tokens} tokens and {new} new ones do not fit the model's context "
                f"of {limit}",
                where=request.prompt.problem_id,
                fix="Lower sampling.max_new_tokens or prompt.max_prompt_tokens.",
            )


def draw_seed(*parts: int | str) -> int:
    """The 64-bit key of a draw, a pure function of everything that names it.

    By convention the parts are (run seed, purpose, step, occurrence within the step, problem id,
    sample index), so a draw does not depend on the slot, batch or process it runs in, and resuming
    needs no generator state.

    >>> draw_seed(0, "grpo", 1, "a/1", 0) == draw_seed(0, "grpo", 1, "a/1", 0)
    True
    >>> draw_seed(0, "grpo", 1, "a/1", 0) == draw_seed(0, "grpo", 1, "a/1", 1)
    False
    """
    # repr keeps ("1",) and (1,) apart; the separator keeps ("ab", "c") and ("a", "bc") apart.
    text = "\x1f".join(repr(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


# --- where a completion ends ----------------------------------------------------------------------


class Decoder(Protocol):
    """The part of a tokenizer this file needs."""

    def decode(self, token_ids: Sequence[int], **kwargs: bool) -> str: ...
    def __len__(self) -> int: ...


class StopStrings:
    """Watches sequences for any of a few strings.

    Decoding every sequence at every token would cost more than a small model. A token can only
    complete a stop string if its own text contains the string's last character (or is a fragment
    of a character), so all other tokens are passed over by a table lookup.

    Args:
        tokenizer: decodes ids to text.
        stops: the strings, none of them empty.
    """

    def __init__(self, tokenizer: Decoder, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)

    @cached_property
    def candidates(self) -> list[bool]:
        """By token id: whether it may complete a stop string."""
        # U+FFFD marks a token that is only part of a character's bytes.
        lasts = {"\ufffd", *(stop[-1] for stop in self._stops)}
        # Twice: some tokenizers leave out the space that a text begins with.
        texts = (self.text([token, token]) for token in range(len(self._tokenizer)))
        return [any(last in text for last in lasts) for text in texts]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens kept: nothing the model wrote is hidden."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def completed(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token has just completed a stop string."""
        text = self.text(token_ids)
        return any(stop in text for stop in self._stops)

    def cut(self, text: str, *, include_stop: bool) -> str:
        """The text up to the first stop string, of which there is one."""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        start, stop = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
        return text[: start + len(stop)] if include_stop else text[:start]

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
        """What was drawn, with its text: without the stop token, cut at the stop string."""
        text = self.text(token_ids[:-1] if reason is FinishReason.STOP_TOKEN else token_ids)
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
