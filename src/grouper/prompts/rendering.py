"""Text -> token ids: chat templates as they really behave, plain text, and completions."""

from __future__ import annotations

import re
import unicodedata

from grouper.errors import PromptError
from grouper.prompts.tokenizer import Tokenizer
from grouper.types import Message

# Some templates open (or open and close) a thinking block in the generation prompt. Whether
# there is one is the format's decision, never the template's.
OPENED_THINKING = re.compile(r"<think>\s*(?:</think>\s*)?\Z")


def render_chat(
    tokenizer: Tokenizer, system: str, question: str
) -> tuple[str, tuple[Message, ...]]:
    """The rendered text up to where the assistant begins, and the messages that gave it.

    Where the template refuses a system message, or leaves it out in silence, the instruction
    goes in front of the question.

    Raises:
        PromptError: the template cannot render even one user message, or loses the question.
    """
    user = Message(role="user", content=question)
    messages: tuple[Message, ...] = (user,)
    text: str | Exception | None = None
    if system:
        messages = (Message(role="system", content=system), user)
        text = apply_template(tokenizer, messages)
        if isinstance(text, Exception) or system.strip() not in text:
            messages = (Message(role="user", content=f"{system}\n\n{question}"),)
            text = None
    if text is None:
        text = apply_template(tokenizer, messages)
    if isinstance(text, Exception):
        raise PromptError(
            f"the chat template fails: {text}",
            where="the tokenizer",
            fix="Use `prompt.template: plain`.",
        ) from text
    if question.strip() not in text:
        raise PromptError(
            "the chat template leaves out the question",
            where="the tokenizer",
            fix="Use `prompt.template: plain`.",
        )
    return _without_opened_thinking(text, question.strip()), messages


def apply_template(
    tokenizer: Tokenizer, messages: tuple[Message, ...], *, generation_prompt: bool = True
) -> str | Exception:
    """The rendered text, or the exception that the template raised."""
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        )
    # A chat template is a program that came with the model and raises what it likes; the
    # caller decides whether another shape of conversation is worth trying.
    except Exception as error:  # noqa: BLE001 - the model's own program, see above
        return error


def _without_opened_thinking(text: str, question: str) -> str:
    end = text.rindex(question) + len(question)
    return text[:end] + OPENED_THINKING.sub("", text[end:])


def encode_prompt(tokenizer: Tokenizer, text: str, question: str, *, chat: bool) -> list[int]:
    """Ids of a prompt, in which the question is text and nothing else.

    A question that names a special token (`<|im_end|>`) must not end its turn or open another
    one, so it is encoded as if the tokenizer had none.

    Args:
        tokenizer: of the model.
        text: the whole prompt.
        question: a part of it.
        chat: the text is that of a chat template, which has written the BOS token where the model
            wants one. In plain text it goes first exactly where the tokenizer puts one; other
            special tokens that a tokenizer adds (an EOS at the end) have no place in a prompt.
    """
    ids = _encode_around(tokenizer, text, question.strip())
    if chat:
        return ids
    bos = tokenizer.bos_token_id
    if bos is None or ids[:1] == [bos]:
        return ids
    adds_bos = tokenizer.encode(text, add_special_tokens=True)[:1] == [bos]
    return [bos, *ids] if adds_bos else ids


def _encode_around(tokenizer: Tokenizer, text: str, question: str) -> list[int]:
    """Ids of `text` without any token that the tokenizer would see in the question alone.

    Text between two special tokens is encoded by itself, so that only the stretch around the
    question has to be cut out, and no other prompt changes.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    as_text = tokenizer.encode(question, add_special_tokens=False, split_special_tokens=True)
    if as_text == tokenizer.encode(question, add_special_tokens=False):
        return ids
    before, _, after = text.rpartition(question)
    names = [name for name in tokenizer.get_added_vocab() if name]
    first = max((before.rfind(n) + len(n) for n in names if n in before), default=0)
    last = min((after.find(n) for n in names if n in after), default=len(after))
    stretch = before[first:] + question + after[:last]
    return [
        *tokenizer.encode(before[:first], add_special_tokens=False),
        *tokenizer.encode(stretch, add_special_tokens=False, split_special_tokens=True),
        *tokenizer.encode(after[last:], add_special_tokens=False),
    ]


def encode_completion(tokenizer: Tokenizer, text: str, problem_id: str) -> list[int]:
    """Ids of `text` as the continuation of a prompt, which decode back to it.

    Tokenizers of the SentencePiece kind put a space before the first word of a text, which is
    wrong in mid-sequence: there the text is encoded after a line break, which is cut off again.

    Raises:
        PromptError: the text does not survive encoding and decoding.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if _survives(tokenizer, ids, text):
        return ids
    start = tokenizer.encode("\n", add_special_tokens=False)
    whole = tokenizer.encode(f"\n{text}", add_special_tokens=False)
    if whole[: len(start)] == start and _survives(tokenizer, whole[len(start) :], text):
        return whole[len(start) :]
    raise PromptError(
        f"the worked solution of {problem_id} does not survive the tokenizer: it would be "
        f"trained as {_decoded_behind_newline(tokenizer, ids)[:80]!r}",
        where="data.sft",
    )


def _survives(tokenizer: Tokenizer, ids: list[int], text: str) -> bool:
    # Tokenizers may put text into a Unicode normal form; that changes no tag and no number.
    decoded = _decoded_behind_newline(tokenizer, ids)
    return unicodedata.normalize("NFKC", decoded) == unicodedata.normalize("NFKC", text)


def _decoded_behind_newline(tokenizer: Tokenizer, ids: list[int]) -> str:
    """`ids` decoded as a continuation: a first space is kept, as it is in mid-sequence."""
    start = tokenizer.encode("\n", add_special_tokens=False)
    before = tokenizer.decode(start, skip_special_tokens=False)
    return tokenizer.decode([*start, *ids], skip_special_tokens=False)[len(before) :]
