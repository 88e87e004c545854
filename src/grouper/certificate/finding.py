"""What a certificate says of one item, and how numbers are put in words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grouper.certificate.evidence import Evidence
from grouper.evaluation.statistics import PairedComparison

Status = Literal["pass", "fail", "missing"]

# Relative difference of two numbers that count as the same one.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the record says of one item."""

    status: Status
    sentence: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


def passed(sentence: str, **numbers: Any) -> Finding:
    """Return the finding that the record answers an objection."""
    return Finding(status="pass", sentence=sentence, numbers=numbers)


def failed(sentence: str, **numbers: Any) -> Finding:
    """Return the finding that the record confirms an objection."""
    return Finding(status="fail", sentence=sentence, numbers=numbers)


def missing(sentence: str, **numbers: Any) -> Finding:
    """Return the finding that the record does not say."""
    return Finding(status="missing", sentence=sentence, numbers=numbers)


def judged(ok: bool, sentence: str, **numbers: Any) -> Finding:
    """Return the finding that an objection is answered, or else confirmed."""
    return Finding(status="pass" if ok else "fail", sentence=sentence, numbers=numbers)


def not_measured(evidence: Evidence) -> Finding:
    """Return the finding that there is nothing to compare, with the runs that lack it."""
    runs = [run for run in evidence.runs if run.base is None or run.last is None]
    names = ", ".join(str(run.path) for run in runs)
    return missing(
        f"{names}: the model before training and the trained one were not both measured on test "
        "problems. A recipe with `data.test` measures both."
    )


def paired_numbers(paired: PairedComparison) -> dict[str, Any]:
    """Return a comparison's numbers by name."""
    return {
        "before": paired.before,
        "after": paired.after,
        "difference": paired.difference,
        "low": paired.interval.low,
        "high": paired.interval.high,
        "p": paired.p_value,
        "problems": paired.problems,
    }


def same_json(left: Any, right: Any) -> bool:
    """Tell whether two values of JSON are equal, but for rounding.

    >>> same_json({"a": [0.1 + 0.2]}, {"a": [0.3]}), same_json(0.3, 0.31), same_json(None, 0.0)
    (True, False, False)
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if left.keys() != right.keys():
            return False
        return all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return False
        return all(map(same_json, left, right))
    if isinstance(left, float) or isinstance(right, float):
        are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
        return are_numbers and math.isclose(left, right, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return bool(left == right)


def finite(value: Any) -> Any:
    """Return a value as a file of JSON has it: lists for tuples, None for what is not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
