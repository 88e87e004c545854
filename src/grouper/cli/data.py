"""`grouper data`: list sources, show, audit and prepare problems, measure pass rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper.cli import options
from grouper.cli.commands import Group
from grouper.cli.text import definitions, flow, progress, short, some, warn, write_rows
from grouper.errors import ConfigError, did_you_mean, plural
from grouper.files import require_writable
from grouper.printable import printable

if TYPE_CHECKING:
    from grouper.config.schema import Recipe, SourceConfig
    from grouper.data import Overlap, ProblemSet
    from grouper.data.audit import Audit
    from grouper.types import Problem

EXAMPLES = """
grouper data list
grouper data show gsm8k --path ./gsm8k --split test
grouper data show prompt-response --path ./sft.jsonl only_correct=true
grouper data prepare openmath-mini numeric_only=true limit=5000
grouper data audit demo                              every part of a recipe, and its leaks
grouper data audit math --path ./math --split train --split validation
grouper data audit mine.jsonl --output quarantine.jsonl
grouper data difficulty demo                         pass rates for `grpo.difficulty`
"""
PREPARE_EXAMPLES = """
grouper data prepare gsm8k --split train --split test
grouper data prepare openmath-mini numeric_only=true limit=5000
grouper data prepare prompt-response --path sft.jsonl only_correct=true unique=128
grouper data prepare numina-tir validation_share=0.1 --output prepared/numina
grouper data prepare hub --path owner/name streaming=true limit=20000 shuffle=0
grouper data prepare ./mine.yaml                       every part of a recipe
"""
DIFFICULTY_EXAMPLES = r"""
grouper data difficulty demo --model outputs/demo/sft/final --samples 8
grouper run demo name=in-band \
    "grpo.difficulty={path: outputs/demo/pass_rates.jsonl, band: [0.1, 0.9]}"
"""

path_of_source = click.option(
    "--path", metavar="PATH", help="Local copy of the source, or the Hub name for `hub`."
)
splits_of_source = click.option(
    "--split",
    "splits",
    multiple=True,
    metavar="NAME",
    help="Split to read; several are checked for overlap, the first one as training data.  "
    "[default: the source's first]",
)


@click.group("data", cls=Group, examples=EXAMPLES)
def data() -> None:
    """List data sources; show, audit and prepare problems.

    SOURCE is a source from the list, a file or folder, or a recipe, which stands for all its
    parts. Give a file or folder that has the name of a source or recipe as a path (./demo).
    """


@data.command("list")
def list_sources() -> None:
    """List the data sources.

    These are the names that `data.*.source` of a recipe and SOURCE accept, with their places on
    the Hub.
    """
    from grouper.data import SOURCES

    rows = []
    for name, source in SOURCES.items():
        description = source.description
        if source.hub:
            subset = f", config {source.subset}" if source.subset else ""
            splits = "/".join(source.splits)
            description = f"{description}; {source.hub} on the Hub{subset}, {splits}"
        rows.append((name, description))
    definitions(rows)


@data.command("show")
@options.source
@path_of_source
@splits_of_source
@click.option(
    "-n",
    "--count",
    metavar="N",
    type=options.WholeNumber(1),
    default=3,
    show_default=True,
    help="Number of problems to print.",
)
def show(
    source: str, settings: tuple[str, ...], *, path: str | None, splits: tuple[str, ...], count: int
) -> None:
    """Print a few problems as they are read.

    Prints the first problems of SOURCE: question, answer, and the start of the solution.

    Settings are those of data.train, such as numeric_only=true. Only as many rows are read.
    """
    # Of so few rows none can be held out.
    settings = ("data.validation_share=0", *settings)
    for name, problems in _load(source, settings, path, splits, limit=count).items():
        _head(name, problems)
        for problem in problems.problems:
            facts = [fact for fact in (problem.subject, problem.level) if fact]
            heading = "  ".join([problem.id, *facts])
            click.echo(printable(f"\n{heading}\n") + short(problem.question, 300))
            if problem.response:
                click.echo(f"Response: {short(problem.response, 300)}")
            elif problem.solution:
                click.echo(f"Solution: {short(problem.solution, 300)}")
            click.echo(printable(f"Answer: {problem.answer}"))
        for row in problems.quarantined:
            text = printable(f"\nrow {row.row} is left out: {row.reason}")
            click.echo(click.style(text, fg="yellow"))
        click.echo()


def _head(name: str, problems: ProblemSet, *facts: str) -> None:
    click.echo(click.style(printable(f"{name}: {problems.name}"), bold=True))
    for line in (*facts, *problems.notes):
        click.echo(printable(f"  {line}"))


@data.command("audit")
@options.source
@path_of_source
@splits_of_source
@click.option(
    "--limit", metavar="N", type=options.WholeNumber(1), help="Maximum number of rows to read."
)
@options.rows_to_show(5)
@click.option(
    "--output",
    metavar="FILE",
    type=options.PATH,
    help="Write every finding as a line of JSON: set, row, id, reason.",
)
def audit(
    source: str,
    settings: tuple[str, ...],
    *,
    path: str | None,
    splits: tuple[str, ...],
    limit: int | None,
    show: int,
    output: Path | None,
) -> None:
    """Find problematic rows of a source.

    Checks SOURCE for reference answers that cannot be read or do not equal themselves, repeated
    questions, contradictory answers, and problems that training and evaluation share. Counts
    kinds of answers, and lengths.
    """
    from grouper.cli.recipe_args import require_new
    from grouper.data.audit import audit as audit_problems
    from grouper.data.audit import quarantine_rows

    require_new(output, "--output")
    with progress().within("audit"):
        sets = _load(source, settings, path, splits, limit=limit)
        audits = {name: audit_problems(problems) for name, problems in sets.items()}
    for name, source_audit in audits.items():
        _print_audit(name, source_audit, show)
    leaks = _leaks(sets)
    if len(sets) > 1:
        click.echo(click.style("overlap between trained and held-out problems", bold=True))
        copies = []
        similar = []
        for leak in leaks:
            pair = f"{leak.held_out_id} in {leak.trained_id}"
            if leak.same_question:
                copies.append(pair)
            else:
                similar.append(pair)
        _list("held-out question", "in the training data", copies, show)
        _list("held-out question", "sharing 13 words", similar, show)
    if output is not None:
        rows = list(quarantine_rows(list(audits.values()), leaks))
        write_rows(rows, output)
        click.echo(f"{plural(len(rows), 'finding')} written to {output}")


def _print_audit(name: str, audit: Audit, show: int) -> None:
    """Print the counts of a set of problems, and its problematic rows."""
    problems = audit.problems
    _head(name, problems, f"{len(problems):,} problems, fingerprint {problems.fingerprint}")
    for title, counts in (
        ("answers", audit.answer_types),
        ("questions, words", audit.question_lengths),
        ("solutions, words", audit.solution_lengths),
    ):
        if counts:
            text = ", ".join(f"{label}: {count:,}" for label, count in counts.items())
            click.echo(f"  {title:<17} {text}")
    unusable = [f"row {row.row}: {row.reason}" for row in problems.quarantined]
    repeated = [", ".join(same.problem_ids) for same in audit.repeated if not same.contradicts]
    contradicting = []
    for repetition in audit.contradictions:
        ids = ", ".join(repetition.problem_ids)
        answers = " | ".join(repetition.answers)
        contradicting.append(f"{ids}: {answers}")
    _list("row", "that cannot be used", unusable, show)
    _list("question", "asked more than once", repeated, show)
    _list("question", "with different answers", contradicting, show)
    click.echo()


def _leaks(sets: Mapping[str, ProblemSet]) -> tuple[Overlap, ...]:
    """Find the overlap between training and held-out sets: `MEASURED`, else all but the first."""
    from grouper.data import find_overlap
    from grouper.training.problem_sets import MEASURED

    held_out_names = [name for name in sets if name in MEASURED] or list(sets)[1:]
    trained: list[Problem] = []
    for name, problems in sets.items():
        if name not in held_out_names:
            trained += problems.problems
    held_out: list[Problem] = []
    for name in held_out_names:
        held_out += sets[name].problems
    return find_overlap(trained, held_out)


def _list(noun: str, description: str, findings: Sequence[str], show: int) -> None:
    click.echo(f"  {plural(len(findings), noun)} {description}")
    some([short(finding, 300) for finding in findings], show, "    ")


@data.command("prepare", examples=PREPARE_EXAMPLES)
@options.source
@path_of_source
@splits_of_source
@click.option(
    "--output",
    metavar="DIR",
    type=options.PATH,
    help="Folder to write.  [default: prepared/<source>]",
)
@click.option("--overwrite", is_flag=True, help="Replace files that differ.")
def prepare(
    source: str,
    settings: tuple[str, ...],
    *,
    path: str | None,
    splits: tuple[str, ...],
    output: Path | None,
    overwrite: bool,
) -> None:
    """Read, filter and check problems once, to a folder.

    Reads (or downloads) SOURCE, applies the filters in its settings, checks every reference
    answer, and writes the remaining problems as JSONL, a file per split, with another file for
    the rows that could not be used.

    A recipe that gives the folder as `path` needs no network. Settings are those of data.train
    (`grouper recipes fields data.train`), validation_share and seed.
    """
    from grouper.data.problems import write_problems
    from grouper.training.problem_sets import PARTS

    with progress().within("prepare"):
        sets = _load(source, settings, path, splits)
    folder = output or Path("prepared") / Path(source).stem
    sources = write_problems(folder.expanduser(), sets, overwrite=overwrite)
    for name, problems in sets.items():
        worked = sum(problem.solution is not None for problem in problems.problems)
        _head(
            name,
            problems,
            f"{folder / name}.jsonl: {plural(len(problems), 'problem')}, {worked:,} with worked "
            f"solutions, fingerprint {problems.fingerprint}",
            f"{plural(len(problems.quarantined), 'row')} cannot be used ({name}.invalid.jsonl)",
        )
    click.echo("\nIn a recipe or on the command line:")
    for name in sets:
        part = name if name in PARTS else "train"
        click.echo(f"  data.{part}={flow(sources[name])}")


@data.command("difficulty", examples=DIFFICULTY_EXAMPLES)
@options.recipe
@click.option(
    "--model",
    metavar="PATH",
    help="Model or adapter folder, GGUF file or Hub name.  [default: the model that the run has "
    "trained]",
)
@click.option(
    "--samples",
    metavar="N",
    type=options.WholeNumber(1),
    default=8,
    show_default=True,
    help="Number of samples per problem.",
)
@click.option(
    "--output",
    metavar="FILE",
    type=options.PATH,
    help="File of JSON lines; an unfinished file is continued.  [default: "
    "<output_dir>/<name>/pass_rates.jsonl]",
)
@options.quiet
def difficulty(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    samples: int,
    output: Path | None,
    quiet: bool,
) -> None:
    """Measure pass rates for the difficulty band.

    Samples each training problem of RECIPE several times, as GRPO would, and writes how often it
    is solved. An interrupted measurement is continued by the same command; `grpo.difficulty.path`
    reads the file.
    """
    from grouper.cli.recipe_args import open_recipe, run_of
    from grouper.models.folders import require_model_folder
    from grouper.models.trained import trained_model

    opened = open_recipe(recipe, overrides, trains=False)
    run = run_of(recipe, opened)
    subject = model or trained_model(opened, run, say=warn)
    require_model_folder(subject, where="--model")
    path = (output or run / "pass_rates.jsonl").expanduser()
    require_writable(path)

    from grouper import api

    display = progress(quiet=quiet)
    with display.within("difficulty"):
        rates = api.pass_rates(opened, subject, path, samples=samples, display=display)
    solved = Counter(correct for correct, _ in rates.values())
    for correct in range(samples + 1):
        bar = "#" * round(40 * solved[correct] / max(solved.values()))
        click.echo(f"solved {correct:>3} of {samples}  {solved[correct]:>6,}  {bar}".rstrip())
    click.echo(f"\n{plural(len(rates), 'problem')}: {path}")


# --- the meaning of SOURCE -----------------------------------------------------------------------


def _load(
    source: str,
    settings: Sequence[str],
    path: str | None,
    splits: Sequence[str],
    *,
    limit: int | None = None,
) -> dict[str, ProblemSet]:
    """Load the problem sets of SOURCE: those of a recipe by part, any other by split.

    Args:
        source: a source, a file or folder, or a recipe.
        settings: `key=value`: those of `data.train` (`numeric_only=true`), `validation_share` and
            `seed`; of a recipe any `section.key=value`.
        path: the path of a local copy of the source, or its name on the Hub.
        splits: the splits of a source; a recipe names its own.
        limit: read at most this many rows of each.

    Raises:
        ConfigError: an unknown source or setting.
        DataError: see `load_problems`.
    """
    from grouper.config.loading import list_recipes, load_recipe, shipped_recipes
    from grouper.data import SOURCES
    from grouper.training.problem_sets import PARTS, load_problem_sets

    exists = bool(source) and Path(source).expanduser().exists()
    is_source = source in SOURCES
    is_shipped = source in shipped_recipes()
    if exists and (is_source or is_shipped):
        noun = "source" if is_source else "recipe"
        warn(f"{source} is taken as the built-in {noun}; what lies here is ./{source}")
    if not is_source and (is_shipped or source.endswith((".yaml", ".yml"))):
        if path is not None or splits:
            raise ConfigError(
                "a recipe names its own paths and splits",
                where="--path" if path is not None else "--split",
                fix="Change them as data.train.path=... and data.train.split=...",
            )
        read = partial(_read, limit=limit, format_too=True)
        return load_problem_sets(load_recipe(source, settings), PARTS, read).sources
    if not is_source and not exists:
        recipe_names = [name for name, _ in list_recipes()]
        suggestion = did_you_mean(source, [*SOURCES, *recipe_names])
        raise ConfigError(
            f"{source!r} is not a source, file, folder or recipe", where="SOURCE", fix=suggestion
        )
    rows: dict[str, str | None] = {"source": "file", "path": source}
    if is_source:
        rows = {"source": source, "path": path}
    loaded: dict[str, ProblemSet] = {}
    for recipe in _trained_on(rows, splits, settings):
        sets = load_problem_sets(recipe, PARTS, partial(_read, limit=limit)).sources
        train = sets.pop("train")
        split = train.name.rpartition("/")[2]
        loaded[split] = train
        loaded |= sets
    return loaded


def _read(
    part: str, source: SourceConfig, recipe: Recipe, *, limit: int | None, format_too: bool = False
) -> ProblemSet:
    """Load a part of a recipe as a run does, however many of its rows cannot be used."""
    from grouper.data import load_problems
    from grouper.prompts import make_format
    from grouper.training.problem_sets import MEASURED

    limits = [number for number in (limit, source.limit) if number]
    lowest_limit = min(limits, default=None)
    return load_problems(
        source.model_copy(update={"limit": lowest_limit}),
        seed=recipe.seed,
        fmt=make_format(recipe.prompt) if format_too else None,
        keep_unreadable=part in MEASURED,
    )


def _trained_on(
    rows: dict[str, str | None], splits: Sequence[str], settings: Sequence[str]
) -> Iterator[Recipe]:
    """Yield a recipe that trains on it for each split of a source."""
    from grouper.config.checks import validate_json
    from grouper.config.overrides import as_json
    from grouper.config.schema import Recipe

    # Settings that are not those of `data.train` -> the section before them.
    sections = {"seed": "", "validation_share": "data.", "data.validation_share": ""}
    overrides = []
    for setting in settings:
        key, equals, _ = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{setting!r} is not a setting", fix="Write key=value, as in numeric_only=true."
            )
        if key == "validation_share" and len(splits) > 1:
            raise ConfigError(
                "validation problems are held out of one split", where=key, fix="Give one --split."
            )
        section = sections.get(key.strip(), "data.train.")
        overrides.append(f"{section}{setting}")
    for split in splits or (None,):
        train = dict(rows)
        if split:
            train["split"] = split
        recipe = {"name": "data", "model": {"path": "."}, "data": {"train": train}}
        text = as_json(recipe, overrides, where="settings")
        yield validate_json(Recipe, text, where="settings")
