"""The model card: what a model is, how well it does and how sure that is, from the run's record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from grouper.data import SOURCES
from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.statistics import CONFIDENCE
from grouper.models.folders import base_of, looks_local
from grouper.publish.portable import without_folder
from grouper.report.page import compared
from grouper.runs.folder import PHASES, RunFolder
from grouper.training.saved_state import is_complete, read_state

CURVES_FILE = "curves.png"


def model_card(
    source: str,
    record: Mapping[str, Any] | None,
    place: str,
    *,
    run: Path | None = None,
    base: str | None = None,
    adapter: bool = False,
    license_id: str | None = None,
) -> str:
    """The text of README.md, with the metadata that the Hub reads.

    Args:
        source: the model folder that is exported.
        record: the content of `grouper.json`; None where the model's recipe is not known.
        place: the folder or Hub name that it will be loaded from.
        run: the run that trained it, if there is one.
        base: the model it was trained from; left out: that of the record, or its own.
        adapter: what is published is the adapter alone.
        license_id: the Hub's name of a licence; left out: that of the base model's card.
    """
    recipe = record["recipe"] if record else {}
    model = recipe.get("model", {})
    base = base or model.get("path") or base_of(source)
    made = made_by(source) if run is not None else None
    tested = [result for result in results_of(source, run) if result.split == "test"]
    of_itself = [result for result in tested if (result.phase, result.step) == made]
    skipped = {"sft": recipe.get("skip_sft"), "grpo": recipe.get("skip_grpo")}
    last = PHASES.index(made[0] if made else PHASES[-1])
    phases = [name for name in PHASES[1 : last + 1] if recipe and not skipped[name]]
    name = recipe.get("name") or Path(source).name
    data = {part: rows for part, rows in recipe.get("data", {}).items() if isinstance(rows, dict)}
    metadata = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["grouper", "math", *(["grpo"] if "grpo" in phases else [])],
        base_model=None if looks_local(base) else base,
        license=license_id or license_of(base),
        datasets=sorted(_hub_sets(data)) or None,
        model_name=name,
        eval_results=[_measured(of_itself[-1], data)] if of_itself else None,
    )
    environment = Environment(  # noqa: S701 - Markdown, not HTML
        loader=PackageLoader("grouper.publish", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = lambda text: re.sub(r"[\s|]+", " ", str(text))
    return environment.get_template("card.md.j2").render(
        metadata=metadata,
        name=name,
        place=place,
        base="a new random model" if model.get("new") else without_folder(base),
        record=record,
        recipe=recipe,
        phases=phases,
        checkpoint=checkpoint_line(source),
        data=data,
        info=None if run is None else RunFolder(run).read_info(),
        results=[*compared(tested)] if tested else [],
        curves=CURVES_FILE,
        version=version("grouper-rl"),
    )


def made_by(source: str) -> tuple[str, int]:
    """The phase that made a model of a run, and the step of it; `base` and 0 before training."""
    folder = Path(source).expanduser()
    if not is_complete(folder):
        return PHASES[0], 0
    state = read_state(folder)
    return state["phase"], state["step"]


def checkpoint_line(source: str) -> str | None:
    """Which checkpoint of its run a model is; None for the result of a phase and any other."""
    folder = Path(source).expanduser()
    if not is_complete(folder) or folder.name == "final":
        return None
    state = read_state(folder)
    phase, step, total = state["phase"], state["step"], state["total"]
    line = f"This is checkpoint {step} of the {total} steps of {phase.upper()}"
    if is_complete(folder.parent / "final"):
        return f"{line}, not the result of its run."
    return f"{line}, in a run that has not been finished."


def results_of(source: str, run: Path | None) -> list[EvaluationResult]:
    """What a run measured up to this model: nothing of a phase or step that came after it."""
    if run is None:
        return []
    phase, step = made_by(source)
    made = PHASES.index(phase), step
    results = RunFolder(run).read_evaluations()
    return [result for result in results if (PHASES.index(result.phase), result.step) <= made]


def license_of(base: str) -> str | None:
    """The licence that the card of a local or cached base model names, or None."""
    try:
        file = Path(base).expanduser() / "README.md"
        found = ModelCard.load(file if looks_local(base) else base).data.license
    except Exception:  # noqa: BLE001 - no card, no network, or metadata of any other kind
        return None
    return found if isinstance(found, str) else None


def _hub_sets(data: Mapping[str, Any]) -> set[str]:
    """The Hub names of the data sets that a recipe reads."""
    rows = [row for part in data.values() for row in (part.get("mixture") or [part])]
    named = {SOURCES[row["source"]].hub if row["source"] in SOURCES else None for row in rows}
    own = {row["path"] for row in rows if row["source"] == "hub"}
    return {name for name in named | own if name}


def _measured(last: EvaluationResult, data: Mapping[str, Any]) -> EvalResult:
    """An evaluation as the Hub's `model-index` has it."""
    rows, interval = data.get("test") or {}, last.interval
    source = str(rows.get("path") or rows.get("source") or "test")
    return EvalResult(
        task_type="text-generation",
        dataset_type=source,
        dataset_name=source,
        dataset_split=rows.get("split") or "test",
        metric_type="accuracy",
        metric_value=round(last.accuracy, 4),
        metric_name=f"accuracy ({CONFIDENCE:.0%} interval {interval.low:.4f} to "
        f"{interval.high:.4f}, {last.overall.problems} problems, {last.samples} sample(s) each)",
    )
