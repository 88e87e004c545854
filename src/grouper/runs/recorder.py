"""The run folder of an open run: rank 0 locks and writes it, and passes each record to trackers."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from grouper.config.loading import resolved_yaml
from grouper.config.schema import Recipe
from grouper.errors import RunFolderError
from grouper.evaluation.result import EvaluationResult
from grouper.files import read_json
from grouper.models.process_group import ProcessGroup
from grouper.rewards.calling import reward_label
from grouper.runs.folder import Intent, LostItemsError, RunFolder
from grouper.runs.lock import RunLock
from grouper.runs.records import RunInfo
from grouper.runs.samples import END, printable
from grouper.runs.trackers import Background, Record, Sink, close_all, find_trackers
from grouper.types import Completion, RolloutGroup, StepReport

if TYPE_CHECKING:
    from torch import Tensor

    from grouper.algorithms.batching import TrainBatch

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")

log = logging.getLogger(__name__)

# Of the time of a run, what drawing its pictures may take before its end.
DRAWING_SHARE = 0.05
# Trackers get a table of completions every so many steps, unless the recipe prints them more often,
# with at most so many rows.
TABLE_EVERY, TABLE_ROWS = 25, 16
TABLE_COLUMNS = ("problem_id", "prompt", "completion", "extracted", "answer", "verdict", "reward")


_GONE = "the folder was deleted, moved or replaced while the run went on"


def _on_rank0(
    method: Callable[Concatenate[Any, Parameters], Value],
) -> Callable[Concatenate[Any, Parameters], Value]:
    """A method that every process calls and rank 0 runs; all get its result.

    It raises `RunFolderError` where the folder is no longer there: what follows would be half a run
    that nothing can continue, or stand among the files of another one.
    """

    @functools.wraps(method)
    def called(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        def alone() -> Value:
            if read_json(self._info, _GONE).get("host") != self._host:
                raise RunFolderError(_GONE, where=str(self.path), fix="Put it back, then --resume.")
            return method(self, *args, **kwargs)

        processes: ProcessGroup = self.processes
        return processes.on_rank0(alone)

    return called


class Recorder(RunFolder):
    """Opens a run folder, new or continued, and keeps the record of the run in it.

    Every process of the run has one. What is wrapped in `_on_rank0` is called by all of them, and
    never from work that rank 0 does alone. Trackers get each record once it is written. They are
    opened by the first record: a run that is refused at its start opens none.

    Pictures are drawn by rank 0 at evaluations and on closing, whatever ends the run: `draw` is
    called with the folder. It may fail without stopping anything.

    Args:
        recipe: of the run; names the folder and the trackers.
        processes: of the run.
        intent: `resume`, `overwrite` and `allow_changes` of `RunFolder.create`.
        info: what the run is.

    Raises:
        RunFolderError: as `RunFolder.create`, or another process is writing the folder.
        ConfigError: a tracker of the user's own that is not there.
    """

    def __init__(
        self, recipe: Recipe, processes: ProcessGroup, intent: Intent, info: RunInfo
    ) -> None:
        super().__init__(recipe.run_folder)
        self.processes = processes
        self._is_new = False
        self._lock: RunLock | None = None
        self._host: Mapping[str, str | int] = {}
        """Where and when the run began; no other run has the same."""
        self._builders: dict[str, Callable[[], Sink]] = {}
        self._open: list[Background] | None = None
        self._weights = {reward_label(one.name): one.weight for one in recipe.rewards}
        self._sampled: list[Mapping[str, Any]] = []
        """The rollouts of the step that comes next, for trackers."""
        self._table_every = recipe.tracking.print_every_steps or TABLE_EVERY
        self.draw: Callable[[RunFolder], object] | None = None
        self._undrawn = False
        self._draw_from = 0.0
        try:
            processes.on_rank0(lambda: self._begin_record(recipe, intent, info))
        except BaseException:  # the lock is given back, whatever went wrong
            self.close()
            raise

    def _begin_record(self, recipe: Recipe, intent: Intent, info: RunInfo) -> None:
        text = resolved_yaml(recipe)
        # Before the lock, which makes the folder: one that is refused stays as it was.
        self._is_new = not self.check(info.recipe_hash, text, **intent)
        self._lock = RunLock(self.path)
        RunFolder.create(self.path, info, recipe_yaml=text, **intent)
        self._host = self.read_info().host
        self._builders = find_trackers(recipe, self.path, started=str(self._host["started"]))

    recipe_hashes = _on_rank0(RunFolder.recipe_hashes)
    record_resolved = _on_rank0(RunFolder.record_resolved)
    changes_begin_at = _on_rank0(RunFolder.changes_begin_at)
    holes = _on_rank0(RunFolder.holes)
    read_evaluation = _on_rank0(RunFolder.read_evaluation)
    truncate_to = _on_rank0(RunFolder.truncate_to)

    @_on_rank0
    def append_metrics(self, report: StepReport) -> None:
        super().append_metrics(report)
        self._undrawn = True
        shown = report.step == 1 or report.step % self._table_every == 0
        # A few rollouts of as many problems as possible.
        rows = sorted(self._sampled, key=lambda row: (row["sample"], row["group"])) if shown else []
        few = rows[:TABLE_ROWS]
        table = [{name: printable(str(row[name]))[-END:] for name in TABLE_COLUMNS} for row in few]
        self._send(Record.of_step(report, _rewards(self._sampled), self._weights, table))
        self._sampled = []

    @_on_rank0
    def write_rollouts(self, phase: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        self._sampled = [*rows]
        super().write_rollouts(phase, step, self._sampled)

    @_on_rank0
    def write_evaluation(self, result: EvaluationResult) -> None:
        super().write_evaluation(result)
        self._undrawn = True
        self._send(Record.of_evaluation(result))
        if time.monotonic() >= self._draw_from:
            self.redraw()

    def _load_evaluation(self, name: str) -> EvaluationResult | None:
        """Treat one whose items were lost as none: a run measures it again."""
        try:
            return super()._load_evaluation(name)
        except LostItemsError as error:
            log.warning("%s It is measured again where its model is still there.", error.what)
            return None

    def redraw(self) -> None:
        """Draw the pictures anew, on rank 0, if anything was recorded since the last time."""
        if self.draw is None or self.processes.rank > 0 or not self._undrawn:
            return
        started = time.monotonic()
        self._undrawn = False
        try:
            self.draw(RunFolder(self.path))
        except Exception as error:  # noqa: BLE001 - a run does not need its pictures
            log.warning(
                "The pictures of the run could not be drawn (%s: %s); the run goes on, and "
                "`grouper report %s` tries again.",
                type(error).__name__,
                error,
                self.path,
            )
        now = time.monotonic()
        self._draw_from = now + (now - started) * (1 / DRAWING_SHARE - 1)

    def discard(self) -> None:
        """As `RunFolder.discard`, where this process has made the folder."""
        if self._is_new:
            super().discard()

    def close(self) -> None:
        """Draw, end the trackers (within `CLOSING_SECONDS`), and let another process write."""
        try:
            self.redraw()
        finally:  # Ctrl-C while it draws
            close_all(self._open or [])
            self._open = None
            if self._lock is not None:
                self._lock.release()

    def _send(self, record: Record) -> None:
        if self._open is None:
            self._open = [Background(name, build) for name, build in self._builders.items()]
        for tracker in self._open:
            tracker.put(record)


def _rewards(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of the rollouts that took part: the total, then each component that was scored."""
    values: dict[str, list[float]] = {}
    for row in rows:
        known = {"total": row["reward"], **row["rewards"]}
        for name, value in known.items():
            if row["advantage"] is not None and value is not None:
                values.setdefault(name, []).append(value)
    return values


# --- what a step says about the tokens of a few rollouts ------------------------------------------


class TokenLog:
    """Collects what the updates of a step say about the tokens of a few rollouts.

    Args:
        groups: of the step.
        advantages: per group, one for each scored rollout.
        count: groups whose tokens are recorded, those with a signal first; or "all".
    """

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        advantages: Sequence[Sequence[float]],
        count: int | Literal["all"],
    ) -> None:
        most = None if count == "all" else count
        chosen = sorted(range(len(groups)), key=lambda g: not any(advantages[g]))[:most]
        self._groups = {g: groups[g] for g in sorted(chosen)}
        # Rows of a batch are numbered as the scored rollouts are.
        scored = [
            (g, sample)
            for g, group in enumerate(groups)
            for sample, rollout in enumerate(group.rollouts)
            if rollout.reward.total is not None
        ]
        self._places = {n: place for n, place in enumerate(scored) if place[0] in self._groups}
        self._logprobs: dict[tuple[int, int], list[float]] = {}
        self._clipped: dict[tuple[int, int], set[int]] = {}

    def see(self, batch: TrainBatch, logprobs: Tensor, clipped: Tensor | None) -> None:
        """Keep what belongs to these rollouts, of a slice of an update.

        Args:
            batch: the slice.
            logprobs: [R, T], of the policy before the first update.
            clipped: [R, T] bool; None: nothing can be.
        """
        for row, number in enumerate(batch.sequence_ids.tolist()):
            if place := self._places.get(number):
                length = int(batch.completion_lengths[row])
                self._logprobs.setdefault(place, logprobs[row, :length].tolist())
                if clipped is not None:
                    places = clipped[row, :length].nonzero().flatten().tolist()
                    self._clipped.setdefault(place, set()).update(places)

    def records(
        self, processes: ProcessGroup, text_of: Callable[[int], str]
    ) -> dict[tuple[int, int], dict[str, Any]]:
        """(group, sample) -> columns of its row; every process calls this.

        Args:
            processes: each has seen other rows.
            text_of: the text of a token id.
        """
        for logprobs, clipped in processes.gather((self._logprobs, self._clipped)):
            self._logprobs = {**logprobs, **self._logprobs}
            for place, tokens in clipped.items():
                self._clipped.setdefault(place, set()).update(tokens)
        return {
            (g, sample): self._columns((g, sample), rollout.completion, text_of)
            for g, group in self._groups.items()
            for sample, rollout in enumerate(group.rollouts)
        }

    def _columns(
        self, place: tuple[int, int], completion: Completion, text_of: Callable[[int], str]
    ) -> dict[str, Any]:
        """Those of `RolloutRow` that have an entry per token."""
        known = {
            "logprobs": completion.logprobs,
            "trainer_logprobs": self._logprobs.get(place),
            "entropies": completion.entropies,
        }
        return {
            "token_texts": [text_of(token) for token in completion.token_ids],
            "clipped": sorted(self._clipped.get(place, ())),
            # Four decimals of a nat are enough to look at.
            **{
                name: [round(value, 4) for value in found] for name, found in known.items() if found
            },
        }
