"""What goes wrong with a shipped recipe on somebody's machine: one paragraph, and a way out."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from gates import package
from model_shapes import shape_folder, with_tokenizer
from transformers import AutoTokenizer

from grouper import errors
from grouper.advice import recipe_checks
from grouper.advice.dry_run import make_plan
from grouper.advice.recipe_checks import check_recipe
from grouper.cli.main import cli
from grouper.config.loading import load_recipe
from grouper.errors import ConfigError, DataError, GrouperError, PromptError

LAYOUTS = Path(__file__).resolve().parents[1] / "data" / "layouts"
NAMES = (
    "gsm8k-xml",
    "math-r1-zero",
    "gsm8k-lite",
    "openmath-dapo",
    "r1-zero-numina",
    "gsm8k",
    "math",
)


def local_data(name: str, folder: Path) -> list[str]:
    """Overrides under which a recipe finds a few rows of each of its parts on this machine."""
    folder.mkdir(exist_ok=True)
    question = {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}
    problem = {"problem": "What is 2 + 3?", "solution": "It is $\\boxed{5}$.", "level": "Level 1"}
    gsm8k, math = folder / "gsm8k", folder / "math"
    for place, row in ((gsm8k, question), (math, problem)):
        place.mkdir(exist_ok=True)
        rows = [{k: v.replace("2", str(i)) for k, v in row.items()} for i in range(2, 12)]
        text = "".join(json.dumps(r).replace("5", str(i)) + "\n" for i, r in enumerate(rows, 5))
        for split in ("train", "test", "validation"):
            (place / f"{split}.jsonl").write_text(text)
    by_source = {
        "gsm8k": f"{{source: gsm8k, path: {gsm8k}}}",
        "math": f"{{source: math, path: {math}, split: train}}",
        "hub": f"{{source: math, path: {math}, split: train}}",
        "numina-tir": f"{{source: numina-tir, path: {LAYOUTS / 'numina-tir'}}}",
        "dapo-math": f"{{source: dapo-math, path: {LAYOUTS / 'dapo-math'}}}",
        "openmath-mini": f"{{source: openmath-mini, path: {LAYOUTS / 'openmath-mini'}}}",
        "prompt-response": f"{{source: math, path: {math}, split: train}}",
    }
    data = load_recipe(name).data
    parts = {part: getattr(data, part) for part in ("sft", "train", "validation", "test")}
    changes = [
        f"data.{part}={by_source[source.source]}" for part, source in parts.items() if source
    ]
    return [*changes, *(["data.validation_share=0.2"] if data.validation_share else [])]


def plain_optimizer(name: str) -> list[str]:
    """What a machine without bitsandbytes is told to set."""
    recipe = load_recipe(name)
    return [
        f"{phase}.optimizer.name=adamw"
        for phase in ("sft", "grpo")
        if getattr(recipe, phase).optimizer.name == "adamw_8bit"
    ]


@pytest.fixture
def overrides(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    """A recipe, and what makes it runnable here but for the weights."""
    name = request.param
    recipe = load_recipe(name)
    assert recipe.model.path is not None
    folder = with_tokenizer(shape_folder(tmp_path / "model", recipe.model.path), recipe.prompt)
    changes = [f"model.path={folder}", f"output_dir={tmp_path / 'outputs'}", *plain_optimizer(name)]
    return name, [*changes, *local_data(name, tmp_path / "data")]


@pytest.mark.parametrize("overrides", NAMES, indirect=True)
def test_a_dry_run_needs_no_weights(overrides: tuple[str, list[str]]) -> None:
    name, changes = overrides
    recipe = load_recipe(name, changes)
    check_recipe(recipe)
    sizes = "\n".join(make_plan(recipe).sizes)
    grpo = recipe.grpo
    rows = grpo.prompts_per_step * grpo.group_size
    assert f"{grpo.prompts_per_step} prompts x {grpo.group_size} samples = {rows} comple" in sizes
    assert "Prompts: " in sizes
    assert ("SFT: " in sizes) == (not recipe.skip_sft)
    assert ("Completions have up to " in sizes) == (name == "openmath-dapo")


# As their users type them; what they resolve to is in `cli/test_typed_commands.py`.
TYPED = [
    "gsm8k-xml",
    (
        "gsm8k-lite --model-name Qwen/Qwen2.5-0.5B-Instruct --use-wandb "
        "--wandb-project qwen-math-grpo --wandb-entity your-entity"
    ),
    "gsm8k-lite --system-prompt-path FILE",
    "openmath-dapo",
    "openmath-dapo --skip-sft",
    "openmath-dapo --skip-grpo",
    "openmath-dapo --max-steps 200 --learning-rate 1e-5",
    "r1-zero-numina --no_wandb --reward_funcs accuracy format reasoning_steps",
    (
        "r1-zero-numina --model_name ./models/Qwen2.5-0.5B --reward_funcs accuracy format "
        "reasoning_steps cosine repetition_penalty --per_device_train_batch_size 4 "
        "--logging_steps 10"
    ),
]


@pytest.mark.parametrize("command", TYPED)
def test_what_is_typed_elsewhere_passes_a_dry_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stubbed but the rows, which lie here instead of on the Hub."""
    if "wandb-project" in command:
        package("wandb", extra="wandb")
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("Write <reasoning> and <answer> tags.")
    Path("models").mkdir()
    name, *words = shlex.split(command)
    recipe = load_recipe(name)
    assert recipe.model.path is not None
    small = shape_folder(tmp_path / "models" / "Qwen2.5-0.5B", recipe.model.path)
    with_tokenizer(small, recipe.prompt)
    overrides = [*local_data(name, tmp_path / "data"), *plain_optimizer(name)]
    called = CliRunner().invoke(cli, ["run", name, *overrides, *words, "--dry-run"])
    assert called.exit_code == 0, called.output
    assert "# Dry run: no model was loaded and nothing was written." in called.output


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ["gsm8k-xml"], indirect=True)
def test_a_model_without_a_chat_template(
    overrides: tuple[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """A chat recipe falls back to plain text and says so; `install` and `plain` end the warning."""
    name, changes = overrides
    recipe = load_recipe(name, changes)
    assert recipe.model.path is not None
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    tokenizer.chat_template = None
    (Path(recipe.model.path) / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(recipe.model.path)
    with caplog.at_level(logging.WARNING):
        make_plan(recipe)
    assert "has no chat template: prompts are plain text" in caplog.text
    caplog.clear()
    for template in ("install", "plain"):
        make_plan(load_recipe(name, [*changes, f"prompt.template={template}"]))
    assert "chat template" not in caplog.text
    with pytest.raises(PromptError, match=r"no chat template.*or `install` to give it one"):
        make_plan(load_recipe(name, [*changes, "prompt.template=chat"]))


@pytest.mark.parametrize("overrides", ["openmath-dapo"], indirect=True)
def test_prompts_of_which_nothing_is_left(overrides: tuple[str, list[str]]) -> None:
    name, changes = overrides
    with pytest.raises(PromptError, match=r"no prompt is left of .* Raise prompt.max_prompt"):
        make_plan(load_recipe(name, [*changes, "prompt.max_prompt_tokens=3"]))
    with pytest.raises(GrouperError, match=r"leave.* for a completion.*max_percentile"):
        make_plan(
            load_recipe(
                name,
                [*changes, "sampling.max_total_tokens=400", "sampling.min_new_tokens=390"],
            )
        )
    # The shortest prompt is never above a percentile.
    plan = make_plan(load_recipe(name, [*changes, "prompt.max_percentile=0.1"]))
    assert any(line.startswith("Prompts: 1 fit") for line in plan.sizes)


@pytest.mark.parametrize("overrides", ["r1-zero-numina"], indirect=True)
def test_a_set_without_a_usable_row(overrides: tuple[str, list[str]], tmp_path: Path) -> None:
    name, changes = overrides
    file = tmp_path / "unboxed.jsonl"
    file.write_text(json.dumps({"problem": "Why?", "solution": "Nobody knows what it is at all."}))
    with pytest.raises(DataError, match=r"no problem is left of 1 rows\. Row 0: no answer, and in"):
        make_plan(load_recipe(name, [*changes, f"data.train.path={file}"]))


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    recipe = load_recipe("openmath-dapo")
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe)
    text = str(caught.value)
    for phase in ("sft", "grpo"):
        assert f"or set {phase}.optimizer.name=adamw (the same update, more memory)" in text
    # What is skipped needs nothing, and a plan is for another machine.
    with pytest.raises(ConfigError) as caught:
        check_recipe(load_recipe("openmath-dapo", ["skip_sft=true"]))
    assert "sft.optimizer" not in str(caught.value)
    assert sum("bitsandbytes" in warning for warning in check_recipe(recipe, runs_here=False)) == 2
    check_recipe(load_recipe("openmath-dapo", plain_optimizer("openmath-dapo")))


def test_without_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.attention: flash attention is not.*=native"):
        check_recipe(load_recipe("gsm8k-xml", ["model.attention=flash_attention_2"]))


def test_local_files_that_are_not_there_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_recipe(load_recipe("math-r1-zero"))
    text = str(caught.value)
    for part in ("sft", "train", "validation", "test"):
        assert f"data.{part}.path: there is no file or folder 'data/math" in text


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("owner/model", True),
        ("model", True),
        ("o-1/m.2_b", True),
        ("https://huggingface.co/owner/model", False),
        ("owner/model/part", False),
        ("owner/", False),
        ("../model", False),
        ("owner/mo--del", False),
        ("owner/model.git", False),
        ("owner/my model", False),
    ],
)
def test_only_a_name_that_the_hub_has_can_be_pushed_to(name: str, right: bool) -> None:
    """A dry run approved of an address, and the first checkpoint was not pushed."""
    recipe = load_recipe("demo", [f"push_to='{name}'"])
    if right:
        check_recipe(recipe)
    else:
        with pytest.raises(ConfigError, match="is not a name that the Hub has"):
            check_recipe(recipe)
