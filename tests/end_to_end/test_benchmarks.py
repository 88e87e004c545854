"""The CPU benchmarks still run, on little work; what they measure does not matter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def output_of(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_sampler_makes_the_tokens_of_generate() -> None:
    out = output_of("cpu.sampler", "--small", "--tries", "1")
    record = json.loads(out[out.index("{\n") :])
    for case in (record["bfloat16"]["fixed"], record["float32"]["ragged"]):
        assert set(case["seconds"]) == {"grouper", "generate", "generate, static cache"}
    assert record["float32"]["fixed"]["tokens"] == 4 * 4 * 16
    assert record["float32"]["fixed"]["logprob_gap"]["grouper"]["max"] < 1e-4


def test_two_checkouts_take_steps_in_turns(tmp_path: Path) -> None:
    """Here a checkout beside itself: the same work, whatever the ratio is on a busy machine."""
    file = tmp_path / "found.json"
    options = ("--cases", "0.5M", "--smaller", "2", "2", "4", "--pairs", "2", "--output", str(file))
    output_of("cpu.before_after", str(ROOT), *options)
    found = json.loads(file.read_text())
    assert found["commits"]["before"] == found["commits"]["after"]
    assert {side: len(taken) for side, taken in found["0.5M"]["seconds"].items()} == {
        "after": 2,
        "before": 2,
    }


def test_a_factor_has_its_exponents() -> None:
    out = output_of(
        "cpu.scaling", "--small", "--steps", "1", "--threads", "1", "--factors", "layers"
    )
    factor, _, text = out.partition(" ")
    found = json.loads(text)
    assert factor == "layers"
    assert found["sizes"] == [2, 4]
    # A head is the same for any number of layers, so work grows a little more slowly than they do.
    assert 0.8 < found["exponent_of_the_arithmetic"]["step"] < 1


@pytest.mark.long
@pytest.mark.timeout(900)  # about a minute on an idle core
def test_a_few_of_the_kills_the_secrets_and_the_memory(tmp_path: Path) -> None:
    """One kill of each kind; tests/invariants/test_kills.py has more."""
    parts = {"--kills": 3, "--inside": 1, "--paired": 1, "--steps": 200}
    sizes = [text for part, size in parts.items() for text in (part, str(size))]
    output_of("reliability.kills_secrets_memory", *sizes, "--output", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    kills, secrets, memory = found["kills"], found["secrets"], found["memory"]
    assert [row["differ"] for row in kills["runs"]] == [[]] * 3
    assert sum("written" in row for row in kills["runs"]) == 1
    assert sum(row["processes"] == 2 for row in kills["runs"]) == 1
    assert secrets["found_in_an_ordinary_child"] == secrets["planted"] == 3
    assert secrets["failures_recorded"] > 0
    assert secrets["workers"] > 0
    assert (secrets["found_in_files"], secrets["found_in_workers"]) == ([], 0)
    assert secrets["in_plain_text"].startswith("refused")
    # Over so few steps caches still fill: a slope of 2 MB in 1,000 steps shows only in the whole.
    assert memory["mb_at_the_end"] - memory["mb_after_a_tenth"] < 5


def test_the_committed_result_keeps_the_promises() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "reliability.json").read_text())
    kills = found["kills"]
    assert kills["kills"] == kills["identical_after_resuming"] == len(kills["runs"]) >= 100
    assert kills["inside_grpo_checkpoints"] >= 25
    assert kills["of_two_processes"] >= 20
    assert found["secrets"]["found_in_files"] == []
    assert found["secrets"]["found_in_workers"] == 0
    assert found["memory"]["steps"] >= 2000
    assert found["memory"]["mb_per_1000_steps"] < 2
    assert {"commit", "cpu"} <= found["machine"].keys()
    assert found["date"]
