"""Which token ends an answer: the one the chat template writes, which is not always EOS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grouper.errors import PromptError
from grouper.prompts.formats import PromptFormat
from grouper.prompts.rendering import apply_template
from grouper.prompts.tokenizer import Tokenizer
from grouper.types import Message

_ANSWER = "the assistant's answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTokens:
    """Example: `StopTokens(trained=151645, all=(151645, 151643))` for Qwen2.5."""

    trained: int
    """What SFT puts after every completion."""
    all: tuple[int, ...]
    """Every id that ends a sampled completion, the trained one first."""


def find_stop_tokens(
    tokenizer: Tokenizer, generation_eos: Sequence[int], fmt: PromptFormat
) -> StopTokens:
    """The stop tokens of a model with this tokenizer and format.

    In a chat the trained one is what the template writes after the assistant's text
    (`<|im_end|>` of Qwen2.5, `<|eot_id|>` of Llama-3); in plain text the tokenizer's EOS.

    Args:
        tokenizer: the model's tokenizer.
        generation_eos: the EOS ids of the model's generation config; may be empty.
        fmt: decides whether the chat template is used.

    Raises:
        PromptError: there is none, so that no completion could ever end.
    """
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    turn_end = _turn_end(tokenizer) if fmt.uses_chat(tokenizer) else []
    found = [*turn_end, *eos, *generation_eos]
    if not found:
        raise PromptError(
            "the tokenizer has no stop token, so no completion would ever end",
            where="the tokenizer",
            fix="Set its eos_token, or eos_token_id in the model's generation_config.json.",
        )
    return StopTokens(trained=found[0], all=tuple(dict.fromkeys(found)))


def _turn_end(tokenizer: Tokenizer) -> list[int]:
    """The special token directly after an assistant message, or nothing."""
    messages = (
        Message(role="user", content="a question"),
        Message(role="assistant", content=_ANSWER),
    )
    text = apply_template(tokenizer, messages, generation_prompt=False)
    if isinstance(text, Exception) or _ANSWER not in text:
        return []
    tail = text[text.rindex(_ANSWER) + len(_ANSWER) :].lstrip()
    ids = tokenizer.encode(tail, add_special_tokens=False) if tail else []
    special = {*tokenizer.get_added_vocab().values(), tokenizer.eos_token_id}
    return ids[:1] if ids and ids[0] in special else []
