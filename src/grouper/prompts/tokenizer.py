"""The tokenizer as this layer sees it: what `prompts` needs and nothing else.

Importing a tokenizer library imports torch, so nothing here does; any object that has these
members will do, a Hugging Face tokenizer first of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text <-> token ids, and the chat template of the model."""

    @property
    def chat_template(self) -> Any:
        """The template, or None."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Ids; with `split_special_tokens` the names of special tokens are text like any other."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        """The rendered text where `tokenize` is false. May raise whatever the template raises."""

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens outside the model's own vocabulary, special or not, with their ids."""
