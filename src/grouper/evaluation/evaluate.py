"""One evaluation: sample completions, grade each once, keep every item.

It is independent of training: anything that meets the sampler and grader protocols can be measured.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from grouper.errors import DataError
from grouper.evaluation.items import (
    FIELDS,
    Drawn,
    PartialEvaluation,
    Slimmer,
    StoredItems,
    Write,
    row_of,
)
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.files import delete, processors, write_lines
from grouper.grading import Grader, by_text_alone
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup, share_of
from grouper.rewards import Group, RewardLog, RewardStack
from grouper.rewards.builtin import format_holds
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.sample_and_grade import grade_as_drawn
from grouper.types import (
    AnswerFormat,
    AnswerKind,
    Completion,
    Problem,
    Prompt,
    Reward,
    SamplingParams,
    Verdict,
)

log = logging.getLogger(__name__)

Items = Sequence[tuple[Problem, Prompt]]


def evaluate(
    *,
    name: str | Callable[[Mapping[str, Any]], str],
    phase: str,
    step: int,
    split: str,
    items: Items,
    sampler: Sampler,
    grader: Grader,
    params: SamplingParams,
    samples: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    card: Mapping[str, Any] | None = None,
    processes: ProcessGroup | None = None,
    fmt: AnswerFormat | None = None,
    rewards: RewardStack | None = None,
    folder: Path | None = None,
    resume: bool = False,
    weights: str = "",
    known: Callable[[str], EvaluationResult | None] | None = None,
    seconds: float | None = None,
) -> EvaluationResult:
    """Measure one model on one set of problems.

    Args:
        name: the name of the files: `base`, `sft`, `grpo`, `validation-grpo-000020`, ..., or a
            function that makes it from the card.
        phase: `base`, `sft` or `grpo`.
        step: optimizer steps of the phase the model has seen.
        split: `test`, `validation`, or the name of a suite.
        items: problems with their rendered prompts; ids must differ.
        sampler: samples the completions.
        grader: grades each completion once.
        params: the sampling parameters; the same for every model that is to be compared.
        samples: completions per problem.
        seed: the run's seed; the random numbers depend on it alone, whatever model is measured.
        progress: called with (completions sampled, completions in all): after each one, or after
            each batch where another process grades them.
        card: more to record with the settings: hashes of the model and data, grader version.
        processes: the processes among which the problems are divided; each is measured once.
        fmt: the prompt format; with `rewards`, each item also has its format and reasoning.
        rewards: also scores each completion; a reward that fails stops nothing.
        folder: the folder for completions as they come, and at the end for the items; left out:
            they are kept in memory. `RunFolder.write_evaluation` deletes the completions.
        resume: use the completions that an interrupted call of the same settings left there.
        weights: tells the model from others (`weights_mark`), where the card does not: completions
            of another model are sampled again.
        known: finds the finished evaluation of a name, which is returned as it is; left out: there
            is none, or it is replaced.
        seconds: evaluate only as many of the first problems as take about this time.

    Raises:
        DataError: there are no problems.
    """
    if not items:
        where = f"evaluation {name if isinstance(name, str) else split}"
        raise DataError("there are no problems", where=where, fix="Check data.test and its limit.")
    assert len({problem.id for problem, _ in items}) == len(items), "loading refuses repeated ids"
    for problem, prompt in items:
        assert problem.id == prompt.problem_id, f"{problem.id} has {prompt.problem_id}'s prompt"
    processes = processes or ProcessGroup()
    card = {
        "prompt_of_item_0": items[0][1].text,
        "sampling": {**asdict(params), "stop": list(params.stop)},
        "grader": type(grader).__qualname__,
        "n": len(items),
        "k": samples,
        "seed": seed,
        **(card or {}),
    }
    title = name if isinstance(name, str) else name(card)
    if known is not None:
        finished = processes.on_rank0(lambda: known(title))
        if finished is not None:
            return finished
    home = folder or Path(processes.on_rank0(lambda: tempfile.mkdtemp(prefix="grouper-eval-")))
    settings = {**card, "weights": weights} if weights else card
    unfinished = PartialEvaluation(home, title, settings, len(items) * samples)
    try:
        written = set(processes.on_rank0(lambda: unfinished.begin(resume=resume)))
        requests = _requests(items, params, samples=samples, seed=seed)
        drawing = _Drawing(
            requests=requests,
            references=[problem.answer for problem, _ in items for _ in range(samples)],
            samples=samples,
            sampler=sampler,
            grader=grader,
            processes=processes,
            write=partial(unfinished.write, processes.rank),
            progress=progress or (lambda *_: None),
        )
        finish = partial(
            _finish, home, title, unfinished, items, samples=samples, fmt=fmt, rewards=rewards
        )
        if seconds is None and len(requests) - len(written) >= _MANY and has_a_processor():
            # A reward of the user's own is called in this process, after all sampling.
            all_ours = rewards is None or rewards.ours
            slim, failures = drawing.in_background(written, finish, follow=all_ours)
        else:
            end = drawing.here(written, seconds)
            card["n"] = end
            slim, failures = processes.on_rank0(lambda: finish(end))
        if failures and processes.rank == 0:
            log.warning(
                "Rewards failed on %d groups of the evaluation, which have none; the first: %s",
                len(failures),
                failures[0],
            )
        result_items: Sequence[EvaluationItem] = StoredItems(home / f"{title}.jsonl.gz", slim)
        if folder is None:
            result_items = tuple(result_items)
        # The folder may be deleted once every process has read them.
        processes.gather(None)
    finally:
        unfinished.close()
        if folder is None and processes.rank == 0:
            shutil.rmtree(home, ignore_errors=True)
    return EvaluationResult(
        name=title,
        phase=phase,
        step=step,
        split=split,
        items=result_items,
        samples=samples,
        card=card,
    )


def _requests(
    items: Items, params: SamplingParams, *, samples: int, seed: int
) -> list[SampleRequest]:
    """Make the requests of all completions, those of one problem next to each other."""
    requests = []
    for problem, prompt in items:
        for sample in range(samples):
            # Neither name nor step is part of a key: all models of a run get the same numbers.
            key = draw_seed(seed, "eval", problem.id, sample)
            requests.append(SampleRequest(prompt=prompt, params=params, key=key))
    return requests


# Seconds that decoding a token may take at the speed below, so that the first completions end, and
# are kept, after minutes. With fewer sequences together, the weights are read more often for each
# token: on two cores without bfloat16, Qwen2.5-Coder-0.5B wrote a quarter fewer tokens a second
# with 12 of them than with 36, and an eighth fewer with 24.
_TOKEN_SECONDS = 0.5
# With fewer sequences, nearly all of the time would be reading of weights.
_FEWEST = 8
# Multiplications and additions per second of a small machine.
_SLOW_CPU = 5e10


@contextlib.contextmanager
def few_at_a_time(sampler: Sampler, policy: Policy) -> Iterator[None]:
    """Limit the sequences that a sampler on a CPU decodes together, so that some end soon.

    All sequences together would end when the last one does, and an evaluation of a large model that
    was killed before that would have kept nothing.
    """
    if not isinstance(sampler, NativeSampler) or policy.device.type != "cpu":
        yield
        return
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    max_slots = sampler.max_slots
    affordable = int(_TOKEN_SECONDS * _SLOW_CPU / (2 * size))
    few = min(max_slots, max(_FEWEST, affordable))
    sampler.max_slots = few
    try:
        yield
    finally:
        # Another value means that memory ran out: the sampler keeps it.
        if sampler.max_slots == few:
            sampler.max_slots = max_slots


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


# With this many completions, a process of its own for grading is worth its start.
_MANY = 2_000
# Completions that are handed over together.
_BATCH = 256
# Seconds after which fewer are handed over.
_PATIENCE = 1.0
# Seconds between two looks at the files that another process writes.
_POLL = 0.05


# Problems after which the number of those that fit in the time is estimated.
_FIRST_WAVE = 32


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """Sampling and grading of completions, each process its share, each written down at once."""

    requests: Sequence[SampleRequest]
    references: Sequence[str]
    samples: int
    sampler: Sampler
    grader: Grader
    processes: ProcessGroup
    write: Write
    progress: Callable[[int, int], None]

    def here(self, written: set[int], seconds: float | None) -> int:
        """Sample and grade in this process.

        Args:
            written: places of the requests that have a completion already.
            seconds: as in `evaluate`.

        Returns:
            The number of problems that have all of their completions.
        """
        started = time.monotonic()
        count = len(self.requests) // self.samples
        end = count if seconds is None else min(count, _FIRST_WAVE)
        while True:
            _exhaust(self.draw(self._my_share(written, end)))
            written.update(range(end * self.samples))
            elapsed = max(time.monotonic() - started, 1e-9)
            # The time of the slowest process, after all have written their completions.
            slowest = max(self.processes.gather(elapsed))
            # Number of problems that take `seconds` in all at this speed.
            affordable = int(end * (seconds or 0) / slowest)
            if end == count or affordable < 1.25 * end:
                return end
            end = min(count, affordable)

    def in_background(
        self, written: set[int], finish: Callable[..., Finished], *, follow: bool
    ) -> Finished:
        """Sample in this process, while another one grades and writes.

        Args:
            written: places of the requests that have a completion already.
            finish: `_finish`.
            follow: call it in that process on rank 0, where it makes each item as soon as it can;
                otherwise in this process, after all sampling.
        """
        places = self._my_share(written)
        follow = follow and self.processes.rank == 0

        def work(parent: Connection) -> Any:
            drawing = replace(self, sampler=_Received(parent), progress=lambda *_: None)
            graded = drawing.draw(places)

            def wait() -> None:
                # Grade more, or else wait for the completions of other processes.
                batch = list(islice(graded, _BATCH))
                if not batch and parent.poll(_POLL):
                    parent.recv()

            slim: list[EvaluationItem] = []
            failures: list[str] = []
            if follow:
                slim, failures = finish(wait=wait)
            _exhaust(graded)
            # Field by field, because a list of records takes ten times as long to send.
            columns = [[getattr(item, name) for item in slim] for name in FIELDS]
            return columns, failures

        with BackgroundProcess(work) as helper:
            self._send_samples(helper, places)
            if not follow:
                helper.result()
            # Wait until all processes have written their completions.
            self.processes.gather(None)
            if follow:
                return self.processes.on_rank0(lambda: _as_items(*helper.result()))
            return self.processes.on_rank0(finish)

    def _send_samples(self, helper: BackgroundProcess, places: Sequence[int]) -> None:
        """Sample completions and hand them over in batches, with None at the end."""
        batch: list[tuple[Any, ...]] = []
        sent_at = time.monotonic()
        samples = self.sampler.sample([self.requests[place] for place in places])
        for count, (n, completion) in enumerate(samples, start=1):
            batch.append(
                (
                    n,
                    completion.token_ids,
                    completion.text,
                    completion.finish_reason,
                    completion.policy_version,
                )
            )
            if len(batch) == _BATCH or time.monotonic() - sent_at > _PATIENCE:
                helper.send(batch)
                batch = []
                sent_at = time.monotonic()
                self.progress(count, len(places))
        helper.send(batch)
        helper.send(None)
        self.progress(len(places), len(places))

    def _my_share(self, written: set[int], end: int | None = None) -> list[int]:
        """Return this process's share of the missing places, of the first `end` problems."""
        count = len(self.requests) if end is None else end * self.samples
        missing = [place for place in range(count) if place not in written]
        share = share_of(missing, self.processes.rank, self.processes.size)
        return [missing[i] for i in share]

    def draw(self, places: Sequence[int]) -> Iterator[None]:
        """Sample, grade and write the completions of these places, one for each step."""
        graded = grade_as_drawn(
            [self.requests[place] for place in places],
            [self.references[place] for place in places],
            sampler=self.sampler,
            grader=self.grader,
        )
        for count, (n, completion, grade, lenient) in enumerate(graded, start=1):
            self.write(places[n], completion, grade, lenient.verdict)
            self.progress(count, len(places))
            yield


def _exhaust(iterator: Iterator[object]) -> None:
    """Run an iterator to its end."""
    for _ in iterator:
        pass


class _Received:
    """A sampler whose completions, without log-probs, come from another process."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        assert requests, "the other process has these too, and names them by their index"
        while (batch := self._parent.recv()) is not None:
            for n, *fields in batch:
                yield n, Completion.bare(*fields)


Finished = tuple[list[EvaluationItem], list[str]]
"""The items without their texts, and the failures of rewards."""


def _finish(
    folder: Path,
    name: str,
    unfinished: PartialEvaluation,
    items: Items,
    end: int | None = None,
    *,
    samples: int,
    fmt: AnswerFormat | None,
    rewards: RewardStack | None,
    wait: Callable[[], None] | None = None,
) -> Finished:
    """Write the items of the sampled completions, in order, few problems in memory at a time.

    It runs on rank 0 alone, since a reward may call a judge.

    Args:
        folder: the folder of the items.
        name: the name of the evaluation.
        unfinished: the sampled completions.
        items: the problems.
        end: the number of problems that have their completions; None: all.
        samples: completions per problem.
        fmt: as in `evaluate`.
        rewards: as in `evaluate`.
        wait: called where a completion is not written yet; None: all are.
    """
    reward_log = RewardLog(place=name)
    without_texts = Slimmer()
    slim: list[EvaluationItem] = []
    # Groups that wait for their rewards.
    waiting: deque[tuple[Problem, Prompt, list[Drawn]]] = deque()

    def groups() -> Iterator[Group]:
        for number, (problem, prompt) in enumerate(items[:end]):
            places = range(number * samples, (number + 1) * samples)
            drawn = [unfinished.read(place, wait) for place in places]
            waiting.append((problem, prompt, drawn))
            completions = [sample.completion for sample in drawn]
            grades = [sample.grade for sample in drawn]
            yield Group(problem, prompt, completions, grades)

    def rows() -> Iterator[dict[str, Any]]:
        rewards_of_groups: Iterator[Sequence[Reward | None]]
        if rewards is None:
            rewards_of_groups = ([None] * samples for _ in groups())
        else:
            rewards_of_groups = rewards.score_all(groups(), reward_log)
        for group_rewards in rewards_of_groups:
            problem, prompt, drawn = waiting.popleft()
            pairs = zip(drawn, group_rewards, strict=True)
            for sample, (completion, reward) in enumerate(pairs):
                item = _item(problem, prompt, sample, completion, reward=reward, fmt=fmt)
                slim.append(without_texts(item))
                yield row_of(item)
        # An old summary must never be in one folder with new items.
        delete(folder / f"{name}.json")

    write_lines(folder / f"{name}.jsonl.gz", rows())
    return slim, reward_log.events


def _as_items(columns: list[list[Any]], failures: list[str]) -> Finished:
    """Make items from their columns; `__init__` would take four times as long."""
    items = [object.__new__(EvaluationItem) for _ in columns[0]]
    for name, column in zip(FIELDS, columns, strict=True):
        set_field = getattr(EvaluationItem, name).__set__
        _exhaust(map(set_field, items, column))
    return items, failures


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
    grade = by_text_alone(drawn.grade, problem.answer)
    lenient_verdict = drawn.lenient
    if drawn.grade.verdict is Verdict.NOT_SCORED:
        lenient_verdict = grade.verdict
    lenient = lenient_verdict is Verdict.CORRECT
    if lenient_verdict is Verdict.NOT_SCORED:
        lenient = grade.correct
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
        lenient=lenient,
        lenient_verdict=lenient_verdict,
        reason=grade.reason,
        stage=grade.stage,
        finish_reason=completion.finish_reason,
        tokens=len(completion.token_ids),
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


# --- work in the background, in a copy of this process on a processor of its own -----------------

# Seconds that a copy which is not needed any more has to write its last results.
_GRACE = 10.0


def has_a_processor() -> bool:
    """Tell whether this process can be copied, and there is another processor for the copy.

    It is false on a machine with CUDA: a copy of a process that has used CUDA may not touch it, and
    none is needed, since the processor waits for the GPU.
    """
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return False
    return processors() > 1 and not torch.cuda.is_available()


class BackgroundProcess(contextlib.AbstractContextManager["BackgroundProcess"]):
    """A function in a forked copy of this process, which must not touch an accelerator there.

    Leaving the context ends it: receiving in the copy then raises `EOFError`. Until then neither
    process collects garbage among the objects that both have: this would write to their memory, and
    so copy all of it.

    Args:
        do: called with a connection that receives everything passed to `send`.
    """

    def __init__(self, do: Callable[[Connection], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, copy_connection = context.Pipe()
        arguments = (do, copy_connection, self._connection)
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        gc.freeze()
        with warnings.catch_warnings():
            # Python warns of forking with threads; the function needs none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        copy_connection.close()

    def send(self, message: Any) -> None:
        """Hand something over; waits while the copy is busy. Raises the exception that ended it."""
        try:
            self._connection.send(message)
        except BrokenPipeError:
            self.result()
            raise

    def result(self) -> Any:
        """Wait for the function and return its result; raises its exception."""
        try:
            value, error = self._connection.recv()
        except (EOFError, ConnectionResetError) as connection_error:
            self._process.join(_GRACE)
            status = self._process.exitcode
            message = f"a process of an evaluation has ended: {status}"
            raise RuntimeError(message) from connection_error
        if error is not None:
            raise error
        return value

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        self._connection.close()
        self._process.join(_GRACE)
        self._process.kill()
        self._process.join()


def _run(do: Callable[[Connection], Any], connection: Connection, other: Connection) -> None:
    """Run the function in the copy.

    The parent ends it, by closing its side of the pipe or by ending itself, so signals are ignored.
    """
    other.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    outcome: tuple[Any, Exception | None]
    try:
        outcome = (do(connection), None)
    except Exception as error:  # noqa: BLE001 - raised in the parent
        outcome = (None, error)
    with contextlib.suppress(OSError):
        connection.send(outcome)
