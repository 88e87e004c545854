"""The prompt formats: a table of records, and the one that a recipe describes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grouper.config.schema import PromptConfig, TagsConfig
from grouper.errors import PromptError, require_known
from grouper.files import table
from grouper.types import AnswerContract, AnswerFormat, AnswerKind

TURN_MARKERS: tuple[str, ...] = tuple(table("grouper.prompts", "turn_markers.yaml"))


def _contract(tags: tuple[str, str, str, str]) -> AnswerContract:
    return AnswerContract(
        kind=AnswerKind.TAG,
        open=tags[2],
        close=tags[3],
        reasoning=tags[:2],
        turn_markers=TURN_MARKERS,
    )


def _with_tags(tags: TagsConfig) -> AnswerFormat:
    four = (tags.reasoning_open, tags.reasoning_close, tags.answer_open, tags.answer_close)
    return AnswerFormat(
        name="tags",
        description="tags of your own (prompt.tags); the prompt opens the reasoning tag",
        system=(
            "Solve the problem. "
            f"Write your working between {tags.reasoning_open} and {tags.reasoning_close}, "
            f"then the final result alone between {tags.answer_open} and {tags.answer_close}."
        ),
        template="{}{{reasoning}}{}{}{{answer}}{}".format(*four),
        contract=_contract(four),
        tags=four,
        prefix=tags.reasoning_open,
    )


def _of_the_table(name: str, row: dict[str, Any]) -> AnswerFormat:
    """A row of `formats.yaml`; a protocol's examples stand before the question, in its layout."""
    stop, tags = tuple(row.pop("stop", ())), row.pop("tags", None)
    if tags is not None:
        tags = tuple(tags)
        contract = _contract(tags)
        contract = replace(contract, open=row.pop("open", contract.open))
    elif "pattern" in row:
        own = {key: row.pop(key) for key in ("pattern", "flexible", "as_text") if key in row}
        contract = AnswerContract(kind=AnswerKind.PATTERN, turn_markers=stop, **own)
    else:
        contract = AnswerContract(kind=AnswerKind.BOXED, turn_markers=TURN_MARKERS)
    if "plain" in row:
        layout = row["plain"]
        shots = [(layout.replace("{question}", q), a) for q, a in row.pop("examples", ())]
        row["plain"] = "".join(f"{asked} {answer}\n\n" for asked, answer in shots) + layout
        row["chat"] = "plain"
    return AnswerFormat(name=name, contract=contract, tags=tags, stop=stop, **row)


FORMATS = {
    name: _of_the_table(name, row) if row else _with_tags(TagsConfig())
    for name, row in table("grouper.prompts", "formats.yaml").items()
}


def make_format(config: PromptConfig) -> AnswerFormat:
    """The format that a recipe's `prompt` section describes.

    Raises:
        PromptError: unknown format, tags for a format that has its own, an instruction or a chat
            template for one that has no place for it.
    """
    fmt = _shipped(config)
    fmt = replace(
        fmt,
        system=fmt.system if config.system is None else config.system,
        chat=fmt.chat if config.template == "auto" else config.template,
        template_kwargs=dict(config.chat_template_kwargs),
    )
    if fmt.chat == "install" and fmt.tags and not fmt.prefix:
        # An installed template opens the first tag: then a model that knows no tag is in one.
        fmt = replace(fmt, prefix=fmt.template.partition("{reasoning}")[0])
    plain = fmt.chat == "plain"
    if plain and fmt.system and "{system}" not in fmt.plain:
        what = f"the format {fmt.name} has no place for an instruction in plain text"
        fix = "Leave it out, or set `prompt.template: chat`."
        raise PromptError(what, where="prompt.system", fix=fix)
    if not plain and fmt.contract.kind is AnswerKind.PATTERN:
        what = f"the examples of the format {fmt.name} are plain text"
        raise PromptError(what, where="prompt.template", fix="Leave it out.")
    return fmt


def with_plain_stops(fmt: AnswerFormat, *, include_stop: bool = True) -> AnswerFormat:
    r"""The format as it is used without a chat template, with strings that end a completion.

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
    before, _, _ = fmt.plain.partition("{question}")
    turn = before.rpartition("\n")[2].strip()
    if turn:
        stops.append(f"\n{turn}")
    return replace(fmt, stop=tuple(stops))


def _shipped(config: PromptConfig) -> AnswerFormat:
    """The format with its own instruction."""
    require_known("prompt format", config.format, FORMATS, "prompt.format", PromptError)
    if config.format == "tags":
        return _with_tags(config.tags or TagsConfig())
    if config.tags is not None:
        raise PromptError(
            f"the format {config.format} has its own tags",
            where="prompt.tags",
            fix="Leave prompt.tags out, or use prompt.format: tags.",
        )
    return FORMATS[config.format]


def warn_about_system(config: PromptConfig) -> list[str]:
    """A warning if the user's own instruction does not name what the rewards look for."""
    fmt = make_format(config)
    missing = [text for text in fmt.marks if text not in fmt.system + fmt.prefix]
    if not missing or fmt.system == _shipped(config).system:
        return []
    warning = (
        f"prompt.system never mentions {', '.join(missing)}, which the format {fmt.name} and its "
        "rewards look for: the model is not told how to answer."
    )
    return [warning]
