"""What a person sees while a run goes on: one line per step, bars, and `training.log`.

Everything is written to standard error. In a terminal bars show how far each part is; anywhere else
(a file, a batch job, a notebook's log) long parts print a line now and then instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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

from grouper.errors import duration, hidden
from grouper.files import refusing, table
from grouper.types import StepReport

logger = logging.getLogger(__name__)

# Without a terminal, the progress of a long part that prints nothing else is printed this often.
PLAIN_SECONDS = 15.0
# There a phase prints about so many lines of steps, and one a minute where steps take long.
PLAIN_LINES = 40
PLAIN_STEP_SECONDS = 60.0
# `time.*` metrics that add up to `time.step`, in the order in which they happen.
TIME_PARTS = ("prefill", "decode", "grade", "update", "other")

# Columns of the line of a step.
WIDTH = 100

_COLUMNS = table("grouper.runs", "columns.yaml")


def format_step(report: StepReport, total: int | None = None, *, verbose: bool = False) -> str:
    """One line about a step; metrics that are missing are left out.

    Args:
        report: what the step did.
        total: steps of the phase.
        verbose: every metric; otherwise the line fits 100 columns.

    >>> from grouper.types import Tally
    >>> tallies = {"solve_rate": Tally.of([1, 0, 0, 1]), "grad_norm": Tally.of([0.25])}
    >>> format_step(StepReport(phase="grpo", step=3, tallies=tallies, status="learning"), 60)
    'grpo  3/60  solved 50%'
    """
    # The loss of GRPO is near 0 by construction, so it is not shown.
    loss = () if "reward/total" in report.tallies else (("loss {:.4f}", "loss"),)
    count = f"{report.step:>{len(str(total))}}/{total}" if total else str(report.step)
    shown = [
        form.format(report.mean(name))
        for form, name in (*loss, *_COLUMNS["short"], *(_COLUMNS["rest"] if verbose else ()))
        if name in report.tallies and report.tallies[name].count
    ]
    status = [] if report.status == "learning" else [report.status]
    line = "  ".join([f"{report.phase} {count}", *shown, *status])
    return line if verbose else line[:WIDTH]


class Task:
    """One long part in progress. Call it with (done, total), or advance it."""

    def __init__(self, show: Callable[[int, int | None], None], total: int | None) -> None:
        self._show = show
        self._total = total
        self.done = 0

    def __call__(self, done: int, total: int | None = None) -> None:
        self.done = done
        self._total = total if total is not None else self._total
        self._show(done, self._total)

    def advance(self, count: int = 1) -> None:
        self(self.done + count)


class Progress:
    """Shows how far a run is.

    Args:
        quiet: show nothing; `training.log` is still written.
        verbose: show every metric of a step.
        log_every: steps between lines, here and in `training.log`.
        console: where to show it; standard error by default.

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
        self.console = console or Console(stderr=True)
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
        # The phase, number and time of the first step of it that was reported.
        self._first: tuple[str, int, float] | None = None

    @contextmanager
    def track(self, description: str, total: int | None = None) -> Iterator[Task]:
        """Show one long part; parts may be nested (an evaluation inside training)."""
        logger.info("%s: started", description)
        start = time.monotonic()
        if not self._live:
            self._print(f"{description} ...")
        with self.within(description, total) as task:
            yield task
        seconds = time.monotonic() - start
        logger.info("%s: done in %.1f s", description, seconds)
        # In a terminal, a part that took less than a second gets no line.
        if seconds >= 1 or not self._live:
            self._print(f"{description}: done in {seconds:.1f} s")

    @contextmanager
    def within(self, description: str, total: int | None = None) -> Iterator[Task]:
        """As `track`, for a part of one step: a bar in a terminal, else a line now and then."""
        if not self._live:
            yield Task(lambda done, total: self._now_and_then(description, done, total), total)
            return
        bars = self._bars
        bars.start()
        row = bars.add_task(description, total=total)
        try:
            yield Task(lambda done, total: bars.update(row, completed=done, total=total), total)
        finally:
            bars.remove_task(row)
            if not bars.tasks:
                bars.stop()

    def step(self, report: StepReport, total: int | None = None) -> None:
        """Show a training step in a line that stays, and write all of it to `training.log`.

        Args:
            report: what the step did.
            total: steps of the phase.
        """
        left = self._time_left(report, total)
        if report.step in (1, total) or report.step % self._log_every == 0:
            logger.info("%s", format_step(report, total, verbose=True))
            line = format_step(report, total, verbose=self._verbose)
            if self._live:
                self._print(line)
            elif self._is_due(report.step, total):
                self._print(line + left)
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
        """Print what a model wrote, above the bars and nowhere else; no part of it is markup."""
        if not self._quiet:
            self.console.print(Text(text), soft_wrap=True)

    def mute(self) -> None:
        """Show nothing from now on, warnings included; `training.log` is still written."""
        self._quiet = self.console.quiet = True

    @property
    def _live(self) -> bool:
        return self.console.is_terminal and not self._quiet

    def _is_due(self, step: int, total: int | None) -> bool:
        """Whether a step has a line on a console that is no terminal.

        A recipe that sets `log_every` gets what it says; `training.log` keeps every step.
        """
        if total is None or self._log_every > 1 or step in (1, total):
            return True
        waited = time.monotonic() - self._last_shown
        return step % -(-total // PLAIN_LINES) == 0 or waited >= PLAIN_STEP_SECONDS

    def _time_left(self, report: StepReport, total: int | None) -> str:
        """How long the rest of the phase takes at the pace so far; in a terminal the bar has it."""
        now = time.monotonic()
        if self._first is None or self._first[0] != report.phase or self._first[1] >= report.step:
            self._first = (report.phase, report.step, now)
            return ""
        if total is None or report.step >= total:
            return ""
        _, first, began = self._first
        left = (now - began) / (report.step - first) * (total - report.step)
        return f"  {duration(left)} left"

    def _print(self, line: str) -> None:
        self._last_shown = time.monotonic()
        if not self._quiet:
            # A log line is one line, whatever width the log reports.
            self.console.print(Text(line), soft_wrap=not self._live)

    def _now_and_then(self, description: str, done: int, total: int | None) -> None:
        if time.monotonic() - self._last_shown >= PLAIN_SECONDS:
            self._print(f"{description}: {done}" + (f" of {total}" if total else ""))


class _LogFile(logging.FileHandler):
    """A log that gives up when it cannot be written: the log may never stop a run."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        with suppress(OSError):  # what is left in the buffer cannot be written either
            end_logging([self])
        logger.warning("%s can no longer be written: %s", self.baseFilename, record.getMessage())


class _OnConsole(logging.Handler):
    """Warnings, shown above the bars instead of through them."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno < logging.ERROR else "bold red"
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        self._console.print(Text(text, style=style), soft_wrap=True)


class _Hiding(logging.Filter):
    """Removes secrets from the messages of libraries and of a user's own code."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = hidden(record.getMessage()), ()
        return True


def setup_logging(run_dir: Path | None, *, console: Console | None = None) -> list[logging.Handler]:
    """Send the library's messages to `training.log`, and its warnings to the console.

    Call it after `RunFolder.create`, which may clear the folder. A console takes the place of an
    earlier one, and a file that of the same one; each open run has a file of its own.

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
    handlers: list[logging.Handler] = [] if console is None else [_OnConsole(console)]
    if run_dir is not None:
        path = run_dir / "training.log"
        with refusing(path):
            run_dir.mkdir(parents=True, exist_ok=True)
            handlers.append(_LogFile(path, encoding="utf-8", errors="backslashreplace"))
    # Without any, Python prints warnings itself: of several processes each would print them all.
    handlers = handlers or [logging.NullHandler()]
    for handler in handlers:
        handler.name = f"grouper on {getattr(handler, 'baseFilename', 'the console')}"
        end_logging([earlier for earlier in root.handlers if earlier.name == handler.name])
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
        handler.addFilter(_Hiding())
        root.addHandler(handler)
    return handlers


def end_logging(handlers: Iterable[logging.Handler]) -> None:
    """Stop sending messages where `setup_logging` sent them."""
    for handler in handlers:
        logging.getLogger("grouper").removeHandler(handler)
        handler.close()
