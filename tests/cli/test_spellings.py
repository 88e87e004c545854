"""Each flag stands for settings, and the resolved recipe shows them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import yaml

from grouper.cli.spellings import ATTENTIONS, FLAGS
from grouper.config.schema import ModelConfig

CASES: list[tuple[list[str], dict[str, Any]]] = [
    (["--max-steps", "7"], {"sft.steps": 400, "grpo.steps": 7}),
    (["--max_steps", "7", "--skip-grpo"], {"sft.steps": 7, "grpo.steps": 60}),
    (["skip_grpo=true", "--learning-rate", "0.5"], {"sft.optimizer.learning_rate": 0.5}),
    (["--save-steps", "5"], {"sft.checkpoint_every": 5, "grpo.checkpoint_every": 5}),
    (["--save_total_limit=3"], {"grpo.keep_checkpoints": 3}),
    (["--eval-steps", "0"], {"grpo.evaluate_every": 0}),
    (["--eval-steps", "epoch"], {"sft.evaluate_every": "epoch", "grpo.evaluate_every": "epoch"}),
    (["--eval_steps=off"], {"sft.evaluate_every": 0, "grpo.evaluate_every": 0}),
    (["--logging-steps", "10"], {"tracking.log_every": 10}),
    (
        ["--rewards", "tag_count, correctness"],
        {"rewards.0.name": "tag_count", "rewards.0.weight": 0.1},
    ),
    (["--reward-funcs", "stack:default"], {"rewards.2.name": "tag_count"}),
    (["--unique-examples", "128"], {"data.sft.unique": 128, "data.train.unique": "all"}),
    (["--unique-examples", "all"], {"data.sft.unique": "all"}),
    (["--dataset", "svamp"], {"data.train.source": "svamp", "data.sft.source": "arithmetic"}),
    (["--save-path", "adapter"], {"save_path": "adapter"}),
    (["--bf16"], {"model.compute_dtype": "bfloat16"}),
    (["--no-bf16"], {"model.compute_dtype": None, "model.dtype": "float32"}),
    (["--attn_implementation", "flash_attention_2"], {"model.attention": "flash_attention_2"}),
    (["--gradient-checkpointing"], {"model.gradient_checkpointing": True}),
    (["--seed", "3", "--run-name", "x"], {"seed": 3, "name": "x"}),
    (["--skip-sft", "--start-from", "out"], {"grpo.start_from": "out", "skip_sft": True}),
    (["--report_to", "math:sqrt,math:sin"], {"tracking.trackers.1.name": "math:sin"}),
    (
        ["tracking.trackers=[{name: 'math:sin'}]", "--report-to", "none"],
        {"tracking.trackers": []},
    ),
    (["--tracker", "math:sqrt", "--project", "p"], {"tracking.trackers.0.project": "p"}),
    (
        ["tracking.trackers=[{name: 'math:sqrt', tags: [a]}, {name: 'math:sin'}]", "--online"],
        {"tracking.trackers.0.tags": ["a"], "tracking.trackers.1.mode": "online"},
    ),
    (["tracking.trackers=[{name: 'math:sin'}]", "--no-trackers"], {"tracking.trackers": []}),
    (["grpo.steps=3", "--steps", "4"], {"grpo.steps": 4}),
]


def at(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[int(part)] if part.isdigit() else recipe[part]
    return recipe


@pytest.fixture
def resolved(monkeypatch, grouper):
    """The recipe that a command would run; no data is read for it."""
    monkeypatch.setattr("grouper.cli.train._dry_run", _show)
    monkeypatch.setattr("grouper.advice.recipe_checks._require_flash_attention", lambda: None)

    def call(*arguments: str) -> Any:
        called = grouper(*arguments, "--dry-run")
        assert called.code == 0, called.err
        return yaml.safe_load(called.out)

    return call


def _show(recipe: Any, _intent: Any) -> None:
    from grouper.config.loading import resolved_yaml

    print(resolved_yaml(recipe))


@pytest.mark.parametrize(("arguments", "expected"), CASES, ids=lambda value: str(value)[:60])
def test_a_flag_is_a_setting(resolved, arguments, expected):
    recipe = resolved("run", "demo", *arguments)
    assert {key: at(recipe, key) for key in expected} == expected


def test_every_flag_is_tried(request):
    tried = {word.partition("=")[0].replace("_", "-") for words, _ in CASES for word in words}
    source = inspect.getsource(inspect.getmodule(test_every_flag_is_tried))  # type: ignore[arg-type]  # this file
    missing = [
        flag.names
        for flag in FLAGS
        for names in [{n for name in flag.names for n in name.split("/")}]
        if not names & tried and not any(f'"{name}"' in source for name in names)
    ]
    assert not missing


def test_the_learning_rate_of_muon_changes_in_proportion(resolved):
    before = resolved("sft", "demo")["sft"]["optimizer"]
    after = resolved("sft", "demo", "--learning-rate", "1.5e-3")["sft"]["optimizer"]
    assert after["learning_rate"] == 1.5e-3
    rates = ("learning_rate", "muon_learning_rate")
    shares = [after[name] / before[name] for name in rates]
    assert shares == pytest.approx([0.5, 0.5])


def test_steps_and_rate_mean_grpo_where_both_phases_run_and_it_is_said(grouper, monkeypatch):
    """As the two-phase system that openmath-dapo stands for documents its command line."""
    monkeypatch.setattr("grouper.cli.train._dry_run", _show)
    typed = ("--max-steps", "200", "--learning-rate", "1e-5", "--dry-run")
    kept = ("optimizer.name=adamw", "steps=null")
    plain = [f"{phase}.{kept[0]}" for phase in ("sft", "grpo")]
    called = grouper("run", "openmath-dapo", *plain, *typed)
    assert called.code == 0, called.err
    recipe = yaml.safe_load(called.out)
    assert at(recipe, "grpo.steps") == 200
    assert at(recipe, "grpo.optimizer.learning_rate") == 1e-5
    assert (at(recipe, "sft.steps"), at(recipe, "sft.epochs")) == (None, 2)
    assert at(recipe, "sft.optimizer.learning_rate") == 2e-4
    assert "note: --max-steps and --learning-rate mean GRPO. SFT stays as the recipe" in called.err
    for words in (["--skip-sft"], ["--skip-grpo"]):
        assert "note:" not in grouper("run", "openmath-dapo", *plain, *typed, *words).err
    assert "note: --max-steps means GRPO." in grouper("run", "demo", *typed[:2], "--dry-run").err


def test_unique_examples_are_those_of_what_runs(resolved):
    assert resolved("grpo", "demo", "--unique-examples", "9")["data"]["train"]["unique"] == 9
    alone = resolved("sft", "demo", "data.sft=null", "--unique-examples", "9")
    assert alone["data"]["train"]["unique"] == 9


def test_a_system_prompt_from_a_file_replaces_the_recipes(resolved, tmp_path):
    file = tmp_path / "system.txt"
    file.write_text("Answer in <reasoning> and <answer> tags.")
    recipe = resolved("run", "demo", "prompt.system=Hello", "--system-prompt-file", str(file))
    assert recipe["prompt"]["system_file"] == str(file)
    assert recipe["prompt"]["system"] is None


def test_a_model_beside_the_work_comes_before_the_hub(resolved, tmp_path, monkeypatch):
    (tmp_path / "models" / "Tiny").mkdir(parents=True)
    (tmp_path / "models" / "Tiny" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found = resolved("run", "demo", "--model", "Somebody/tiny")["model"]
    assert (found["path"], found["new"]) == ("./models/Tiny", None)
    assert resolved("run", "demo", "--model", "Somebody/other")["model"]["path"] == "Somebody/other"


def test_config_names_the_recipe(resolved, grouper, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(grouper("recipes", "show", "demo").out)
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", "mine.yaml", "sft.steps=3", "--output-dir", "here"]
    recipe = resolved("run", *arguments)
    assert (recipe["sft"]["steps"], recipe["output_dir"]) == (3, "here")
    assert resolved("run", "--config", "demo")["name"] == "demo"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run"], "Missing argument 'RECIPE'"),
        (["run", "demo", "--config", "x.yaml"], "and so does 'demo'"),
        (["run", "demo", "--no-trackers", "--tracker", "wandb"], "contradict"),
        (["run", "demo", "--project", "p"], "--project: the recipe has no trackers"),
        (["run", "demo", "--tracker", "none", "--tracker", "wandb"], "contradict"),
        (["run", "demo", "--eval-steps", "often"], "neither a number of steps, 'epoch' nor 'off'"),
        (["run", "--config", "demos"], "Did you mean 'demo'"),
        (["run", "--config", "demos.yaml"], "./demos.yaml: there is no recipe file"),
        (["run", "demo", "--unique-examples", "some"], "neither a number of examples nor 'all'"),
        (["run", "demo", "--rewards", "corectness"], "Did you mean 'correctness'"),
        (["run", "demo", "--tracker", "wanbd"], "Did you mean 'wandb'"),
        (["run", "demo", "--system-prompt-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_cannot_be_meant_is_told(grouper, arguments, text):
    called = grouper(*arguments, "--dry-run")
    assert called.code == 2
    assert text in called.err
    assert "Traceback" not in called.err


def test_the_attentions_are_the_recipes():
    annotation = ModelConfig.model_fields["attention"].annotation
    assert set(ATTENTIONS) == set(annotation.__args__)  # type: ignore[union-attr]  # a Literal


def test_no_two_flags_share_a_name():
    names = [name for flag in FLAGS for part in flag.names for name in part.split("/")]
    assert len(names) == len(set(names))
