"""TensorBoard: event files in `<run>/trackers/tensorboard/<phase>/`."""

from __future__ import annotations

import json
import sys
import time
from types import ModuleType
from typing import Any

from grouper.evaluation.result import EvaluationResult
from grouper.runs.sinks.base import Step, TrackedRun, evaluation_numbers, step_numbers

FLUSH_SECONDS = 10


class TensorBoardSink:
    """One folder of events a phase: `tensorboard --logdir outputs` draws them in one chart.

    Needs no network. TensorFlow is not imported, even where it is installed.

    Args:
        run: whose events they are.
        params: further keywords of TensorBoard's `EventFileWriter`.
    """

    def __init__(self, run: TrackedRun, **params: Any) -> None:
        # TensorBoard takes TensorFlow for its file system where it finds one, unless this exists.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event_pb2, self._open_writer = event_pb2, EventFileWriter
        self._scalar, self._histogram, self._text = scalar_pb, histogram_pb, text_pb
        self._folder = run.path / "trackers" / "tensorboard"
        # Indented by four: TensorBoard reads Markdown, in which that is code.
        lines = json.dumps(dict(run.recipe), indent=2).splitlines()
        self._recipe = "\n".join(f"    {line}" for line in lines)
        self._params = {"flush_secs": FLUSH_SECONDS, **params}
        self._writers: dict[str, Any] = {}

    def step(self, step: Step) -> None:
        report = step.report
        summaries = [self._scalar(n, value) for n, value in step_numbers(report).items()]
        summaries += [
            self._histogram(f"rewards/{name}", values) for name, values in step.rewards.items()
        ]
        self._add(report.phase, report.step, summaries)

    def evaluation(self, result: EvaluationResult) -> None:
        numbers = evaluation_numbers(result).items()
        self._add(result.phase, result.step, [self._scalar(n, value) for n, value in numbers])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _add(self, phase: str, step: int, summaries: list[Any]) -> None:
        if phase not in self._writers:
            self._writers[phase] = self._started(phase, step)
        for summary in summaries:
            self._write(phase, step, summary=summary)

    def _started(self, phase: str, step: int) -> Any:
        """A new file; what an earlier process wrote about this step and later ones is void."""
        writer = self._open_writer(str(self._folder / phase), **self._params)
        self._writers[phase] = writer
        log = self._event_pb2.SessionLog
        self._write(phase, step, session_log=log(status=log.START))
        self._write(phase, 0, summary=self._text("recipe", self._recipe))
        return writer

    def _write(self, phase: str, step: int, **content: Any) -> None:
        event = self._event_pb2.Event(wall_time=time.time(), step=step, **content)
        self._writers[phase].add_event(event)
