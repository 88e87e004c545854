"""Rendering of a problem as token ids, for SFT, rollouts, evaluation and `generate` alike.

Chat templates are tested by the text that they render, and a worked solution is encoded apart from
its prompt.
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
from grouper.programs.code_blocks import OUTPUT_BLOCK, program_block
from grouper.programs.from_marks import program_from_marks
from grouper.types import AnswerFormat, AnswerKind, Demonstration, Message, Problem, Prompt

log = logging.getLogger(__name__)

# Some templates open a thinking block in the generation prompt. Whether there is one is the
# format's decision, unless the recipe has chosen the template's mode
# (prompt.chat_template_kwargs). A block that is empty and closed is the template's way to say that
# the model answers without thinking, as it was trained and is served: it stays.
OPENED_THINKING = re.compile(r"<think>\s*\Z")


class Tokenizer(Hashable, Protocol):
    """The methods of a tokenizer that prompts need.

    A Hugging Face tokenizer has all of them. It is not imported: its library would import torch.
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
        """Encode a text; with `split_special_tokens`, names of special tokens are mere text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        """Render a conversation, as text if `tokenize` is false.

        It may raise any exception that the template raises.
        """

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The tokens that are found in a text before it is split, special or not, by id."""


# One integer object per id, which all prompts share: in a tuple each id takes 8 bytes, and 28 more
# as an object of its own, where a large set has a hundred million.
_SHARED_IDS: dict[int, int] = {}


def _shared(ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids as a tuple of shared objects."""
    return tuple(map(_SHARED_IDS.setdefault, ids, ids))


# --- prompts -------------------------------------------------------------------------------------


def render(
    problem: Problem, fmt: AnswerFormat, tokenizer: Tokenizer, earlier: Sequence[Message] = ()
) -> Prompt:
    """Render the prompt of `problem`, generation prompt and prefix included.

    If the problem has a whole prompt, that is used word for word.

    Args:
        problem: the problem, with a question or a whole prompt.
        fmt: the format.
        tokenizer: the model's tokenizer.
        earlier: turns before the question; only a chat template knows how to write them.

    Raises:
        PromptError: the chat template cannot render it, or it has no tokens.
    """
    messages: tuple[Message, ...] | None = None
    question = problem.question
    fmt, earlier = _with_own_system(fmt, (*problem.earlier, *earlier))
    if problem.prompt is not None:
        # The special tokens of a whole prompt are intended: none is encoded as mere text.
        text = problem.prompt
        question = ""
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
    if ids[:1] != bos:
        ids = [*bos, *ids]
    if not ids:
        raise PromptError(f"the prompt of {problem.id} has no tokens", where="prompt")
    return Prompt(
        problem_id=problem.id,
        text=text,
        token_ids=_shared(ids),
        messages=messages,
        prefix=fmt.prefix if text.endswith(fmt.prefix) else "",
    )


def _with_own_system(
    fmt: AnswerFormat, turns: tuple[Message, ...]
) -> tuple[AnswerFormat, tuple[Message, ...]]:
    """Put the conversation's own system message before the format's instruction.

    The model needs both: the task of the assistant from the data, and the way to write the answer
    from the format.
    """
    if not turns or turns[0]["role"] != "system":
        return fmt, turns
    system_message = turns[0]["content"].strip()
    paragraphs = [system_message]
    if fmt.system.strip() not in system_message:
        paragraphs.append(fmt.system)
    system = "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
    return replace(fmt, system=system), turns[1:]


def uses_chat(fmt: AnswerFormat, tokenizer: Tokenizer) -> bool:
    """Tell whether prompts go through the tokenizer's chat template.

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


# Llama 3.2 and others write the date into every prompt. This is the date that their templates use
# where there is no clock.
_NO_CLOCK = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"

# Marks around the values of prompt.chat_template_kwargs in a template that has them.
_KWARGS_BEGIN = "{#- prompt.chat_template_kwargs -#}"
_KWARGS_END = "{#- end of prompt.chat_template_kwargs -#}"


def install_template(fmt: AnswerFormat, tokenizer: Any) -> None:
    """Give the tokenizer the recipe's chat template, so that every program renders the same.

    With `prompt.template: install` that is the format's own template. Any other template is kept,
    with two changes. It shows a fixed date in place of today's: a prompt must be the same tomorrow,
    in a resumed run, in the evaluation and in the exported model. And its variables have the values
    of `prompt.chat_template_kwargs` unless a caller gives others.

    Raises:
        PromptError: a variable that the template does not read, or there is no template to read it.
    """
    template = tokenizer.chat_template
    if fmt.chat == "install":
        format_template = own_chat_template(fmt, tokenizer)
        if template and template != format_template:
            log.warning(
                "prompt.template: install replaces the model's own chat template, which its "
                "training had in every example. prompt.template: auto keeps it."
            )
        _require_variables(fmt, "")
        tokenizer.chat_template = format_template
        return
    if not isinstance(template, str):
        _require_variables(fmt, template)
        return
    model_template = _without_additions(template)
    _require_variables(fmt, "" if fmt.chat == "plain" else model_template)
    fixed_date = _NO_CLOCK if "strftime_now" in model_template else ""
    defaults = _jinja_defaults(fmt.template_kwargs)
    tokenizer.chat_template = fixed_date + defaults + model_template


def _without_additions(template: str) -> str:
    """Return a chat template as it came with the model."""
    template = template.removeprefix(_NO_CLOCK)
    if template.startswith(_KWARGS_BEGIN):
        _, _, template = template.partition(_KWARGS_END)
    return template


def _jinja_defaults(values: Mapping[str, Any]) -> str:
    """Write statements that set variables of a template where its caller does not."""
    if not values:
        return ""
    lines = [
        f"{{%- set {name} = {name} if {name} is defined else {_jinja_literal(value)} -%}}"
        for name, value in values.items()
    ]
    return _KWARGS_BEGIN + "".join(lines) + _KWARGS_END


def _jinja_literal(value: object) -> str:
    """Write a JSON value as a Jinja literal: as in JSON, except for null."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_jinja_literal, value)) + "]"
    if isinstance(value, Mapping):
        entries = [f"{json.dumps(key)}: {_jinja_literal(entry)}" for key, entry in value.items()]
        return "{" + ", ".join(entries) + "}"
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
        message = "these are variables of the model's own chat template, and none is used"
        if isinstance(template, dict):
            message = "the tokenizer has several chat templates, and variables are for one"
        raise PromptError(message, where=where, fix="Leave it out, or use prompt.template: chat.")
    names = set(re.findall(r"[A-Za-z_]\w*", template))
    for name in fmt.template_kwargs:
        if name not in names:
            near = nearest(name, names)
            hint = f"Did you mean {near!r}?" if near else "Its text says which ones it has."
            message = f"the model's chat template reads no variable {name!r}"
            raise PromptError(message, where=where, fix=hint)


# Layout of a first turn.
_LAYOUT = "{system}\n\n{question}\n"


def own_chat_template(fmt: AnswerFormat, tokenizer: Tokenizer, layout: str = _LAYOUT) -> str:
    """Write a Jinja chat template: instruction, turns, and the opened tag as generation prompt.

    Conversations without a system message get the format's, so that a saved tokenizer renders the
    same layout in any program that loads it.

    Args:
        fmt: the format, whose instruction and prefix the template has.
        tokenizer: its BOS comes first where it puts one in front of a text, since nothing adds it
            to the text of a chat template.
        layout: the layout of a first turn.
    """
    text_before_question, _, question_suffix = layout.partition("{question}")
    _, _, text_after_system = text_before_question.partition("{system}")
    question_prefix = text_after_system.lstrip()
    gap = text_after_system.removesuffix(question_prefix)

    def jinja_string(text: str) -> str:
        # A JSON string is a Jinja string: the same quotes and escapes, but for those of Unicode.
        return json.dumps(text, ensure_ascii=False)

    question = (
        f"{jinja_string(question_prefix)} + message['content'] + {jinja_string(question_suffix)}"
    )
    bos = "{{- bos_token -}}" if _bos(tokenizer) else ""
    return bos + (
        "{%- if messages[0]['role'] == 'system' -%}"
        "{%- set instruction = messages[0]['content'] -%}{%- set turns = messages[1:] -%}"
        "{%- else -%}"
        f"{{%- set instruction = {jinja_string(fmt.system)} -%}}{{%- set turns = messages -%}}"
        "{%- endif -%}"
        f"{{%- if instruction -%}}{{{{- instruction + {jinja_string(gap)} -}}}}{{%- endif -%}}"
        "{%- for message in turns -%}"
        "{%- if message['role'] == 'assistant' -%}{{- message['content'] + eos_token + '\n' -}}"
        f"{{%- else -%}}{{{{- {question} -}}}}{{%- endif -%}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {jinja_string(fmt.prefix)} -}}}}{{%- endif -%}}"
    )


def _render_chat(
    tokenizer: Tokenizer, fmt: AnswerFormat, question: str, earlier: tuple[Message, ...] = ()
) -> tuple[str, tuple[Message, ...]]:
    """Render a conversation up to where the assistant begins; return the text and its messages.

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
        _, first, *later = messages
        first = Message(role="user", content=f"{system}\n\n{first['content']}")
        messages = (first, *later)
        text = _apply_template(tokenizer, messages)
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
    # A tag at the end of the question itself stays, and so does a mode that the recipe has chosen.
    if not fmt.template_kwargs and not text.rstrip().endswith(question.strip()):
        text = OPENED_THINKING.sub("", text)
    _require_one_block(fmt, text)
    return text, messages


def _require_one_block(fmt: AnswerFormat, text: str) -> None:
    """Refuse a prompt that opens a thinking block for a format that opens one itself.

    Raises:
        PromptError: both open one.
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
    """Return the rendered text, or the exception that the template raised."""
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        )
    # A chat template is a program that came with the model and may raise any exception; the
    # caller decides whether another shape of conversation is worth trying.
    except Exception as error:  # noqa: BLE001 - the model's own program, see above
        return error


def _bos(tokenizer: Tokenizer) -> list[int]:
    """Return the BOS token where the tokenizer puts it in front of a text, else nothing."""
    ids = tokenizer.encode("a")
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _encode_around(tokenizer: Tokenizer, text: str, question: str) -> list[int]:
    """Encode `text` without any token that the tokenizer would see in the question alone.

    A question that names a special token (`<|im_end|>`) must not end its turn or open another one,
    so it is encoded as if the tokenizer had none. Text between two special tokens is encoded by
    itself, so that only the part around the question has to be cut out, and no other prompt
    changes.
    """
    if not _names_special_token(tokenizer, question):
        return tokenizer.encode(text, add_special_tokens=False)
    prefix, _, suffix = text.rpartition(question)
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content]
    # Up to the last special token before the question, and from the first after it.
    start = max((prefix.rfind(name) + len(name) for name in names if name in prefix), default=0)
    end = min((suffix.find(name) for name in names if name in suffix), default=len(suffix))
    text_around = prefix[start:] + question + suffix[:end]
    return [
        *tokenizer.encode(prefix[:start], add_special_tokens=False),
        *tokenizer.encode(text_around, add_special_tokens=False, split_special_tokens=True),
        *tokenizer.encode(suffix[end:], add_special_tokens=False),
    ]


def _names_special_token(tokenizer: Tokenizer, question: str) -> bool:
    """Tell whether the tokenizer would see a special token in the question."""
    # Encoding takes most of the time in which a large set is prepared, and few questions need it
    # here: the pattern rules out the others.
    if not _special_token_pattern(tokenizer).search(question):
        return False
    as_text = tokenizer.encode(question, add_special_tokens=False, split_special_tokens=True)
    return as_text != tokenizer.encode(question, add_special_tokens=False)


@functools.lru_cache(maxsize=1)  # a set is rendered with one tokenizer
def _special_token_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Compile a pattern for texts in which the tokenizer may find an added token.

    It is the beginning of their names, since some tokenizers have thousands of them. Where a
    special token is looked for in a normal form of the text, it is empty and matches every text.
    """
    beginnings = set()
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and token.normalized:
            beginnings.add("")
        else:
            beginnings.add(re.escape(token.content[:4]))
    return re.compile("|".join(beginnings) or "(?!)")


# --- completions ---------------------------------------------------------------------------------


def demonstrate(
    problem: Problem, fmt: AnswerFormat, tokenizer: Tokenizer, stop_token_id: int
) -> Demonstration:
    """Encode prompt and worked solution of `problem` as SFT trains them, stop token last.

    The completion's ids are put after the prompt's: the joined text is never tokenized,
    so no template can drop a part of it.

    Raises:
        PromptError: no worked solution, its text does not survive the tokenizer, or it holds
            the stop token in its middle.
    """
    prompt = render(problem, fmt, tokenizer)
    text = completion_text(problem, fmt)
    text = _without_end(tokenizer, text, stop_token_id)
    spans: tuple[tuple[int, int], ...] = ()
    if fmt.tools:
        ids, spans = _encode_turns(tokenizer, text, problem.id)
    else:
        ids = encode_completion(tokenizer, text, problem.id)
    ids = [*ids, stop_token_id]
    if ids.count(stop_token_id) > 1:
        raise PromptError(
            f"the worked solution of {problem.id} holds the stop token itself in its middle",
            where="data.sft",
        )
    return Demonstration(prompt=prompt, token_ids=_shared(ids), tool_spans=spans)


def _encode_turns(
    tokenizer: Tokenizer, text: str, problem_id: str
) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Encode a completion with outputs of tools: each apart, as sampling in turns has them.

    Returns:
        The ids, and the spans of those that tools wrote.

    Raises:
        PromptError: the text does not survive encoding and decoding.
    """
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    start = 0
    for output in OUTPUT_BLOCK.finditer(text):
        if start < output.start():
            ids += encode_completion(tokenizer, text[start : output.start()], problem_id)
        said = tokenizer.encode(output[0], add_special_tokens=False, split_special_tokens=True)
        spans.append((len(ids), len(ids) + len(said)))
        ids += said
        start = output.end()
    if start < len(text):
        ids += encode_completion(tokenizer, text[start:], problem_id)
    return ids, tuple(spans)


def _without_end(tokenizer: Tokenizer, text: str, stop_token_id: int) -> str:
    """Remove special tokens from the end of a completion, where rows of other trainers have them.

    The stop token is appended later; a second one, or another end of text before it, would be
    trained.
    """
    ends = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    ends.append(tokenizer.decode([stop_token_id], skip_special_tokens=False))
    while True:
        stripped = text.rstrip()
        end = next((end for end in ends if end.strip() and stripped.endswith(end)), None)
        if end is None:
            return text
        text = stripped.removesuffix(end)


def completion_text(problem: Problem, fmt: AnswerFormat) -> str:
    """Write the worked solution of `problem` in its format, without the prefix.

    A whole response is taken word for word, without the prefix if it begins with it: the prompt has
    opened that already. Else the answer is the column `demonstrated_answer` where the source has
    one, or the reference.

    Where the answer is what a program prints, the solution is a program: that of the problem, or
    one made of the arithmetic that its solution marks.

    Raises:
        PromptError: the problem has no worked solution, one that holds tags of the format, a
            response in another layout, or no program for a format that needs one.
    """
    if problem.response is not None:
        return _response_text(problem, problem.response, fmt)
    if fmt.contract.kind is AnswerKind.PROGRAM:
        return program_block(problem.program or _program_of(problem))
    solution = problem.solution or ""
    if not solution.strip():
        raise PromptError(f"problem {problem.id} has no worked solution", where="data.sft")
    # A tag of one character, such as a line break or a point, may occur in any solution.
    tags = [tag for tag in fmt.tags or () if len(tag.strip()) > 1]
    repeated_tags = [repr(tag) for tag in tags if tag in solution]
    if repeated_tags:
        raise PromptError(
            f"the worked solution of {problem.id} holds {', '.join(repeated_tags)}, which the "
            f"format {fmt.name} puts around it; a whole completion is `columns: {{response: ...}}`",
            where="data.sft",
        )
    return right_completion(problem, fmt, problem.columns.get("demonstrated_answer"))


def _program_of(problem: Problem) -> str:
    """Return a program made of marked arithmetic (`<<48/2=24>>`).

    Raises:
        PromptError: none is marked, or it does not lead to the reference.
    """
    for text in problem.columns.values():
        if isinstance(text, str) and "<<" in text:
            program = program_from_marks(text, problem.question, problem.answer)
            if program is not None:
                return program
    raise PromptError(
        f"problem {problem.id} has no program, and its solution marks no arithmetic "
        "(<<48/2=24>>) that leads to its answer",
        where="data.sft",
    )


def _response_text(problem: Problem, response: str, fmt: AnswerFormat) -> str:
    """Return a whole response without the prefix.

    Raises:
        PromptError: the response is in another layout.
    """
    if problem.prompt is not None:
        return response
    # Training on another layout after this format's prompt would unteach this format.
    missing = [mark for mark in fmt.marks if mark not in fmt.prefix + response]
    if missing:
        raise PromptError(
            f"the response of {problem.id} lacks {', '.join(missing)} of the format {fmt.name}",
            where="data.sft",
        )
    if fmt.prefix and response.lstrip().startswith(fmt.prefix):
        return response.lstrip().removeprefix(fmt.prefix)
    return response


def right_completion(problem: Problem, fmt: AnswerFormat, answer: object = None) -> str:
    """Write a completion that answers with `answer` or the reference, without the prefix."""
    reasoning = (problem.solution or "").strip() or f"The answer is {problem.answer}."
    if fmt.contract.kind is AnswerKind.BOXED and r"\boxed" in reasoning:
        text_before_reasoning, _, _ = fmt.template.partition("{reasoning}")
        return text_before_reasoning + reasoning
    answer_text = problem.answer if answer is None else str(answer)
    return fmt.completion(reasoning, answer_text)


def encode_completion(tokenizer: Tokenizer, text: str, problem_id: str) -> list[int]:
    """Encode `text` as the continuation of a prompt, with ids that decode back to it.

    Tokenizers of the SentencePiece kind put a space before the first word of a text, which is
    wrong in mid-sequence: there the text is encoded after a line break, which is cut off again.

    Raises:
        PromptError: the text does not survive encoding and decoding.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if _survives(tokenizer, ids, text):
        return ids
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    ids_after_break = tokenizer.encode(f"\n{text}", add_special_tokens=False)
    if ids_after_break[: len(line_break)] == line_break:
        continuation = ids_after_break[len(line_break) :]
        if _survives(tokenizer, continuation, text):
            return continuation
    decoded = _decode_continuation(tokenizer, ids)
    raise PromptError(
        f"the worked solution of {problem_id} does not survive the tokenizer: it would be "
        f"trained as {decoded[:80]!r}",
        where="data.sft",
    )


def _survives(tokenizer: Tokenizer, ids: list[int], text: str) -> bool:
    """Tell whether ids decode to a text that means the same."""
    decoded = _decode_continuation(tokenizer, ids)
    if unicodedata.normalize("NFKC", decoded) != unicodedata.normalize("NFKC", text):
        return False
    # Tokenizers may put text into a Unicode normal form, which must change no number: ten to the
    # third, with a raised 3, is not 103.
    for character in set(text) - set(decoded):
        if unicodedata.decomposition(character).startswith(("<super>", "<sub>", "<fraction>")):
            return False
    return True


def _decode_continuation(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode `ids` after a line break, so that a first space is kept."""
    line_break_ids = tokenizer.encode("\n", add_special_tokens=False)
    line_break = tokenizer.decode(line_break_ids, skip_special_tokens=False)
    text = tokenizer.decode([*line_break_ids, *ids], skip_special_tokens=False)
    return text[len(line_break) :]


# --- stop tokens ---------------------------------------------------------------------------------

_ANSWER = "the assistant's answer"


def find_stop_tokens(
    tokenizer: Tokenizer, generation_eos: Sequence[int], fmt: AnswerFormat
) -> tuple[int, ...]:
    """Find the ids that end a sampled completion: (151645, 151643) for Qwen2.5.

    SFT puts the first after every completion. In a chat it is the token that the template writes
    after the assistant's text (`<|im_end|>` of Qwen2.5, `<|eot_id|>` of Llama-3), which is not
    always EOS; in plain text it is the tokenizer's EOS.

    Args:
        tokenizer: the model's tokenizer.
        generation_eos: the EOS ids of the model's generation config; may be empty.
        fmt: decides whether the chat template is used.

    Raises:
        PromptError: there is none, so that no completion could ever end.
    """
    stop_ids = _turn_end(tokenizer) if uses_chat(fmt, tokenizer) else []
    if tokenizer.eos_token_id is not None:
        stop_ids.append(tokenizer.eos_token_id)
    stop_ids += generation_eos
    if not stop_ids:
        raise PromptError(
            "the tokenizer has no stop token, so no completion would ever end",
            where="the tokenizer",
            fix="Set its eos_token, or eos_token_id in the model's generation_config.json.",
        )
    return tuple(dict.fromkeys(stop_ids))


def _turn_end(tokenizer: Tokenizer) -> list[int]:
    """Return the special token directly after an assistant message, or nothing."""
    messages = (
        Message(role="user", content="a question"),
        Message(role="assistant", content=_ANSWER),
    )
    text = _apply_template(tokenizer, messages, generation_prompt=False)
    if isinstance(text, Exception) or _ANSWER not in text:
        return []
    _, _, text_after_answer = text.rpartition(_ANSWER)
    text_after_answer = text_after_answer.lstrip()
    if not text_after_answer:
        return []
    ids = tokenizer.encode(text_after_answer, add_special_tokens=False)
    special_ids = {*tokenizer.added_tokens_decoder, tokenizer.eos_token_id}
    return ids[:1] if ids and ids[0] in special_ids else []
