"""Models at their true widths and head shapes, two layers of them.

What is looked at, and for more models: `benchmarks/sampling/families.py`.
"""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2.5 0.5B", "Gemma 3 1B", "Llama 3.2 1B", "Phi-4-mini"])
def test_it_runs_natively_and_computes_what_transformers_computes(name: str) -> None:
    from benchmarks.sampling.families import FAMILIES, look_at

    found = look_at(FAMILIES[name])
    assert found["refused"] is None
    assert found["same_greedy"]
    assert found["logprob_gap"] < 1e-4
    assert found["finite_gradients"]
