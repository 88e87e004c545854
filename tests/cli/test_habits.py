"""Command lines as they are typed for other trainers."""

from __future__ import annotations

import click
import pytest

from grouper.cli.train import run_command, sft_command


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
    assert found["rewards"] == "accuracy,format"
    assert "demo" in (found["recipe"], found["config"])
    assert "grpo.steps=3" in {found["recipe"], *found["overrides"]}  # type: ignore[misc]  # a tuple


def test_one_name_and_a_recipe_behind_it():
    found = read("--rewards", "accuracy", "demo")
    assert (found["rewards"], found["recipe"]) == ("accuracy", "demo")


def test_trackers_are_such_a_list_and_may_be_repeated():
    assert read("demo", "--report-to", "wandb", "trackio")["tracker"] == ("wandb,trackio",)
    assert read("demo", "--tracker", "a:b", "--tracker", "c:d")["tracker"] == ("a:b", "c:d")


def test_what_stands_behind_two_dashes_is_left_alone():
    assert read("--rewards", "accuracy", "--", "demo")["recipe"] == "demo"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--bf16", "true"], True),
        (["--bf16=False"], False),
        (["--bf16"], True),
        (["--no-bf16"], False),
        ([], None),
    ],
)
def test_a_switch_may_have_a_value(words, value):
    assert read("demo", *words)["bf16"] is value
    assert read(*words, "demo")["recipe"] == "demo"


@pytest.mark.parametrize(
    ("command", "option", "text"),
    [
        (run_command, "--num_generations", "grpo.group_size"),
        (run_command, "--per-device-train-batch-size=4", "grpo.prompts_per_step or sft.batch_size"),
        (run_command, "--torch_dtype", "model.dtype"),
        (run_command, "--max-grad-norm", "grpo.optimizer.max_grad_norm"),
        (sft_command, "--max-grad-norm", "sft.optimizer.max_grad_norm"),
        (run_command, "--push-to-hub", "comes later"),
    ],
)
def test_trls_arguments_lead_to_the_setting(command, option, text):
    with pytest.raises(click.UsageError, match=text.replace(".", r"\.")):
        command.make_context("x", ["demo", option, "4"])


def test_what_nobody_knows_is_click_s_own_complaint():
    with pytest.raises(click.NoSuchOption):
        read("demo", "--nonsense")


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
