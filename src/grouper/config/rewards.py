"""The reward section of a recipe: one component of the sum."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from grouper.config.credentials import refuse_literal_secrets
from grouper.config.section import Fraction, PositiveFloat, Section

LARGEST = 1e15
"""What a value, a weight and their product may be at most: a float64 still tells totals 0.1 apart,
and the square of a gradient is finite in float32."""


class RewardConfig(Section):
    """One component of the reward."""

    name: str = Field(
        description="a built-in name, `path/to/file.py:function`, or `stack:name` for several"
    )
    weight: float = Field(1.0, ge=-LARGEST, le=LARGEST)
    params: Annotated[dict[str, Any], AfterValidator(refuse_literal_secrets)] = Field(
        default_factory=dict, description="its parameters; ${NAME} is read from the environment"
    )
    max_failure_rate: Fraction = Field(
        0.1, description="share of the recent groups it may fail on before the run stops"
    )
    deterministic: bool = Field(
        True,
        description="false: it may answer the same input differently (a model as a judge); a run "
        "is then not repeatable",
    )
    timeout_seconds: PositiveFloat = Field(
        120.0, description="a group's time: an async function is stopped, another warned of"
    )
