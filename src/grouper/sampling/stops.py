"""Stop strings: found as soon as the token that completes one is drawn, across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from grouper.types import Completion, FinishReason


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
        texts = (self.text([token]) for token in range(len(self._tokenizer)))
        return [any(last in text for last in lasts) for text in texts]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens kept: nothing the model wrote is hidden."""
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

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
