"""The decode kernel compiles for a consumer's card, and fits into its shared memory (G1).

The whole grid of cards, dimensions and kernels is `benchmarks/gpu/triton_grid.py`, whose table is
in `benchmarks/results/triton_grid.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.long  # a minute of compiling
@pytest.mark.needs_package("triton", extra="triton")
def test_decoding_with_wide_heads_fits_a_consumers_card(tmp_path: Path) -> None:
    """In a process of its own: where there is no GPU this one imported Triton's interpreter."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    # Nothing that was compiled before is taken for it.
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu.triton_grid"),
            *("--arch", "89", "--dim", "128", "256", "--part", "decode"),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 bad" in done.stdout


def test_the_committed_table_holds_every_card_and_nothing_that_does_not_fit() -> None:
    table = json.loads((ROOT / "benchmarks" / "results" / "triton_grid.json").read_text())
    rows = table["programs"]
    assert {row["card"] for row in rows} == {f"sm_{n}" for n in (75, 80, 86, 89, 90, 120)}
    decode = {(r["card"], r["dtype"], r["dim"]) for r in rows if r["kernel"] == "own_part"}
    halves = {"sm_75": "float16"}
    assert decode == {
        (card, dtype, dim)
        for card in {row["card"] for row in rows}
        for dtype in (halves.get(card, "bfloat16"), "float32")
        for dim in (64, 96, 128, 256)
    }
    kernels = {"prompt_part", "merge", "_sums", "_pick", "_norm", "_norm_gradient", "_rotate"}
    kernels |= {"own_part", "_gate", "_gate_gradient", "_scores", "_gradient"}
    assert {row["kernel"] for row in rows} == kernels
    assert all(row["bad"] == 0 and row["shared"] <= row["limit"] for row in rows)
