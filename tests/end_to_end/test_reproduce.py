"""Reproducing published numbers: unattended, killed, resumed, reported; its cases as they stand.

The script is `benchmarks/learning/reproduce.py`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from recipes.model_shapes import SHAPES, shape_folder, with_tokenizer

from benchmarks.checkout import importing_from
from benchmarks.learning import reproduce
from grouper.config.loading import load_recipe
from grouper.runs.folder import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, "-m", "benchmarks.learning.reproduce"]
CASE = "gsm8k-0.5b"
# A model of Qwen2's kind in little, few problems, few steps.
SMALLER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}
SIZES = [
    "data.train.limit=60",
    "data.test.limit=6",
    "threads=1",
    "grpo.steps=8",
    "grpo.prompts_per_step=2",
    "grpo.checkpoint_every=1",
    "grpo.evaluate_every=0",
    "grpo.dynamic_sampling_rounds=0",
    "grpo.require_correct_in_group=false",
    "grpo.allow_truncation=true",
    "prompt.max_prompt_tokens=2000",
    "sampling.max_new_tokens=32",
    "sampling.max_slots=16",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = {**SHAPES["Qwen/Qwen2.5-0.5B"], **SMALLER}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return with_tokenizer(tmp_path / "model", load_recipe("gsm8k").prompt)


def words(case: str, model: Path, data: dict[str, str], *more: str) -> list[str]:
    settings = [f"model.path={model}", *SIZES, *(f"{k}={v}" for k, v in data.items())]
    asked = [word for setting in settings for word in ("--set", setting)]
    return [*SCRIPT, "--cases", case, "--outputs", "out", *asked, *more]


def output_of(folder: Path, called: list[str], *, code: int = 0) -> str:
    found = importing_from(ROOT)
    done = subprocess.run(
        called, cwd=folder, env=found, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_killed_resumed_and_reported(shared_data: Path, model: Path, tmp_path: Path) -> None:
    gsm8k = str(shared_data / "gsm8k")
    called = words(
        *(CASE, model, {"data.train.path": gsm8k, "data.test.path": gsm8k}, "--seeds", "0", "1")
    )
    runs = [tmp_path / "out" / f"{CASE}-seed{seed}" for seed in (0, 1)]
    results, page = (tmp_path / "out" / f"results.{kind}" for kind in ("json", "md"))
    # The second seed cannot be run: its place is taken.
    runs[1].mkdir(parents=True)
    (runs[1] / "thesis.txt").write_text("mine")

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen(called, cwd=tmp_path, env=importing_from(ROOT), **quiet)
    metrics = runs[0] / "metrics.jsonl"
    until(lambda: metrics.exists() or started.poll() is not None)
    started.send_signal(signal.SIGKILL)
    started.wait()
    # The run hears of it, saves and ends.
    until(lambda: not (runs[0] / ".lock").exists())
    before = RunFolder(runs[0]).metrics_rows()
    assert 0 < len(before) < 8
    assert not (runs[0] / "evaluations" / "grpo.json").exists()

    out = output_of(tmp_path, called, code=1)
    assert f"{CASE}-seed0: done" in out
    steps = [row["step"] for row in RunFolder(runs[0]).metrics_rows() if row["phase"] == "grpo"]
    assert steps == list(range(1, 9))
    assert RunFolder(runs[0]).metrics_rows()[: len(before)] == before
    found = json.loads(results.read_text())
    assert list(found["failed"]) == [f"{CASE}-seed1"]
    assert found["cases"][CASE]["runs"] == [f"out/{CASE}-seed0"]
    assert f"Not finished: {CASE}-seed1" in page.read_text()
    assert (runs[1] / "thesis.txt").exists()

    (runs[1] / "thesis.txt").unlink()
    out = output_of(tmp_path, called)
    assert re.findall(r"^(\S+) begins", out, re.MULTILINE) == [f"{CASE}-seed1"]
    out = output_of(tmp_path, called)
    assert "begins" not in out
    found = json.loads(results.read_text())
    assert found["failed"] == {}
    assert [row["name"] for row in found["cases"][CASE]["results"]] == ["base", "grpo"]
    assert len(found["cases"][CASE]["accuracies_of_seeds"]["grpo"]) == 2
    assert re.search(rf"`{CASE}`.*% \[.*points: .*; 2 seed", page.read_text())


@pytest.mark.timeout(600)
def test_an_adapter_on_problems_of_math(shared_data: Path, model: Path, tmp_path: Path) -> None:
    folder = shared_data / "math"
    parts = {
        f"data.{part}": f"{{source: math, path: {folder}, split: {split}, limit: {limit}}}"
        for part, split, limit in (("train", "train", 60), ("test", "validation", 6))
    }
    more = ["--seeds", "0"] + [
        w for s in ("grpo.steps=1", "evaluation.samples=2") for w in ("--set", s)
    ]
    output_of(tmp_path, words("math-1.5b", model, parts, *more))
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["cases"].values()
    assert row["results"][-1]["problems"] == 6
    assert (tmp_path / "out/math-1.5b-seed0/grpo/final/adapter_config.json").exists()
    # Settings that are not those of the run are refused, and the run is left alone.
    other = words("math-1.5b", model, parts, *more, "--set", "grpo.group_size=4")
    output_of(tmp_path, other, code=1)


# Each traces a model of 1.5B, which takes most of a minute.
LONG_CASES = [pytest.param(case, marks=pytest.mark.long) for case in ("gsm8k-1.5b", "math-1.5b")]


@pytest.mark.parametrize("case", [CASE, *LONG_CASES])
def test_every_case_fits_the_card_and_passes_a_dry_run(
    case: str, shared_data: Path, tmp_path: Path
) -> None:
    """As it stands, but for where the data and a configuration of the same shape lie."""
    asked = reproduce.CASES[case]
    recipe = load_recipe(asked.recipe, asked.settings)
    folder = with_tokenizer(shape_folder(tmp_path / "model", recipe.model.path), recipe.prompt)
    kind = asked.recipe
    split = {"gsm8k": "test", "math": "validation"}[kind]
    data = {
        "data.train": f"{{source: {kind}, path: {shared_data / kind}, split: train, limit: 200}}",
        "data.test": f"{{source: {kind}, path: {shared_data / kind}, split: {split}, limit: 50}}",
    }
    settings = [f"model.path={folder}", *(f"{key}={value}" for key, value in data.items())]
    called = [word for setting in settings for word in ("--set", setting)]
    dry = [*SCRIPT, "--dry-run", "--cases", case, *called]
    assert f"{case}-seed0: done" in output_of(tmp_path, dry)
    # Without the data rows count as being as long as the recipe allows.
    plan = [sys.executable, "-m", "grouper", "plan", asked.recipe, "--device", "cuda", "--json"]
    plan += [*asked.settings, f"model.path={folder}"]
    done = subprocess.run(plan, capture_output=True, text=True, check=True)
    cards = json.loads(done.stdout)["cards"]
    assert next(card for card in cards if card["gib"] == 24)["fits"]
    assert "warning" not in done.stderr


def test_the_page_in_docs_is_the_scripts() -> None:
    assert (ROOT / "docs" / "results" / "reproduce.md").read_text("utf-8") == reproduce.page({})


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)
