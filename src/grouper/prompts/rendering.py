"""A problem as token ids: the one renderer of SFT, rollouts, evaluation and `generate`.

Chat templates are tested by what they render, and a worked solution is encoded apart from its
prompt.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import unicodedata
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from grouper.errors import PromptError, nearest
from grouper.types import AnswerFormat, AnswerKind, Demonstration, Message, Problem, Prompt

log = logging.getLogger(__name__)

# Some templates open a thinking block in the generation prompt. Whether there is one is the
# format's decision, unless the recipe has chosen the template's mode
# (prompt.chat_template_kwargs). A block that is empty and closed is the template's way to say that
# the model answers without thinking, as it was trained and is served: it stays.
OPENED_THINKING = re.compile(r"<think>\s*\Z")


class Tokenizer(Hashable, Protocol):
    """What prompts need of a tokenizer; importing a tokenizer library would import torch.

    A Hugging Face tokenizer has all of it.
    """

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

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """By id, the tokens that are found in a text before it is split, special or not."""


# Every id that was met, for all prompts to share: in a tuple each takes 8 bytes, and 28 more as an
# object of its own, where a large set has a hundred million.
_SHARED: dict[int, int] = {}


# --- prompts -------------------------------------------------------------------------------------


def render(
    problem: Problem, fmt: AnswerFormat, tokenizer: Tokenizer, earlier: Sequence[Message] = ()
) -> Prompt:
    """The prompt of `problem`, generation prompt and prefix included.

    If the problem has a whole prompt, that is used word for word.

    Args:
        problem: its question, or its prompt.
        fmt: the format.
        tokenizer: of the model.
        earlier: turns before the question; only a chat template knows how to write them.

    Raises:
        PromptError: the chat template cannot render it, or it has no tokens.
    """
    messages: tuple[Message, ...] | None = None
    question = problem.question
    fmt, earlier = _with_own_system(fmt, (*problem.earlier, *earlier))
    if problem.prompt is not None:
        text, question = problem.prompt, ""  # rendered already: its special tokens are meant
    elif uses_chat(fmt, tokenizer):
        text, messages = _render_chat(tokenizer, fmt, question, earlier)
        if not text.endswith(fmt.prefix):  # a template may have opened it already
            text += fmt.prefix
    elif earlier:
        raise PromptError(
            "turns come before the question, and plain text has no place for them",
            where="prompt.template",
            fix="Use a model with a chat template, or prompt.template: install.",
        )
    else:
        text = fmt.plain_prompt(question)
    ids = _encode_around(tokenizer, text, question.strip())
    # A chat template has written the BOS token where the model wants one. In plain text it goes
    # first exactly where the tokenizer puts one; other special tokens that a tokenizer adds (an EOS
    # at the end) have no place in a prompt.
    bos = _bos(tokenizer) if messages is None else []
    ids = ids if ids[:1] == bos else [*bos, *ids]
    if not ids:
        raise PromptError(f"the prompt of {problem.id} has no tokens", where="prompt")
    return Prompt(
        problem_id=problem.id,
        text=text,
        token_ids=tuple(map(_SHARED.setdefault, ids, ids)),
        messages=messages,
        prefix=fmt.prefix if text.endswith(fmt.prefix) else "",
    )


def _with_own_system(
    fmt: AnswerFormat, turns: tuple[Message, ...]
) -> tuple[AnswerFormat, tuple[Message, ...]]:
    """The format with the conversation's own system message before its instruction.

    Both are said: what the data asks of the assistant, and how the answer is written.
    """
    if not turns or turns[0]["role"] != "system":
        return fmt, turns
    own = turns[0]["content"].strip()
    parts = [own] if fmt.system.strip() in own else [own, fmt.system]
    return replace(fmt, system="\n\n".join(part for part in parts if part)), turns[1:]


def uses_chat(fmt: AnswerFormat, tokenizer: Tokenizer) -> bool:
    """Whether prompts go through the tokenizer's chat template.

    Raises:
        PromptError: the recipe insists on a chat template and there is none, or another one.
    """
    if fmt.chat == "install" and tokenizer.chat_template != own_chat_template(fmt, tokenizer):
        raise PromptError(
            "the format's chat template is not installed in the tokenizer",
            where="prompt.template",
            fix="Call `install_template(fmt, tokenizer)` first.",
        )
    if fmt.chat == "chat" and not tokenizer.chat_template:
        raise PromptError(
            "the tokenizer has no chat template",
            where="prompt.template",
            fix="Use `auto` or `plain`, or `install` to give it one.",
        )
    return fmt.chat != "plain" and bool(tokenizer.chat_template)


# Llama 3.2 and others write the date into every prompt: theirs where there is no clock.
_NO_CLOCK = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"

# Between these stand the values of prompt.chat_template_kwargs in a template that has them.
_KWARGS_BEGIN = "{#- prompt.chat_template_kwargs -#}"
_KWARGS_END = "{#- end of prompt.chat_template_kwargs -#}"


def install_template(fmt: AnswerFormat, tokenizer: Any) -> None:
    """Give the tokenizer the recipe's chat template, so that whatever loads it renders the same.

    That is the format's own where the recipe wants it installed. Any other template is kept, with
    two changes. It shows a fixed date in place of today's: a prompt must be the same tomorrow, in a
    resumed run, in the evaluation and in what is exported. And its variables have the values of
    `prompt.chat_template_kwargs` unless a caller gives others.

    Raises:
        PromptError: a variable that the template does not read, or there is no template to read it.
    """
    template = tokenizer.chat_template
    if fmt.chat == "install":
        own = own_chat_template(fmt, tokenizer)
        if template and template != own:
            log.warning(
                "prompt.template: install replaces the model's own chat template, which its "
                "training had in every example. prompt.template: auto keeps it."
            )
        _require_variables(fmt, "")
        tokenizer.chat_template = own
        return
    if not isinstance(template, str):
        _require_variables(fmt, template)
        return
    plain = _without_additions(template)
    _require_variables(fmt, "" if fmt.chat == "plain" else plain)
    additions = _NO_CLOCK if "strftime_now" in plain else ""
    tokenizer.chat_template = additions + _jinja_defaults(fmt.template_kwargs) + plain


def _without_additions(template: str) -> str:
    """A chat template as the model brought it."""
    plain = template.removeprefix(_NO_CLOCK)
    if plain.startswith(_KWARGS_BEGIN):
        plain = plain.partition(_KWARGS_END)[2]
    return plain


def _jinja_defaults(values: Mapping[str, Any]) -> str:
    """Statements that set variables of a template where its caller does not."""
    if not values:
        return ""
    lines = [
        f"{{%- set {name} = {name} if {name} is defined else {_jinja_literal(value)} -%}}"
        for name, value in values.items()
    ]
    return _KWARGS_BEGIN + "".join(lines) + _KWARGS_END


def _jinja_literal(value: object) -> str:
    """A JSON value as Jinja writes it: as JSON does, but for null."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_jinja_literal, value)) + "]"
    if isinstance(value, Mapping):
        rows = (f"{json.dumps(key)}: {_jinja_literal(one)}" for key, one in value.items())
        return "{" + ", ".join(rows) + "}"
    return json.dumps(value, ensure_ascii=False)


def _require_variables(fmt: AnswerFormat, template: Any) -> None:
    """Refuse variables that a chat template does not read: they would change nothing.

    Raises:
        PromptError: there is such a variable.
    """
    if not fmt.template_kwargs:
        return
    where = "prompt.chat_template_kwargs"
    if not isinstance(template, str) or not template:
        what = "these are variables of the model's own chat template, and none is used"
        if isinstance(template, dict):
            what = "the tokenizer has several chat templates, and variables are for one"
        raise PromptError(what, where=where, fix="Leave it out, or use prompt.template: chat.")
    names = set(re.findall(r"[A-Za-z_]\w*", template))
    for name in fmt.template_kwargs:
        if name not in names:
            near = nearest(name, names)
            hint = f"Did you mean {near!r}?" if near else "Its text says which ones it has."
            what = f"the model's chat template reads no variable {name!r}"
            raise PromptError(what, where=where, fix=hint)


# How a first turn is laid out.
_LAYOUT = "{system}\n\n{question}\n"


def own_chat_template(fmt: AnswerFormat, tokenizer: Tokenizer, layout: str = _LAYOUT) -> str:
    """A Jinja chat template: instruction, turns, and the opened tag as the generation prompt.

    Conversations without a system message get the format's, so that a saved tokenizer renders the
    same layout in any program that loads it.

    Args:
        fmt: its instruction and its prefix.
        tokenizer: the BOS that it puts in front of a text comes first, since nobody adds it to the
            text of a chat template.
        layout: of a first turn.
    """
    before, _, after = layout.partition("{question}")
    between = before.partition("{system}")[2]
    turn = between.lstrip()
    gap = between.removesuffix(turn)
    # A JSON string is a Jinja string: the same quotes and escapes, but for those of Unicode.
    texts = (fmt.system, fmt.prefix, gap, turn, after)
    instruction, opened, gap, turn, after = (json.dumps(t, ensure_ascii=False) for t in texts)
    bos = "{{- bos_token -}}" if _bos(tokenizer) else ""
    return bos + (
        "{%- if messages[0]['role'] == 'system' -%}"
        "{%- set instruction = messages[0]['content'] -%}{%- set turns = messages[1:] -%}"
        "{%- else -%}"
        f"{{%- set instruction = {instruction} -%}}{{%- set turns = messages -%}}"
        "{%- endif -%}"
        f"{{%- if instruction -%}}{{{{- instruction + {gap} -}}}}{{%- endif -%}}"
        "{%- for message in turns -%}"
        "{%- if message['role'] == 'assistant' -%}{{- message['content'] + eos_token + '\n' -}}"
        f"{{%- else -%}}{{{{- {turn} + message['content'] + {after} -}}}}{{%- endif -%}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {opened} -}}}}{{%- endif -%}}"
    )


def _render_chat(
    tokenizer: Tokenizer, fmt: AnswerFormat, question: str, earlier: tuple[Message, ...] = ()
) -> tuple[str, tuple[Message, ...]]:
    """The rendered text up to where the assistant begins, and the messages that gave it.

    Where the template refuses a system message, or leaves it out in silence, the instruction
    goes in front of the question.

    Raises:
        PromptError: the template cannot render even one user message, or loses the question.
    """
    system = fmt.system
    messages: tuple[Message, ...] = (*earlier, Message(role="user", content=question))
    if system:
        messages = (Message(role="system", content=system), *messages)
    text = _apply_template(tokenizer, messages)
    if system and (isinstance(text, Exception) or system.strip() not in text):
        first, *rest = messages[1:]
        messages = (Message(role="user", content=f"{system}\n\n{first['content']}"), *rest)
        text = _apply_template(tokenizer, messages)
    cause = text if isinstance(text, Exception) else None
    what = "leaves out the question" if cause is None else f"fails: {cause}"
    if isinstance(text, Exception) or question.strip() not in text:
        raise PromptError(
            f"the chat template {what}",
            where="the tokenizer",
            fix="Use `prompt.template: plain`.",
        ) from cause
    # A tag at the end of the question itself stays, and so does a mode that the recipe has chosen.
    if not fmt.template_kwargs and not text.rstrip().endswith(question.strip()):
        text = OPENED_THINKING.sub("", text)
    _require_one_block(fmt, text)
    return text, messages


def _require_one_block(fmt: AnswerFormat, text: str) -> None:
    """Refuse a prompt that opens a thinking block for a format that opens one itself.

    Raises:
        PromptError: it does.
    """
    if OPENED_THINKING.search(text) and fmt.tags is not None and "<think>" in fmt.tags:
        raise PromptError(
            f"the chat template opens a thinking block (prompt.chat_template_kwargs), and the "
            f"format {fmt.name} wants one of its own inside it",
            where="prompt.format",
            fix="Use prompt.format: boxed, or leave prompt.chat_template_kwargs out.",
        )


def _apply_template(
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


def _bos(tokenizer: Tokenizer) -> list[int]:
    """The BOS token where the tokenizer puts it in front of a text, else nothing."""
    return [first for first in tokenizer.encode("a")[:1] if first == tokenizer.bos_token_id]


def _encode_around(tokenizer: Tokenizer, text: str, question: str) -> list[int]:
    """Ids of `text` without any token that the tokenizer would see in the question alone.

    A question that names a special token (`<|im_end|>`) must not end its turn or open another one,
    so it is encoded as if the tokenizer had none. Text between two special tokens is encoded by
    itself, so that only the part around the question has to be cut out, and no other prompt
    changes.
    """
    asked = functools.partial(tokenizer.encode, question, add_special_tokens=False)
    # Of the time that a large set takes to prepare most is encoding: few questions need it thrice.
    if not _names(tokenizer).search(question) or asked(split_special_tokens=True) == asked():
        return tokenizer.encode(text, add_special_tokens=False)
    before, _, after = text.rpartition(question)
    names = [t.content for t in tokenizer.added_tokens_decoder.values() if t.content]
    first = max((before.rfind(n) + len(n) for n in names if n in before), default=0)
    last = min((after.find(n) for n in names if n in after), default=len(after))
    around = before[first:] + question + after[:last]
    return [
        *tokenizer.encode(before[:first], add_special_tokens=False),
        *tokenizer.encode(around, add_special_tokens=False, split_special_tokens=True),
        *tokenizer.encode(after[last:], add_special_tokens=False),
    ]


@functools.lru_cache(maxsize=1)  # a set is rendered with one tokenizer
def _names(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Found in each text in which the tokenizer may find an added token, and in few others.

    It is the beginning of their names, since some tokenizers have thousands of them; and nothing,
    which every text has, where a special one is looked for in a normal form of the text.
    """
    added = tokenizer.added_tokens_decoder.values()
    names = {"" if t.special and t.normalized else re.escape(t.content[:4]) for t in added}
    return re.compile("|".join(names) or "(?!)")


# --- completions ---------------------------------------------------------------------------------


def demonstrate(
    problem: Problem, fmt: AnswerFormat, tokenizer: Tokenizer, stop_token_id: int
) -> Demonstration:
    """Prompt and worked solution of `problem` as SFT trains them, stop token last.

    The completion's ids are put after the prompt's: the joined text is never tokenised,
    so no template can drop a part of it.

    Raises:
        PromptError: no worked solution, its text does not survive the tokenizer, or it holds
            the stop token in its middle.
    """
    prompt = render(problem, fmt, tokenizer)
    text = _without_end(tokenizer, completion_text(problem, fmt), stop_token_id)
    ids = [*encode_completion(tokenizer, text, problem.id), stop_token_id]
    if ids.count(stop_token_id) > 1:
        raise PromptError(
            f"the worked solution of {problem.id} holds the stop token itself in its middle",
            where="data.sft",
        )
    return Demonstration(prompt=prompt, token_ids=tuple(map(_SHARED.setdefault, ids, ids)))


def _without_end(tokenizer: Tokenizer, text: str, stop_token_id: int) -> str:
    """A completion without special tokens at its end, as rows of other trainers have them.

    The stop token is put there; a second one, or another end of text before it, would be trained.
    """
    ends = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    ends.append(tokenizer.decode([stop_token_id], skip_special_tokens=False))
    while True:
        shorter = text.rstrip()
        end = next((end for end in ends if end.strip() and shorter.endswith(end)), None)
        if end is None:
            return text
        text = shorter.removesuffix(end)


def completion_text(problem: Problem, fmt: AnswerFormat) -> str:
    """The worked solution of `problem` as its format wants it, less the prefix.

    A whole response is taken word for word, but for the prefix, if it begins with it: the prompt
    has opened that already. Else the answer is the column `demonstrated_answer` where the source
    has one, or the reference.

    Raises:
        PromptError: the problem has no worked solution, one that holds tags of the format, or a
            response in another layout.
    """
    if (response := problem.response) is not None:
        if problem.prompt is not None:
            return response
        # After this format's prompt another layout would unteach this one.
        if missing := [mark for mark in fmt.marks if mark not in fmt.prefix + response]:
            raise PromptError(
                f"the response of {problem.id} lacks {', '.join(missing)} of the format {fmt.name}",
                where="data.sft",
            )
        repeated = fmt.prefix and response.lstrip().startswith(fmt.prefix)
        return response.lstrip().removeprefix(fmt.prefix) if repeated else response
    solution = problem.solution or ""
    if not solution.strip():
        raise PromptError(f"problem {problem.id} has no worked solution", where="data.sft")
    tags = [tag for tag in fmt.tags or () if len(tag.strip()) > 1]  # not a line break, or a point
    held = [repr(tag) for tag in tags if tag in solution]
    if held:  # they would stand there twice
        raise PromptError(
            f"the worked solution of {problem.id} holds {', '.join(held)}, which the format "
            f"{fmt.name} puts around it; a whole completion is `columns: {{response: ...}}`",
            where="data.sft",
        )
    return right_completion(problem, fmt, problem.columns.get("demonstrated_answer"))


def right_completion(problem: Problem, fmt: AnswerFormat, answer: object = None) -> str:
    """A completion that answers `problem` with `answer` or its reference, less the prefix."""
    reasoning = (problem.solution or "").strip() or f"The answer is {problem.answer}."
    if fmt.contract.kind is AnswerKind.BOXED and r"\boxed" in reasoning:
        return fmt.template.partition("{reasoning}")[0] + reasoning
    return fmt.completion(reasoning, problem.answer if answer is None else str(answer))


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
        f"trained as {_decoded_in_mid_sequence(tokenizer, ids)[:80]!r}",
        where="data.sft",
    )


def _survives(tokenizer: Tokenizer, ids: list[int], text: str) -> bool:
    # Tokenizers may put text into a Unicode normal form, which must change no number: ten to the
    # third, with a raised 3, is not 103.
    decoded, kinds = _decoded_in_mid_sequence(tokenizer, ids), ("<super>", "<sub>", "<fraction>")
    same = unicodedata.normalize("NFKC", decoded) == unicodedata.normalize("NFKC", text)
    lost = {*text} - {*decoded}
    return same and not any(unicodedata.decomposition(c).startswith(kinds) for c in lost)


def _decoded_in_mid_sequence(tokenizer: Tokenizer, ids: list[int]) -> str:
    """`ids` decoded after a line break, so that a first space is kept."""
    start = tokenizer.encode("\n", add_special_tokens=False)
    before = tokenizer.decode(start, skip_special_tokens=False)
    return tokenizer.decode([*start, *ids], skip_special_tokens=False)[len(before) :]


# --- stop tokens ---------------------------------------------------------------------------------

_ANSWER = "the assistant's answer"


def find_stop_tokens(
    tokenizer: Tokenizer, generation_eos: Sequence[int], fmt: AnswerFormat
) -> tuple[int, ...]:
    """The ids that end a sampled completion: (151645, 151643) for Qwen2.5.

    SFT puts the first after every completion. In a chat it is what the template writes after the
    assistant's text (`<|im_end|>` of Qwen2.5, `<|eot_id|>` of Llama-3), which is not always EOS; in
    plain text it is the tokenizer's EOS.

    Args:
        tokenizer: the model's tokenizer.
        generation_eos: the EOS ids of the model's generation config; may be empty.
        fmt: decides whether the chat template is used.

    Raises:
        PromptError: there is none, so that no completion could ever end.
    """
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    turn_end = _turn_end(tokenizer) if uses_chat(fmt, tokenizer) else []
    found = [*turn_end, *eos, *generation_eos]
    if not found:
        raise PromptError(
            "the tokenizer has no stop token, so no completion would ever end",
            where="the tokenizer",
            fix="Set its eos_token, or eos_token_id in the model's generation_config.json.",
        )
    return tuple(dict.fromkeys(found))


def _turn_end(tokenizer: Tokenizer) -> list[int]:
    """The special token directly after an assistant message, or nothing."""
    messages = (
        Message(role="user", content="a question"),
        Message(role="assistant", content=_ANSWER),
    )
    text = _apply_template(tokenizer, messages, generation_prompt=False)
    if isinstance(text, Exception) or _ANSWER not in text:
        return []
    tail = text[text.rindex(_ANSWER) + len(_ANSWER) :].lstrip()
    ids = tokenizer.encode(tail, add_special_tokens=False) if tail else []
    special = {*tokenizer.added_tokens_decoder, tokenizer.eos_token_id}
    return ids[:1] if ids and ids[0] in special else []
