"""The run folder of an open run: rank 0 locks and writes it, and passes each record to trackers."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from grouper.config.loading import resolved_yaml
from grouper.config.schema import Recipe
from grouper.errors import GrouperError, RunFolderError
from grouper.evaluation.result import EvaluationResult
from grouper.files import read_json
from grouper.models.process_group import ProcessGroup
from grouper.printable import printable
from grouper.rewards.call import reward_label
from grouper.runs.folder import Intent, LostItemsError, RunFolder
from grouper.runs.lock import RunLock
from grouper.runs.records import RunEnd, RunInfo
from grouper.runs.samples import END
from grouper.runs.trackers import Background, Record, Sink, close_all, find_trackers
from grouper.types import Completion, RolloutGroup, StepReport

if TYPE_CHECKING:
    from torch import Tensor

    from grouper.algorithms.batching import TrainBatch

# (number of the group, number of the sample in it).
RolloutId = tuple[int, int]

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")

log = logging.getLogger(__name__)

# Share of a run's time that drawing pictures may take before its end.
DRAWING_SHARE = 0.05
# Steps between two tables of completions for trackers, unless the recipe prints them more often.
TABLE_EVERY = 25
# Rows of such a table at most.
TABLE_ROWS = 16
TABLE_COLUMNS = ("problem_id", "prompt", "completion", "extracted", "answer", "verdict", "reward")


_GONE = "the folder was deleted, moved or replaced while the run went on"


def _on_rank0(
    method: Callable[Concatenate[Any, Parameters], Value],
) -> Callable[Concatenate[Any, Parameters], Value]:
    """Make a method that every process calls and rank 0 runs; all get its result.

    The method raises `RunFolderError` if the folder of this run is gone. Otherwise its records
    would be half a run that nothing can continue, or would be among the files of another one.
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
    """Opens a run folder, new or continued, and writes the record of the run into it.

    Every process of the run has one. Methods wrapped in `_on_rank0` are called by all of them, and
    never from work that rank 0 does alone. Trackers get each record once it is written. They are
    opened by the first record: a run that is refused at its start opens none.

    Pictures are drawn by rank 0 at evaluations and on closing, whatever ends the run: `draw` is
    called with the folder. A failure of it stops nothing.

    Args:
        recipe: of the run; names the folder and the trackers.
        processes: of the run.
        intent: `resume`, `overwrite` and `allow_changes` of `RunFolder.create`.
        info: description of the run.

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
        """Machine and time of the run's start, which identify it."""
        self._builders: dict[str, Callable[[], Sink]] = {}
        self._open: list[Background] | None = None
        """The trackers, once they are opened."""
        self._weights = {reward_label(reward.name): reward.weight for reward in recipe.rewards}
        self._sampled: list[Mapping[str, Any]] = []
        """The rollouts of the step that is recorded next, for trackers."""
        self._table_every = recipe.tracking.print_every_steps or TABLE_EVERY
        self.draw: Callable[[RunFolder], object] | None = None
        self._undrawn = False
        """Whether something was recorded since the last drawing."""
        self._draw_from = 0.0
        """Time from which pictures may be drawn again."""
        try:
            processes.on_rank0(lambda: self._begin_record(recipe, intent, info))
        except BaseException:  # Ctrl-C, too, must release the lock
            self.close()
            raise

    def _begin_record(self, recipe: Recipe, intent: Intent, info: RunInfo) -> None:
        """Check, lock and open the folder, and find the trackers."""
        text = resolved_yaml(recipe)
        # Before the lock, which makes the folder: a refused folder is not touched.
        self._is_new = not self.check(info.recipe_hash, text, **intent)
        self._lock = RunLock(self.path)
        RunFolder.create(self.path, info, recipe_yaml=text, **intent)
        self.write_end(None)
        self._host = self.read_info().host
        self._builders = find_trackers(recipe, self.path, started=str(self._host["started"]))

    recipe_hashes = _on_rank0(RunFolder.recipe_hashes)
    record_resolved = _on_rank0(RunFolder.record_resolved)
    changes_begin_at = _on_rank0(RunFolder.changes_begin_at)
    missing_records = _on_rank0(RunFolder.missing_records)
    read_evaluation = _on_rank0(RunFolder.read_evaluation)
    truncate_to = _on_rank0(RunFolder.truncate_to)

    @_on_rank0
    def append_metrics(self, report: StepReport) -> None:
        super().append_metrics(report)
        self._undrawn = True
        table = []
        if report.step == 1 or report.step % self._table_every == 0:
            table = _completions_table(self._sampled)
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
        """Read an evaluation; None if its items were lost, so that the run measures it again."""
        try:
            return super()._load_evaluation(name)
        except LostItemsError as error:
            log.warning("%s It is measured again where its model is still there.", error.what)
            return None

    def redraw(self) -> None:
        """Draw the pictures again, on rank 0, if anything was recorded since the last time."""
        if self.draw is None or self.processes.rank > 0 or not self._undrawn:
            return
        started = time.monotonic()
        self._undrawn = False
        try:
            self.draw(RunFolder(self.path))
        except Exception as error:  # noqa: BLE001 - a run does not need its pictures
            log.warning(
                "The pictures of the run could not be drawn (%s: %s); the run continues, and "
                "`grouper report %s` tries again.",
                type(error).__name__,
                error,
                self.path,
            )
        ended = time.monotonic()
        self._draw_from = ended + (ended - started) * (1 / DRAWING_SHARE - 1)

    def discard(self) -> None:
        """Discard the folder as `RunFolder.discard` does, if this process has made it."""
        if self._is_new:
            super().discard()

    def close(self, end: RunEnd | None = None) -> None:
        """Draw, end the trackers (within `CLOSING_SECONDS`), and let another process write.

        Args:
            end: how the run ends, which its report shows; None: it has not begun.
        """
        try:
            if end is not None:
                self._record_end(end)
            self.redraw()
        finally:  # also on Ctrl-C while it draws
            close_all(self._open or [])
            self._open = None
            if self._lock is not None:
                self._lock.release()

    def _record_end(self, end: RunEnd) -> None:
        """Write how the run ends; its report is then drawn again, since it shows this."""
        if self._lock is None or not self._is_ours():
            return
        try:
            self.write_end(end)
        except GrouperError as error:  # the disk is full, which may be why the run ends
            log.warning("%s", error.paragraph())
        if not (self.is_untrained() and self.is_unmeasured()):
            self._undrawn = True

    def _is_ours(self) -> bool:
        """Return whether the folder is still there, and still that of this run."""
        try:
            return self.read_info().host == self._host
        except GrouperError:
            return False

    def _send(self, record: Record) -> None:
        """Send a record to all trackers; the first one opens them."""
        if self._open is None:
            self._open = [Background(name, build) for name, build in self._builders.items()]
        for tracker in self._open:
            tracker.put(record)


def _completions_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a few rollouts of as many problems as possible, as rows of text."""
    first_samples = sorted(rows, key=lambda row: (row["sample"], row["group"]))
    return [
        {name: printable(str(row[name]))[-END:] for name in TABLE_COLUMNS}
        for row in first_samples[:TABLE_ROWS]
    ]


def _rewards(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the rewards of rollouts with an advantage: the total, then each scored component."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row["advantage"] is None:
            continue
        rewards = {"total": row["reward"], **row["rewards"]}
        for name, value in rewards.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return values


# --- the tokens of a few rollouts -----------------------------------------------------------------


class TokenLog:
    """Collects values of the tokens of a few rollouts from the updates of a step.

    Args:
        groups: of the step.
        advantages: per group, one for each scored rollout.
        count: number of groups whose tokens are recorded, those with a signal first; or "all".
    """

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        advantages: Sequence[Sequence[float]],
        count: int | Literal["all"],
    ) -> None:
        signal_first = sorted(range(len(groups)), key=lambda number: not any(advantages[number]))
        recorded = signal_first if count == "all" else signal_first[:count]
        self._groups = {number: groups[number] for number in sorted(recorded)}
        # Sequence id -> rollout. The rows of a batch are numbered as the scored rollouts are.
        self._rollout_of_row: dict[int, RolloutId] = {}
        sequence_id = 0
        for number, group in enumerate(groups):
            for sample, rollout in enumerate(group.rollouts):
                if rollout.reward.total is None:
                    continue
                if number in self._groups:
                    self._rollout_of_row[sequence_id] = (number, sample)
                sequence_id += 1
        self._logprobs: dict[RolloutId, list[float]] = {}
        self._clipped: dict[RolloutId, set[int]] = {}

    def observe(self, batch: TrainBatch, logprobs: Tensor, clipped: Tensor | None) -> None:
        """Record the values of these rollouts in a slice of an update.

        Args:
            batch: the slice.
            logprobs: [R, T], of the policy before the first update.
            clipped: [R, T] bool; None: no token can be clipped.
        """
        for row, sequence_id in enumerate(batch.sequence_ids.tolist()):
            rollout_id = self._rollout_of_row.get(sequence_id)
            if rollout_id is None:
                continue
            length = int(batch.completion_lengths[row])
            self._logprobs.setdefault(rollout_id, logprobs[row, :length].tolist())
            if clipped is not None:
                positions = clipped[row, :length].nonzero().flatten().tolist()
                self._clipped.setdefault(rollout_id, set()).update(positions)

    def records(
        self, processes: ProcessGroup, text_of: Callable[[int], str]
    ) -> dict[RolloutId, dict[str, Any]]:
        """Return the columns of each rollout's row; every process calls this.

        Args:
            processes: their rows are different ones.
            text_of: token id -> text.

        Returns:
            (group, sample) -> columns.
        """
        for logprobs, clipped in processes.gather((self._logprobs, self._clipped)):
            self._logprobs = {**logprobs, **self._logprobs}
            for rollout_id, positions in clipped.items():
                self._clipped.setdefault(rollout_id, set()).update(positions)
        columns = {}
        for number, group in self._groups.items():
            for sample, rollout in enumerate(group.rollouts):
                rollout_id = (number, sample)
                columns[rollout_id] = self._columns(rollout_id, rollout.completion, text_of)
        return columns

    def _columns(
        self, rollout_id: RolloutId, completion: Completion, text_of: Callable[[int], str]
    ) -> dict[str, Any]:
        """Return the columns of `RolloutRow` that have an entry per token."""
        columns: dict[str, Any] = {
            "token_texts": [text_of(token) for token in completion.token_ids],
            "clipped": sorted(self._clipped.get(rollout_id, ())),
        }
        values_by_name = {
            "logprobs": completion.logprobs,
            "trainer_logprobs": self._logprobs.get(rollout_id),
            "entropies": completion.entropies,
        }
        for name, values in values_by_name.items():
            if values:
                # Four decimals of a nat are enough for display.
                columns[name] = [round(value, 4) for value in values]
        return columns
