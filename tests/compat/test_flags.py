"""Each flag stands for settings, and the resolved recipe shows them; how flags may be written."""

from __future__ import annotations

import typing
from typing import Any

import click
import pytest
import yaml

from grouper.cli.train import run as run_command
from grouper.cli.train import sft as sft_command
from grouper.compat.aliases import aliases
from grouper.compat.flags import flag_named, flags
from grouper.config.checks import settings
from grouper.config.schema import ModelConfig, Recipe

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
        {
            "rewards.0.name": "tag_count",
            "rewards.0.weight": 0.1,
            "rewards.1.name": "correctness",
        },
    ),
    (["--reward-funcs", "stack:default"], {"rewards.2.name": "tag_count"}),
    (["--unique-examples", "128"], {"data.sft.unique": 128, "data.train.unique": "all"}),
    (["--unique-examples", "all"], {"data.sft.unique": "all"}),
    (["--dataset", "svamp"], {"data.train.source": "svamp", "data.sft.source": "arithmetic"}),
    (["--save-path", "adapter"], {"save_path": "adapter"}),
    (["--bf16"], {"model.compute_dtype": "bfloat16"}),
    (["--no-bf16"], {"model.compute_dtype": "float32", "model.dtype": "float32"}),
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
    (["tracking.trackers=[{name: 'math:sin'}]", "--tracker", "none"], {"tracking.trackers": []}),
    (["grpo.steps=4", "--steps", "4"], {"grpo.steps": 4}),
    (["--max_steps=-1", "grpo.epochs=2"], {"grpo.steps": None}),
    (["--eval_strategy", "steps", "--eval_steps", "20"], {"grpo.evaluate_every": 20}),
    (["--eval-strategy", "no"], {"sft.evaluate_every": 0, "grpo.evaluate_every": 0}),
    (["--use-wandb"], {"tracking.trackers.0.name": "wandb"}),
    (
        ["tracking.trackers=[{name: 'math:sin'}]", "--use_wandb", "--wandb-tags", "a", "b"],
        {"tracking.trackers.0.name": "math:sin", "tracking.trackers.1.tags": ["a", "b"]},
    ),
    (["--report-to", "math:sin", "--no_wandb"], {"tracking.trackers.0.name": "math:sin"}),
    (
        ["--tracker", "math:sin", "--wandb-run-name", "7", "--entity", "e"],
        {"tracking.trackers.0.run_name": "7", "tracking.trackers.0.entity": "e"},
    ),
    (["--num_generations", "4"], {"grpo.group_size": 4}),
    (["--num-train-epochs", "2"], {"grpo.steps": None, "grpo.epochs": 2.0}),
    (["--warmup_steps", "5"], {"grpo.optimizer.warmup_steps": 5}),
    (["--warmup_ratio", "0.25"], {"grpo.optimizer.warmup_ratio": 0.25}),
    (["--system-prompt", "a: b"], {"prompt.system": "a: b"}),
    (["--max-seq-length", "99"], {"sft.max_tokens": 99}),
    (["--optim", "adamw_torch_fused"], {"grpo.optimizer.name": "adamw"}),
    (["--scale_rewards", "False"], {"grpo.advantage": "mean"}),
    (["--max-grad-norm", "0"], {"grpo.optimizer.max_grad_norm": None}),
    (["--model_revision", "main", "--model", "a/b"], {"model.revision": None}),
    (["--model_revision", "12e5", "--model", "a/b"], {"model.revision": "12e5"}),
    (["--use_cpu"], {"device": "cpu"}),
    (["--push_to_hub", "True"], {"push_to": "demo"}),
    (["--no-push-to-hub"], {"push_to": None}),
    # 8 x 2 completions for each of two optimizer steps.
    (
        [
            "grpo.updates_per_batch=2",
            "--per-device-train-batch-size=8",
            "--gradient_accumulation_steps=2",
        ],
        {"grpo.prompts_per_step": 4},
    ),
]


def at(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[int(part)] if part.isdigit() else recipe[part]
    return recipe


@pytest.fixture
def resolved(monkeypatch, grouper):
    """The recipe that a command would run; no data is read for it."""
    monkeypatch.setattr("grouper.cli.train._dry_run", _show)
    monkeypatch.setattr("grouper.advice.recipe_checks.find_spec", lambda name: True)

    def call(*arguments: str) -> Any:
        called = grouper(*arguments, "--dry-run")
        assert called.code == 0, called.err
        return yaml.safe_load(called.out)

    return call


def _show(recipe: Any, _intent: Any) -> None:
    from grouper.config.loading import resolved_yaml

    print(resolved_yaml(recipe))


@pytest.mark.usefixtures("extras")
@pytest.mark.parametrize(("arguments", "expected"), CASES, ids=lambda value: str(value)[:60])
def test_a_flag_is_a_setting(resolved, arguments, expected):
    recipe = resolved("run", "demo", *arguments)
    assert {key: at(recipe, key) for key in expected} == expected


def test_a_name_of_trls_that_has_a_key_is_a_flag():
    names = [name for name, row in aliases().items() if "to" in row]
    assert len(names) > 25
    assert [name for name in names if flag_named(name) not in flags()] == []
    others = [row.get("also", ()) for row in flags().values()]
    spellings = [*flags(), *(name for several in others for name in several)]
    assert len(spellings) == len(set(spellings))


def test_help_stays_short():
    shown = [flag for flag, row in flags().items() if "help" in row]
    assert len(shown) <= 26
    options = {name for option in run_command.params for name in option.opts}
    assert {f"--{flag}" for flag in flags()} <= options


def test_the_learning_rate_of_muon_changes_in_proportion(resolved):
    before = resolved("sft", "demo")["sft"]["optimizer"]
    after = resolved("sft", "demo", "--learning-rate", "1.5e-3")["sft"]["optimizer"]
    assert after["learning_rate"] == 1.5e-3
    rates = ("learning_rate", "muon_learning_rate")
    shares = [after[name] / before[name] for name in rates]
    assert shares == pytest.approx([0.5, 0.5])
    words = ("sft.optimizer.name=adamw", "--learning-rate", "1.5e-3")
    other = resolved("sft", "demo", *words)["sft"]["optimizer"]
    assert other["muon_learning_rate"] == before["muon_learning_rate"]


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
    assert "note:" not in grouper("run", "demo", "--seed", "3", "--dry-run").err


def test_a_data_set_is_for_what_runs(resolved):
    for words, part in (("sft", "sft"), ("run", "train"), ("grpo", "train")):
        data = resolved(words, "demo", "--dataset", "gsm8k")["data"]
        assert [name for name in ("sft", "train") if data[name]["source"] == "gsm8k"] == [part]
    alone = resolved("sft", "demo", "data.sft=null", "--dataset", "gsm8k")["data"]
    assert (alone["sft"], alone["train"]["source"]) == (None, "gsm8k")


def test_unique_examples_are_those_of_what_runs(resolved):
    assert resolved("grpo", "demo", "--unique-examples", "9")["data"]["train"]["unique"] == 9
    alone = resolved("sft", "demo", "data.sft=null", "--unique-examples", "9")
    assert alone["data"]["train"]["unique"] == 9


def test_a_system_prompt_from_a_file_replaces_the_recipes(resolved, grouper, tmp_path, monkeypatch):
    file, mine = tmp_path / "system.txt", tmp_path / "mine.yaml"
    file.write_text("Answer in <reasoning> and <answer> tags.\n")
    mine.write_text(grouper("recipes", "show", "demo", "prompt.system=Hello").out)
    recipe = resolved("run", str(mine), "--system_prompt_path", str(file))
    assert recipe["prompt"]["system"] == "Answer in <reasoning> and <answer> tags."
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = resolved("run", str(mine), "--system-prompt-file=~/system.txt")
    assert at_home["prompt"] == recipe["prompt"]


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
        (["run", "demo", "--tracker", "none", "--tracker", "wandb"], "contradict"),
        (["run", "demo", "--no-wandb", "--report_to", "wandb"], "contradict"),
        (["run", "demo", "--tracker", "none", "--use-wandb"], "contradict"),
        (["run", "demo", "--use-wandb", "--no_wandb"], "--use-wandb, also --wandb: given 2 times"),
        (["run", "demo", "--project", "p"], "--project: the recipe has no trackers"),
        (["run", "demo", "--no-wandb", "--wandb-project", "p"], "the recipe has no trackers"),
        (
            ["run", "demo", "--eval-steps", "often"],
            "should be a whole number, or 'epoch' (got 'often')",
        ),
        (["run", "demo", "--eval_strategy", "often"], "is one of steps, epoch, no"),
        (["run", "--config", "demos"], "Did you mean 'demo'"),
        (["run", "--config", "demos.yaml"], "./demos.yaml: there is no recipe file"),
        (
            ["run", "demo", "--unique-examples", "some"],
            "should be a whole number, or 'all' (got 'some')",
        ),
        (["run", "demo", "--rewards", "corectness"], "Did you mean 'correctness'"),
        (["run", "demo", "--tracker", "wanbd"], "Did you mean 'wandb'"),
        (
            ["run", "demo", "--system-prompt-file", "nowhere.txt"],
            "nowhere.txt: cannot be read",
        ),
        (["run", "demo", "--bf16=maybe"], "--bf16 is true or false, not 'maybe'"),
        (["run", "demo", "--hub-model-id", "us/ours"], "--push-to-hub pushes to: give both"),
        (["run", "demo", "--learning-rate", "fast"], "got 'fast'"),
        (["run", "demo", "--learning-rate", "fast", "grpo.optimizer.name=muon"], "got 'fast'"),
        (["run", "demo", "--seed", "2026-01-01"], "got '2026-01-01'"),
        (["run", "demo", "--seed", "[1"], "--seed"),
    ],
)
def test_what_cannot_be_meant_is_told(grouper, arguments, text):
    called = grouper(*arguments, "--dry-run")
    assert called.code == 2
    assert text in called.err
    assert "Traceback" not in called.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--steps 3 --max_steps 4", "--max-steps, also --steps: given 2 times, with 3 and 4"),
        ("--max-steps 3 --max_steps 4", "Give it once"),
        ("--model a --model_path b", "--model-path: given 2 times, with a and b"),
        ("--rewards accuracy --reward_funcs format", "with accuracy and format"),
        ("--bf16 --no-bf16", "--bf16: given 2 times, with true and false"),
        ("grpo.steps=3 --max-steps 4", "grpo.steps=3 and --max-steps contradict each other"),
        ("seed=1 --seed 2", "seed=1 and --seed contradict"),
        ("--eval-strategy no --eval-steps 5", "--eval-steps and --eval-strategy contradict"),
        ("data.train.source=math --dataset svamp", "source=math and --dataset contradict"),
        ('data.train={"limit":5} --dataset svamp', "data.train would be {'source': 'svamp'}"),
        (
            'rewards=[{"name":"correctness"}] --rewards format',
            "and --rewards contradict each other",
        ),
        (
            "grpo.prompts_per_step=3 --per_device_train_batch_size 8",
            "--per-device-train-batch-size",
        ),
        ("prompt.system=a --system-prompt-file /dev/null", "and --system-prompt-file contradict"),
        ("--system-prompt a --system_prompt_path /dev/null", "contradict each other"),
    ],
)
def test_contradictions_are_refused_in_one_paragraph(grouper, words, text):
    called = grouper("run", "demo", *words.split(), "--dry-run")
    assert called.code == 2
    assert text in called.err
    assert len([line for line in called.err.splitlines() if "rror:" in line]) == 1


def test_a_data_set_and_what_is_read_of_it_go_together(resolved):
    """`--dataset_name NAME --dataset_config NAME`, with the second as its hint has it."""
    words = ["data.train.subset=main", "--dataset", "us/ours", "data.train.columns.question=q"]
    train = resolved("run", "gsm8k", *words)["data"]["train"]
    assert (train["source"], train["path"], train["subset"]) == ("hub", "us/ours", "main")
    assert (train["columns"], train["split"]) == ({"question": "q"}, None)


def test_the_same_twice_is_no_contradiction(resolved):
    words = ["--seed", "3", "seed=3", "--seed=3", "grpo.steps=1", "grpo.steps=2"]
    recipe = resolved("run", "demo", *words)
    assert (recipe["seed"], recipe["grpo"]["steps"]) == (3, 2)


def read(*words: str) -> dict[str, object]:
    """What click makes of a command line of `grouper run`."""
    return run_command.make_context("run", list(words)).params


@pytest.mark.parametrize(
    "words",
    [
        "demo --reward_funcs accuracy format grpo.steps=3",
        "--rewards accuracy format demo grpo.steps=3",
        "--reward-funcs=accuracy format demo grpo.steps=3",
        "grpo.steps=3 --rewards accuracy,format --config demo",
        "--rewards accuracy format --config demo grpo.steps=3",
        "--report_to wandb --rewards accuracy format demo grpo.steps=3",
        "--rewards accuracy format --bf16 true demo grpo.steps=3",
    ],
)
def test_names_of_a_list_may_have_blanks_between_them(words):
    found = read(*words.split())
    assert found["rewards"] == ("accuracy,format",)
    assert "demo" in (found["recipe"], found["config"])
    assert "grpo.steps=3" in (*found["overrides"], found["recipe"])


def test_one_name_and_a_recipe_behind_it():
    found = read("--rewards", "accuracy", "demo")
    assert (found["rewards"], found["recipe"]) == (("accuracy",), "demo")


@pytest.mark.parametrize("recipe", ["./mine.yaml", "mine.yml", "runs/mine"])
def test_a_path_behind_a_list_is_the_recipe_and_a_function_in_a_file_is_not(recipe):
    found = read("--rewards", "accuracy", "rewards/mine.py:brevity", recipe)
    assert (found["rewards"], found["recipe"]) == (("accuracy,rewards/mine.py:brevity",), recipe)


def test_a_list_without_a_name_is_refused():
    with pytest.raises(click.UsageError, match="'--rewards' requires an argument"):
        read("demo", "--rewards")


def test_a_flag_of_a_phase_that_the_recipe_skips_is_that_phase_s(resolved):
    recipe = resolved("sft", "demo", "skip_sft=true", "--learning-rate", "0.5")
    assert recipe["sft"]["optimizer"]["learning_rate"] == 0.5
    assert recipe["grpo"]["optimizer"]["learning_rate"] != 0.5


def test_trackers_are_such_a_list_and_may_be_repeated():
    assert read("demo", "--report-to", "wandb", "trackio")["tracker"] == ("wandb,trackio",)
    assert read("demo", "--tracker", "a:b", "--tracker", "c:d")["tracker"] == ("a:b", "c:d")


def test_what_stands_behind_two_dashes_is_left_alone():
    assert read("--rewards", "accuracy", "--", "demo")["recipe"] == "demo"
    assert read("demo", "--", "--no-bf16")["overrides"] == ("--no-bf16",)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--bf16", "true"], ("true",)),
        (["--bf16", "True"], ("true",)),
        (["--bf16=False"], ("false",)),
        (["--bf16"], ("true",)),
        (["--no-bf16"], ("false",)),
        (["--no_bf16", "no"], ("true",)),
        ([], ()),
    ],
)
def test_a_switch_may_have_a_value(words, value):
    assert read("demo", *words)["bf16"] == value
    assert read(*words, "demo")["recipe"] == "demo"


@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        (run_command, "--torch_dtype bfloat16", "--torch_dtype. Write model.dtype=bfloat16."),
        (run_command, "--lora-r=8", "There is no option --lora-r. Write model.lora.rank=8."),
        (run_command, "--top_p --beta 1", "Write sampling.top_p=VALUE or evaluation.top_p=VALUE."),
        (run_command, "--loss_type dapo", "See grpo.weighting and grpo.surrogate."),
        (run_command, "--reward_weights 1", "See rewards.0.weight."),
        (
            run_command,
            "--group-size 8",
            "There is no option --group-size. Write grpo.group_size=8.",
        ),
        (run_command, "--grpo.steps=3", "There is no option --grpo.steps. Write grpo.steps=3."),
        (sft_command, "--weighting constant", "Write sft.weighting=constant or grpo.weighting="),
        (run_command, "--num_generations_eval 3", "num_generations_eval has no counterpart"),
        (run_command, "--unique-train-exmples 3", "Did you mean --unique-train-examples?"),
        (run_command, "--wandb_projct=mine", "--wandb_projct. Did you mean --wandb-project?"),
        (run_command, "--max-step=3", "There is no option --max-step. Did you mean --max-steps?"),
        (run_command, "--lora-rnk 3", "--lora-rnk. Did you mean model.lora.rank=3?"),
        (run_command, "--num_generation 4", "Did you mean --num-generations?"),
        (run_command, "--rewards.9.weight=2", "--rewards.9.weight. Write rewards.9.weight=2."),
        (run_command, "--nonsense", "`grouper recipes fields` lists all settings"),
        (run_command, "--nonsense [1", "There is no option --nonsense."),
    ],
)
def test_an_argument_that_is_no_flag_leads_to_the_setting(command, words, text):
    with pytest.raises(click.UsageError) as refused:
        command.make_context(command.name, ["demo", *words.split()])
    assert text in refused.value.message


@pytest.mark.parametrize("flag", ["--save-path", "--max_steps", "--rewards", "--report_to"])
def test_a_flag_does_not_take_the_next_one_for_its_value(flag):
    """`--save-path --dry-run` would train."""
    with pytest.raises(click.UsageError, match=f"{flag} needs a value, and --dry-run is a flag"):
        read("demo", flag, "--dry-run")
    assert read("demo", "--max-steps", "-1")["max_steps"] == ("-1",)


def test_an_option_of_one_letter_is_clicks_own_to_refuse():
    with pytest.raises(click.NoSuchOption, match="-z"):
        read("demo", "-qz")


def test_the_keys_of_the_table_are_the_recipes():
    def template(row: dict[str, Any]) -> list[str]:
        spelled = [key for several in row.get("spells", {}).values() for key in several]
        return [*([row["to"]] if "to" in row else []), *spelled, *row.get("first", ())]

    known = {key for key, _ in settings(Recipe)}
    keys = {
        key.format(phase=phase, phases=phase)
        for row in flags().values()
        for key in template(row)
        for phase in ("sft", "grpo")
    }
    assert [key for key in keys if not any(f"{k}.".startswith(f"{key}.") for k in known)] == []
    attentions = typing.get_args(ModelConfig.model_fields["attention"].annotation)
    assert set(flags()["attention"]["metavar"].split("|")) == set(attentions)


@pytest.mark.parametrize("word", ["-z", "-qz", "-model"])
def test_a_short_option_is_click_s_own_complaint(word):
    with pytest.raises(click.NoSuchOption):
        read("demo", word)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["gsm8k-lite"], "grouper run gsm8k-lite"),
        (["./mine.yaml"], "grouper run ./mine.yaml"),
        (["train", "demo"], "grouper run RECIPE"),
    ],
)
def test_a_recipe_without_a_command_is_told_the_command(grouper, words, text):
    called = grouper(*words)
    assert called.code == 2
    assert text in called.err
