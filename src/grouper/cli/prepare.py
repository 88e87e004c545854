"""`grouper data prepare`: read, filter and check once; train from the result anywhere."""

from __future__ import annotations

from pathlib import Path

import click

from grouper.cli.data_sets import load_sets, source_arguments

EXAMPLES = """\b
Examples:
  grouper data prepare gsm8k --split train --split test
  grouper data prepare openmath-mini numeric_only=true limit=5000
  grouper data prepare prompt-response --path sft.jsonl only_correct=true unique=128
  grouper data prepare numina-tir validation_share=0.1 --output prepared/numina
  grouper data prepare hub --path owner/name streaming=true limit=20000 shuffle=0
  grouper data prepare ./mine.yaml                       every part of a recipe
"""


@click.command("prepare", epilog=EXAMPLES, short_help="Read, filter and check once, to a folder.")
@source_arguments
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to write.  [default: prepared/<source>]",
)
@click.option("--overwrite", is_flag=True, help="Replace files that differ.")
def prepare_command(
    source: str,
    settings: tuple[str, ...],
    *,
    path: str | None,
    splits: tuple[str, ...],
    output: Path | None,
    overwrite: bool,
) -> None:
    """Read (or download) SOURCE, apply the filters in its settings, check every reference, and
    write what is left as JSONL, a file per split, with the rows that could not be used beside it.

    A recipe names the folder as `path`, and needs no network for it. Settings are those of
    data.train (`grouper recipes fields data.train`), validation_share and seed.
    """
    from grouper.data.problems import write_problems

    sets = load_sets(source, path, splits, settings)
    sets = {_split_name(name, loaded): loaded for name, loaded in sets.items()}
    folder = output or Path("prepared") / Path(source).stem
    ready = {name: problems for name, (_, problems) in sets.items()}
    sources = write_problems(folder.expanduser(), ready, overwrite=overwrite)
    for name, (_, problems) in sets.items():
        click.echo(click.style(f"{folder / name}.jsonl", bold=True))
        worked = sum(p.solution is not None for p in problems.problems)
        facts = f"{len(problems):,} problems, {worked:,} with worked solutions"
        click.echo(f"  {facts}, fingerprint {problems.fingerprint}")
        for note in problems.notes:
            click.echo(f"  {note}")
        click.echo(f"  {len(problems.quarantined):,} rows cannot be used ({name}.invalid.jsonl)")
    click.echo("\nIn a recipe or on the command line:")
    for name in sets:
        part = name if name in ("sft", "train", "validation", "test") else "train"
        click.echo(f"  data.{part}={{source: {sources[name]}, path: {folder}, split: {name}}}")


def _split_name(name: str, loaded: tuple[object, object]) -> str:
    """What the file is called: the split, where the set was named after its source."""
    from grouper.data import ProblemSet

    problems = loaded[1]
    assert isinstance(problems, ProblemSet)
    split = problems.name.rpartition("/")[2] if "/" in problems.name else ""
    return name if name in _PART_NAMES or not split.isidentifier() else split


_PART_NAMES = ("sft", "train", "validation", "test")
