"""What every sampler promises: requests in, completions out as each one finishes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from grouper.errors import PromptError
from grouper.types import Completion, Prompt, SamplingParams


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
