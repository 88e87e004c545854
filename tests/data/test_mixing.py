"""Several sources by weight, as one set."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from grouper.config.schema import SourceConfig
from grouper.data import load_problems
from grouper.errors import ConfigError, DataError


@pytest.fixture
def files(tmp_path):
    def make(name: str, count: int) -> str:
        path = tmp_path / name / "train.jsonl"
        path.parent.mkdir()
        rows = ({"question": f"{name} {i}?", "answer": str(i)} for i in range(count))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return {"a": make("a", 30), "b": make("b", 40)}


def mixture(files, weights, **config):
    members = [
        {"source": "file", "path": files[name], "weight": weight}
        for name, weight in weights.items()
    ]
    return SourceConfig.model_validate_json(json.dumps({"mixture": members, **config}))


def shares(problems):
    return Counter(problem.question[0] for problem in problems.problems)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": 1, "b": 1}, {"a": 30, "b": 30}),
        ({"a": 3, "b": 1}, {"a": 30, "b": 10}),
        ({"a": 0.5, "b": 1}, {"a": 20, "b": 40}),
    ],
)
def test_weights_are_shares_and_no_problem_comes_twice(files, weights, expected):
    mixed = load_problems(mixture(files, weights), seed=0)
    assert shares(mixed) == expected
    assert len({p.question for p in mixed.problems}) == len(mixed)
    assert len({p.id for p in mixed.problems}) == len(mixed)
    said = ", ".join(
        f"{expected[name]} of the {size} in train" for name, size in (("a", 30), ("b", 40))
    )
    assert mixed.notes == (f"mixture: {said}.",)


def test_the_seed_decides_which_and_in_what_order(files):
    config = mixture(files, {"a": 1, "b": 1})
    first, again, other = (load_problems(config, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.fingerprint != other.fingerprint
    assert [p.id for p in first.problems] != sorted(p.id for p in first.problems)
    # Both sources all along, so that the first of an epoch are a mixture as well.
    assert min(shares_of_half(first).values()) > 5
    # The recipe's own shuffle takes the place of the run's seed.
    shuffled = mixture(files, {"a": 1, "b": 1}, shuffle=1)
    assert load_problems(shuffled, seed=0) == other


def shares_of_half(mixed):
    return Counter(p.question[0] for p in mixed.problems[: len(mixed) // 2])


def test_limit_and_filters_are_of_the_mixture(files):
    whole = load_problems(mixture(files, {"a": 1, "b": 1}), seed=0)
    part = load_problems(mixture(files, {"a": 1, "b": 1}, offset=3, limit=8), seed=0)
    assert part.problems == whole.problems[3:11]
    with pytest.raises(DataError, match="none behind offset"):
        load_problems(mixture(files, {"a": 1, "b": 1}, offset=99), seed=0)


def test_the_fingerprint_is_of_all(files, tmp_path):
    before = load_problems(mixture(files, {"a": 1, "b": 1}), seed=0).fingerprint
    path = tmp_path / "b" / "train.jsonl"
    path.write_text(path.read_text().replace('"answer": "7"', '"answer": "8"'))
    everything = mixture(files, {"a": 3, "b": 4})
    assert load_problems(everything, seed=0).fingerprint != before


def test_a_member_that_would_give_nothing(files):
    with pytest.raises(DataError, match="would give no problem"):
        load_problems(mixture(files, {"a": 1000, "b": 1}), seed=0)


def test_members_are_checked_where_they_stand():
    config = SourceConfig.model_validate_json(
        json.dumps({"mixture": [{"source": "gsm9k"}, {"source": "file"}]})
    )
    with pytest.raises(ConfigError) as refused:
        load_problems(config, seed=0)
    text = str(refused.value)
    assert "data.mixture.0.source: there is no data source 'gsm9k'" in text
    assert "data.mixture.1.path: path is missing" in text
