"""One evaluation: sample completions, grade each once, keep every item.

It is independent of training: anything that meets the sampler and grader protocols can be measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from grouper.errors import DataError
from grouper.evaluation.items import Drawn, PartialEvaluation, Slimmer, StoredItems, row_of
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.files import delete, write_lines
from grouper.grading import Grader, by_text_alone
from grouper.models.device import cpu_product_rate
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup, share_of
from grouper.rewards import Group, RewardLog, RewardStack
from grouper.rewards.builtin import format_holds
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.sample_and_grade import grade_as_drawn
from grouper.sampling.turns import innermost
from grouper.types import (
    AnswerFormat,
    AnswerKind,
    Grade,
    Problem,
    Prompt,
    Reward,
    SamplingParams,
    Verdict,
)

log = logging.getLogger(__name__)

Items = Sequence[tuple[Problem, Prompt]]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one evaluation measures: problems, sampling, rewards, and what its record says."""

    name: str
    """Name of the files: `base`, `sft`, `grpo`, `validation-grpo-000020`, ..."""
    phase: str
    """`base`, `sft` or `grpo`: the phase that made the model."""
    step: int
    """Optimizer steps of the phase that the model has seen."""
    split: str
    """`test`, `validation`, or the name of a suite."""
    items: Items
    """Problems with their rendered prompts; ids must differ."""
    params: SamplingParams
    """The same for every model that is to be compared."""
    samples: int
    """Completions per problem."""
    seed: int
    """The run's seed; the random numbers depend on it alone, whatever model is measured."""
    format: AnswerFormat | None = None
    """The prompt format; with `rewards`, each item also has its format and reasoning."""
    rewards: RewardStack | None = None
    """Scores each completion, too; a reward that fails stops nothing."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the card: hashes of the model and the data, the grader's settings."""
    weights: str = ""
    """Tells the model from others (`weights_mark`) where the card does not: completions of another
    model are sampled again."""
    seconds: float | None = None
    """Evaluate only as many of the first problems as take about this time; None: all."""

    def __post_init__(self) -> None:
        if not self.items:
            raise DataError(
                "there are no problems",
                where=f"evaluation {self.name}",
                fix="Check data.test and its limit.",
            )
        ids = {problem.id for problem, _ in self.items}
        assert len(ids) == len(self.items), "loading refuses repeated ids"
        for problem, prompt in self.items:
            message = f"{problem.id} has {prompt.problem_id}'s prompt"
            assert problem.id == prompt.problem_id, message

    @property
    def completions(self) -> int:
        """Number of completions that all problems have together."""
        return len(self.items) * self.samples

    def card(self, grader: Grader) -> dict[str, Any]:
        """Return the settings that decide the numbers, as the result records them."""
        _, first_prompt = self.items[0]
        return {
            "prompt_of_item_0": first_prompt.text,
            "sampling": {**asdict(self.params), "stop": list(self.params.stop)},
            "grader": type(grader).__qualname__,
            "n": len(self.items),
            "k": self.samples,
            "seed": self.seed,
            **self.facts,
        }


def measure(
    measurement: Measurement,
    sampler: Sampler,
    grader: Grader,
    *,
    processes: ProcessGroup | None = None,
    folder: Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Sample and grade completions, write each down at once, and make the items of them.

    Args:
        measurement: what is measured.
        sampler: samples the completions.
        grader: grades each completion once.
        processes: the processes among which the completions are divided; each is sampled once.
        folder: the folder for completions as they come, and at the end for the items; left out:
            they are kept in memory. `RunFolder.write_evaluation` deletes the completions.
        resume: use the completions that an interrupted call of the same measurement left there.
        progress: called after each completion with (completions sampled, completions in all), both
            of this process.

    Returns:
        The result; with `folder`, its items stay in their file.
    """
    processes = processes or ProcessGroup()
    card = measurement.card(grader)
    settings = {**card, "weights": measurement.weights} if measurement.weights else card
    home = folder or Path(processes.on_rank0(lambda: tempfile.mkdtemp(prefix="grouper-eval-")))
    partial = PartialEvaluation(home, measurement.name, settings, measurement.completions)
    try:
        written = set(processes.on_rank0(lambda: partial.begin(resume=resume)))
        drawing = _Drawing(
            measurement=measurement,
            requests=_requests(measurement),
            sampler=sampler,
            grader=grader,
            processes=processes,
            partial=partial,
            progress=progress or (lambda *_: None),
        )
        problem_count = drawing.draw_all(written)
        card["n"] = problem_count
        slim, failures = processes.on_rank0(
            lambda: _write_items(home, measurement, partial, problem_count)
        )
        if failures and processes.rank == 0:
            log.warning(
                "Rewards failed on %d groups of the evaluation, which have none; the first: %s",
                len(failures),
                failures[0],
            )
        items: Sequence[EvaluationItem] = StoredItems(home / f"{measurement.name}.jsonl.gz", slim)
        if folder is None:
            items = tuple(items)
        # The folder may be deleted once every process has read the items.
        processes.gather(None)
    finally:
        partial.close()
        if folder is None and processes.rank == 0:
            shutil.rmtree(home, ignore_errors=True)
    return EvaluationResult(
        name=measurement.name,
        phase=measurement.phase,
        step=measurement.step,
        split=measurement.split,
        items=items,
        samples=measurement.samples,
        card=card,
    )


def _requests(measurement: Measurement) -> list[SampleRequest]:
    """Make the requests of all completions, those of one problem next to each other."""
    requests = []
    for problem, prompt in measurement.items:
        for sample in range(measurement.samples):
            # Neither name nor step is part of a key: all models of a run get the same numbers.
            key = draw_seed(measurement.seed, "eval", problem.id, sample)
            requests.append(SampleRequest(prompt=prompt, params=measurement.params, key=key))
    return requests


# Seconds that decoding a token may take, so that the first completions end, and are kept, after
# minutes. With fewer sequences together, the weights are read more often for each token: on two
# cores without bfloat16, Qwen2.5-Coder-0.5B wrote a quarter fewer tokens a second with 12 of them
# than with 36, and an eighth fewer with 24; on one core with it, 154 a second with 25 of them, and
# 347 with 150.
_TOKEN_SECONDS = 0.5
# With fewer sequences, nearly all of the time would be reading of weights.
_FEWEST = 8
# Of the rate of a product of large matrices, about what decoding reaches.
_RATE_SHARE = 0.4


@contextlib.contextmanager
def few_at_a_time(sampler: Sampler, policy: Policy) -> Iterator[None]:
    """Limit the sequences that a sampler on a CPU decodes together, so that some end soon.

    All sequences together would end when the last one does, and an evaluation of a large model that
    was killed before that would have kept nothing.
    """
    native = innermost(sampler)
    if not isinstance(native, NativeSampler) or policy.device.type != "cpu":
        yield
        return
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    max_slots = native.max_slots
    rate = _RATE_SHARE * cpu_product_rate(policy.products_dtype)
    affordable = _TOKEN_SECONDS * rate / (2 * size)
    # A power of two: a measurement is never the same, and products in bfloat16 of another number of
    # rows may differ in their last bits.
    few = min(max_slots, max(_FEWEST, 2 ** round(math.log2(affordable))))
    native.max_slots = few
    try:
        yield
    finally:
        # Another value means that memory ran out: the sampler keeps it.
        if native.max_slots == few:
            native.max_slots = max_slots


# Values of each tensor that tell the weights of a model from others: training changes all of them.
_MARKED = 256


@torch.no_grad()
def weights_mark(policy: Policy) -> str:
    """Hash a few values of every tensor of a model; the hash differs after each training step."""
    digest = hashlib.sha256()
    for name, parameter in sorted(policy.model.named_parameters()):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        flat = local.flatten()
        stride = max(1, flat.numel() // _MARKED)
        values = flat[::stride]
        digest.update(f"{name} {flat.numel()} {values.dtype}\n".encode())
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# Problems after which the number of those that fit in the time is estimated.
_FIRST_WAVE = 32


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """Sampling and grading of completions, each process its share, each written down at once."""

    measurement: Measurement
    requests: Sequence[SampleRequest]
    sampler: Sampler
    grader: Grader
    processes: ProcessGroup
    partial: PartialEvaluation
    progress: Callable[[int, int], None]

    def draw_all(self, written: set[int]) -> int:
        """Sample what is missing, of all problems or of as many as there is time for.

        Args:
            written: places of the requests that have a completion already.

        Returns:
            The number of problems that have all of their completions.
        """
        count = len(self.measurement.items)
        seconds = self.measurement.seconds
        if seconds is None:
            self._draw(written, count)
            # Wait until all processes have written their completions.
            self.processes.gather(None)
            return count
        started = time.monotonic()
        end = min(count, _FIRST_WAVE)
        while True:
            self._draw(written, end)
            written.update(range(end * self.measurement.samples))
            elapsed = max(time.monotonic() - started, 1e-9)
            # The time of the slowest process, after all have written their completions.
            slowest = max(self.processes.gather(elapsed))
            # Number of problems that take `seconds` in all at this speed.
            affordable = int(end * seconds / slowest)
            if end == count or affordable < 1.25 * end:
                return end
            end = min(count, affordable)

    def _draw(self, written: set[int], end: int) -> None:
        """Sample, grade and write this process's share of what the first `end` problems lack."""
        samples = self.measurement.samples
        missing = [place for place in range(end * samples) if place not in written]
        share = share_of(missing, self.processes.rank, self.processes.size)
        places = [missing[i] for i in share]
        items = self.measurement.items
        graded = grade_as_drawn(
            [self.requests[place] for place in places],
            [items[place // samples][0].answer for place in places],
            sampler=self.sampler,
            grader=self.grader,
        )
        for count, (n, completion, grade, lenient) in enumerate(graded, start=1):
            self.partial.write(self.processes.rank, places[n], completion, grade, lenient.verdict)
            self.progress(count, len(places))


def _write_items(
    folder: Path, measurement: Measurement, partial: PartialEvaluation, problem_count: int
) -> tuple[list[EvaluationItem], list[str]]:
    """Write the items of the sampled completions, in order, few problems in memory at a time.

    It runs on rank 0 alone, since a reward may call a judge.

    Args:
        folder: the folder of the items.
        measurement: what was measured.
        partial: the sampled completions.
        problem_count: the number of problems that have their completions.

    Returns:
        The items without their texts, and the failures of rewards.
    """
    samples = measurement.samples
    reward_log = RewardLog(place=measurement.name)
    without_texts = Slimmer()
    slim: list[EvaluationItem] = []
    # Groups that wait for their rewards.
    waiting: deque[tuple[Problem, Prompt, list[Drawn]]] = deque()
    partial.index()

    def groups() -> Iterator[Group]:
        for number, (problem, prompt) in enumerate(measurement.items[:problem_count]):
            places = range(number * samples, (number + 1) * samples)
            drawn = [partial.read(place) for place in places]
            waiting.append((problem, prompt, drawn))
            completions = [sample.completion for sample in drawn]
            grades = [sample.grade for sample in drawn]
            yield Group(problem, prompt, completions, grades)

    def rows() -> Iterator[dict[str, Any]]:
        rewards_of_groups: Iterator[Sequence[Reward | None]]
        if measurement.rewards is None:
            rewards_of_groups = ([None] * samples for _ in groups())
        else:
            rewards_of_groups = measurement.rewards.score_all(groups(), reward_log)
        for group_rewards in rewards_of_groups:
            problem, prompt, drawn = waiting.popleft()
            pairs = zip(drawn, group_rewards, strict=True)
            for sample, (completion, reward) in enumerate(pairs):
                item = _item(
                    problem, prompt, sample, completion, reward=reward, fmt=measurement.format
                )
                slim.append(without_texts(item))
                yield row_of(item)
        # An old summary must never be in one folder with new items.
        delete(folder / f"{measurement.name}.json")

    write_lines(folder / f"{measurement.name}.jsonl.gz", rows())
    return slim, reward_log.events


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How a completion counts in an evaluation."""

    grade: Grade
    """By the text alone where the reference cannot be read."""
    lenient_verdict: Verdict
    """On the answer found in any format."""
    lenient: bool
    """Whether it is right in any format."""


def count_grades(strict: Grade, lenient_verdict: Verdict, reference: str) -> Counted:
    """Return how a completion counts that was graded in its format and in any.

    Args:
        strict: the grade in its format.
        lenient_verdict: the verdict in any format.
        reference: the reference answer.
    """
    grade = by_text_alone(strict, reference)
    if strict.verdict is Verdict.NOT_SCORED:
        lenient_verdict = grade.verdict
    lenient = lenient_verdict is Verdict.CORRECT
    if lenient_verdict is Verdict.NOT_SCORED:
        lenient = grade.correct
    return Counted(grade=grade, lenient_verdict=lenient_verdict, lenient=lenient)


def _item(
    problem: Problem,
    prompt: Prompt,
    sample: int,
    drawn: Drawn,
    *,
    reward: Reward | None,
    fmt: AnswerFormat | None,
) -> EvaluationItem:
    """Make the item of one completion."""
    completion = drawn.completion
    counted = count_grades(drawn.grade, drawn.lenient, problem.answer)
    grade = counted.grade
    observed: dict[str, Any] = {}
    if reward is not None and fmt is not None:
        observed = {
            "format": format_holds(completion.text, fmt),
            "reasoning": len(reasoning_of(completion.text, fmt)),
            "rewards": dict(reward.components),
            "reward": reward.total,
        }
    return EvaluationItem(
        problem_id=problem.id,
        subject=problem.subject,
        level=problem.level,
        sample=sample,
        prompt=prompt.text,
        completion=completion.text,
        answer=problem.answer,
        extracted=grade.extracted,
        verdict=grade.verdict,
        lenient=counted.lenient,
        lenient_verdict=counted.lenient_verdict,
        reason=grade.reason,
        stage=grade.stage,
        finish_reason=completion.finish_reason,
        tokens=len(completion.token_ids),
        logprob=drawn.logprob,
        **observed,
    )


def settings_name(split: str, params: SamplingParams, problems: int, samples: int) -> str:
    """Make a file name with the settings of a measurement.

    >>> settings_name("test", SamplingParams(temperature=0), 500, 1)
    'test-greedy-500x1'
    >>> settings_name("test", SamplingParams(temperature=0.7, top_p=0.9), 500, 8)
    'test-t0.7-p0.9-500x8'
    """
    sampling = "greedy"
    if params.temperature:
        values = {
            "t": params.temperature,
            "p": params.top_p if params.top_p < 1 else 0,
            "k": params.top_k,
            "m": params.min_p,
        }
        sampling = "-".join(f"{letter}{value:g}" for letter, value in values.items() if value)
    return f"{split}-{sampling}-{problems}x{samples}"


def reasoning_of(text: str, fmt: AnswerFormat) -> str:
    r"""Return the reasoning in a completion: the text between its tags, or else before the answer.

    Empty where a tag is missing. The tag that the prompt opens counts.

    >>> from grouper.prompts import FORMATS
    >>> reasoning_of(r"2 and 2, so \boxed{4}.", FORMATS["boxed"])
    '2 and 2, so'
    """
    if fmt.tags is None:
        mark = _ANSWER_MARKS.get(fmt.contract.kind)
        if mark is None:
            return text.strip()
        text_before_answer, _, _ = text.rpartition(mark)
        return text_before_answer.strip()
    open_tag, close_tag, _, _ = fmt.tags
    _, opened, body = (fmt.prefix + text).partition(open_tag)
    reasoning, closed, _ = body.partition(close_tag)
    if not opened or not closed:
        return ""
    return reasoning.strip()


# Text at which the answer of a format without tags begins.
_ANSWER_MARKS = {AnswerKind.BOXED: "\\boxed", AnswerKind.HASHES: "####"}
