"""The CPU benchmarks still run, on little work; what they measure is nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def output_of(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sampler_makes_the_tokens_of_generate() -> None:
    out = output_of("cpu_sampler.py", "--small", "--tries", "1")
    record = json.loads(out[out.index("{\n") :])
    for case in (record["bfloat16"]["fixed"], record["float32"]["ragged"]):
        assert set(case["seconds"]) == {"grouper", "generate", "generate, static cache"}
    assert record["float32"]["fixed"]["tokens"] == 4 * 4 * 16
    assert record["float32"]["fixed"]["logprob_gap"]["grouper"]["max"] < 1e-4


def test_a_factor_has_its_exponents() -> None:
    out = output_of(
        "scaling.py", "--small", "--steps", "1", "--threads", "1", "--factors", "layers"
    )
    factor, _, text = out.partition(" ")
    found = json.loads(text)
    assert factor == "layers"
    assert found["sizes"] == [2, 4]
    # A head is the same for any number of layers, so work grows a little more slowly than they do.
    assert 0.8 < found["exponent_of_the_arithmetic"]["step"] < 1
