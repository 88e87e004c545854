"""The prompt formats: a table of records, and the one that a recipe describes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grouper.config.schema import PromptConfig, TagsConfig
from grouper.errors import PromptError, did_you_mean
from grouper.files import table
from grouper.types import AnswerContract, AnswerFormat, AnswerKind

# Text with which models begin an invented next turn of the conversation.
TURN_MARKERS = (
    "\nUser:",
    "\nuser\n",  # <|im_start|>user as it decodes without special tokens
    "Human:",  # base models go on in the same line
    "\nQuestion:",
    "\n### Question",
    "\n### Instruction",
    "<|user|>",
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "[INST]",
)


def _contract(tags: tuple[str, str, str, str]) -> AnswerContract:
    return AnswerContract(
        kind=AnswerKind.TAG,
        open=tags[2],
        close=tags[3],
        reasoning=tags[:2],
        turn_markers=TURN_MARKERS,
    )


XML_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
THINK_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
BOXED = AnswerContract(kind=AnswerKind.BOXED, turn_markers=TURN_MARKERS)


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


def _protocol(name: str, row: dict[str, Any]) -> AnswerFormat:
    """A row of `protocols.yaml`: its examples stand before the question, in the same layout."""
    layout: str = row["question"]
    shots = [f"{layout.replace('{question}', q)} {answer}\n\n" for q, answer in row["examples"]]
    return AnswerFormat(
        name=name,
        description=row["description"],
        template=row["template"],
        contract=AnswerContract(
            kind=AnswerKind.PATTERN,
            pattern=row["pattern"],
            flexible=row.get("flexible", ""),
            as_text=row.get("as_text", False),
            turn_markers=tuple(row["stop"]),
        ),
        stop=tuple(row["stop"]),
        chat="plain",
        plain="".join(shots) + layout,
    )


_TABLE = (
    AnswerFormat(
        name="xml",
        description="<reasoning> and <answer> tags, each on lines of their own",
        system=(
            "Solve the problem. Write your answer in exactly this form:\n"
            "<reasoning>\nyour working, step by step\n</reasoning>\n"
            "<answer>\nthe final result and nothing else\n</answer>"
        ),
        template="<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>",
        contract=_contract(XML_TAGS),
        tags=XML_TAGS,
    ),
    AnswerFormat(
        name="compact",
        description="the tags of xml without line breaks or instruction, for tiny models",
        template="<reasoning>{reasoning}</reasoning><answer>{answer}</answer>",
        contract=_contract(XML_TAGS),
        tags=XML_TAGS,
    ),
    AnswerFormat(
        name="think",
        description="<think> and <answer> tags with a blank line between them",
        system=(
            "Think about the problem first, then give the result. Write in exactly this form:\n"
            "<think>\nyour thoughts, step by step\n</think>\n\n"
            "<answer>\nthe final result and nothing else\n</answer>"
        ),
        template="<think>\n{reasoning}\n</think>\n\n<answer>\n{answer}\n</answer>",
        contract=_contract(THINK_TAGS),
        tags=THINK_TAGS,
    ),
    AnswerFormat(
        name="r1-zero",
        description="the plain-text conversation of R1-Zero, for base models",
        # The published prompt word for word: rows made with it must render identically.
        system=(
            "A conversation between User and Assistant. The User asks a question, and the "
            "Assistant solves it. The Assistant first thinks about the reasoning process in the "
            "mind and then provides the User with the answer. The reasoning process is enclosed "
            "within <think> </think> and answer is enclosed within <answer> </answer> tags, "
            "respectively, i.e., <think> reasoning process here </think> <answer> answer here "
            "</answer>."
        ),
        template="<think> {reasoning} </think> <answer> {answer} </answer>",
        # With one space between the tags: the published rewards require it.
        contract=replace(_contract(THINK_TAGS), open="</think> <answer>"),
        tags=THINK_TAGS,
        prefix="<think>",
        stop=("</answer>",),
        chat="plain",
        plain="{system}\nUser: {question}\nAssistant: ",
    ),
    AnswerFormat(
        name="question-only",
        description=r"the question and nothing else, answered in \boxed{}, for base models",
        template="\n{reasoning}\n\nThe final answer is \\boxed{{answer}}.",
        contract=BOXED,
        chat="plain",
        plain="{question}",
    ),
    AnswerFormat(
        name="boxed",
        description=r"free reasoning with the answer in \boxed{}",
        system=r"Solve the problem step by step and put the final answer in \boxed{}.",
        template="{reasoning}\n\nThe final answer is \\boxed{{answer}}.",
        contract=BOXED,
    ),
    _with_tags(TagsConfig()),
    *(_protocol(*row) for row in table("grouper.prompts", "protocols.yaml").items()),
)
FORMATS = {fmt.name: fmt for fmt in _TABLE}


def make_format(config: PromptConfig) -> AnswerFormat:
    """The format that a recipe's `prompt` section describes.

    Raises:
        PromptError: unknown format, or tags for a format that has its own.
    """
    fmt = _shipped(config)
    return replace(
        fmt,
        system=fmt.system if config.system is None else config.system,
        chat=fmt.chat if config.template == "auto" else config.template,
    )


def _shipped(config: PromptConfig) -> AnswerFormat:
    """The format with its own instruction."""
    if config.format not in FORMATS:
        raise PromptError(
            f"there is no prompt format {config.format!r}",
            where="prompt.format",
            fix=did_you_mean(config.format, FORMATS),
        )
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
    wanted = [*(fmt.tags or ()), *([r"\boxed"] if fmt.contract.kind is AnswerKind.BOXED else [])]
    missing = [text for text in wanted if text not in fmt.system + fmt.prefix]
    if not missing or fmt.system == _shipped(config).system:
        return []
    warning = (
        f"prompt.system never mentions {', '.join(missing)}, which the format {fmt.name} and its "
        "rewards look for: the model is not told how to answer."
    )
    return [warning]
