"""Chains of runs: what refers to what, one after the other, and the comparison at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper import stages
from grouper.config.loading import load_recipe, resolved_yaml
from grouper.errors import ConfigError
from grouper.stages import (
    StageConfig,
    StagesConfig,
    check_stages,
    load_stages,
    run_stages,
    stage_recipe,
)

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "stages"

CHAIN: dict[str, Any] = {
    "name": "chain",
    "recipe": "shared.yaml",
    "stages": [
        {"name": "teacher", "settings": {"skip_grpo": True}},
        {
            "name": "student",
            "settings": {
                "skip_sft": True,
                "skip_grpo": True,
                "model.new.intermediate_size": 32,
            },
        },
        {
            "name": "distilled",
            "texts": {"by": "teacher", "samples": 2},
            "settings": {
                "model": {"path": "{student.base}"},
                "sft.steps": 8,
                "grpo.steps": 2,
                "grpo.algorithm": "distillation",
                "grpo.teacher": {"path": "{teacher}"},
            },
        },
        {
            "name": "reinforced",
            "settings": {
                "model": {"path": "{student.base}"},
                "skip_sft": True,
                "grpo.steps": 1,
                "grpo.start_from": "{distilled}",
            },
        },
    ],
    "tables": {
        "Student": {
            "random": "student.base",
            "warm-up": "distilled.sft",
            "distillation": "distilled.grpo",
            "GRPO": "reinforced.grpo",
        }
    },
}


def chain_in(folder: Path, **changes: Any) -> Path:
    """A stages file beside its recipe and data; runs go to the same folder."""
    write_problems(folder)
    recipe = load_recipe("demo", [*TINY_RUN, *data_from(str(folder))])
    (folder / "shared.yaml").write_text(resolved_yaml(recipe, defaults=False))
    file = folder / "chain.yaml"
    file.write_text(
        yaml.safe_dump({**CHAIN, "output_dir": str(folder), **changes}, sort_keys=False)
    )
    return file


@pytest.mark.slow  # 15 s: four tiny runs
def test_a_chain_runs_once_and_compares_its_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_stages(chain_in(tmp_path))
    result = run_stages(config)
    assert list(result.runs) == ["teacher", "student", "distilled", "reinforced"]
    folder = tmp_path / "chain"
    assert result.path == folder
    # What a stage refers to is what the earlier one has made.
    distilled = load_recipe(folder / "distilled" / "recipe.yaml")
    assert distilled.model.path == str(folder / "student" / "base")
    assert distilled.grpo.teacher is not None
    assert distilled.grpo.teacher.path == str(folder / "teacher" / "sft" / "final")
    assert distilled.data.sft is not None
    texts = [json.loads(row) for row in (folder / "distilled.jsonl").read_text().splitlines()]
    assert texts
    assert {row["model"] for row in texts} == {str(folder / "teacher" / "sft" / "final")}
    (comparison,) = result.comparisons.values()
    assert [entry.name for entry in comparison.results] == [
        "random",
        "warm-up",
        "distillation",
        "GRPO",
    ]
    assert len(comparison.differences) == 4
    report = (folder / "stages.md").read_text()
    assert "distillation - warm-up" in report
    assert "(reinforced/report.html)" in report
    numbers = json.loads((folder / "stages.json").read_text())
    assert numbers["Student"]["differences"][0]["verdict"]

    # Repeated, nothing is trained or written again.
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(stages, "synthesize", never)
    weights = folder / "reinforced" / "grpo" / "final" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert run_stages(config).comparisons.keys() == {"Student"}
    assert weights.stat().st_mtime_ns == written


def test_a_reference_is_replaced_inside_of_a_setting(tmp_path: Path) -> None:
    final = tmp_path / 'runs "1"' / "grpo" / "final"
    final.mkdir(parents=True)
    stage = StageConfig(
        name="next", settings={"grpo.teacher": {"path": "{first}", "sources": {"math": "{first}"}}}
    )
    config = StagesConfig(name="chain", recipe="demo", stages=(StageConfig(name="first"), stage))
    recipe = stage_recipe(config, stage, lambda name, _: {"first": str(final)}[name])
    assert recipe.grpo.teacher is not None
    assert recipe.grpo.teacher.path == recipe.grpo.teacher.sources["math"] == str(final)
    assert recipe.run_folder == Path("outputs/chain/next")


def test_a_stage_that_trained_nothing_has_no_final_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has trained no model"):
        stages.final_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": []}, "at least 1"),
        ({"stages": [{"name": "a"}, {"name": "a"}]}, "two stages have the name a"),
        (
            {"stages": [{"name": "a"}, {"name": "b", "settings": {"x": "{teacher}"}}]},
            "stage b needs teacher, which is no earlier stage",
        ),
        (
            {"stages": [{"name": "a", "texts": {"by": "a"}}]},
            "stage a needs a, which is no earlier stage",
        ),
        ({"stages": [{"name": "a"}], "tables": {"T": {"x": "a.final"}}}, "a.final is no STAGE"),
        ({"stages": [{"name": "a", "setting": {}}]}, "settings"),
    ],
)
def test_a_chain_that_cannot_run_is_refused_at_once(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_stages(chain_in(tmp_path, **({"tables": {}} | changes)))


def test_a_file_that_is_missing_or_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_stages(tmp_path / "nowhere.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="no mapping"):
        load_stages(tmp_path / "list.yaml")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_examples_are_valid(file: Path) -> None:
    """Every stage of them is a recipe that loads, and every table names what it measures."""
    check_stages(load_stages(file))


@pytest.mark.parametrize(
    ("stage", "table", "message"),
    [
        ({"settings": {"grpo.groop_size": 4}}, {}, "groop_size"),
        ({"settings": {"skip_sft": True}}, {"T": {"x": "b.sft"}}, "b is not measured after sft"),
        ({"settings": {"data.test": None}}, {"T": {"x": "b.grpo"}}, "b is not measured"),
    ],
)
def test_a_mistake_in_a_later_stage_is_told_before_the_first_begins(
    stage: dict[str, Any], table: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stages_of = [{"name": "a"}, {"name": "b", **stage}]
    with pytest.raises(ConfigError, match=message):
        run_stages(load_stages(chain_in(tmp_path, stages=stages_of, tables=table)))
    assert not (tmp_path / "chain").exists()
