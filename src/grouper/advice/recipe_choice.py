r"""The choices of a new recipe: from what model and problems are to format, phases and rewards.

Pure: `grouper init` looks at model and problems and, where it can, lets the model answer a few of
them (`advice.first_answers`); what follows from that is decided here, and nothing is loaded.

What a model does counts more than what it is called. A model whose answers were seen is judged by
them; one that could not be asked is judged by its kind and size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# A share of the finished answers from which a model is said to know a format: GRPO then finds right
# answers to compare with.
KNOWN = 0.5
# A share of all answers, those that were cut off among them, that must show it.
SEEN = 0.25
# Parameters below which an instruct model that could not be asked is taught the format first.
SMALL = 1_000_000_000
# Tokens of a completion at most: of a model that answers at once, and of one that thinks first.
COMPLETION = 512
THINKING_COMPLETION = 2048
# Problems from which a part is held out at all, the share, and the most that a test needs: a
# thousand problems show a difference of about four points.
ENOUGH = 40
HELD_OUT = 0.05
TEST_SHARE = 0.1
MOST_TESTED = 1000

Kind = Literal["base", "instruct", "thinking"]

# Words of a model's name, set off by what is no letter or digit.
_NAMES: tuple[tuple[Kind, str], ...] = (
    ("base", r"base|pt|pretrain(?:ed)?|foundation"),
    ("thinking", r"think(?:ing)?|reason(?:ing|er)?|qwq|r1|s1|o1"),
    ("instruct", r"instruct(?:ion)?|it|chat|sft|dpo|rlhf|assistant|tulu|zephyr|hermes"),
)
# What only the chat template of a model that thinks first holds.
_THINKS = ("<think>", "enable_thinking", "reasoning_content")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """What a model is, before it has answered anything.

    Example: `ModelKind(kind="instruct", why="its chat template ends turns with its EOS")`.
    """

    kind: Kind
    why: str
    """What it was seen by, as a clause."""
    parameters: int | None = None
    """About; None where its weights are not on this machine."""
    plain: bool = False
    """It has no chat template: prompts are plain text."""
    context: int | None = None
    """Longest sequence that it takes, in tokens; None where it is not known."""

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
    """Tell the kind of a model by its name, its chat template and the tokens that end its texts.

    The name goes first: base models are often saved with the chat template of their instruct
    siblings. Where it is silent, a template whose turns end in another token than the model's
    texts do was never trained.

    Args:
        name: a folder or Hub name.
        template: the tokenizer's chat template; None where there is none.
        ends_turns: whether the token after a turn of the template ends the model's texts; None
            where it is not known.
        parameters: how many there are.
        context: the longest sequence that it takes, in tokens.
        here: whether the model could be looked at; else its name says all that is known.

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
    if here and not template:
        return "base", "it has no chat template"
    last_part = name.rstrip("/").rpartition("/")[2]
    words = {word.lower() for word in re.split(r"[^A-Za-z0-9]+", last_part)}
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
    seen = "it has a chat template" if here else "its name does not say that it is a base model"
    return "instruct", seen


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKind:
    """What the first problems are like.

    Example: `DataKind(problems=7473, solutions=True)`.
    """

    problems: int
    """How many there are at least; 0 where they could not be read."""
    solutions: bool = False
    """Whether they have worked solutions, which SFT can train."""
    r1_prompts: bool = False
    """Whether rows are whole prompts in the layout of R1-Zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A few answers of a model that was asked in one format.

    Example: `Observation(format="boxed", answers=4, held=3, right=1, ended=4, tokens=180)`.
    """

    format: str
    answers: int
    held: int
    """Answers that stood where the format wants them."""
    right: int
    ended: int
    """Answers that came to an end by themselves; the others were cut off."""
    tokens: int
    """Median of an answer."""

    @property
    def is_finished(self) -> bool:
        """Whether any answer came to where its result stands."""
        return self.ended > 0 or self.held > 0

    @property
    def is_known(self) -> bool:
        """Whether the model answers in this format without having been taught.

        An answer that was cut off says nothing about where its result would have stood, so it
        counts for little.
        """
        finished = max(self.ended, self.held)
        return self.held >= KNOWN * finished and self.held >= SEEN * self.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a new recipe sets, and why."""

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
        model: what it is.
        data: what there is to train on.
        observations: what it did, one per format that it was asked in; none where it was not.

    >>> told = choose(kind_of("a/b-Instruct", None, here=False), DataKind(problems=100))
    >>> told.format, told.sft, told.max_new_tokens
    ('boxed', False, 512)
    """
    if model.kind != "base":
        # Cut off while they think, answers say nothing; a base model that never ends says a lot.
        observations = [one for one in observations if one.is_finished]
    seen = _best(observations)
    reasons: dict[str, str] = {}
    if data.r1_prompts:
        name = "r1-zero"
        reasons["prompt.format"] = "The rows are whole prompts in this format."
        seen = next((one for one in observations if one.format == name), None)
    elif seen is not None and seen.is_known:
        name = seen.format
        held = f"{seen.held} of {seen.answers} answers stood where it wants them"
        reasons["prompt.format"] = f"The model knows it: {held}."
    else:
        name = "boxed"
        seen = next((one for one in observations if one.format == name), None)
        if seen is None:
            reasons["prompt.format"] = "Most models have met it in training."
        else:
            held = f"{seen.held} of {seen.answers} answers stood in a box"
            reasons["prompt.format"] = f"The model knows none yet ({held}); this is the shortest."
    sft, reasons["skip_sft"] = _sft_first(model, data, seen)
    taught = sft or (model.kind != "base" if seen is None else seen.is_known)
    reasons["grpo.require_correct_in_group"] = (
        "A group without a right answer teaches nothing."
        if taught
        else "The format has to be learned from its reward, so groups without a right answer count."
    )
    wanted = THINKING_COMPLETION if model.kind == "thinking" else COMPLETION
    limit = wanted if model.context is None else min(wanted, model.context // 2)
    return Choices(
        format=name,
        sft=sft,
        rewards=rewards_for(name),
        needs_correct=taught,
        max_new_tokens=limit,
        reasons=reasons,
    )


def _best(observations: Collection[Observation]) -> Observation | None:
    """The format with most right answers, then most answers in it, then the first asked."""
    return max(observations, key=lambda one: (one.is_known, one.right, one.held), default=None)


def _sft_first(model: ModelKind, data: DataKind, seen: Observation | None) -> tuple[bool, str]:
    """Whether SFT comes first, and why or why not."""
    if not data.solutions:
        return False, "There are no worked solutions for SFT."
    if model.kind == "thinking":
        return False, "No SFT: solutions without thoughts would unteach the model to think."
    small = model.parameters is not None and model.parameters < SMALL
    if seen is None:
        return _sft_first_by_kind(model.kind, small=small)
    if not seen.is_known:
        return True, "SFT first: the model does not answer in the format yet."
    if seen.right == 0 and (small or model.kind == "base"):
        return True, "SFT first: none of its answers was right, and GRPO needs some that are."
    return False, "No SFT: the model answers in the format by itself."


def _sft_first_by_kind(kind: Kind, *, small: bool) -> tuple[bool, str]:
    """The same for a model that could not be asked."""
    if kind == "base":
        return True, "SFT first: a base model was not taught to answer, nor to stop."
    if small:
        return True, "SFT first: so small a model rarely keeps to a format it is only told of."
    return False, "No SFT: a model of its kind usually answers in the format when it is told to."


def rewards_for(fmt: str) -> tuple[dict[str, Any], ...]:
    r"""Correctness, and a little for the format, of which a part is paid for a part.

    All-or-nothing format rewards are equal within a group, and teach nothing, as long as no answer
    of it is in the format.

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


# Formats that a model is asked in, the first that is to be preferred.
CANDIDATES = ("boxed", "xml")
