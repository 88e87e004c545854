r"""The choices of a new recipe: format, phases and rewards for a model and its problems.

This module loads nothing. `grouper init` inspects model and problems and, if it can, lets the model
answer a few of them (`advice.first_answers`); the decisions are made here.

A model that has answered problems is judged by its answers, any other by its name, type and size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# Share of the finished answers that must be in a format for a model to know it: GRPO then finds
# right answers to compare with.
KNOWN = 0.5
# Share of all answers, truncated ones included, that must be in the format.
SEEN = 0.25
# Parameters below which an instruct model without answers is taught the format first.
SMALL = 1_000_000_000
# Tokens of a completion at most: of a model that answers at once, and of one that thinks first.
COMPLETION = 512
THINKING_COMPLETION = 2048
# Number of problems from which a part is held out, the shares of validation and test, and the
# largest test: a thousand problems show a difference of about four points.
ENOUGH = 40
HELD_OUT = 0.05
TEST_SHARE = 0.1
MOST_TESTED = 1000

Kind = Literal["base", "instruct", "thinking"]

# Type of a model -> words of its name, which are separated by characters other than letters and
# digits.
_NAMES: tuple[tuple[Kind, str], ...] = (
    ("base", r"base|pt|pretrain(?:ed)?|foundation"),
    ("thinking", r"think(?:ing)?|reason(?:ing|er)?|qwq|r1|s1|o1"),
    ("instruct", r"instruct(?:ion)?|it|chat|sft|dpo|rlhf|assistant|tulu|zephyr|hermes"),
)
# Texts that only the chat template of a model that thinks first contains.
_THINKS = ("<think>", "enable_thinking", "reasoning_content")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """The type of a model, as far as it is known without its answers.

    Example: `ModelKind(kind="instruct", why="its chat template ends turns with its EOS")`.
    """

    kind: Kind
    why: str
    """The reason, as a clause."""
    parameters: int | None = None
    """Approximate number; None if its weights are not on this machine."""
    plain: bool = False
    """Whether prompts are plain text, because it has no chat template."""
    context: int | None = None
    """Longest sequence that it takes, in tokens; None if it is not known."""

    def __str__(self) -> str:
        noun = {"base": "a base model", "instruct": "an instruct model"}.get(
            self.kind, "a model that thinks first"
        )
        return f"{noun} ({self.why})"


def kind_of(
    name: str,
    template: str | None,
    *,
    ends_turns: bool | None = None,
    parameters: int | None = None,
    context: int | None = None,
    here: bool = True,
) -> ModelKind:
    """Tell the type of a model by its name, its chat template and the tokens that end its texts.

    The name is decisive: base models are often saved with the chat template of their instruct
    siblings. If the name says nothing, a template whose turns end in another token than the model's
    texts was never trained.

    Args:
        name: a folder or Hub name.
        template: the tokenizer's chat template; None if there is none.
        ends_turns: whether the token after a turn of the template ends the model's texts; None if
            it is not known.
        parameters: number of parameters.
        context: the longest sequence that it takes, in tokens.
        here: whether the model is on this machine; otherwise only its name is known.

    >>> kind_of("Qwen/Qwen3-4B-Base", "{{ messages }} <think>").kind
    'base'
    >>> kind_of("./tuned", "{{ messages }}", ends_turns=False).kind
    'base'
    >>> kind_of("./tuned", "{{ messages }}", ends_turns=True).kind
    'instruct'
    >>> kind_of("./tuned", None).why
    'it has no chat template'
    """
    kind, why = _kind_and_reason(name, template, ends_turns=ends_turns, here=here)
    plain = here and not template
    return ModelKind(kind=kind, why=why, parameters=parameters, context=context, plain=plain)


def _kind_and_reason(
    name: str, template: str | None, *, ends_turns: bool | None, here: bool
) -> tuple[Kind, str]:
    """Return the type of a model, and the reason as a clause."""
    if here and not template:
        return "base", "it has no chat template"
    base_name = name.rstrip("/").rpartition("/")[2]
    words = {word.lower() for word in re.split(r"[^A-Za-z0-9]+", base_name)}
    kinds_by_name = [
        kind for kind, pattern in _NAMES if any(re.fullmatch(pattern, word) for word in words)
    ]
    if "base" in kinds_by_name:
        return "base", "by its name"
    if template and any(mark in template for mark in _THINKS):
        return "thinking", "its chat template has thoughts"
    if kinds_by_name:
        return kinds_by_name[0], "by its name"
    if ends_turns is False:
        return "base", "its chat template ends turns with a token that does not end its texts"
    reason = "it has a chat template" if here else "its name does not say that it is a base model"
    return "instruct", reason


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKind:
    """Properties of the problems that a recipe trains on.

    Example: `DataKind(problems=7473, solutions=True)`.
    """

    problems: int
    """Lower bound of their number; 0 if they could not be read."""
    solutions: bool = False
    """Whether they have worked solutions, which SFT can train."""
    r1_prompts: bool = False
    """Whether rows are whole prompts in the layout of R1-Zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A few answers of a model in one format.

    Example: `Observation(format="boxed", answers=4, held=3, right=1, ended=4, tokens=180)`.
    """

    format: str
    answers: int
    held: int
    """Number of answers that are in the format."""
    right: int
    ended: int
    """Number of answers that ended by themselves; the others were truncated."""
    tokens: int
    """Median length of an answer."""

    @property
    def is_finished(self) -> bool:
        """Whether any answer ended, or got to its result."""
        return self.ended > 0 or self.held > 0

    @property
    def is_known(self) -> bool:
        """Whether the model answers in this format without having been taught.

        A truncated answer does not show whether its result would have been in the format, so it
        counts for little.
        """
        finished = max(self.ended, self.held)
        return self.held >= KNOWN * finished and self.held >= SEEN * self.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Settings of a new recipe, and the reasons for them."""

    format: str
    sft: bool
    """Whether SFT on worked solutions comes first."""
    rewards: tuple[dict[str, Any], ...]
    needs_correct: bool
    """`grpo.require_correct_in_group`: whether a group without a right answer teaches nothing."""
    max_new_tokens: int
    reasons: dict[str, str] = field(default_factory=dict)
    """Setting -> a sentence."""


def choose(model: ModelKind, data: DataKind, observations: Sequence[Observation] = ()) -> Choices:
    """Choose format, phases, rewards and the limit of a completion.

    Args:
        model: its type.
        data: properties of the problems.
        observations: answers of the model, one per format; empty if it has answered nothing.

    >>> told = choose(kind_of("a/b-Instruct", None, here=False), DataKind(problems=100))
    >>> told.format, told.sft, told.max_new_tokens
    ('boxed', False, 512)
    """
    if model.kind != "base":
        # Answers that are truncated while a model thinks say nothing about the format; a base
        # model that never ends has not learned it.
        observations = [observation for observation in observations if observation.is_finished]
    reasons: dict[str, str] = {}
    name, reasons["prompt.format"] = _choose_format(data, observations)
    in_format = next((o for o in observations if o.format == name), None)
    sft, reasons["skip_sft"] = _sft_first(model, data, in_format)
    if sft:
        knows_format = True
    elif in_format is not None:
        knows_format = in_format.is_known
    else:
        knows_format = model.kind != "base"
    if knows_format:
        reason = "A group without a right answer teaches nothing."
    else:
        reason = (
            "The format has to be learned from its reward, so groups without a right answer count."
        )
    reasons["grpo.require_correct_in_group"] = reason
    limit = THINKING_COMPLETION if model.kind == "thinking" else COMPLETION
    if model.context is not None:
        limit = min(limit, model.context // 2)
    return Choices(
        format=name,
        sft=sft,
        rewards=rewards_for(name),
        needs_correct=knows_format,
        max_new_tokens=limit,
        reasons=reasons,
    )


def _choose_format(data: DataKind, observations: Collection[Observation]) -> tuple[str, str]:
    """Choose a format, and give the reason in a sentence."""
    if data.r1_prompts:
        return "r1-zero", "The rows are whole prompts in this format."
    best = _best(observations)
    if best is not None and best.is_known:
        count = f"{best.held} of {best.answers} answers stood where it wants them"
        return best.format, f"The model knows it: {count}."
    boxed = next((o for o in observations if o.format == "boxed"), None)
    if boxed is None:
        return "boxed", "Most models have met it in training."
    count = f"{boxed.held} of {boxed.answers} answers stood in a box"
    return "boxed", f"The model knows none yet ({count}); this is the shortest."


def _best(observations: Collection[Observation]) -> Observation | None:
    """Return a format that is known, with most right answers, then most answers in it."""
    return max(observations, key=lambda o: (o.is_known, o.right, o.held), default=None)


def _sft_first(model: ModelKind, data: DataKind, in_format: Observation | None) -> tuple[bool, str]:
    """Return whether SFT comes first, and the reason.

    Args:
        model: its type.
        data: properties of the problems.
        in_format: answers in the format of the recipe, if there are any.
    """
    if not data.solutions:
        return False, "There are no worked solutions for SFT."
    if model.kind == "thinking":
        return False, "No SFT: solutions without thoughts would unteach the model to think."
    small = model.parameters is not None and model.parameters < SMALL
    if in_format is None:
        return _sft_first_by_kind(model.kind, small=small)
    if not in_format.is_known:
        return True, "SFT first: the model does not answer in the format yet."
    if in_format.right == 0 and (small or model.kind == "base"):
        return True, "SFT first: none of its answers was right, and GRPO needs some that are."
    return False, "No SFT: the model answers in the format by itself."


def _sft_first_by_kind(kind: Kind, *, small: bool) -> tuple[bool, str]:
    """Return whether SFT comes first for a model without answers, and the reason."""
    if kind == "base":
        return True, "SFT first: a base model was not taught to answer, nor to stop."
    if small:
        return True, "SFT first: so small a model rarely keeps to a format it is only told of."
    return False, "No SFT: a model of its kind usually answers in the format when it is told to."


def rewards_for(fmt: str) -> tuple[dict[str, Any], ...]:
    r"""Return the rewards of a format: correctness, and a little for the format, also in part.

    All-or-nothing format rewards are equal within a group, and teach nothing, as long as no answer
    of the group is in the format.

    >>> [reward["name"] for reward in rewards_for("boxed")]
    ['correctness', 'boxed_format']
    >>> [reward["name"] for reward in rewards_for("xml")]
    ['correctness', 'format', 'tag_count']
    """
    correct: dict[str, Any] = {"name": "correctness"}
    if fmt in ("boxed", "question-only"):
        partial = {"name": "boxed_format", "weight": 0.1, "params": {"partial": 0.5}}
        return (correct, partial)
    layout = ({"name": name, "weight": 0.1} for name in ("format", "tag_count"))
    return (correct, *layout)


# Formats in which a model is asked, in order of preference.
CANDIDATES = ("boxed", "xml")
