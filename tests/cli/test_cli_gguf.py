"""Commands take a GGUF file wherever they take a model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import Grouper
from gguf_files import TinyGguf

from grouper.models.folders import gguf_folder
from grouper.models.gguf import folder_of_gguf

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(50)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyGguf().write(tmp_path_factory.mktemp("models") / "tiny.gguf", quantized="Q8_0")


def recipe(file: Path) -> list[str]:
    """The demonstration's recipe with the file as its model."""
    return ["demo", "model.new=null", f"model.path={file}", "prompt.max_prompt_tokens=99"]


def test_plan(grouper: Grouper, file: Path) -> None:
    called = grouper("plan", *recipe(file), "--json")
    assert called.code == 0, called.err
    assert json.loads(called.out)["parameters"] > 10_000


def test_dry_run(grouper: Grouper, file: Path) -> None:
    called = grouper("run", *recipe(file), "--dry-run")
    assert called.code == 0, called.err
    assert "All checks passed" in called.out


def test_init(
    grouper: Grouper, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    called = grouper("init", "--model", file, "--data", "rows.jsonl", "--full", "--no-samples")
    assert called.code == 0, called.err
    assert f"path: {file}" in Path("mine.yaml").read_text()


@pytest.mark.slow
def test_preview_eval_generate_and_chat(grouper: Grouper, file: Path, tmp_path: Path) -> None:
    short = ["sampling.max_new_tokens=8", "data.test.options.count=8"]
    called = grouper("preview", *recipe(file), *short, "--problems", 2)
    # A random model gives GRPO nothing to learn from.
    assert called.code == 1, called.err
    assert f"Model:     {file}" in called.out
    called = grouper("eval", *recipe(file), *short, "--model", file, "--json")
    assert called.code == 0, called.err
    (result,) = json.loads(called.out)["evaluations"][0]["results"]
    assert result["name"] == file.name
    assert 0 <= result["accuracy"] <= 1
    called = grouper("generate", file, "--format", "compact", "--question", "What is 1+1?")
    assert called.code == 0, called.err
    assert called.out.strip()
    called = grouper("chat", file, "--format", "compact", stdin="What is 1+1?\n")
    assert called.code == 0, called.err


@pytest.mark.slow
def test_a_run_of_lora_goes_on_without_the_file(
    grouper: Grouper, file: Path, tmp_path: Path
) -> None:
    """The adapter names the folder in the cache, which PEFT can load by itself."""
    settings = [
        *recipe(file),
        "model.lora.rank=4",
        "skip_grpo=true",
        "sft.steps=2",
        "sft.evaluate_every=0",
        "evaluation.max_new_tokens=8",
        "data.test.options.count=8",
        f"output_dir={tmp_path}",
        "name=lora",
    ]
    called = grouper("run", *settings)
    assert called.code == 0, called.err
    adapter = tmp_path / "lora" / "sft" / "final"
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base) == gguf_folder(str(file))
    called = grouper("eval", *settings, "--model", adapter)
    assert called.code == 0, called.err


def test_a_folder_with_a_gguf_file_alone(grouper: Grouper, file: Path) -> None:
    called = grouper("plan", "demo", "model.new=null", f"model.path={file.parent}")
    assert called.code == 2
    assert f"Name the file: {file}." in called.err


def test_a_copy_that_stands_in_for_a_model_of_the_hub_is_named(
    grouper: Grouper, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make real-models` leaves one where no Hub can be reached."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder_of_gguf(str(file)), "real-models/Tiny-1B")
    changes = ["model.path=owner/Tiny-1B", *recipe(file)[1:2], "prompt.max_prompt_tokens=99"]
    called = grouper("run", "demo", *changes, "--dry-run")
    assert called.code == 0, called.err
    assert "owner/Tiny-1B is read from ./real-models/Tiny-1B, a copy made of a GGUF" in called.err
