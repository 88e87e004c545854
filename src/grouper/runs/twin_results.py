"""Evaluations on twins in the record of a run, each beside that on the originals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.twin_problems import TwinComparison, compare_twins
from grouper.runs.folder import RunFolder

# Entries of a card that have to be equal for the two to differ in the numbers alone.
_SAME = ("model_hash", "prompt", "sampling", "k", "seed", "grading")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTwins:
    """A model on problems and on their twins."""

    phase: str
    step: int
    model_hash: str | None
    split: str
    """The problems: `test`, `validation` or a suite."""
    comparison: TwinComparison


def read_twins(run: Path) -> list[RecordedTwins]:
    """Read what `grouper eval --twins` has left in a run folder, by model and problems.

    Raises:
        DataError: no problem was scored both as it is and with other numbers.
        RunFolderError: an evaluation is damaged.
    """
    twins = []
    for folder in sorted((run / "eval_runs").glob("*")):
        twins += pair_twins(folder.name, RunFolder(folder).read_evaluations())
    return twins


def pair_twins(model: str, results: Sequence[EvaluationResult]) -> list[RecordedTwins]:
    """Pair a model's results on twins with those on their originals.

    Args:
        model: its name in sentences.
        results: all that was measured of it.

    Raises:
        DataError: no problem was scored both as it is and with other numbers.
    """
    pairs = []
    for twins in results:
        originals = _originals_of(twins, results)
        if originals is not None:
            pairs.append(
                RecordedTwins(
                    phase=twins.phase,
                    step=twins.step,
                    model_hash=twins.card.get("model_hash"),
                    split=originals.split,
                    comparison=compare_twins(model, originals, twins),
                )
            )
    return pairs


def _originals_of(
    twins: EvaluationResult, results: Sequence[EvaluationResult]
) -> EvaluationResult | None:
    """Return the result on the originals in the same settings; None: there is none."""
    split = twins.card.get("twins_of")
    if split is None:
        return None
    for result in results:
        is_same = all(result.card.get(name) == twins.card.get(name) for name in _SAME)
        if result.split == split and is_same:
            return result
    return None
