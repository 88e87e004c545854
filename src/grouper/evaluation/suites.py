"""Public problem sets by name, and a recipe that measures on one of them as the field does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grouper.config.schema import PromptConfig, Recipe, SourceConfig
from grouper.data.reading import source_named
from grouper.data.sources import SOURCES
from grouper.errors import ConfigError, did_you_mean, require_known
from grouper.files import table
from grouper.prompts import FORMATS

SUITES: dict[str, dict[str, Any]] = table("grouper.evaluation", "suites.yaml")

# A prompt is never left out of a suite because a recipe has shorter ones.
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
        """Where its problems lie, as evaluations record it; the revision follows from loading."""
        data = self.data
        return {
            "name": self.name,
            "source": data.source,
            "path": data.path or SOURCES[data.source].hub,
            "subset": data.subset or SOURCES[data.source].subset,
            "split": data.split,
            "answer": self.answer,
        }


def suite_named(text: str) -> Suite:
    """The suite of that name, with its problems in a local copy (NAME=PATH), or a file as one.

    Raises:
        ConfigError: there is no such suite or file.
    """
    name, _, path = text.partition("=")
    # An empty path would be the current folder.
    is_file = name not in SUITES and bool(name) and Path(name).expanduser().exists()
    if name not in SUITES and not is_file:
        raise ConfigError(
            f"there is no suite {name!r}, and no file of that name",
            where="--on",
            fix=did_you_mean(name, SUITES),
        )
    # Of a file it is not known what its answers are, which is what MATH's may be.
    row = dict(SUITES["math" if is_file else name])
    if is_file:
        row["data"], name = source_named(name), Path(name).stem
    elif path:
        local = {"path": path}
        if row["data"]["source"] == "hub":  # of any layout, with the same columns
            local["source"] = "file"
        row["data"] = {**row["data"], **local}
    del row["about"]
    suite = Suite(name=name, **{"sampling": {}, **row, "data": SourceConfig(**row["data"])})
    return replace(suite, prompts=tuple(suite.prompts))


def recipe_on(
    recipe: Recipe, suite: Suite, *, prompt: str | None, tokens: int, **changes: Any
) -> Recipe:
    """The recipe that measures on a suite.

    Args:
        recipe: of the model.
        suite: what to measure on.
        prompt: a format; None: the recipe's own.
        tokens: the longest completion.
        changes: to the suite's sampling (`samples`, `temperature`, ...); None: as it has it.

    Raises:
        ConfigError: there is no such format, or a value that cannot be.
    """
    asked = recipe.prompt if prompt is None else PromptConfig(format=prompt)
    require_known("prompt format", asked.format, FORMATS, where="--prompt")
    given = {name: value for name, value in changes.items() if value is not None}
    own = {"samples": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    settings = {**own, **suite.sampling, **given, "max_new_tokens": tokens, "rewards": False}
    # Through an override, whose refusals say what is wrong with a value.
    wanted = [f"evaluation.{key}={json.dumps(value)}" for key, value in settings.items()]
    sampling = {"stop": None} if prompt is not None else {}
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"test": suite.data, "test_share": 0.0}),
            "prompt": asked.model_copy(update={"max_prompt_tokens": _LONG}),
            "evaluation": recipe.override(*wanted).evaluation,
            "sampling": recipe.sampling.model_copy(update={**sampling, "max_total_tokens": None}),
        }
    )
