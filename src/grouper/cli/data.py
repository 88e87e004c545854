"""`grouper data`: the sources there are, what they hold, what is wrong with them, and a copy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.text import definitions, short, some, warn
from grouper.config.checks import validate_json
from grouper.config.loading import list_recipes, load_recipe
from grouper.config.overrides import as_json
from grouper.config.schema import Recipe, SourceConfig
from grouper.data import (
    SOURCES,
    Overlap,
    ProblemSet,
    find_overlap,
    hold_out,
    load_problems,
    without,
)
from grouper.errors import ConfigError, did_you_mean
from grouper.files import write_atomic
from grouper.prompts import make_format
from grouper.training.problem_sets import MEASURED, PARTS

if TYPE_CHECKING:
    from grouper.data.audit import Audit

Loaded = dict[str, tuple[SourceConfig, ProblemSet]]
"""Part or split -> how it was read, and what."""


def listed() -> None:
    """Print every source, and where it lies."""
    rows = []
    for name, source in SOURCES.items():
        subset = f", config {source.subset}" if source.subset else ""
        hub = f"; {source.hub} on the Hub{subset}, {'/'.join(source.splits)}" if source.hub else ""
        rows.append((name, f"{source.description}{hub}"))
    definitions(rows)


def show(count: int, **source: Any) -> None:
    """Print the first problems as they are read."""
    for name, (_, problems) in load_sets(**source, limit=count).items():
        _head(name, problems)
        for problem in problems.problems:
            facts = [problem.id, *filter(None, (problem.subject, problem.level))]
            click.echo(f"\n{'  '.join(facts)}\n{short(problem.question, 300)}")
            worked = problem.response or problem.solution
            if worked:
                click.echo(
                    f"{'Response' if problem.response else 'Solution'}: {short(worked, 300)}"
                )
            click.echo(f"Answer: {problem.answer}")
        for row in problems.quarantined:
            click.echo(click.style(f"\nrow {row.row} is left out: {row.reason}", fg="yellow"))
        click.echo()


def _head(name: str, problems: ProblemSet, indent: str = "") -> None:
    click.echo(click.style(f"{name}: {problems.name}", bold=True))
    for note in problems.notes:
        click.echo(f"{indent}{note}")


def audited(limit: int | None, show: int, output: Path | None, **source: Any) -> None:
    """Print, and write where asked, everything that is wrong with a source."""
    from grouper.data.audit import audit, quarantine_rows

    loaded = load_sets(**source, limit=limit)
    sets = {name: problems for name, (_, problems) in loaded.items()}
    audits = {name: audit(problems) for name, problems in sets.items()}
    for name, found in audits.items():
        _tell(name, found, show)
    held_out = [name for name in sets if name in MEASURED] or list(sets)[1:]
    leaks = [
        (f"{test} of {train}", leak)
        for train, test in itertools.product([n for n in sets if n not in held_out], held_out)
        for leak in find_overlap(sets[train].problems, sets[test].problems)
    ]
    if len(sets) > 1:
        _tell_leaks(leaks, show)
    if output is not None:
        rows = list(quarantine_rows(list(audits.values()), [leak for _, leak in leaks]))
        text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
        write_atomic(output, text.encode())
        click.echo(f"{len(rows):,} findings written to {output}")


def _tell(name: str, found: Audit, show: int) -> None:
    problems = found.problems
    _head(name, problems, "  ")
    click.echo(f"  {len(problems):,} problems, fingerprint {problems.fingerprint}")
    for what, counts, unit in (
        ("answers", found.answer_types, ""),
        ("questions", found.question_lengths, " (words)"),
        ("solutions", found.solution_lengths, " (words)"),
    ):
        if counts:
            text = ", ".join(f"{name}: {count:,}" for name, count in counts.items())
            click.echo(f"  {what:<11} {text}{unit}")
    twice = [r for r in found.repeated if not r.contradicts]
    apart = [f"{', '.join(r.problem_ids)}: {' | '.join(r.answers)}" for r in found.contradictions]
    unusable = [f"row {row.row}: {row.reason}" for row in problems.quarantined]
    _list("rows that cannot be used", unusable, show)
    _list("questions asked more than once", [", ".join(r.problem_ids) for r in twice], show)
    _list("questions with different answers", apart, show)
    click.echo()


def _tell_leaks(leaks: Sequence[tuple[str, Overlap]], show: int) -> None:
    click.echo(click.style("overlap between trained and held-out problems", bold=True))
    for what, same in (("held-out questions are trained on", True), ("share 13 words", False)):
        found = [(pair, leak) for pair, leak in leaks if leak.same_question is same]
        _list(what, [f"{p}: {o.held_out_id} in {o.trained_id}" for p, o in found], show)


def _list(what: str, findings: Sequence[str], show: int) -> None:
    click.echo(f"  {len(findings):,} {what}")
    some([short(finding, 300) for finding in findings], show, "    ")


def prepared(source: str, output: Path | None, overwrite: bool, **named: Any) -> None:
    """Write ready problems to a folder, and print what to write in a recipe."""
    from grouper.data.problems import write_problems

    loaded = load_sets(source, **named)
    sets = {_split_name(name, problems): (c, problems) for name, (c, problems) in loaded.items()}
    folder = output or Path("prepared") / Path(source).stem
    ready = {name: problems for name, (_, problems) in sets.items()}
    sources = write_problems(folder.expanduser(), ready, overwrite=overwrite)
    for name, (_, problems) in sets.items():
        click.echo(click.style(f"{folder / name}.jsonl", bold=True))
        worked = sum(p.solution is not None for p in problems.problems)
        facts = f"{len(problems):,} problems, {worked:,} with worked solutions"
        unusable = f"{len(problems.quarantined):,} rows cannot be used ({name}.invalid.jsonl)"
        notes = (f"{facts}, fingerprint {problems.fingerprint}", *problems.notes, unusable)
        click.echo("".join(f"  {note}\n" for note in notes), nl=False)
    click.echo("\nIn a recipe or on the command line:")
    for name in sets:
        part = name if name in PARTS else "train"
        click.echo(f"  data.{part}={{source: {sources[name]}, path: {folder}, split: {name}}}")


def _split_name(name: str, problems: ProblemSet) -> str:
    """What the file is called: the split, where the set was named after its source."""
    split = problems.name.rpartition("/")[2] if "/" in problems.name else ""
    return name if name in PARTS or not split.isidentifier() else split


# --- what SOURCE stands for ----------------------------------------------------------------------


def load_sets(
    source: str,
    settings: Sequence[str],
    path: str | None,
    splits: Sequence[str],
    *,
    limit: int | None = None,
) -> Loaded:
    """The problem sets that SOURCE stands for, by part or split.

    Args:
        source: a source, a file or folder, or a recipe.
        settings: `key=value`: those of `data.train` (`numeric_only=true`), `validation_share` and
            `seed`; of a recipe any `section.key=value`.
        path: where the source lies.
        splits: of a source; a recipe names its own.
        limit: read at most this many rows of each.

    Raises:
        ConfigError: an unknown source or setting.
        DataError: see `load_problems`.
    """
    recipes = _as_recipes(source, path, splits, settings)
    loaded: Loaded = {}
    for name, recipe in recipes.items():
        for part in PARTS:
            config: SourceConfig | None = getattr(recipe.data, part)
            if config is not None:
                few = min(filter(None, (limit, config.limit)), default=None)
                read = config.model_copy(update={"limit": few})
                # As a run does: what is only measured on is kept whole.
                keep = not name and part in MEASURED
                fmt = None if name else make_format(recipe.prompt)
                problems = load_problems(read, seed=recipe.seed, fmt=fmt, keep_unreadable=keep)
                loaded[name or part] = (read, problems)
        if share := recipe.data.validation_share:
            # As a run does: validation taken out of train, and its questions out of sft.
            config, whole = loaded[name or "train"]
            train, held_out = hold_out(whole, share, seed=recipe.seed)
            loaded |= {name or "train": (config, train), "validation": (config, held_out)}
            if "sft" in loaded:
                loaded["sft"] = (loaded["sft"][0], without(loaded["sft"][1], held_out))
    return loaded


def _as_recipes(
    source: str, path: str | None, splits: Sequence[str], settings: Sequence[str]
) -> dict[str, Recipe]:
    """The recipe that SOURCE is, without a name; or one for each split that trains on it."""
    shipped = [recipe for recipe, _ in list_recipes()]
    here = Path(source).expanduser().exists()
    known = source in SOURCES
    if here and (known or source in shipped):
        kind = "source" if known else "recipe"
        warn(f"{source} is taken as the built-in {kind}; what lies here is ./{source}")
    if not known and (source in shipped or source.endswith((".yaml", ".yml"))):
        if path is not None or splits:
            raise ConfigError(
                "a recipe names its own paths and splits",
                where="--path" if path is not None else "--split",
                fix="Change them as data.train.path=... and data.train.split=...",
            )
        return {"": load_recipe(source, settings)}
    if not known and not here:
        near = did_you_mean(source, [*SOURCES, *shipped])
        raise ConfigError(
            f"{source!r} is no source, file, folder or recipe", where="SOURCE", fix=near
        )
    overrides = [_override(setting) for setting in settings]
    place = {"source": source if known else "file", "path": path if known else source}
    recipes = {}
    for split in splits or (None,):
        data = {"train": place | ({"split": split} if split else {})}
        text = as_json(
            {"name": "data", "model": {"path": "."}, "data": data}, overrides, where="settings"
        )
        name = split or (source if known else Path(source).name)
        recipes[name] = validate_json(Recipe, text, where="settings")
    if len(splits) > 1 and any(recipe.data.validation_share for recipe in recipes.values()):
        raise ConfigError(
            "validation problems are held out of one split",
            where="validation_share",
            fix="Give one --split.",
        )
    return recipes


def _override(setting: str) -> str:
    """A setting of a source as one of the recipe that trains on it."""
    key, equals, _ = setting.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{setting!r} is not a setting", fix="Write key=value, as in numeric_only=true."
        )
    own = {"seed": "", "validation_share": "data."}
    return own.get(key.strip(), "data.train.") + setting
