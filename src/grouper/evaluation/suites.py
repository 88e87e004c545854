"""Public problem sets by name, and the recipe that measures on one with the usual settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grouper.config.schema import PromptConfig, Recipe, SourceConfig
from grouper.data.reading import source_named
from grouper.data.sources import SOURCES
from grouper.errors import ConfigError, did_you_mean, require_known
from grouper.files import load_table
from grouper.prompts import FORMATS

SUITES: dict[str, dict[str, Any]] = load_table("grouper.evaluation", "suites.yaml")

# Maximal prompt tokens: no problem of a suite is left out because of a recipe's limit.
_LONG = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A problem set to measure on.

    Example: `suite_named("gsm8k")`, `suite_named("gsm8k=./gsm8k/test.jsonl")`.
    """

    name: str
    data: SourceConfig
    answer: str
    prompts: tuple[str, ...]
    tokens: int
    sampling: Mapping[str, Any]

    @property
    def card(self) -> dict[str, Any]:
        """The source of its problems, as evaluations record it; loading adds the revision."""
        data = self.data
        source = SOURCES[data.source]
        return {
            "name": self.name,
            "source": data.source,
            "path": data.path or source.hub,
            "subset": data.subset or source.subset,
            "split": data.split,
            "answer": self.answer,
        }


def suite_named(text: str) -> Suite:
    """Return the suite of that name, with a local copy of its problems (NAME=PATH), or a file.

    Raises:
        ConfigError: there is no such suite or file.
    """
    name, _, path = text.partition("=")
    if name in SUITES:
        row = dict(SUITES[name])
        data = dict(row["data"])
        if path:
            data["path"] = path
            # A local copy may have any layout, with the same columns.
            if data["source"] == "hub":
                data["source"] = "file"
    # An empty path would be the current folder.
    elif name and Path(name).expanduser().exists():
        # The answers of a file may be of any form, as MATH's are.
        row = dict(SUITES["math"])
        data = source_named(name)
        name = Path(name).stem
    else:
        raise ConfigError(
            f"there is no suite {name!r}, and no file of that name",
            where="--on",
            fix=did_you_mean(name, SUITES),
        )
    return Suite(
        name=name,
        data=SourceConfig(**data),
        answer=row["answer"],
        prompts=tuple(row["prompts"]),
        tokens=row["tokens"],
        sampling=row.get("sampling", {}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChanges:
    """Settings of an evaluation in place of those of a recipe or a suite; None keeps theirs."""

    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @property
    def set_values(self) -> dict[str, float]:
        """The settings that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def recipe_on(
    recipe: Recipe,
    suite: Suite,
    *,
    prompt: str | None,
    tokens: int,
    changes: SamplingChanges | None = None,
) -> Recipe:
    """Make the recipe that measures on a suite.

    Args:
        recipe: the recipe of the model.
        suite: the suite.
        prompt: a format; None: the recipe's own.
        tokens: the longest completion.
        changes: values in place of the suite's sampling; None: as the suite has them.

    Raises:
        ConfigError: there is no such format, or an impossible value.
    """
    prompt_config = recipe.prompt
    sampling_changes: dict[str, Any] = {}
    if prompt is not None:
        prompt_config = PromptConfig(format=prompt)
        sampling_changes["stop"] = None
    sampling_changes["max_total_tokens"] = None
    require_known("prompt format", prompt_config.format, FORMATS, where="--prompt")

    settings = {"samples": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    settings.update(suite.sampling)
    if changes is not None:
        settings.update(changes.set_values)
    settings["max_new_tokens"] = tokens
    settings["rewards"] = False
    # As an override, whose errors say what is wrong with a value.
    overrides = [f"evaluation.{key}={json.dumps(value)}" for key, value in settings.items()]
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"test": suite.data, "test_share": 0.0}),
            "prompt": prompt_config.model_copy(update={"max_prompt_tokens": _LONG}),
            "evaluation": recipe.override(*overrides).evaluation,
            "sampling": recipe.sampling.model_copy(update=sampling_changes),
        }
    )
