"""One evaluation: draw completions, grade each once, keep every item.

Knows nothing of training: anything that meets the sampler and grader protocols can be measured.
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
    Lightener,
    StoredItems,
    Unfinished,
    Write,
    row_of,
)
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.files import delete, processors, write_lines
from grouper.grading import Grader, by_text_alone
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup, share_of
from grouper.rewards import Group, Notes, RewardStack
from grouper.rewards.builtin import format_holds
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.graded import grade_as_drawn
from grouper.sampling.native import NativeSampler
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
        name: names the files: `base`, `sft`, `grpo`, `validation-grpo-000020`, ..., or a function
            that makes it of the card.
        phase: `base`, `sft` or `grpo`.
        step: optimizer steps of the phase the model has seen.
        split: `test`, `validation`, or the name of a suite.
        items: problems with their rendered prompts; ids must differ.
        sampler: draws the completions.
        grader: grades each completion once.
        params: how to draw; the same for every model that is to be compared.
        samples: completions per problem.
        seed: the run's; what is drawn depends on it alone, whatever model is measured.
        progress: called with (completions drawn, completions in all): after each one, or after
            each batch where another process grades them.
        card: more to record beside the settings: hashes of the model and data, grader version.
        processes: the processes among which the problems are divided; each is measured once.
        fmt: the prompt format; with `rewards`, each item also has its format and reasoning.
        rewards: also scores each completion; a reward that fails stops nothing.
        folder: where completions are written as they come, and at the end the items; left out:
            they are kept in memory. `RunFolder.write_evaluation` deletes the completions.
        resume: go on from what an interrupted call of the same settings has left there.
        weights: tells the model from others (`weights_mark`), where the card does not: what
            another one has drawn is drawn again.
        known: finds the finished evaluation of a name, which is returned as it is; left out: there
            is none, or it is replaced.
        seconds: draw no more problems, from the first on, than are done in about this time.

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
    if known is not None and (before := processes.on_rank0(lambda: known(title))) is not None:
        return before
    home = folder or Path(processes.on_rank0(lambda: tempfile.mkdtemp(prefix="grouper-eval-")))
    settings = {**card, "weights": weights} if weights else card
    unfinished = Unfinished(home, title, settings, len(items) * samples)
    try:
        done = processes.on_rank0(lambda: unfinished.begin(resume=resume))
        # Neither name nor step is part of a key: all models of a run meet the same numbers.
        requests = [
            SampleRequest(
                prompt=prompt, params=params, key=draw_seed(seed, "eval", problem.id, sample)
            )
            for problem, prompt in items
            for sample in range(samples)
        ]

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
        if seconds is None and len(requests) - len(done) >= _MANY and has_a_processor():
            # A reward of the user's own is called here, when all is drawn.
            ours = rewards is None or rewards.ours
            light, failures = drawing.beside({*done}, finish, follow=ours)
        else:
            card["n"] = end = drawing.here({*done}, seconds)
            light, failures = processes.on_rank0(lambda: finish(end))
        if failures and processes.rank == 0:
            log.warning(
                "Rewards failed on %d groups of the evaluation, which have none; the first: %s",
                len(failures),
                failures[0],
            )
        found = StoredItems(home / f"{title}.jsonl.gz", light)
        stored: Sequence[EvaluationItem] = found if folder else tuple(found)
        processes.gather(None)  # every process has read them
    finally:
        unfinished.close()
        if folder is None and processes.rank == 0:
            shutil.rmtree(home, ignore_errors=True)
    return EvaluationResult(
        name=title,
        phase=phase,
        step=step,
        split=split,
        items=stored,
        samples=samples,
        card=card,
    )


# Seconds that decoding a token may take at the speed below, so that the first completions end, and
# are kept, after minutes. Fewer sequences together read the weights more often for each token: on
# two cores without bfloat16, Qwen2.5-Coder-0.5B wrote a quarter fewer tokens a second with 12 of
# them than with 36, and an eighth fewer with 24.
_TOKEN_SECONDS = 0.5
# Below this the weights would be read for hardly anything.
_FEWEST = 8
# Multiplications and additions per second, of a small machine.
_SLOW_CPU = 5e10


@contextlib.contextmanager
def few_at_a_time(sampler: Sampler, policy: Policy) -> Iterator[None]:
    """Let a sampler on a CPU draw so few sequences of a large model together that some end soon.

    Together they would all end when the last one does, and an evaluation that was killed before
    that would have kept nothing.
    """
    if not isinstance(sampler, NativeSampler) or policy.device.type != "cpu":
        yield
        return
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    before = sampler.max_slots
    few = min(before, max(_FEWEST, int(_TOKEN_SECONDS * _SLOW_CPU / (2 * size))))
    sampler.max_slots = few
    try:
        yield
    finally:
        if sampler.max_slots == few:  # else memory ran out, and fewer are right from now on
            sampler.max_slots = before


# Values of each tensor that tell the weights of a model from others: training changes all of them.
_MARKED = 256


@torch.no_grad()
def weights_mark(policy: Policy) -> str:
    """A hash of a sample of every tensor of a model, which differs after each step of training."""
    digest = hashlib.sha256()
    for name, parameter in sorted(policy.model.named_parameters()):
        flat = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).flatten()
        few = flat[:: max(1, flat.numel() // _MARKED)]
        digest.update(f"{name} {flat.numel()} {few.dtype}\n".encode())
        digest.update(few.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# Completions from which on a process of its own is worth its start.
_MANY = 2_000
# Completions, or seconds in which there are fewer, that are handed over together.
_BATCH, _PATIENCE = 256, 1.0
# Seconds until it is looked again for what another process writes.
_POLL = 0.05


# Problems after which it is estimated how many more there is time for.
_FIRST_WAVE = 32


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """Draws and grades completions, each process its share, and writes each one down at once."""

    requests: Sequence[SampleRequest]
    references: Sequence[str]
    samples: int
    sampler: Sampler
    grader: Grader
    processes: ProcessGroup
    write: Write
    progress: Callable[[int, int], None]

    def here(self, drawn: set[int], seconds: float | None) -> int:
        """Draw in this process.

        Args:
            drawn: places of the requests that were answered before.
            seconds: as in `evaluate`.

        Returns:
            The number of problems that are drawn by now.
        """
        count, started = len(self.requests) // self.samples, time.monotonic()
        end = count if seconds is None else min(count, _FIRST_WAVE)
        while True:
            deque(self.draw(self._shared(drawn, end)), maxlen=0)
            drawn.update(range(end * self.samples))
            # Of the slowest, when all have written theirs.
            took = max(self.processes.gather(max(time.monotonic() - started, 1e-9)))
            # How many problems, at the speed of those that are done, take `seconds` in all.
            fits = int(end * (seconds or 0) / took)
            if end == count or fits < 1.25 * end:
                return end
            end = min(count, fits)

    def beside(self, drawn: set[int], finish: Callable[..., Finished], *, follow: bool) -> Finished:
        """Sample here; a process of its own grades and writes.

        Args:
            drawn: places of the requests that were answered before.
            finish: `_finish`.
            follow: call it in that process on rank 0, where it makes the items as soon as they
                can be; otherwise here, when all is drawn.
        """
        mine = self._shared(drawn)
        follow = follow and self.processes.rank == 0

        def work(parent: Connection) -> Any:
            received = replace(self, sampler=_Received(parent), progress=lambda *_: None)
            graded = received.draw(mine)

            def wait() -> None:
                # Without more of its own it waits for what another process writes.
                if not [*islice(graded, _BATCH)] and parent.poll(_POLL):
                    parent.recv()

            light, failed = finish(wait=wait) if follow else ([], [])
            deque(graded, maxlen=0)
            # Field by field: a list of records takes ten times as long to send.
            return [[getattr(item, name) for item in light] for name in FIELDS], failed

        with Beside(work) as helper:
            batch: list[tuple[Any, ...]] = []
            sent = time.monotonic()
            answers = self.sampler.sample([self.requests[place] for place in mine])
            for done, (n, one) in enumerate(answers, start=1):
                batch.append((n, one.token_ids, one.text, one.finish_reason, one.policy_version))
                if len(batch) == _BATCH or time.monotonic() - sent > _PATIENCE:
                    helper.send(batch)
                    batch, sent = [], time.monotonic()
                    self.progress(done, len(mine))
            helper.send(batch)
            helper.send(None)
            self.progress(len(mine), len(mine))
            if not follow:
                helper.result()
            self.processes.gather(None)  # until all have written theirs
            return self.processes.on_rank0(
                (lambda: _as_items(*helper.result())) if follow else finish
            )

    def _shared(self, drawn: set[int], end: int | None = None) -> list[int]:
        """The places that are left for this process, of so many problems; None: of all."""
        count = len(self.requests) if end is None else end * self.samples
        left = [place for place in range(count) if place not in drawn]
        return [left[i] for i in share_of(left, self.processes.rank, self.processes.size)]

    def draw(self, places: Sequence[int]) -> Iterator[None]:
        """Those at these places of the requests, one whenever the next is asked for."""
        graded = grade_as_drawn(
            [self.requests[place] for place in places],
            [self.references[place] for place in places],
            sampler=self.sampler,
            grader=self.grader,
        )
        for done, (n, completion, grade, lenient) in enumerate(graded, start=1):
            self.write(places[n], completion, grade, lenient.verdict)
            self.progress(done, len(places))
            yield


class _Received:
    """A sampler whose completions, without log-probs, come from another process."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        assert requests, "the other process has these too, and names them by their index"
        while (batch := self._parent.recv()) is not None:
            for n, *known in batch:
                yield n, Completion.bare(*known)


Finished = tuple[list[EvaluationItem], list[str]]
"""The items without their texts, and what failed while they were rewarded."""


def _finish(
    folder: Path,
    name: str,
    unfinished: Unfinished,
    items: Items,
    end: int | None = None,
    *,
    samples: int,
    fmt: AnswerFormat | None,
    rewards: RewardStack | None,
    wait: Callable[[], None] | None = None,
) -> Finished:
    """Write the items of what was drawn, in order, few problems in memory at a time.

    On rank 0 alone, since a reward may call a judge.

    Args:
        folder: of the items.
        name: of the evaluation.
        unfinished: where they were drawn.
        items: the problems.
        end: the number of those that were drawn; None: all.
        samples: of each problem.
        fmt: as in `evaluate`.
        rewards: as in `evaluate`.
        wait: called where one has not been drawn yet; None: all have been.
    """
    notes, lightened = Notes(place=name), Lightener()
    light: list[EvaluationItem] = []
    waiting: deque[tuple[Problem, Prompt, list[Drawn]]] = deque()

    def groups() -> Iterator[Group]:
        for number, (problem, prompt) in enumerate(items[:end]):
            places = range(number * samples, (number + 1) * samples)
            drawn = [unfinished.read(place, wait) for place in places]
            waiting.append((problem, prompt, drawn))
            yield Group(problem, prompt, [d.completion for d in drawn], [d.grade for d in drawn])

    def rows() -> Iterator[dict[str, Any]]:
        scored: Iterator[Sequence[Reward | None]] = ([None] * samples for _ in groups())
        if rewards is not None:
            scored = rewards.score_all(groups(), notes)
        for given in scored:
            problem, prompt, drawn = waiting.popleft()
            for sample, (one, reward) in enumerate(zip(drawn, given, strict=True)):
                item = _item(problem, prompt, sample, one, reward=reward, fmt=fmt)
                light.append(lightened(item))
                yield row_of(item)
        delete(folder / f"{name}.json")  # never an old summary beside new items

    write_lines(folder / f"{name}.jsonl.gz", rows())
    return light, notes.events


def _as_items(columns: list[list[Any]], failed: list[str]) -> Finished:
    """Items of their columns; `__init__` would take four times as long."""
    items = [object.__new__(EvaluationItem) for _ in columns[0]]
    for name, column in zip(FIELDS, columns, strict=True):
        deque(map(getattr(EvaluationItem, name).__set__, items, column), maxlen=0)
    return items, failed


def _item(
    problem: Problem,
    prompt: Prompt,
    sample: int,
    one: Drawn,
    *,
    reward: Reward | None,
    fmt: AnswerFormat | None,
) -> EvaluationItem:
    completion, grade = one.completion, by_text_alone(one.grade, problem.answer)
    lenient = grade.verdict if one.grade.verdict is Verdict.NOT_SCORED else one.lenient
    known = lenient is not Verdict.NOT_SCORED
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
        lenient=lenient is Verdict.CORRECT if known else grade.correct,
        lenient_verdict=lenient,
        reason=grade.reason,
        stage=grade.stage,
        finish_reason=completion.finish_reason,
        tokens=len(completion.token_ids),
        **observed,
    )


def settings_name(split: str, params: SamplingParams, problems: int, samples: int) -> str:
    """A file name with the settings of a measurement.

    >>> settings_name("test", SamplingParams(temperature=0), 500, 1)
    'test-greedy-500x1'
    >>> settings_name("test", SamplingParams(temperature=0.7, top_p=0.9), 500, 8)
    'test-t0.7-p0.9-500x8'
    """
    drawn = {
        "t": params.temperature,
        "p": params.top_p if params.top_p < 1 else 0,
        "k": params.top_k,
        "m": params.min_p,
    }
    how = [f"{letter}{value:g}" for letter, value in drawn.items() if value]
    return "-".join([split, *(how if params.temperature else ["greedy"]), f"{problems}x{samples}"])


def reasoning_of(text: str, fmt: AnswerFormat) -> str:
    r"""The reasoning in a completion: the text between its tags, or else before the answer.

    Empty where a tag is missing. The tag that the prompt opens counts.

    >>> from grouper.prompts import FORMATS
    >>> reasoning_of(r"2 and 2, so \boxed{4}.", FORMATS["boxed"])
    '2 and 2, so'
    """
    if fmt.tags is None:
        mark = _ANSWER_MARKS.get(fmt.contract.kind)
        return (text if mark is None else text.rpartition(mark)[0]).strip()
    _, opened, rest = (fmt.prefix + text).partition(fmt.tags[0])
    inside, closed, _ = rest.partition(fmt.tags[1])
    return inside.strip() if opened and closed else ""


# Where the answer of a format without tags begins.
_ANSWER_MARKS = {AnswerKind.BOXED: "\\boxed", AnswerKind.HASHES: "####"}


# --- work that goes on beside the sampler, in a copy of this process on a processor of its own ----

# Seconds in which a copy that is not needed any more may still write down what it has.
_GRACE = 10.0


def has_a_processor() -> bool:
    """Whether a copy can be made here, and would not take the processor of this process.

    Not on a machine with CUDA: a copy of a process that has used it may not touch it, and none is
    needed, since the processor waits for the GPU.
    """
    safe = sys.platform == "linux" and not multiprocessing.current_process().daemon
    return safe and processors() > 1 and not torch.cuda.is_available()


class Beside(contextlib.AbstractContextManager["Beside"]):
    """A function in a forked copy of this process, which must not touch an accelerator there.

    Leaving the context ends it: what it is to receive then raises `EOFError`. Until then neither
    process looks for garbage among what both have: a look would touch it, and so copy all of it.

    Args:
        do: called with a connection, which hands on what `send` is given.
    """

    def __init__(self, do: Callable[[Connection], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        arguments = (do, theirs, self._connection)
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        gc.freeze()
        with warnings.catch_warnings():  # of threads: what runs in the copy needs none of them
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def send(self, thing: Any) -> None:
        """Hand something over; waits while the copy is busy. Raises what it has ended with."""
        try:
            self._connection.send(thing)
        except BrokenPipeError:
            self.result()
            raise

    def result(self) -> Any:
        """What the function returns; raises what it raised."""
        try:
            value, error = self._connection.recv()
        except (EOFError, ConnectionResetError) as ended:
            self._process.join(_GRACE)
            status = self._process.exitcode
            raise RuntimeError(f"a process of an evaluation has ended: {status}") from ended
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
    """In the copy: the parent decides when it ends, by closing its side or by ending itself."""
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
