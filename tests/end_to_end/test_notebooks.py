"""The notebooks as they are saved: run in order, with plots and tables, and no machine in them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from recipe_data import gsm8k

from benchmarks.tools.notebooks import EXECUTED, NOTEBOOKS, clean, code_cells
from grouper.cli import main
from grouper.cli.main import cli
from grouper.config.loading import load_recipe
from grouper.runs.folder import RunFolder

# What would name a machine, and nobody's text.
PATHS = re.compile(r"(?<![\w.])/(?:work|home|root|tmp|Users|opt|usr|var)/|\b0x[0-9a-f]{6,}\b")
# Bytes of a notebook that are quick to open and to review.
LARGEST = 300_000


def load(name: str) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text("utf-8"))
    return notebook


def test_all_notebooks_are_known() -> None:
    assert {file.stem for file in NOTEBOOKS.glob("*.ipynb")} == {*EXECUTED, "colab_t4"}


@pytest.mark.parametrize("name", EXECUTED)
def test_every_cell_has_run_in_order(name: str) -> None:
    cells = code_cells(load(name))
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds, "a plot and a table"


@pytest.mark.parametrize("name", [*EXECUTED, "colab_t4"])
def test_nothing_of_a_machine_is_saved(name: str) -> None:
    notebook = load(name)
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < LARGEST
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        for output in cell.get("outputs", []):
            readable = {k: v for k, v in output.get("data", {}).items() if k != "image/png"}
            text = json.dumps([readable, output.get("text", "")])
            assert PATHS.findall(text) == []


def test_folders_are_removed_from_outputs() -> None:
    folder = "/tmp/notebook-x"
    output = {"text": [f"{folder}/outputs/a <object at 0x7f00deadbeef>"]}
    assert clean(output, folder) == {"text": ["outputs/a <object>"]}
    assert PATHS.search(f"in {folder}/a")
    assert not PATHS.search("runs/tmp/x")


def colab_commands() -> list[list[str]]:
    text = "\n".join("".join(cell["source"]) for cell in code_cells(load("colab_t4")))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [shlex.split(line[1:]) for line in lines if line.startswith("!")]


def test_the_notebook_for_colab_says_that_it_was_not_run() -> None:
    notebook = load("colab_t4")
    assert "**Not run by us**" in "".join(notebook["cells"][0]["source"])
    for cell in code_cells(notebook):
        assert (cell["execution_count"], cell["outputs"]) == (None, [])


@pytest.mark.parametrize(
    "words", [words[1:] for words in colab_commands() if words[0] == "grouper"], ids=" ".join
)
def test_a_command_for_colab_parses(words: list[str]) -> None:
    verb, *arguments = words
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    params = command.make_context(verb, arguments).params
    if "overrides" in params:
        recipe = load_recipe(params["recipe"], params["overrides"])
        # A T4 has no bfloat16.
        assert (recipe.model.dtype, recipe.model.compute_dtype) == ("float32", "float16")
        assert recipe.sampling.dtype in ("auto", "same", "float32")


def test_colab_trains_evaluates_and_explains() -> None:
    verbs = [words[1] for words in colab_commands() if words[0] == "grouper"]
    assert verbs == [
        *("env", "plan", "run", "preview", "run", "diagnose", "show", "compare", "report"),
        "export",
    ]
    others = {words[0] for words in colab_commands()} - {"grouper"}
    assert others == {"nvidia-smi", "pip"}
    # Relative to the folder of the runs, `t4` is what the run is called.
    runs = {word for words in colab_commands() for word in words if word.endswith("/t4")}
    assert {Path(run).name for run in runs} == {"t4"}


def call(*words: str) -> None:
    """Run a command, which has to end well."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0, words


@pytest.mark.slow
def test_the_commands_for_colab_run_with_a_tiny_model(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in their order, on the CPU, with products in float16 as on a T4."""
    monkeypatch.chdir(tmp_path)
    data = gsm8k(shared_data, tmp_path / "data")
    tiny = "{hidden_size: 64, layers: 2, intermediate_size: 192, vocab_size: 640}"
    teaching = [
        *("skip_sft=false", "sft.steps=40", "skip_grpo=true", "data.test=null", "name=tiny"),
        *("sft.evaluate_every=0", "sft.batch_size=8", "sft.max_tokens=null", "output_dir=."),
        "sft.optimizer={name: muon, muon_learning_rate: 0.02, learning_rate: 5e-3}",
        f"model={{new: {tiny}}}",
    ]
    call("run", "gsm8k-lite", *data, *teaching)
    smaller = [
        *data,
        *("model.path=tiny/sft/final", "device=cpu", "threads=1"),
        *("grpo.steps=2", "grpo.prompts_per_step=2", "grpo.allow_truncation=true"),
        "sampling.max_new_tokens=60",
    ]
    for program, *words in colab_commands():
        if program != "grouper":
            continue
        here = [word.replace("/content/drive/MyDrive", str(tmp_path)) for word in words]
        if "gsm8k-lite" in here:
            here += smaller
        call(*here)
    run = RunFolder(tmp_path / "grouper" / "t4")
    scales = [row["loss_scale"] for row in run.metrics_rows() if "loss_scale" in row]
    assert scales
    assert all(scale > 0 for scale in scales)
    assert (tmp_path / "t4-model" / "Modelfile").is_file()
