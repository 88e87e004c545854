"""The prompt formats: a table of records, and the one that a recipe describes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grouper.config.schema import PromptConfig, TagsConfig
from grouper.errors import PromptError, require_known
from grouper.files import load_table
from grouper.types import AnswerContract, AnswerFormat, AnswerKind

TURN_MARKERS: tuple[str, ...] = tuple(load_table("grouper.prompts", "turn_markers.yaml"))


def _tag_contract(tags: tuple[str, str, str, str]) -> AnswerContract:
    """Make the contract of a format whose answer stands between tags."""
    reasoning_open, reasoning_close, answer_open, answer_close = tags
    return AnswerContract(
        kind=AnswerKind.TAG,
        open=answer_open,
        close=answer_close,
        reasoning=(reasoning_open, reasoning_close),
        turn_markers=TURN_MARKERS,
    )


def _format_with_tags(tags: TagsConfig) -> AnswerFormat:
    """Make a format with the user's own tags."""
    tag_texts = (tags.reasoning_open, tags.reasoning_close, tags.answer_open, tags.answer_close)
    return AnswerFormat(
        name="tags",
        description="tags of your own (prompt.tags); the prompt opens the reasoning tag",
        system=(
            "Solve the problem. "
            f"Write your working between {tags.reasoning_open} and {tags.reasoning_close}, "
            f"then the final result alone between {tags.answer_open} and {tags.answer_close}."
        ),
        template="{}{{reasoning}}{}{}{{answer}}{}".format(*tag_texts),
        contract=_tag_contract(tag_texts),
        tags=tag_texts,
        prefix=tags.reasoning_open,
    )


def _format_from_row(name: str, row: dict[str, Any]) -> AnswerFormat:
    """Make a format from a row of `formats.yaml`.

    The examples of a protocol stand before the question, in its layout.
    """
    stop = tuple(row.pop("stop", ()))
    tags = row.pop("tags", None)
    if tags is not None:
        tags = tuple(tags)
        contract = _tag_contract(tags)
        contract = replace(contract, open=row.pop("open", contract.open))
    elif "pattern" in row:
        keys = [key for key in ("pattern", "flexible", "as_text") if key in row]
        fields = {key: row.pop(key) for key in keys}
        contract = AnswerContract(kind=AnswerKind.PATTERN, turn_markers=stop, **fields)
    else:
        kind = AnswerKind(row.pop("kind", AnswerKind.BOXED))
        contract = AnswerContract(kind=kind, turn_markers=TURN_MARKERS)
    if "plain" in row:
        layout = row["plain"]
        examples = ""
        for question, answer in row.pop("examples", ()):
            example_prompt = layout.replace("{question}", question)
            space = "" if example_prompt.endswith("\n") else " "
            examples += f"{example_prompt}{space}{answer}\n\n"
        row["plain"] = examples + layout
        row["chat"] = "plain"
    return AnswerFormat(name=name, contract=contract, tags=tags, stop=stop, **row)


FORMATS = {
    name: _format_from_row(name, row) if row else _format_with_tags(TagsConfig())
    for name, row in load_table("grouper.prompts", "formats.yaml").items()
}


def make_format(config: PromptConfig) -> AnswerFormat:
    """Make the format that a recipe's `prompt` section describes.

    Raises:
        PromptError: unknown format, tags for a format that has its own, an instruction or a chat
            template for one that has no place for it.
    """
    fmt = _shipped_format(config)
    fmt = replace(
        fmt,
        system=fmt.system if config.system is None else config.system,
        chat=fmt.chat if config.template == "auto" else config.template,
        template_kwargs=dict(config.chat_template_kwargs),
    )
    if fmt.chat == "install" and fmt.tags and not fmt.prefix:
        # The installed template opens the first tag, for models that do not know the tags.
        fmt = replace(fmt, prefix=fmt.template.partition("{reasoning}")[0])
    is_plain = fmt.chat == "plain"
    if is_plain and fmt.system and "{system}" not in fmt.plain:
        message = f"the format {fmt.name} has no place for an instruction in plain text"
        fix = "Leave it out, or set `prompt.template: chat`."
        raise PromptError(message, where="prompt.system", fix=fix)
    if not is_plain and fmt.contract.kind is AnswerKind.PATTERN:
        message = f"the examples of the format {fmt.name} are plain text"
        raise PromptError(message, where="prompt.template", fix="Leave it out.")
    return fmt


def with_plain_stops(fmt: AnswerFormat, *, include_stop: bool = True) -> AnswerFormat:
    r"""Add the strings that end a completion, for use without a chat template.

    In a chat a token ends the turn. In plain text a base model that has answered writes the next
    turn itself, and the one after that, until the limit. Formats with stop strings of their own
    keep those; the ones without an instruction are taught by SFT, stop token included.

    Args:
        fmt: the format.
        include_stop: whether the stop string stays in the text; else the tag that closes the answer
            cannot be one.

    >>> with_plain_stops(FORMATS["xml"]).stop
    ('</answer>', '\nUser:')
    """
    if fmt.stop or not fmt.system:
        return fmt
    stops = []
    if include_stop and fmt.contract.kind is AnswerKind.TAG:
        stops.append(fmt.contract.close)
    text_before_question, _, _ = fmt.plain.partition("{question}")
    _, _, last_line = text_before_question.rpartition("\n")
    turn_marker = last_line.strip()
    if turn_marker:
        stops.append(f"\n{turn_marker}")
    return replace(fmt, stop=tuple(stops))


def _shipped_format(config: PromptConfig) -> AnswerFormat:
    """Return the format with its own instruction."""
    require_known("prompt format", config.format, FORMATS, "prompt.format", PromptError)
    if config.format == "tags":
        return _format_with_tags(config.tags or TagsConfig())
    if config.tags is not None:
        raise PromptError(
            f"the format {config.format} has its own tags",
            where="prompt.tags",
            fix="Leave prompt.tags out, or use prompt.format: tags.",
        )
    return FORMATS[config.format]


def warn_about_system(config: PromptConfig) -> list[str]:
    """Warn if the user's own instruction does not name the marks that the rewards look for."""
    fmt = make_format(config)
    missing = [mark for mark in fmt.marks if mark not in fmt.system + fmt.prefix]
    if not missing or fmt.system == _shipped_format(config).system:
        return []
    warning = (
        f"prompt.system never mentions {', '.join(missing)}, which the format {fmt.name} and its "
        "rewards look for: the model is not told how to answer."
    )
    return [warning]
