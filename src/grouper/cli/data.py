"""`grouper data`: the sources there are, what they hold, what is wrong with them, and a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from grouper.cli.measure import progress
from grouper.cli.opening import require_new
from grouper.cli.text import definitions, flow, short, some, warn, write_rows
from grouper.config.checks import validate_json
from grouper.config.loading import list_recipes, load_recipe, shipped_recipes
from grouper.config.overrides import as_json
from grouper.config.schema import Recipe, SourceConfig
from grouper.data import SOURCES, ProblemSet, find_overlap, load_problems
from grouper.errors import ConfigError, counted, did_you_mean
from grouper.prompts import make_format
from grouper.runs.samples import printable
from grouper.training.problem_sets import MEASURED, PARTS, load_problem_sets


def listed() -> None:
    """Print every source and its place on the Hub."""
    rows = []
    for name, source in SOURCES.items():
        subset = f", config {source.subset}" if source.subset else ""
        hub = f"; {source.hub} on the Hub{subset}, {'/'.join(source.splits)}" if source.hub else ""
        rows.append((name, f"{source.description}{hub}"))
    definitions(rows)


def show(count: int, **source: Any) -> None:
    """Print the first problems as they are read."""
    # Of so few rows none can be held out.
    source["settings"] = ("data.validation_share=0", *source["settings"])
    for name, problems in _load(**source, limit=count).items():
        _head(name, problems)
        for problem in problems.problems:
            facts = [problem.id, *filter(None, (problem.subject, problem.level))]
            click.echo(printable(f"\n{'  '.join(facts)}\n") + short(problem.question, 300))
            if worked := problem.response or problem.solution:
                kind = "Response" if problem.response else "Solution"
                click.echo(f"{kind}: {short(worked, 300)}")
            click.echo(printable(f"Answer: {problem.answer}"))
        for row in problems.quarantined:
            text = printable(f"\nrow {row.row} is left out: {row.reason}")
            click.echo(click.style(text, fg="yellow"))
        click.echo()


def _head(name: str, problems: ProblemSet, *facts: str) -> None:
    click.echo(click.style(printable(f"{name}: {problems.name}"), bold=True))
    for line in (*facts, *problems.notes):
        click.echo(printable(f"  {line}"))


def audited(limit: int | None, show: int, output: Path | None, **source: Any) -> None:
    """Print everything that is wrong with a source, and write it to a file on request."""
    from grouper.data.audit import audit, quarantine_rows

    require_new(output, "--output")
    with progress().within("audit"):
        sets = _load(**source, limit=limit)
        audits = {name: audit(problems) for name, problems in sets.items()}
    for name, found in audits.items():
        problems = found.problems
        _head(name, problems, f"{len(problems):,} problems, fingerprint {problems.fingerprint}")
        for what, counts in (
            ("answers", found.answer_types),
            ("questions, words", found.question_lengths),
            ("solutions, words", found.solution_lengths),
        ):
            if counts:
                text = ", ".join(f"{kind}: {count:,}" for kind, count in counts.items())
                click.echo(f"  {what:<17} {text}")
        unusable = [f"row {row.row}: {row.reason}" for row in problems.quarantined]
        twice = [", ".join(r.problem_ids) for r in found.repeated if not r.contradicts]
        apart = [
            f"{', '.join(r.problem_ids)}: {' | '.join(r.answers)}" for r in found.contradictions
        ]
        _list("row", "that cannot be used", unusable, show)
        _list("question", "asked more than once", twice, show)
        _list("question", "with different answers", apart, show)
        click.echo()
    held_out = [name for name in sets if name in MEASURED] or list(sets)[1:]
    trained = [p for name, s in sets.items() if name not in held_out for p in s.problems]
    leaks = find_overlap(trained, [p for n in held_out for p in sets[n].problems])
    if len(sets) > 1:
        click.echo(click.style("overlap between trained and held-out problems", bold=True))
        for what, same in (("in the training data", True), ("sharing 13 words", False)):
            pairs = [f"{o.held_out_id} in {o.trained_id}" for o in leaks if o.same_question is same]
            _list("held-out question", what, pairs, show)
    if output is not None:
        rows = list(quarantine_rows(list(audits.values()), leaks))
        write_rows(rows, output)
        click.echo(f"{counted(len(rows), 'finding')} written to {output}")


def _list(noun: str, what: str, findings: Sequence[str], show: int) -> None:
    click.echo(f"  {counted(len(findings), noun)} {what}")
    some([short(finding, 300) for finding in findings], show, "    ")


def prepared(source: str, output: Path | None, overwrite: bool, **named: Any) -> None:
    """Write problems that are ready for training, and print what to write in a recipe."""
    from grouper.data.problems import write_problems

    with progress().within("prepare"):
        sets = _load(source, **named)
    folder = output or Path("prepared") / Path(source).stem
    sources = write_problems(folder.expanduser(), sets, overwrite=overwrite)
    for name, problems in sets.items():
        worked = sum(p.solution is not None for p in problems.problems)
        _head(
            name,
            problems,
            f"{folder / name}.jsonl: {counted(len(problems), 'problem')}, {worked:,} with worked "
            f"solutions, fingerprint {problems.fingerprint}",
            f"{counted(len(problems.quarantined), 'row')} cannot be used ({name}.invalid.jsonl)",
        )
    click.echo("\nIn a recipe or on the command line:")
    for name in sets:
        part = name if name in PARTS else "train"
        click.echo(f"  data.{part}={flow(sources[name])}")


# --- what SOURCE stands for ----------------------------------------------------------------------


def _load(
    source: str,
    settings: Sequence[str],
    path: str | None,
    splits: Sequence[str],
    *,
    limit: int | None = None,
) -> dict[str, ProblemSet]:
    """The problem sets of SOURCE: those of a recipe by part, any other by split.

    Args:
        source: a source, a file or folder, or a recipe.
        settings: `key=value`: those of `data.train` (`numeric_only=true`), `validation_share` and
            `seed`; of a recipe any `section.key=value`.
        path: of a local copy of the source, or its name on the Hub.
        splits: of a source; a recipe names its own.
        limit: read at most this many rows of each.

    Raises:
        ConfigError: an unknown source or setting.
        DataError: see `load_problems`.
    """
    here = bool(source) and Path(source).expanduser().exists()
    known, shipped = source in SOURCES, source in shipped_recipes()
    if here and (known or shipped):
        kind = "source" if known else "recipe"
        warn(f"{source} is taken as the built-in {kind}; what lies here is ./{source}")
    if not known and (shipped or source.endswith((".yaml", ".yml"))):
        if path is not None or splits:
            raise ConfigError(
                "a recipe names its own paths and splits",
                where="--path" if path is not None else "--split",
                fix="Change them as data.train.path=... and data.train.split=...",
            )
        read = partial(_read, limit=limit, format_too=True)
        return load_problem_sets(load_recipe(source, settings), PARTS, read).sources
    if not known and not here:
        near = did_you_mean(source, [*SOURCES, *(name for name, _ in list_recipes())])
        raise ConfigError(
            f"{source!r} is no source, file, folder or recipe", where="SOURCE", fix=near
        )
    place = {"source": source if known else "file", "path": path if known else source}
    loaded: dict[str, ProblemSet] = {}
    for recipe in _trained_on(place, splits, settings):
        sets = load_problem_sets(recipe, PARTS, partial(_read, limit=limit)).sources
        split = sets.pop("train")
        loaded |= {split.name.rpartition("/")[2]: split, **sets}
    return loaded


def _read(
    part: str, source: SourceConfig, recipe: Recipe, *, limit: int | None, format_too: bool = False
) -> ProblemSet:
    """Load a part of a recipe as a run does, however many of its rows cannot be used."""
    few = min(filter(None, (limit, source.limit)), default=None)
    return load_problems(
        source.model_copy(update={"limit": few}),
        seed=recipe.seed,
        fmt=make_format(recipe.prompt) if format_too else None,
        keep_unreadable=part in MEASURED,
    )


def _trained_on(
    place: dict[str, str | None], splits: Sequence[str], settings: Sequence[str]
) -> Iterator[Recipe]:
    """For each split of a source, a recipe that trains on it."""
    own = {"seed": "", "validation_share": "data.", "data.validation_share": ""}
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
        overrides.append(own.get(key.strip(), "data.train.") + setting)
    for split in splits or (None,):
        data = {"train": place | ({"split": split} if split else {})}
        text = as_json(
            {"name": "data", "model": {"path": "."}, "data": data}, overrides, where="settings"
        )
        yield validate_json(Recipe, text, where="settings")
