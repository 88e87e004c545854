"""Our table of TRL's names against TRL itself: every field, every default.

It skips where TRL is not installed (`pip install -e ".[trl]"`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from gates import package

trl = package("trl", extra="trl")
pytestmark = pytest.mark.slow

from trl import rewards
from trl.scripts.grpo import GRPOScriptArguments

from grouper.compat.aliases import aliases, dialects

NAMES = {name: row for name, row in aliases().items() if "default" in row}
REWARD_NAMES = dialects()[-1]["rewards"]
# What Open-R1's script adds to those of TRL's.
OF_OPEN_R1 = {"soft_overlong_punishment"}

CLASSES = {
    "grpo": (trl.GRPOConfig, trl.ModelConfig, GRPOScriptArguments),
    "sft": (trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments),
}


def fields(phase: str) -> dict[str, Any]:
    return {field.name: field for cls in CLASSES[phase] for field in dataclasses.fields(cls)}


def default_of(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return getattr(field.default, "value", field.default)
    made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if made else None


@pytest.mark.parametrize("phase", CLASSES)
def test_the_table_has_exactly_trls_names(phase: str) -> None:
    ours = {name for name, row in NAMES.items() if phase in row["default"]}
    assert ours == set(fields(phase))


@pytest.mark.parametrize("phase", CLASSES)
def test_the_defaults_are_trls(phase: str) -> None:
    ours = {name: row["default"][phase] for name, row in NAMES.items() if phase in row["default"]}
    theirs = {name: default_of(field) for name, field in fields(phase).items()}
    assert ours == theirs


def test_the_rewards_of_trls_script_are_there() -> None:
    assert REWARD_NAMES.keys() > OF_OPEN_R1
    for name in REWARD_NAMES.keys() - OF_OPEN_R1:
        assert hasattr(rewards, name)
