"""Progress for humans: the line of a step, terminals and logs, `training.log`."""

from __future__ import annotations

import io
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from grouper.errors import RunFolderError
from grouper.runs import progress as progress_module
from grouper.runs.progress import Progress, end_logging, format_step, setup_logging
from grouper.types import StepReport, Tally

GRPO = {
    "reward/total": Tally.of([0.5, 1.0]),
    "policy/kl": Tally.of([0.00123]),
    "solve_rate": Tally.of([1, 1, 1, 0]),
    "groups/mixed": Tally.of([1, 0]),
    "groups/all_right": Tally.of([0, 1]),
    "groups/all_wrong": Tally.of([0, 0]),
    "completion/truncated": Tally.of([0, 0, 0, 1]),
    "completion/tokens": Tally.of([20, 24]),
    "policy/entropy": Tally.of([0.5]),
    "grad_norm": Tally.of([0.123]),
    "time.prefill": Tally.of([0.1]),
    "time.decode": Tally.of([0.5]),
    "time.grade": Tally.of([0.1]),
    "time.update": Tally.of([0.26]),
    "time.other": Tally.of([0.04]),
    "time.step": Tally.of([1.0]),
    "time.sampled_tokens_per_second": Tally.of([7000.4]),
    "time.trained_tokens_per_second": Tally.of([12345.0]),
    "time.mfu": Tally.of([0.314]),
}


def make_report(
    step: int = 3, tallies: dict[str, Tally] | None = None, events: tuple[str, ...] = ()
) -> StepReport:
    return StepReport(
        phase="grpo",
        step=step,
        tallies=GRPO if tallies is None else tallies,
        status="learning",
        events=events,
    )


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=60), out


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=160, force_terminal=True), out


@pytest.fixture
def log(tmp_path):
    handlers = setup_logging(tmp_path)
    yield tmp_path / "training.log"
    end_logging(handlers)


LINE = "grpo  3/60  reward 0.750  solved 75%  length 22  KL 0.0012  1.00 s"


def test_the_line_fits_and_the_long_one_says_everything():
    assert format_step(make_report(), 60) == LINE
    assert format_step(make_report(), 60, verbose=True) == (
        f"{LINE}  mixed 50%  all right 50%  all wrong 0%  truncated 25%  entropy 0.50  grad 0.12  "
        "sampled 7,000 tok/s  trained 12,345 tok/s  MFU 31.4%  prefill 0.10 s  decode 0.50 s  "
        "grade 0.10 s  update 0.26 s  other 0.04 s"
    )


def test_the_line_fits_a_hundred_columns_at_its_longest():
    values = {"reward/total": -1234.5678, "solve_rate": 1.0, "completion/tokens": 131072.0}
    values |= {"policy/kl": 1.2345e-10, "time.step": 12345.678}
    tallies = {name: Tally.of([value]) for name, value in values.items()}
    report = replace(make_report(99_999, tallies), status="no-signal:equal-rewards")
    assert len(format_step(report, 100_000)) <= 100


def test_an_sft_line():
    tallies = {
        "loss": Tally.of([0.5]),
        "tokens": Tally.of([1000]),
        "learning_rate": Tally.of([0.02]),
        "time.step": Tally.of([0.25]),
    }
    report = StepReport(phase="sft", step=1, tallies=tallies, status="skipped:not-finite")
    assert format_step(report) == "sft 1  loss 0.5000  0.25 s  skipped:not-finite"


def test_missing_and_empty_metrics_are_left_out():
    assert format_step(make_report(tallies={})) == "grpo 3"
    assert format_step(make_report(tallies={"grad_norm": Tally.of([])})) == "grpo 3"
    for name in GRPO:
        left = {key: value for key, value in GRPO.items() if key != name}
        assert "nan" not in format_step(make_report(tallies=left))


@pytest.mark.parametrize("make", [plain, terminal])
def test_every_step_has_one_line_that_stays(make):
    """U6: in a terminal and in a pipe."""
    console, out = make()
    progress = Progress(console=console)
    with progress.track("GRPO", total=25) as task:
        for step in range(1, 26):
            progress.step(make_report(step), 25)
            task.advance()
    lines = [line for line in out.getvalue().splitlines() if "reward" in line]
    steps = [re.findall(r"grpo +(\d+)/25", line) for line in lines]
    assert [int(step) for (step,) in steps] == [*range(1, 26)]
    if not console.is_terminal:
        assert out.getvalue().startswith("GRPO ...\n")
        assert "\x1b" not in out.getvalue()
    console, out = make()
    Progress(console=console, verbose=True).step(make_report(3), 25)
    assert "MFU 31.4%" in " ".join(out.getvalue().split())


def test_without_a_terminal_a_long_part_says_how_far_it_is(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    console, out = plain()
    with Progress(console=console).track("evaluating base", total=100) as task:
        for done in range(1, 101):
            now[0] += 1
            task(done, 100)
    assert out.getvalue().count("evaluating base: ") == 7
    assert "evaluating base: 30 of 100" in out.getvalue()


def shown_steps(out):
    return [int(step) for step in re.findall(r"^grpo +(\d+)/", out.getvalue(), re.MULTILINE)]


def report_steps(progress, now, seconds):
    for step in range(1, 401):
        now[0] += seconds
        progress.step(make_report(step), 400)


def test_without_a_terminal_a_long_phase_has_forty_lines_with_the_time_left(monkeypatch, log):
    """A batch job's output was 400 lines of SFT, and none said when it would end."""
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    console, out = plain()
    report_steps(Progress(console=console), now, seconds=3)
    assert shown_steps(out) == [1, *range(10, 401, 10)]
    lines = out.getvalue().splitlines()
    assert "left" not in lines[0] + lines[-1]
    # 200 steps of 3 s each, and 10 of them.
    assert lines[20].endswith("  10 min left")
    assert lines[39].endswith("  30 s left")
    assert log.read_text().count("/400") == 400  # the file has every one


def test_without_a_terminal_long_steps_have_a_line_each(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    console, out = plain()
    report_steps(Progress(console=console), now, seconds=100)
    assert shown_steps(out) == [*range(1, 401)]


def test_lines_that_a_recipe_asks_for_are_shown_without_a_terminal():
    console, out = plain()
    report_steps(Progress(console=console, log_every=2), [0.0], seconds=0)
    assert shown_steps(out) == [1, *range(2, 401, 2)]


def test_in_a_terminal_nested_bars_and_the_step_line_are_shown():
    console, out = terminal()
    progress = Progress(console=console)
    with progress.track("GRPO", total=2) as steps:
        progress.step(make_report(1), 2)
        steps.advance()
        with progress.track("evaluating", total=4) as task:
            task(3, 4)
        progress.say("a table")
        progress.step(make_report(2), 2)
    shown = out.getvalue()
    for text in ("GRPO", "evaluating", "grpo 1/2", "grpo 2/2", "a table"):
        assert text in shown
    with progress.track("again", total=1):
        pass
    assert "again" in out.getvalue()


@pytest.mark.parametrize("make", [plain, terminal])
def test_an_error_ends_the_bars_and_goes_on_its_way(make):
    console, out = make()
    progress = Progress(console=console)
    with pytest.raises(RuntimeError, match="boom"), progress.track("GRPO", total=2):
        raise RuntimeError("boom")
    assert "done in" not in out.getvalue()
    if console.is_terminal:
        hidden, shown = (out.getvalue().rfind(code) for code in ("\x1b[?25l", "\x1b[?25h"))
        assert 0 <= hidden < shown  # the cursor is back


def test_quiet_shows_nothing_and_still_logs(log):
    for console, out in (plain(), terminal()):
        progress = Progress(console=console, quiet=True)
        with progress.track("GRPO", total=1):
            progress.step(make_report(1), 1)
            progress.say("a table")
        assert out.getvalue() == ""
    assert "grpo 1/1" in log.read_text()


def test_a_line_stays_a_line_and_is_no_markup_without_a_terminal():
    console, out = plain()
    line = f"[bold]Measured before: {'/folder' * 40}"
    Progress(console=console).say(line)
    assert out.getvalue() == f"{line}\n"


def test_a_sample_is_shown_as_it_is_and_not_logged(log):
    """Square brackets in what a model wrote are no markup, and a log of a long run stays short."""
    for make in (plain, terminal):
        console, out = make()
        Progress(console=console).sample("Response: [red]4[/red]\nExtracted: [4]")
        assert "[red]4[/red]\nExtracted: [4]\n" in out.getvalue()
        quiet, out = make()
        Progress(console=quiet, quiet=True).sample("Response: 4")
        assert out.getvalue() == ""
    assert "Response" not in log.read_text()


def test_the_log_holds_every_nth_step_the_edges_and_all_events(log):
    console, _ = plain()
    progress = Progress(console=console, log_every=5)
    for step in range(1, 13):
        progress.step(make_report(step, events=("grader timeout",) if step == 3 else ()), 12)
    text = log.read_text()
    assert [
        line.split("grpo ")[1].split("/")[0].strip() for line in text.splitlines() if "/12" in line
    ] == [
        "1",
        "5",
        "10",
        "12",
    ]
    assert "grpo step 3: grader timeout" in text


def test_the_log_takes_any_text_and_is_continued(tmp_path, monkeypatch):
    # pytest would show the text in a report, which cannot carry half a character.
    monkeypatch.setattr(logging.getLogger("grouper"), "propagate", False)
    for text in ("first \ud83d", "second"):
        handlers = setup_logging(tmp_path)
        logging.getLogger("grouper.training").info("%s", text)
        end_logging(handlers)
    logging.getLogger("grouper.training").info("third")
    lines = (tmp_path / "training.log").read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["first \\ud83d", "second"]


def test_each_open_run_has_its_log_until_it_ends(tmp_path):
    said = logging.getLogger("grouper.training").info
    first, second = setup_logging(tmp_path / "a"), setup_logging(tmp_path / "b")
    again = setup_logging(tmp_path / "b")  # a run that was left open, as in a notebook
    said("both are open")
    end_logging(first)
    said("one is open")
    end_logging([*second, *again])
    said("none is open")
    logs = [(tmp_path / name / "training.log").read_text() for name in "ab"]
    found = [[line.split(": ", 1)[1] for line in log.splitlines()] for log in logs]
    assert found == [["both are open"], ["both are open", "one is open"]]


def test_warnings_and_only_they_reach_the_console(tmp_path):
    console, out = plain()
    handlers = setup_logging(tmp_path, console=console)
    logging.getLogger("grouper.training").info("a detail")
    logging.getLogger("grouper.training").warning("half of the completions are cut off")
    end_logging(handlers)
    assert out.getvalue() == "warning: half of the completions are cut off\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_log_that_cannot_be_written_does_not_stop_the_run(tmp_path, capsys):
    (tmp_path / "training.log").symlink_to("/dev/full")
    console, out = plain()
    handlers = setup_logging(tmp_path, console=console)
    logging.getLogger("grouper.training").info("a detail")
    logging.getLogger("grouper.training").info("another")
    end_logging(handlers)
    assert out.getvalue().count("can no longer be written") == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="cannot write here"):
        setup_logging(tmp_path / "file")
