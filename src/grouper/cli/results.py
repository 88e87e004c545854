"""Comparisons of evaluations that several commands make and print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grouper.cli.text import show, show_blocks, warn
from grouper.errors import ConfigError

if TYPE_CHECKING:
    from grouper.evaluation.compare import Comparison
    from grouper.tables import Table


def show_results(comparison: Comparison, *, parts: bool = True) -> None:
    """Print results side by side: accuracy, differences and rewards; if `parts`, also lenient
    verdicts, pass@k, and everything by subject, level and length.
    """
    from grouper.evaluation import result_tables

    results = comparison.results
    settings = [result.card.get("sampling") for result in results]
    if any(setting != settings[0] for setting in settings):
        warn("these models were not measured with the same sampling settings.")
    show_blocks(result_tables.comparison_blocks(comparison))
    tables: list[Table] = []
    if parts:
        tables.append(result_tables.answers_table(results))
        tables += result_tables.curve_tables(results)
    metrics = result_tables.metrics_table(results)
    if metrics is not None:
        tables.append(metrics)
    if parts:
        for _, tables_of_criterion in result_tables.part_tables(results):
            tables += tables_of_criterion
    for table_of_results in tables:
        show("", table_of_results)
    show("")


def stages(runs: Sequence[Path], *, on: str = "test", most_seeds: int | None = None) -> Comparison:
    """Compare base, SFT and GRPO of a run, or of several seeds of one recipe.

    Args:
        runs: their folders.
        on: the problems, `test` or `validation`; the last evaluation of each phase counts.
        most_seeds: runs that there may be, where their results decide whether there is another.

    Raises:
        ConfigError: nothing was measured on them in one of the runs.
    """
    from grouper.evaluation.compare import compare_arms
    from grouper.runs.folder import PHASES, RunFolder

    by_run = []
    for run in runs:
        results = RunFolder(run).read_evaluations()
        by_run.append({result.phase: result for result in results if result.split == on})
    names = [name for name in PHASES if all(name in by_phase for by_phase in by_run)]
    if not names:
        raise ConfigError(
            f"the {on} problems were not measured in every one of them",
            where=", ".join(map(str, runs)),
            fix="Finish the runs (--resume), or name their evaluations.",
        )
    arms = {name: [by_phase[name] for by_phase in by_run] for name in names}
    return compare_arms(arms, most_seeds=most_seeds)
