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
                    sentences = [
                        f"stage {stage.name} needs {name}, which is no earlier stage.",
                        did_you_mean(name, earlier),
                    ]
                    yield " ".join(filter(None, sentences))
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
        GrouperError: as runs do, and before the first of them: wrong settings of any stage.
    """
    check_stages(config)
    folder = Path(config.output_dir).expanduser() / config.name
    runs: dict[str, Path] = {}

    def model_of(name: str, is_base: bool) -> str:
        return first_model(runs[name]) if is_base else final_model(runs[name])

    for stage in config.stages:
        recipe = stage_recipe(config, stage, model_of)
        progress = display(stage.name)
        if stage.texts is not None:
            _write_texts(recipe, stage.texts, final_model(runs[stage.texts.by]), progress)
        train_recipe(recipe, resume=recipe.run_folder.exists(), display=progress)
        runs[stage.name] = recipe.run_folder
    comparisons = {title: _compare(title, rows, runs) for title, rows in config.tables.items()}
    result = StagesResult(path=folder, runs=runs, comparisons=comparisons)
    numbers = {title: found.numbers for title, found in comparisons.items()}
    write_atomic(folder / "stages.json", (json.dumps(numbers, indent=1) + "\n").encode())
    write_atomic(folder / REPORT_FILE, _report(config, result).encode())
    return result


def check_stages(config: StagesConfig) -> None:
    """Check the settings of every stage, and that each table names what will be measured.

    Raises:
        ConfigError: wrong settings of a stage, or an evaluation that no run will have.
    """
    recipes = {
        stage.name: stage_recipe(config, stage, lambda name, _: name) for stage in config.stages
    }
    for title, rows in config.tables.items():
        for label, place in rows.items():
            stage_name, _, phase = place.partition(".")
            recipe = recipes[stage_name]
            data = recipe.data
            is_tested = data.test is not None or data.test_share > 0
            if not is_tested or phase not in ("base", *recipe.phases):
                raise ConfigError(
                    f"stage {stage_name} is not measured after {phase}",
                    where=f"tables: {title}: {label}",
                    fix="Name a phase that it runs, and give the recipe data.test.",
                )


def stage_recipe(
    config: StagesConfig, stage: StageConfig, model_of: Callable[[str, bool], str]
) -> Recipe:
    """Return the recipe of a stage.

    Args:
        config: of the chain.
        stage: one of its stages.
        model_of: (name of an earlier stage, whether the model that it began with is meant) -> the
            folder of its model.

    Raises:
        ConfigError: every wrong or unknown setting of it at once.
    """

    def quoted_model(match: re.Match[str]) -> str:
        return json.dumps(model_of(match[1], match[2] is not None))[1:-1]

    # Only strings hold references; what is written as JSON is YAML, too.
    settings = [
        f"{key}={_REFERENCE.sub(quoted_model, json.dumps(value))}"
        for key, value in stage.settings.items()
    ]
    folder = Path(config.output_dir).expanduser() / config.name
    settings += [f"name={stage.name}", f"output_dir={json.dumps(str(folder))}"]
    if stage.texts is not None:
        texts = str(folder / f"{stage.name}.jsonl")
        source = {"source": "file", "path": texts, "columns": {"response": "response"}}
        # All of it is replaced: settings of another source do not fit these texts.
        settings.append(f"data.sft={json.dumps(source)}")
    return load_recipe(config.recipe, settings)


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


def _write_texts(recipe: Recipe, texts: TextsConfig, model: str, display: Progress) -> None:
    """Write the right answers of an earlier model once, where the recipe reads its demonstrations.

    They lie beside the run, which is not begun before they are complete.
    """
    assert recipe.data.sft is not None
    assert recipe.data.sft.path is not None
    if recipe.run_folder.exists():
        return
    rows, completions = synthesize(
        recipe, model, recipe.data.sft.path, samples=texts.samples, display=display
    )
    display.say(f"{model} has written {rows} right answers in {completions} completions.")


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
