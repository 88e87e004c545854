"""The display of a run in progress: one line per step, bars, and `training.log`.

Everything is written to standard error. In a terminal bars show the progress of each task; anywhere
else (a file, a batch job, a notebook's log) long tasks print a line now and then instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from grouper.errors import duration, redact
from grouper.files import load_table, os_errors_as
from grouper.types import StepReport

logger = logging.getLogger(__name__)

# Seconds between lines of progress of a long task without a terminal, if it prints nothing else.
PLAIN_SECONDS = 15.0
# Lines of steps that a phase prints without a terminal, about.
PLAIN_LINES = 40
# Seconds after which the next step is printed in any case.
PLAIN_STEP_SECONDS = 60.0
# `time.*` metrics that add up to `time.step`, in the order in which they happen.
TIME_PARTS = ("prefill", "decode", "grade", "update", "other")

# Columns of the line of a step.
WIDTH = 100

_COLUMNS = load_table("grouper.runs", "columns.yaml")


def format_step(report: StepReport, total: int | None = None, *, verbose: bool = False) -> str:
    """Format a step on one line; metrics that are missing are left out.

    Args:
        report: of the step.
        total: steps of the phase.
        verbose: every metric; otherwise the line fits 100 columns.

    >>> from grouper.types import Tally
    >>> tallies = {"solve_rate": Tally.of([1, 0, 0, 1]), "grad_norm": Tally.of([0.25])}
    >>> format_step(StepReport(phase="grpo", step=3, tallies=tallies, status="learning"), 60)
    'grpo  3/60  solved 50%'
    """
    columns: list[Any] = []  # (template, metric)
    if "reward/total" not in report.tallies:  # the loss of GRPO is near 0 by construction
        columns.append(("loss {:.4f}", "loss"))
    columns += _COLUMNS["short"]
    if verbose:
        columns += _COLUMNS["rest"]
    step = str(report.step)
    if total:
        step = f"{step:>{len(str(total))}}/{total}"
    texts = [f"{report.phase} {step}"]
    for template, name in columns:
        if name in report.tallies and report.tallies[name].count:
            texts.append(template.format(report.mean(name)))
    if report.status != "learning":
        texts.append(report.status)
    line = "  ".join(texts)
    return line if verbose else line[:WIDTH]


class Task:
    """A long task in progress. Call it with (done, total), or advance it."""

    def __init__(self, show: Callable[[int, int | None], None], total: int | None) -> None:
        self._show = show
        self._total = total
        self.done = 0

    def __call__(self, done: int, total: int | None = None) -> None:
        self.done = done
        if total is not None:
            self._total = total
        self._show(done, self._total)

    def advance(self, count: int = 1) -> None:
        self(self.done + count)


class Progress:
    """Displays the progress of a run.

    Args:
        quiet: show nothing; `training.log` is still written.
        verbose: show every metric of a step.
        log_every: steps between lines, on the console and in `training.log`.
        console: default: standard error.

    Example:
        with progress.track("evaluating base", total=512) as task:
            evaluate(..., progress=task)
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        verbose: bool = False,
        log_every: int = 1,
        console: Console | None = None,
    ) -> None:
        # In a notebook, too, lines go to standard error: rich would make an output of each.
        self.console = console or Console(stderr=True, force_jupyter=False)
        self._quiet = quiet
        self._verbose = verbose
        self._log_every = log_every
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self._last_shown = time.monotonic()
        # Phase, number and time of the first step that was reported of the phase.
        self._first: tuple[str, int, float] | None = None

    @contextmanager
    def track(self, description: str, total: int | None = None) -> Iterator[Task]:
        """Show a long task; tasks may be nested (an evaluation inside training)."""
        logger.info("%s: started", description)
        start = time.monotonic()
        if not self._live:
            self._print(f"{description} ...")
        with self.within(description, total) as task:
            yield task
        seconds = time.monotonic() - start
        logger.info("%s: done in %.1f s", description, seconds)
        # In a terminal, a task that took less than a second gets no line.
        if seconds >= 1 or not self._live:
            self._print(f"{description}: done in {seconds:.1f} s")

    @contextmanager
    def within(self, description: str, total: int | None = None) -> Iterator[Task]:
        """Show a task within a step: a bar in a terminal, else a line now and then."""
        if not self._live:
            yield Task(lambda done, total: self._now_and_then(description, done, total), total)
            return
        bars = self._bars
        bars.start()
        bar = bars.add_task(description, total=total)
        try:
            yield Task(lambda done, total: bars.update(bar, completed=done, total=total), total)
        finally:
            bars.remove_task(bar)
            if not bars.tasks:
                bars.stop()

    def step(self, report: StepReport, total: int | None = None) -> None:
        """Show a training step in a line that stays, and write all of it to `training.log`.

        Args:
            report: of the step.
            total: steps of the phase.
        """
        # For every step: the first one starts the clock of the phase.
        time_left = self._time_left(report, total)
        if report.step in (1, total) or report.step % self._log_every == 0:
            logger.info("%s", format_step(report, total, verbose=True))
            line = format_step(report, total, verbose=self._verbose)
            if self._live:
                self._print(line)
            elif self._is_due(report.step, total):
                self._print(line + time_left)
        for event in report.events:
            logger.info("%s step %d: %s", report.phase, report.step, event)

    def say(self, renderable: RenderableType) -> None:
        """Print something above the bars; text is written to `training.log`, too."""
        if isinstance(renderable, str):
            logger.info("%s", renderable)
            self._print(renderable)
        elif not self._quiet:
            self.console.print(renderable)

    def sample(self, text: str) -> None:
        """Print text of a model above the bars, without markup; not written to `training.log`."""
        if not self._quiet:
            self.console.print(Text(text), soft_wrap=True)

    def mute(self) -> None:
        """Show nothing more, warnings included; `training.log` is still written."""
        self._quiet = True
        self.console.quiet = True

    @property
    def _live(self) -> bool:
        """Whether bars are shown."""
        return self.console.is_terminal and not self._quiet

    def _is_due(self, step: int, total: int | None) -> bool:
        """Return whether a step has a line on a console that is not a terminal.

        With `log_every` the recipe decides; `training.log` has every step.
        """
        if total is None or self._log_every > 1 or step in (1, total):
            return True
        steps_per_line = -(-total // PLAIN_LINES)
        seconds_since_line = time.monotonic() - self._last_shown
        return step % steps_per_line == 0 or seconds_since_line >= PLAIN_STEP_SECONDS

    def _time_left(self, report: StepReport, total: int | None) -> str:
        """Return in words how long the rest of the phase takes at the average pace.

        The text is empty at the first step, and after the last.
        """
        seconds = time.monotonic()
        if self._first is None or self._first[0] != report.phase or self._first[1] >= report.step:
            self._first = (report.phase, report.step, seconds)
            return ""
        if total is None or report.step >= total:
            return ""
        _, first_step, first_seconds = self._first
        seconds_per_step = (seconds - first_seconds) / (report.step - first_step)
        return f"  {duration(seconds_per_step * (total - report.step))} left"

    def _print(self, line: str) -> None:
        """Print a line."""
        self._last_shown = time.monotonic()
        if not self._quiet:
            # Outside a terminal a line is not wrapped, whatever width the log reports.
            self.console.print(Text(line), soft_wrap=not self._live)

    def _now_and_then(self, description: str, done: int, total: int | None) -> None:
        """Print the progress of a task, unless a line was printed a short time ago."""
        if time.monotonic() - self._last_shown >= PLAIN_SECONDS:
            line = f"{description}: {done}"
            if total:
                line += f" of {total}"
            self._print(line)


class _LogFile(logging.FileHandler):
    """A log file that is closed when it cannot be written: the log must never stop a run."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        with suppress(OSError):  # the rest of the buffer cannot be written either
            end_logging([self])
        logger.warning("%s can no longer be written: %s", self.baseFilename, record.getMessage())


class _OnConsole(logging.Handler):
    """Shows warnings above the bars instead of through them."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno < logging.ERROR else "bold red"
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        self._console.print(Text(text, style=style), soft_wrap=True)


class _Hiding(logging.Filter):
    """Removes secrets from the messages of libraries and of a user's code."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = redact(record.getMessage())
        record.args = ()
        return True


def setup_logging(run_dir: Path | None, *, console: Console | None = None) -> list[logging.Handler]:
    """Send the library's messages to `training.log`, and its warnings to the console.

    Call it after `RunFolder.create`, which may clear the folder. A console replaces an earlier one,
    and a file replaces the same file; each open run has a file of its own.

    Args:
        run_dir: the run folder; None for no file.
        console: the one that `Progress` uses; None for no warnings on the console.

    Returns:
        The new handlers, for `end_logging`.

    Raises:
        RunFolderError: the file cannot be opened.
    """
    root = logging.getLogger("grouper")
    root.setLevel(logging.INFO)
    handlers: list[logging.Handler] = []
    if console is not None:
        handlers.append(_OnConsole(console))
    if run_dir is not None:
        path = run_dir / "training.log"
        with os_errors_as(path):
            run_dir.mkdir(parents=True, exist_ok=True)
            handlers.append(_LogFile(path, encoding="utf-8", errors="backslashreplace"))
    if not handlers:
        # Without a handler Python prints warnings itself, on each of several processes.
        handlers.append(logging.NullHandler())
    for handler in handlers:
        handler.name = f"grouper on {getattr(handler, 'baseFilename', 'the console')}"
        end_logging([earlier for earlier in root.handlers if earlier.name == handler.name])
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
        handler.addFilter(_Hiding())
        root.addHandler(handler)
    return handlers


def end_logging(handlers: Iterable[logging.Handler]) -> None:
    """Remove and close the handlers of `setup_logging`."""
    for handler in handlers:
        logging.getLogger("grouper").removeHandler(handler)
        handler.close()
