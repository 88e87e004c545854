"""The model card: origin and accuracy of a model, with its confidence, from a run's record."""

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
from grouper.evaluation.result_tables import result_blocks
from grouper.evaluation.statistics import CONFIDENCE
from grouper.models.folders import base_of, looks_local
from grouper.publish.portable import without_folder
from grouper.runs.contamination_blocks import contamination_blocks
from grouper.runs.folder import PHASES, RunFolder
from grouper.tables import as_markdown
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
    """Write the text of README.md, with the metadata that the Hub reads.

    Args:
        source: the model folder that is exported.
        record: the content of `grouper.json`; None if the model's recipe is not known.
        place: the folder or Hub name that it will be loaded from.
        run: the run that trained it, if there is one.
        base: the model it was trained from; default: that of the record, or of `source`.
        adapter: whether the adapter alone is published.
        license_id: the Hub's name of a license; default: that of the base model's card.
    """
    recipe = record["recipe"] if record else {}
    model = recipe.get("model", {})
    base = base or model.get("path") or base_of(source)
    test_results = [result for result in results_of(source, run) if result.split == "test"]
    own_results = []
    last_phase = PHASES[-1]
    if run is not None:
        last_phase, step = made_by(source)
        own_results = [r for r in test_results if r.phase == last_phase and r.step == step]
    phases = _trained_phases(recipe, last_phase)
    name = recipe.get("name") or Path(source).name
    data = {
        part_name: settings
        for part_name, settings in recipe.get("data", {}).items()
        if isinstance(settings, dict)
    }
    tags = ["grouper", "math"]
    if "grpo" in phases:
        tags.append("grpo")
    metadata = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
        base_model=None if looks_local(base) else base,
        license=license_id or license_of(base),
        datasets=sorted(_hub_sets(data)) or None,
        model_name=name,
        eval_results=[_eval_result(own_results[-1], data)] if own_results else None,
    )
    environment = Environment(  # noqa: S701 - Markdown, not HTML
        loader=PackageLoader("grouper.publish", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["markdown"] = as_markdown
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
        results=result_blocks(test_results) if test_results else [],
        checks=[] if run is None else contamination_blocks(run),
        curves=CURVES_FILE,
        version=version("grouper-rl"),
    )


def _trained_phases(recipe: Mapping[str, Any], last_phase: str) -> list[str]:
    """Return the phases of a recipe up to the one that a model is of; none without a recipe."""
    if not recipe:
        return []
    last = PHASES.index(last_phase)
    return [phase for phase in PHASES[1 : last + 1] if not recipe.get(f"skip_{phase}")]


def made_by(source: str) -> tuple[str, int]:
    """Return the phase that made a model of a run, and its step; `base` and 0 before training."""
    folder = Path(source).expanduser()
    if not is_complete(folder):
        return PHASES[0], 0
    state = read_state(folder)
    return state["phase"], state["step"]


def checkpoint_line(source: str) -> str | None:
    """Describe which checkpoint of its run a model is; None for the result of a phase.

    Models that are of no run have no line either.
    """
    folder = Path(source).expanduser()
    if not is_complete(folder) or folder.name == "final":
        return None
    state = read_state(folder)
    phase = state["phase"].upper()
    line = f"This is checkpoint {state['step']} of the {state['total']} steps of {phase}"
    if is_complete(folder.parent / "final"):
        return f"{line}, not the result of its run."
    return f"{line}, in a run that has not been finished."


def results_of(source: str, run: Path | None) -> list[EvaluationResult]:
    """Return the results of a run up to this model, without later phases and steps."""
    if run is None:
        return []
    phase, step = made_by(source)
    position = (PHASES.index(phase), step)
    results = RunFolder(run).read_evaluations()
    return [result for result in results if (PHASES.index(result.phase), result.step) <= position]


def license_of(base: str) -> str | None:
    """Return the license that the card of a local or cached base model names, or None."""
    try:
        card: str | Path = base
        if looks_local(base):
            card = Path(base).expanduser() / "README.md"
        license_id = ModelCard.load(card).data.license
    except Exception:  # noqa: BLE001 - no card, no network, or metadata of any other kind
        return None
    return license_id if isinstance(license_id, str) else None


def _hub_sets(data: Mapping[str, Any]) -> set[str]:
    """Return the Hub names of the data sets that a recipe reads."""
    names = set()
    for settings in data.values():
        for source in settings.get("mixture") or [settings]:
            if source["source"] in SOURCES:
                names.add(SOURCES[source["source"]].hub)
            if source["source"] == "hub":
                names.add(source["path"])
    return {name for name in names if name}


def _eval_result(result: EvaluationResult, data: Mapping[str, Any]) -> EvalResult:
    """Convert an evaluation to an entry of the Hub's `model-index`."""
    test_settings = data.get("test") or {}
    source = str(test_settings.get("path") or test_settings.get("source") or "test")
    interval = result.interval
    return EvalResult(
        task_type="text-generation",
        dataset_type=source,
        dataset_name=source,
        dataset_split=test_settings.get("split") or "test",
        metric_type="accuracy",
        metric_value=round(result.accuracy, 4),
        metric_name=f"accuracy ({CONFIDENCE:.0%} interval {interval.low:.4f} to "
        f"{interval.high:.4f}, {result.overall.problems} problems, "
        f"{result.samples} sample(s) each)",
    )
