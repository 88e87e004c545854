r"""Prompt formats: what the model is asked, and where its answer will stand.

One object does both, so that no reward or grader can expect another layout than the one that was
asked for. `render` is the only renderer: SFT, rollouts, evaluation and `generate` all use it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from grouper.config.schema import PromptConfig, TagsConfig
from grouper.errors import PromptError, did_you_mean
from grouper.prompts.chat_template import own_chat_template
from grouper.prompts.rendering import encode_completion, encode_prompt, render_chat
from grouper.prompts.tokenizer import Tokenizer
from grouper.types import (
    AnswerContract,
    AnswerKind,
    Demonstration,
    Message,
    Problem,
    Prompt,
    RewardLayout,
)

# Text with which models go on to invent the next turn of the conversation.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How a problem becomes a prompt, and a worked solution a completion.

    Example: `FORMATS["xml"].render(problem, tokenizer).token_ids`.
    """

    name: str
    description: str
    system: str
    """The instruction. In a chat the system message; in plain text the opening paragraph."""
    contract: AnswerContract
    tags: tuple[str, str, str, str] | None = None
    """Reasoning open and close, answer open and close, that opened by `prefix` included."""
    prefix: str = ""
    """What the prompt already opens of the assistant's turn."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay in its text."""
    template: Literal["auto", "chat", "plain", "install"] = "auto"
    """`auto`: the tokenizer's chat template where it has one, unless the format is `plain_only`.
    `install`: the format's own, which `install` puts into the tokenizer."""
    plain_only: bool = False
    """Made for base models: plain text although there is a chat template."""
    opening: str = ""
    """Completion = opening + reasoning + middle + answer + closing, less the prefix."""
    middle: str = ""
    closing: str = ""
    before_question: str = "\n\nUser: "
    """Plain text = system + before_question + question + after_question + prefix."""
    after_question: str = "\nAssistant:\n"

    @property
    def layout(self) -> RewardLayout:
        """What reward functions need to know of this format."""
        return RewardLayout(contract=self.contract, tags=self.tags, prefix=self.prefix)

    def install(self, tokenizer: Any) -> None:
        """Give the tokenizer the format's own chat template, if the recipe wants it installed."""
        if self.template == "install":
            tokenizer.chat_template = own_chat_template(self.system, self.prefix)

    def uses_chat(self, tokenizer: Tokenizer) -> bool:
        """Whether prompts go through the tokenizer's chat template.

        Raises:
            PromptError: the recipe insists on a chat template and there is none, or another one.
        """
        own = own_chat_template(self.system, self.prefix)
        if self.template == "install" and tokenizer.chat_template != own:
            raise PromptError(
                "the format's chat template is not installed in the tokenizer",
                where="prompt.template",
                fix="Call `install(tokenizer)` of the format first.",
            )
        if self.template == "chat" and not tokenizer.chat_template:
            raise PromptError(
                "the tokenizer has no chat template",
                where="prompt.template",
                fix="Use `auto` or `plain`, or `install` to give it one.",
            )
        if self.template == "auto":
            return bool(tokenizer.chat_template) and not self.plain_only
        return self.template != "plain"

    def falls_back(self, tokenizer: Tokenizer) -> bool:
        """Whether prompts are plain text only because the tokenizer has no chat template."""
        return self.template == "auto" and not self.plain_only and not tokenizer.chat_template

    def render(self, problem: Problem, tokenizer: Tokenizer) -> Prompt:
        """The prompt of `problem`, generation prompt and prefix included.

        A whole prompt that the problem brings along is taken word for word.

        Raises:
            PromptError: the chat template cannot render it, or it has no tokens.
        """
        messages: tuple[Message, ...] | None = None
        question = problem.question
        if problem.prompt is not None:
            text, question = problem.prompt, ""  # rendered already: its special tokens are meant
        elif self.uses_chat(tokenizer):
            text, messages = render_chat(tokenizer, self.system, problem.question)
            if not text.endswith(self.prefix):  # a template may have opened it already
                text += self.prefix
        else:
            text = self.plain_text(problem.question)
        ids = encode_prompt(tokenizer, text, question, chat=messages is not None)
        if not ids:
            raise PromptError(f"the prompt of {problem.id} has no tokens", where="prompt")
        return Prompt(
            problem_id=problem.id,
            text=text,
            token_ids=tuple(ids),
            messages=messages,
            prefix=self.prefix if text.endswith(self.prefix) else "",
        )

    def made_up_prompt(self, problem: Problem) -> Prompt:
        """The prompt without a tokenizer: a chat where the format can be one, and no real ids."""
        plain = self.plain_only or self.template == "plain"
        system = [Message(role="system", content=self.system)] if self.system else []
        user = Message(role="user", content=problem.question)
        return Prompt(
            problem_id=problem.id,
            text=self.plain_text(problem.question),
            token_ids=(0,),
            messages=None if plain else (*system, user),
            prefix=self.prefix,
        )

    def plain_text(self, question: str) -> str:
        """The prompt without a chat template."""
        before = self.before_question if self.system else self.before_question.lstrip()
        return f"{self.system}{before}{question}{self.after_question}{self.prefix}"

    def completion_text(self, problem: Problem) -> str:
        """The worked solution of `problem` as this format wants it, less the prefix.

        A whole response is taken word for word. Else the answer is the column
        `demonstrated_answer` where the source has one, or the reference.

        Raises:
            PromptError: the problem has no worked solution, or a response in another layout.
        """
        if problem.response is not None:
            return self._response(problem, problem.response)
        if not (problem.solution or "").strip():
            raise PromptError(f"problem {problem.id} has no worked solution", where="data.sft")
        reasoning = (problem.solution or "").strip()
        answer = str(problem.columns.get("demonstrated_answer", problem.answer))
        return self._worked(reasoning, answer)

    def right_completion(self, problem: Problem) -> str:
        """A completion that answers `problem` with its reference, less the prefix."""
        reasoning = (problem.solution or "").strip() or f"The answer is {problem.answer}."
        return self._worked(reasoning, problem.answer)

    def _worked(self, reasoning: str, answer: str) -> str:
        if self.contract.kind is AnswerKind.BOXED and r"\boxed" in reasoning:
            return self.opening + reasoning
        return self.written(reasoning, answer)

    def written(self, reasoning: str, answer: str) -> str:
        """A completion in the format's own layout, less the prefix."""
        whole = f"{self.opening}{reasoning}{self.middle}{answer}{self.closing}"
        return whole.removeprefix(self.prefix)

    def _response(self, problem: Problem, response: str) -> str:
        """A response as it is; after this format's prompt another layout would unteach this one."""
        missing = [tag for tag in (self.tags or ()) if tag not in self.prefix + response]
        if missing and problem.prompt is None:
            raise PromptError(
                f"the response of {problem.id} lacks {', '.join(missing)} of the format "
                f"{self.name}",
                where="data.sft",
            )
        return response

    def demonstrate(
        self, problem: Problem, tokenizer: Tokenizer, stop_token_id: int
    ) -> Demonstration:
        """Prompt and worked solution of `problem` as SFT trains them, stop token last.

        The completion's ids are put after the prompt's: the joined text is never tokenised,
        so no template can drop a part of it.

        Raises:
            PromptError: no worked solution, its text does not survive the tokenizer, or it holds
                the stop token.
        """
        prompt = self.render(problem, tokenizer)
        ids = encode_completion(tokenizer, self.completion_text(problem), problem.id)
        if stop_token_id in ids:
            raise PromptError(
                f"the worked solution of {problem.id} holds the stop token itself",
                where="data.sft",
            )
        return Demonstration(
            prompt=prompt, token_ids=(*ids, stop_token_id), stop_token_id=stop_token_id
        )


def _tag_contract(tags: tuple[str, str, str, str]) -> AnswerContract:
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

_TABLE = (
    PromptFormat(
        name="xml",
        description="<reasoning> and <answer> tags, each on lines of their own",
        system=(
            "Solve the problem. Write your answer in exactly this form:\n"
            "<reasoning>\nyour working, step by step\n</reasoning>\n"
            "<answer>\nthe final result and nothing else\n</answer>"
        ),
        contract=_tag_contract(XML_TAGS),
        tags=XML_TAGS,
        opening="<reasoning>\n",
        middle="\n</reasoning>\n<answer>\n",
        closing="\n</answer>",
    ),
    PromptFormat(
        name="compact",
        description="the tags of xml without line breaks or instruction, for tiny models",
        system="",
        contract=_tag_contract(XML_TAGS),
        tags=XML_TAGS,
        opening="<reasoning>",
        middle="</reasoning><answer>",
        closing="</answer>",
    ),
    PromptFormat(
        name="think",
        description="<think> and <answer> tags with a blank line between them",
        system=(
            "Think about the problem first, then give the result. Write in exactly this form:\n"
            "<think>\nyour thoughts, step by step\n</think>\n\n"
            "<answer>\nthe final result and nothing else\n</answer>"
        ),
        contract=_tag_contract(THINK_TAGS),
        tags=THINK_TAGS,
        opening="<think>\n",
        middle="\n</think>\n\n<answer>\n",
        closing="\n</answer>",
    ),
    PromptFormat(
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
        # With one space between the tags, as asked: its rewards have always wanted that.
        contract=replace(_tag_contract(THINK_TAGS), open="</think> <answer>"),
        tags=THINK_TAGS,
        prefix="<think>",
        stop=("</answer>",),
        plain_only=True,
        opening="<think> ",
        middle=" </think> <answer> ",
        closing=" </answer>",
        before_question="\nUser: ",
        after_question="\nAssistant: ",
    ),
    PromptFormat(
        name="question-only",
        description=r"the question and nothing else, answered in \boxed{}, for base models",
        system="",
        contract=BOXED,
        plain_only=True,
        opening="\n",
        middle="\n\nThe final answer is \\boxed{",
        closing="}.",
        before_question="",
        after_question="",
    ),
    PromptFormat(
        name="boxed",
        description=r"free reasoning with the answer in \boxed{}",
        system=r"Solve the problem step by step and put the final answer in \boxed{}.",
        contract=BOXED,
        middle="\n\nThe final answer is \\boxed{",
        closing="}.",
    ),
)


def _with_tags(tags: TagsConfig) -> PromptFormat:
    four = (tags.reasoning_open, tags.reasoning_close, tags.answer_open, tags.answer_close)
    return PromptFormat(
        name="tags",
        description="tags of your own (prompt.tags); the prompt opens the reasoning tag",
        system=(
            "Solve the problem. "
            f"Write your working between {tags.reasoning_open} and {tags.reasoning_close}, "
            f"then the final result alone between {tags.answer_open} and {tags.answer_close}."
        ),
        contract=_tag_contract(four),
        tags=four,
        prefix=tags.reasoning_open,
        opening=tags.reasoning_open,
        middle=f"{tags.reasoning_close}{tags.answer_open}",
        closing=tags.answer_close,
    )


FORMATS: dict[str, PromptFormat] = {fmt.name: fmt for fmt in (*_TABLE, _with_tags(TagsConfig()))}


def make_format(config: PromptConfig) -> PromptFormat:
    """The format that a recipe's `prompt` section describes.

    Raises:
        PromptError: unknown format, or tags for a format that has its own.
    """
    fmt = _default_format(config)
    system = fmt.system if config.system is None else config.system
    return replace(fmt, system=system, template=config.template)


def _default_format(config: PromptConfig) -> PromptFormat:
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


def warn_about_system(fmt: PromptFormat) -> list[str]:
    """A warning where an instruction of the user's never names what the rewards will look for."""
    if fmt.system == _shipped_system(fmt):
        return []
    wanted = [*(fmt.tags or ()), *([r"\boxed"] if fmt.contract.kind is AnswerKind.BOXED else [])]
    missing = [text for text in wanted if text not in fmt.system + fmt.prefix]
    if not missing:
        return []
    warning = (
        f"prompt.system never mentions {', '.join(missing)}, which the format {fmt.name} and its "
        "rewards look for: the model is not told how to answer."
    )
    return [warning]


def _shipped_system(fmt: PromptFormat) -> str:
    if fmt.name != "tags" or fmt.tags is None:
        return FORMATS[fmt.name].system
    names = ("reasoning_open", "reasoning_close", "answer_open", "answer_close")
    return _with_tags(TagsConfig(**dict(zip(names, fmt.tags, strict=True)))).system
