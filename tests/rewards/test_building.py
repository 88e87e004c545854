"""What all built-in rewards share: a name, a range, references, and no text they choke on."""

from __future__ import annotations

import math
import time

import pytest
from reward_calls import DAPO, HOSTILE, R1_ZERO, RIGHT, THINK, WRONG, XML

from grouper.errors import RewardError
from grouper.rewards import REWARDS
from grouper.rewards.building import references_of

NEEDED = {"soft_overlong": {"max_tokens": 100, "buffer_tokens": 20}}


@pytest.mark.parametrize("layout", [XML, THINK, R1_ZERO, DAPO], ids=["xml", "think", "r1", "dapo"])
@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_keeps_its_range_on_hostile_text(name: str, layout: object) -> None:
    function = REWARDS[name](layout, **NEEDED.get(name, {}))
    low, high = function.bounds
    started = time.perf_counter()
    for grades in ([RIGHT] * len(HOSTILE), [WRONG] * len(HOSTILE)):
        values = function(
            prompts=["q"] * len(HOSTILE),
            completions=list(HOSTILE),
            grades=grades,
            reference_answer=["42"] * len(HOSTILE),
        )
        assert all(math.isfinite(v) and low <= v <= high for v in values)
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_says_what_it_is_called_what_it_pays_and_where_it_is_from(name: str) -> None:
    builder = REWARDS[name]
    assert builder(XML, **NEEDED.get(name, {})).__name__ == name
    assert "Range" in (builder.__doc__ or "")


@pytest.mark.parametrize(
    ("column", "reference"),
    [
        ("72", "72"),
        ("48 / 2 = 24\n#### 72", "72"),
        (r"so it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("", ""),
    ],
)
def test_references(column: str, reference: str) -> None:
    assert references_of({"solution": [column]}) == [reference]
    assert references_of({"solution": ["other"], "answer": [column]}) == [reference]


def test_an_unknown_variant_is_refused() -> None:
    for name in ("accuracy", "cosine", "xml_tag_count", "dapo_answer"):
        with pytest.raises(RewardError, match="'orignal' is no variant"):
            REWARDS[name](XML, variant="orignal")
