"""`grouper grade` and `grade-agreement`: what the grader says, and whether to believe it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from grouper.grading.agreement import Agreement
    from grouper.types import AnswerContract, Grade

EXAMPLES = """\b
Examples:
  grouper grade 'so \\boxed{0.5}' --answer '\\frac12'
  grouper grade '<answer>18 dollars</answer>' --answer 18 --format xml
  cat completion.txt | grouper grade - --answer 42
"""
AGREEMENT_EXAMPLES = """\b
Examples:
  grouper grade-agreement completions.jsonl --format boxed
  grouper grade-agreement outputs/demo/rollouts/grpo-000001.jsonl.gz --format compact
"""

format_option = click.option(
    "--format",
    "format_",
    metavar="FORMAT",
    help="Where the answer stands: a prompt format, `hashes` or `last-number`.  "
    "[default: what the text looks like]",
)
timeout_option = click.option(
    "--timeout", default=2.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
    help="Seconds for one pair on the symbolic rung.",
)  # fmt: skip


@click.command("grade", epilog=EXAMPLES)
@click.argument("text")
@click.option("--answer", required=True, help="The reference answer.")
@format_option
@timeout_option
def grade_command(text: str, *, answer: str, format_: str | None, timeout: float) -> None:
    """Grade one completion TEXT (`-`: standard input) against a reference, and show every stage:
    what strict and lenient extraction find, which rung decides, the verdict, why, and the time.
    """
    from grouper.config.schema import GradingConfig
    from grouper.grading import Grader, check_reference, extract, extract_lenient

    text = sys.stdin.read() if text == "-" else text
    name = format_ or _looks_like(text)
    contract = _contract(name)
    problem = check_reference(answer)
    with Grader(contract, GradingConfig(timeout_seconds=timeout)) as grader:
        strict = grader.submit(text, answer).result()
        lenient = grader.submit_lenient(text, answer).result()
    found, loosely = extract(text, contract), extract_lenient(text, contract)
    chosen = "" if format_ else "  (by the look of the text; --format names another)"
    lines = {
        "format": f"{name}{chosen}",
        "reference": f"{_shown(answer)}  ({problem or 'readable, equals itself'})",
        "strict": f"{_shown(found.answer)}  ({found.reason})",
        "lenient": f"{_shown(loosely.answer)}  ({loosely.reason})",
        "verdict": _verdict(strict),
        "leniently": _verdict(lenient),
    }
    for label, value in lines.items():
        click.echo(f"{label:<10} {value}")


def _verdict(grade: Grade) -> str:
    colour = "green" if grade.correct else "yellow" if grade.extracted is None else "red"
    verdict = click.style(grade.verdict.value, fg=colour, bold=True)
    return f"{verdict}  rung {grade.rung}, {1000 * grade.seconds:.2f} ms: {_shown(grade.reason)}"


def _shown(text: str | None, length: int = 200) -> str:
    """Text that cannot move the cursor or fill the screen."""
    if text is None:
        return "none"
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: length + 1])
    return shown if len(text) <= length else f"{shown[:length]}..."


def _looks_like(text: str) -> str:
    if "<answer>" in text:
        return "think" if "</think>" in text else "xml"
    if "<SOLUTION>" in text:
        return "tags"
    return "hashes" if "####" in text and "box" not in text else "boxed"


def _contract(name: str) -> AnswerContract:
    from grouper.prompts.formats import FORMATS, TURN_MARKERS
    from grouper.types import AnswerContract, AnswerKind

    kinds = {"hashes": AnswerKind.HASHES, "last-number": AnswerKind.LAST_NUMBER}
    if name in kinds:
        return AnswerContract(kind=kinds[name], turn_markers=TURN_MARKERS)
    if name not in FORMATS:
        raise ConfigError(
            f"there is no prompt format {name!r}",
            where="--format",
            fix=did_you_mean(name, [*FORMATS, *kinds]),
        )
    return FORMATS[name].contract


TEXT_COLUMNS = ("text", "completion", "response", "prediction", "output")
ANSWER_COLUMNS = ("answer", "reference", "ground_truth", "gold", "expected_answer")


@click.command("grade-agreement", epilog=AGREEMENT_EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@format_option
@timeout_option
@click.option("--text", "text_column", help="The column of completions.")
@click.option("--answer", "answer_column", help="The column of references.")
@click.option("--show", default=20, show_default=True, help="Disagreements to print.")
def grade_agreement_command(
    file: Path,
    *,
    format_: str | None,
    timeout: float,
    text_column: str | None,
    answer_column: str | None,
    show: int,
) -> None:
    """Grade the completions in FILE with our grader and with Math-Verify, and list where they
    differ.

    FILE holds one row a line, or is a stored file of rollouts or evaluation items. Math-Verify is
    given the answer that we extracted, in a process of its own with a deadline.
    """
    from grouper.config.schema import GradingConfig
    from grouper.grading.agreement import compare_with_math_verify

    rows = _rows(file)
    texts = _column(rows, text_column, TEXT_COLUMNS, file)
    references = _column(rows, answer_column, ANSWER_COLUMNS, file)
    name = format_ or _looks_like(texts[0])
    settings = GradingConfig(timeout_seconds=timeout)
    _tell(compare_with_math_verify(texts, references, _contract(name), settings), name, show)


def _rows(file: Path) -> list[dict[str, Any]]:
    from grouper.data.reading import read_files
    from grouper.files import read_lines

    rows = list(read_lines(file)) if file.suffix == ".gz" else read_files((file,))
    if not rows:
        raise DataError("there are no rows in it", where=str(file))
    return [dict(row) for row in rows]


def _column(
    rows: list[dict[str, Any]], asked: str | None, usual: tuple[str, ...], file: Path
) -> list[str]:
    present = {name for row in rows for name in row}
    names = [name for name in ((asked,) if asked else usual) if name in present]
    if not names:
        raise DataError(
            f"there is no column {asked or ' or '.join(usual)}",
            where=str(file),
            fix=f"Name one with --text or --answer. Columns: {', '.join(sorted(present))}.",
        )
    values = [row.get(names[0]) for row in rows]
    return ["" if value is None else str(value) for value in values]


def _tell(agreement: Agreement, name: str, show: int) -> None:
    click.echo(f"{len(agreement.compared):,} answers compared, by format {name}", nl=False)
    click.echo(f"; {agreement.left_out:,} had no answer, or a reference nobody can read.")
    if not agreement.compared:
        click.echo("Nothing was compared: name the format of the completions with --format.")
    for (ours, theirs), count in agreement.counts.items():
        click.echo(f"  {count:>7,}  ours {ours}, Math-Verify {theirs}")
    apart = {(pair.ours.extracted, pair.reference): pair for pair in agreement.disagreements}
    total = len(agreement.disagreements)
    click.echo(f"{total:,} disagreements, on {len(apart):,} different pairs")
    for pair in list(apart.values())[:show]:
        answer, reference = _shown(pair.ours.extracted, 80), _shown(pair.reference, 80)
        click.echo(f"  {answer}  against  {reference}")
        click.echo(
            f"    ours {pair.ours.verdict.value} ({pair.ours.rung}: {_shown(pair.ours.reason)}); "
            f"Math-Verify {pair.theirs.value} ({_shown(pair.why, 120)})"
        )
    if len(apart) > show:
        click.echo(f"  and {len(apart) - show:,} more")
