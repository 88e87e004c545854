"""Models at their true widths and head shapes, two layers of them: `benchmarks/families.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def families() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import families

        yield families


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2.5 0.5B", "Gemma 3 1B", "Llama 3.2 1B", "Phi-4-mini"])
def test_it_runs_natively_and_computes_what_transformers_computes(
    name: str, families: ModuleType
) -> None:
    found = families.look_at(families.FAMILIES[name])
    assert found["refused"] is None
    assert found["same_greedy"]
    assert found["logprob_gap"] < 1e-4
    assert found["finite_gradients"]
