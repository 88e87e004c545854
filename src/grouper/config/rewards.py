"""The reward section of a recipe: one component of the sum."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from grouper.section import Fraction, PositiveFloat, Section

__all__ = ["RewardConfig"]


class RewardConfig(Section):
    """One component of the reward."""

    name: str = Field(
        description="a built-in name, `path/to/file.py:function`, or `stack:name` for several"
    )
    weight: float = 1.0
    params: dict[str, Any] = Field(default_factory=dict)
    max_failure_rate: Fraction = Field(
        0.1, description="share of the recent groups it may fail on before the run stops"
    )
    timeout_seconds: PositiveFloat = Field(
        120.0, description="a group's time: an async function is stopped, another warned of"
    )
