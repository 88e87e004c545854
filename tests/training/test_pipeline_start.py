"""What a run that goes on says: everything that could make it another run."""

from __future__ import annotations

from typing import Any

import pytest

from grouper.runs.records import NOT_THERE, RunInfo
from grouper.training.pipeline import banner_lines

INFO = RunInfo(
    recipe_hash="aaaa",
    versions={"torch": "2.13.0", "kernels": "0123abcd", "compute dtype": "float32"},
    fingerprints={"train": "0123456789abcdef"},
    code={"mine.py": "fedcba9876543210"},
    host={"threads": 2, "processes": 1},
)


def lines(**changes: Any) -> str:
    allowed = changes.pop("allowed", {})
    versions = changes.pop("versions", {"torch": "2.13.0"})
    now = {**versions, "CPU threads": 2, "processes": 1, **changes}
    return "\n".join(banner_lines(INFO, allowed, now))


def test_nothing_differs(caplog: pytest.LogCaptureFixture) -> None:
    text = lines()
    assert "recipe: unchanged (hash aaaa)" in text
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"versions": {"torch": "2.14.0"}}, "torch 2.13.0 -> 2.14.0"),
        ({"versions": {"torch": "2.13.0", "kernels": "none"}}, "kernels 0123abcd -> none"),
        ({"versions": {"compute dtype": "bfloat16"}}, "compute dtype float32 -> bfloat16"),
        ({"CPU threads": 1}, "CPU threads 2 -> 1"),
        ({"processes": 4}, "processes 1 -> 4"),
    ],
)
def test_what_breaks_bit_for_bit_is_a_warning(
    caplog: pytest.LogCaptureFixture, change: dict[str, Any], told: str
) -> None:
    lines(**change)
    assert told in caplog.text


def test_changes_are_told() -> None:
    changes = {"grpo.steps": [6, 8]}
    text = lines(allowed=changes)
    assert "changed, as allowed: grpo.steps 6 -> 8" in text


def test_settings_of_a_model_that_is_there_are_said_to_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines(allowed={"model.path": ["a", "b"], "model.lora.dropout": [0.0, 0.1], "seed": [0, 1]})
    assert "no effect on them: model.path a -> b, model.lora.dropout 0.0 -> 0.1" in caplog.text
    assert "seed" not in caplog.text


def test_an_adapter_that_is_merged_is_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    lines(allowed={"model.lora.rank": [8, NOT_THERE], "model.lora": [NOT_THERE, None]})
    assert not caplog.records
