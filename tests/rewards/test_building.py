"""What all built-in rewards share: a name, a range, references, and no text they choke on."""

from __future__ import annotations

import math
import pickle
import time

import pytest
from reward_calls import DAPO, HOSTILE, R1_ZERO, RIGHT, THINK, WRONG, XML

from grouper.errors import RewardError
from grouper.rewards import REWARDS
from grouper.rewards.building import references_of

NEEDED = {"soft_overlong": {"max_tokens": 100, "buffer_tokens": 20}}
VALUED = ("correctness", "format", "xml_correctness", "lite_numeric")


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
            completion_ids=[[1] * len(text) for text in HOSTILE],
        )
        assert all(math.isfinite(v) and low <= v <= high for v in values)
    assert time.perf_counter() - started < 2.0


ORIGINALS = {
    XML: [name for name in REWARDS if name.startswith(("xml_", "lite_"))],
    THINK: ["format", "reasoning_steps", "repetition_penalty"],
    DAPO: [name for name in REWARDS if name.startswith("dapo_")],
}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_holds_up_an_original(text: str) -> None:
    for layout, names in ORIGINALS.items():
        tags = layout.tags
        assert tags is not None
        texts = (text, tags[0] + text, "".join(tags) + text, f"{tags[1]} {tags[2]}" * 2_000)
        for name in names:
            function = REWARDS[name](layout, variant="original")
            started = time.perf_counter()
            function(prompts=["q"] * 4, completions=texts, reference_answer=["4"] * 4)
            assert time.perf_counter() - started < 1.0, name


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_can_be_pickled(name: str) -> None:
    """TRL's asynchronous worker sends the functions to another process."""
    params = {**NEEDED.get(name, {}), **({"value": 0.25} if name in VALUED else {})}
    function = REWARDS[name](XML, **params)
    copy = pickle.loads(pickle.dumps(function))
    assert (copy.__name__, copy.bounds) == (function.__name__, function.bounds)
    text = "<reasoning>\na\n</reasoning>\n<answer>\n42\n</answer>\n"
    columns = {
        "prompts": ["q"] * 2,
        "completions": [text, "no"],
        "grades": [RIGHT, WRONG],
        "reference_answer": ["42"] * 2,
        "completion_ids": [[1] * 90, [1]],
    }
    assert copy(**columns) == function(**columns)


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
