"""The records that flow through Grouper, in pipeline order.

    Problem -> Prompt -> Completion -> Grade -> Reward -> Rollout -> RolloutGroup -> StepReport

All are frozen, keyword-only and checked at construction; none is ever half filled: a stage
turns one type into the next. Nothing here imports torch, and no record has methods that need
the world (a file, a model, a device), so stored records can be read and scored again later.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from typing_extensions import TypedDict


def _require(condition: bool, message: str) -> None:
    """Check an invariant of a record; a broken one is a `ValueError`, also under `python -O`."""
    if not condition:
        raise ValueError(message)


class Message(TypedDict):
    """One chat message, in the shape chat templates take."""

    role: str
    content: str


class FinishReason(StrEnum):
    """Why a completion ended; never guessed from the last token."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


class Verdict(StrEnum):
    """The grader's verdict on one answer.

    `UNPARSEABLE` is about the model's answer, `NOT_SCORED` about the reference.
    """

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NO_ANSWER = "no_answer"
    UNPARSEABLE = "unparseable"
    TIMEOUT = "timeout"
    CRASH = "crash"
    NOT_SCORED = "not_scored"


class AnswerKind(StrEnum):
    """Where a prompt format promises that the answer stands."""

    TAG = "tag"
    BOXED = "boxed"
    HASHES = "hashes"
    LAST_NUMBER = "last_number"
    PATTERN = "pattern"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContract:
    r"""Where the answer stands in a completion: the half of a prompt format that grading reads.

    Example: `AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")`.
    """

    kind: AnswerKind
    open: str = ""
    """The text before the answer (tags only): its tag, with what must stand before that."""
    close: str = ""
    """The text after the answer (tags only)."""
    reasoning: tuple[str, str] | None = None
    """The tags around the reasoning (tags only): what stands between them answers nothing."""
    turn_markers: tuple[str, ...] = ()
    """Text that starts an invented next turn; nothing from there on counts."""
    pattern: str = ""
    """A regular expression whose first match holds the answer in its group (patterns only)."""
    flexible: str = ""
    """One whose last match is the lenient answer; empty: any known notation."""
    as_text: bool = False
    """Compare as text, without commas, dollar signs and a last full stop, and not as math."""

    def __post_init__(self) -> None:
        if self.kind is AnswerKind.TAG:
            _require(bool(self.open and self.close), "a tag contract needs both its tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    r"""How a model is prompted and how it answers: one record for prompts, rewards and grading.

    Example: `AnswerFormat(name="boxed", template=r"{reasoning} \boxed{{answer}}",
    contract=AnswerContract(kind=AnswerKind.BOXED))`.
    """

    name: str
    description: str = ""
    system: str = ""
    """The instruction: the system message of a chat, or where `plain` has it."""
    template: str
    """A whole completion, with `{reasoning}` and `{answer}` where they stand."""
    contract: AnswerContract
    """Where grading finds the answer."""
    tags: tuple[str, str, str, str] | None = None
    """Reasoning open and close, answer open and close; None for a format without tags."""
    prefix: str = ""
    """The beginning of `template` that the prompt writes: counted as part of the completion."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay in its text."""
    chat: Literal["auto", "chat", "plain", "install"] = "auto"
    """`auto`: the tokenizer's chat template where it has one, else `plain`. `install`: the
    format's own chat template, which is put into the tokenizer."""
    plain: str = "{system}\n\nUser: {question}\nAssistant:\n"
    """The prompt without a chat template, `prefix` left out."""
    tools: bool = False
    """Whether a completion has turns: a block of code is run, and the model reads its output."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values for variables of the model's own chat template, such as `enable_thinking`."""

    def __post_init__(self) -> None:
        is_complete = "{reasoning}" in self.template and "{answer}" in self.template
        _require(is_complete, f"format {self.name}: the template has no reasoning or no answer")
        _require("{question}" in self.plain, f"format {self.name}: the prompt has no question")

    @property
    def marks(self) -> tuple[str, ...]:
        r"""The texts that mark an answer: the tags, `\boxed`, ```` ```python ````; else none."""
        if self.tags:
            return self.tags
        kinds = {AnswerKind.BOXED: (r"\boxed",), AnswerKind.PROGRAM: ("```python",)}
        return kinds.get(self.contract.kind, ())

    @property
    def runs_programs(self) -> bool:
        """Whether what a model writes in this format is run."""
        return self.tools or self.contract.kind is AnswerKind.PROGRAM

    def completion(self, reasoning: str, answer: str) -> str:
        """Write a completion in this format, without the prefix.

        Where a program prints the answer, it prints a string.
        """
        if self.contract.kind is AnswerKind.PROGRAM:
            answer = repr(answer)
        opening, _, remainder = self.template.partition("{reasoning}")
        separator, _, closing = remainder.partition("{answer}")
        text = f"{opening}{reasoning}{separator}{answer}{closing}"
        return text.removeprefix(self.prefix)

    def plain_prompt(self, question: str) -> str:
        """Write the prompt without a chat template; without an instruction, the turn is first."""
        opening, _, closing = self.plain.partition("{question}")
        opening = opening.replace("{system}", self.system)
        if not self.system:
            opening = opening.lstrip()
        return f"{opening}{question}{closing}{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question with its reference answer.

    Example: `Problem(id="gsm8k/test/0", question="2+2?", answer="4", source="gsm8k")`.
    """

    id: str
    """Unique across a mixture of sources: `<source>/<split>/<row>`."""
    question: str
    answer: str
    """The reference answer alone (`72`), not the worked solution."""
    source: str
    solution: str | None = None
    """The worked solution, where the source has one: what SFT trains on."""
    program: str | None = None
    """A Python program that prints the answer, where the source has one."""
    response: str | None = None
    """A whole completion, where the source has one: SFT trains it word for word. What the prompt
    has already opened (`<think>`) is not part of it."""
    prompt: str | None = None
    """A whole prompt in a layout of its own, where the source has one: the model reads it word for
    word. None: a prompt format renders the question."""
    earlier: tuple[Message, ...] = ()
    """Turns before the question, a system message first, where the source has conversations."""
    subject: str | None = None
    level: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All fields of the source row, unchanged and under their own names; passed to rewards, where
    one with the name of a field of ours is `source_<name>`."""

    def __post_init__(self) -> None:
        _require(bool(self.id), "a problem needs an id")
        _require(bool(self.question.strip()), f"problem {self.id}: the question is empty")
        _require(bool(self.answer.strip()), f"problem {self.id}: the answer is empty")

    @property
    def demonstration(self) -> tuple[str | None, ...]:
        """What SFT may train, of which it takes one: solution, program and response."""
        return (self.solution, self.program, self.response)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    r"""A problem as the model sees it. Engines receive `token_ids` and nothing else.

    Example: `Prompt(problem_id="a/0", text="Q: 2+2?\nA:", token_ids=(5, 9, 2))`.
    """

    problem_id: str
    text: str
    """The rendered text whose encoding `token_ids` is, the generation prefix included."""
    token_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    """The chat messages, or None for a plain-text format."""
    prefix: str = ""
    """The part of the assistant's turn that the prompt has already opened (`<think>`)."""

    def __post_init__(self) -> None:
        _require(len(self.token_ids) > 0, f"prompt of {self.problem_id} has no tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw completions. Nothing is inherited from a model's generation config.

    Example: `SamplingParams(temperature=1.0, max_new_tokens=256, stop=("</answer>",))`.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    min_new_tokens: int = 0
    """Stop tokens are not drawn before this many tokens."""
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    include_stop: bool = True
    """Whether `Completion.text` keeps the stop string that ended it."""

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "temperature must be 0 (greedy) or more")
        _require(0 < self.top_p <= 1, "top_p must be in (0, 1]")
        _require(self.top_k >= 0, "top_k must be 0 (off) or more")
        _require(0 <= self.min_p < 1, "min_p must be in [0, 1)")
        _require(self.max_new_tokens >= 1, "max_new_tokens must be 1 or more")
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens must be between 0 and max_new_tokens",
        )
        _require(all(self.stop), "a stop string must not be empty")

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from less than the full distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the model wrote, token for token as sampled.

    Example: `Completion(token_ids=(7, 2), logprobs=(-0.1, -0.3), text="4",
    finish_reason=FinishReason.STOP_TOKEN, policy_version=3)`.
    """

    token_ids: tuple[int, ...]
    """As sampled: with `STOP_TOKEN` the last id is the stop token, with `STOP_STRING` the token
    that completed the string."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each id at the sampling temperature, before any truncation."""
    text: str
    """Decoded without the stop token; the stop string is kept or trimmed as the params say."""
    finish_reason: FinishReason
    policy_version: int
    """How many optimizer steps the sampling weights had seen."""
    entropies: tuple[float, ...] = ()
    """In nats: of the distribution each id was drawn from, before any truncation. Empty where the
    sampler does not know it."""
    tool_spans: tuple[tuple[int, int], ...] = ()
    """[start, end) of the ids that tools wrote and the model only read: they are never trained, and
    their log-probs and entropies are 0. In order, apart from each other."""

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        _require(count > 0, "a completion has at least one token")
        _require(len(self.logprobs) == count, "one log-prob per token")
        _require(len(self.entropies) in (0, count), "one entropy per token, or none at all")
        borders = [0, *(border for span in self.tool_spans for border in span), count]
        _require(borders == sorted(borders), "tool spans lie in the completion, one after another")

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each id, whether the model drew it."""
        is_sampled = [True] * len(self.token_ids)
        for start, end in self.tool_spans:
            is_sampled[start:end] = [False] * (end - start)
        return tuple(is_sampled)

    @classmethod
    def bare(
        cls, ids: Sequence[int], text: str, reason: str = FinishReason.STOP_TOKEN, version: int = 0
    ) -> Completion:
        """One without log-probs, which are all 0."""
        return cls(
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            text=text,
            finish_reason=FinishReason(reason),
            policy_version=version,
        )

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The grader's verdict on one completion, able to explain itself.

    Example: `Grade(verdict=Verdict.CORRECT, extracted="4", stage="number", reason="4 = 4")`.
    """

    verdict: Verdict
    extracted: str | None
    """The answer found in the completion, or None."""
    stage: str
    """The stage that decided (`text`, `number`, `symbolic`), or `extract`."""
    reason: str
    seconds: float = field(default=0.0, compare=False)
    """Time spent on it, in a worker of the processor, as the deadline is; not part of a run's
    record."""

    @property
    def correct(self) -> bool:
        return self.verdict is Verdict.CORRECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Named components and their weights.

    Example: `Reward(components={"correctness": 1.0, "format": 0.5}, weights={...})`.
    """

    components: Mapping[str, float | None]
    """None means "not scored" and takes the rollout out of its group."""
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        _require(self.components.keys() == self.weights.keys(), "one weight per component")
        for name, value in self.components.items():
            _require(value is None or math.isfinite(value), f"reward {name} is {value}")

    @property
    def total(self) -> float | None:
        """Weighted sum, or None when a component with a non-zero weight was not scored."""
        total = 0.0
        for name, value in self.components.items():
            if self.weights[name] == 0:
                continue
            if value is None:
                return None
            total += self.weights[name] * value
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion with its grade and reward."""

    completion: Completion
    grade: Grade
    reward: Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All rollouts of one prompt: the unit over which a group baseline is taken."""

    problem: Problem
    prompt: Prompt
    params: SamplingParams
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        _require(len(self.rollouts) > 0, f"group of {self.problem.id} has no rollouts")

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts whose reward is known; the others take no part in anything."""
        return tuple(r for r in self.rollouts if r.reward.total is not None)

    @property
    def solved(self) -> int:
        """How many rollouts are correct."""
        return sum(r.grade.correct for r in self.rollouts)

    @property
    def mixed(self) -> bool:
        """True if some rollouts are correct and some are not."""
        return 0 < self.solved < len(self.rollouts)

    @property
    def diversity(self) -> float:
        """The diversity of completions: 0 where all are the same, 1 where no two are."""
        if len(self.rollouts) == 1:
            return 1
        distinct = {rollout.completion.token_ids for rollout in self.rollouts}
        return (len(distinct) - 1) / (len(self.rollouts) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and the completion SFT should teach."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    """Of the completion; the last one is the stop token."""
    tool_spans: tuple[tuple[int, int], ...] = ()
    """As those of a `Completion`: read, and never trained."""


@dataclass(frozen=True, slots=True)
class Tally:
    """A mean that merges: sum, count and range of one metric.

    >>> Tally.of([1.0, 3.0]).merge(Tally.of([8.0])).mean
    4.0
    """

    sum: float
    count: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Tally:
        """Tally of plain values; an empty one has count 0 and a NaN mean."""
        items = [float(v) for v in values]
        if not items:
            return cls(0.0, 0.0, math.inf, -math.inf)
        return cls(math.fsum(items), float(len(items)), min(items), max(items))

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def merge(self, other: Tally) -> Tally:
        return Tally(
            self.sum + other.sum,
            self.count + other.count,
            min(self.min, other.min),
            max(self.max, other.max),
        )


def merge_tallies(reports: Sequence[Mapping[str, Tally]]) -> dict[str, Tally]:
    """Merge tallies by name; a name missing from one report counts nothing there."""
    merged: dict[str, Tally] = {}
    for report in reports:
        for name, tally in report.items():
            merged[name] = merged[name].merge(tally) if name in merged else tally
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one training step did.

    Example: `StepReport(phase="grpo", step=3, tallies={"reward/total": Tally.of([1.0, 0.0])},
    status="learning")`.
    """

    phase: str
    step: int
    """Number of the step, counted from 1."""
    tallies: Mapping[str, Tally]
    """`time.*`, `memory.*` and `host.*` are the only metrics that may differ between two equal
    runs."""
    status: str
    """One word (and why): `learning`, `no-signal:all-wrong`, ..."""
    events: tuple[str, ...] = ()
    """Events worth reading: a grader timeout, a skipped step."""

    def mean(self, name: str) -> float:
        """The mean of a metric.

        Raises:
            KeyError: this step has no such metric; names the nearest one.
        """
        if name not in self.tallies:
            near = difflib.get_close_matches(name, self.tallies, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else "report.tallies lists them"
            raise KeyError(f"{self.phase} step {self.step} has no metric {name!r}: {hint}")
        return self.tallies[name].mean
