"""Several runs one after the other, each beginning with what earlier ones have made.

A stages file has what the runs share (`recipe`), what each stage changes, and which evaluations are
compared at the end. In a setting, `{teacher}` is the final model of the stage `teacher`, and
`{teacher.base}` the model that it began with. See docs/distillation.md for an example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grouper.api import synthesize
from grouper.api import train as train_recipe
from grouper.config.checks import validate_json
from grouper.config.loading import load_recipe
from grouper.config.overrides import parse_yaml
from grouper.config.schema import Positive, Recipe, Section
from grouper.errors import ConfigError, did_you_mean
from grouper.evaluation.compare import Comparison, compare
from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.result_tables import comparison_blocks
from grouper.files import write_atomic
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress
from grouper.tables import as_markdown

# The one report of all stages, in their folder.
REPORT_FILE = "stages.md"

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]

# `{teacher}` and `{teacher.base}` in a setting.
_REFERENCE = re.compile(r"\{([A-Za-z][A-Za-z0-9_-]*)(\.base)?\}")


class TextsConfig(Section):
    """Right answers of an earlier stage's model, which become the demonstrations of SFT."""

    by: Name
    """the stage whose final model writes them"""
    samples: Positive = 1
    """completions of each training problem, of which the right ones are kept"""


class StageConfig(Section):
    """One run."""

    name: Name
    settings: dict[str, Any] = Field(default_factory=dict)
    """`section.key: value`, over those of the recipe"""
    texts: TextsConfig | None = None
    """write data.sft first"""


class StagesConfig(Section):
    """A chain of runs."""

    name: Name
    output_dir: str = "outputs"
    recipe: str
    """name or file of what all stages have in common; a path is relative to this file"""
    stages: Annotated[tuple[StageConfig, ...], Field(strict=False, min_length=1)]
    tables: dict[str, dict[str, str]] = Field(default_factory=dict)
    """title of a comparison -> its rows, in order: label -> `stage.base`, `stage.sft` or
    `stage.grpo`"""

    def contradictions(self) -> Iterator[str]:
        earlier: list[str] = []
        for stage in self.stages:
            if stage.name in earlier:
                yield f"two stages have the name {stage.name}"
            names = [name for name, _ in _REFERENCE.findall(json.dumps(stage.settings))]
            if stage.texts is not None:
                names.append(stage.texts.by)
            for name in names:
                if name not in earlier:
                    hint = did_you_mean(name, earlier)
                    yield f"stage {stage.name} needs {name}, which is no earlier stage {hint}"
            earlier.append(stage.name)
        for title, rows in self.tables.items():
            for label, place in rows.items():
                stage_name, _, phase = place.partition(".")
                if stage_name not in earlier or phase not in ("base", "sft", "grpo"):
                    yield f"tables: {title}: {label}: {place} is no STAGE.base, .sft or .grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesResult:
    """What a chain of runs has made."""

    path: Path
    runs: Mapping[str, Path]
    """Stage -> its run folder."""
    comparisons: Mapping[str, Comparison]
    """Title -> the evaluations of a table, each paired with the one before it."""


def load_stages(path: Path | str) -> StagesConfig:
    """Read a stages file.

    Raises:
        ConfigError: it is not there, or every wrong or unknown setting at once.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError("there is no such file", where=str(path), fix="Check the path.")
    data = parse_yaml(file.read_text(encoding="utf-8"), str(path))
    if not isinstance(data, dict):
        raise ConfigError("this is no mapping of settings", where=str(path))
    config = validate_json(StagesConfig, json.dumps(data), where=str(path))
    beside = file.parent / config.recipe
    if config.recipe.endswith((".yaml", ".yml", ".json")) and beside.is_file():
        config = config.model_copy(update={"recipe": str(beside)})
    return config


def run_stages(
    config: StagesConfig,
    display: Callable[[str], Progress] = lambda _: Progress(quiet=True),
) -> StagesResult:
    """Run every stage that is not finished yet, and compare the evaluations of each table.

    Each stage is a run of its own in `<output_dir>/<name>/<stage>`. Repeated after an interruption,
    it goes on where it was.

    Args:
        config: from `load_stages`.
        display: name of a stage -> where its progress is shown.

    Raises:
        GrouperError: as runs do; ConfigError: a table names an evaluation that no run has.
    """
    folder = Path(config.output_dir).expanduser() / config.name
    runs: dict[str, Path] = {}
    for stage in config.stages:
        recipe = stage_recipe(config, stage, runs)
        if stage.texts is not None:
            recipe = _with_texts(recipe, stage.texts, runs, display(stage.name))
        resume = recipe.run_folder.exists()
        train_recipe(recipe, resume=resume, display=display(stage.name))
        runs[stage.name] = recipe.run_folder
    comparisons = {title: _compare(title, rows, runs) for title, rows in config.tables.items()}
    result = StagesResult(path=folder, runs=runs, comparisons=comparisons)
    numbers = {title: found.numbers for title, found in comparisons.items()}
    write_atomic(folder / "stages.json", (json.dumps(numbers, indent=1) + "\n").encode())
    write_atomic(folder / REPORT_FILE, _report(config, result).encode())
    return result


def stage_recipe(config: StagesConfig, stage: StageConfig, runs: Mapping[str, Path]) -> Recipe:
    """Return the recipe of a stage.

    Args:
        config: of the chain.
        stage: one of its stages.
        runs: folders of the earlier ones.

    Raises:
        ConfigError: every wrong or unknown setting of it at once.
    """

    def model_of(match: re.Match[str]) -> str:
        run = runs[match[1]]
        return first_model(run) if match[2] else final_model(run)

    settings = []
    for key, value in stage.settings.items():
        # Only strings hold references; what is written as JSON is YAML, too.
        text = _REFERENCE.sub(lambda match: json.dumps(model_of(match))[1:-1], json.dumps(value))
        settings.append(f"{key}={text}")
    folder = Path(config.output_dir).expanduser() / config.name
    place = [f"name={stage.name}", f"output_dir={json.dumps(str(folder))}"]
    return load_recipe(config.recipe, [*settings, *place])


def final_model(run: Path) -> str:
    """Return the folder of the last model that a run has trained.

    Raises:
        ConfigError: it has trained none.
    """
    for phase in ("grpo", "sft"):
        folder = run / phase / "final"
        if folder.exists():
            return str(folder)
    raise ConfigError(
        "this stage has trained no model",
        where=str(run),
        fix="Refer to the model it began with: {NAME.base}.",
    )


def first_model(run: Path) -> str:
    """Return the model that a run began with: a folder of its own if the recipe made a new one."""
    made = run / "base"
    if made.exists():
        return str(made)
    return str(load_recipe(run / "recipe.yaml").model.path)


def _with_texts(
    recipe: Recipe, texts: TextsConfig, runs: Mapping[str, Path], display: Progress
) -> Recipe:
    """Write the right answers of an earlier model once, and return the recipe that trains on them.

    They lie beside the run, which is not begun before they are complete.
    """
    model = final_model(runs[texts.by])
    file = recipe.run_folder.with_suffix(".jsonl")
    if not recipe.run_folder.exists():
        rows, completions = synthesize(recipe, model, file, samples=texts.samples, display=display)
        display.say(f"{model} has written {rows} right answers in {completions} completions.")
    source = {"source": "file", "path": str(file), "columns": {"response": "response"}}
    return recipe.override(data={"sft": source})


def _report(config: StagesConfig, result: StagesResult) -> str:
    """Write the comparisons as Markdown, with links to the report of each run."""
    lines = [f"# {config.name}", ""]
    for title, comparison in result.comparisons.items():
        lines += [f"## {title}", ""]
        for block in comparison_blocks(comparison):
            lines += [as_markdown(block), ""]
    lines += ["## Runs", ""]
    lines += [f"- {stage}: [report]({stage}/report.html)" for stage in result.runs]
    return "\n".join([*lines, ""])


def _compare(title: str, rows: Mapping[str, str], runs: Mapping[str, Path]) -> Comparison:
    """Compare the recorded evaluations of a table on the test problems."""
    results: list[EvaluationResult] = []
    for label, place in rows.items():
        stage, _, phase = place.partition(".")
        result = RunFolder(runs[stage]).read_evaluation(phase)
        if result is None:
            raise ConfigError(
                f"the run of {stage} was not measured after {phase}",
                where=f"tables: {title}: {label}",
                fix="Name an evaluation that it has, or give the recipe data.test.",
            )
        results.append(replace(result, name=label))
    return compare(results)
