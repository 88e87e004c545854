"""Sets larger than memory: no more is read than needed, and what is exact."""

from __future__ import annotations

import itertools
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from grouper.config.schema import SourceConfig
from grouper.data import load_problems, loading
from grouper.data.streaming import shuffled, window
from grouper.errors import DataError

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(500)]


@pytest.fixture(params=["jsonl", "parquet", "csv"])
def path(request, tmp_path):
    path = tmp_path / f"a.{request.param}"
    if request.param == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif request.param == "csv":
        lines = ["question,answer", *(f"{row['question']},{row['answer']}" for row in ROWS)]
        path.write_text("\n".join(lines) + "\n")
    else:
        pa.parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=64)
    return str(path)


def load(path, **config):
    settings = {"source": "file", "path": str(path), "streaming": True, **config}
    return load_problems(SourceConfig(**settings), seed=0)


def test_in_order_a_stream_gives_what_reading_everything_gives(path):
    streamed = load(path, offset=7, limit=30)
    assert streamed == load(path, offset=7, limit=30, streaming=False)
    assert streamed.problems[0].id == "a/7"


def test_shuffling_is_seeded_and_keeps_row_numbers(path, monkeypatch):
    monkeypatch.setattr(loading, "SHUFFLE_BUFFER", 100)
    drawn = load(path, limit=50, shuffle=0)
    assert drawn == load(path, limit=50, shuffle=0)
    assert drawn.fingerprint != load(path, limit=50, shuffle=1).fingerprint
    rows = [int(p.id.removeprefix("a/")) for p in drawn.problems]
    assert [f"q{row}" for row in rows] == [p.question for p in drawn.problems]
    assert len(set(rows)) == 50
    assert rows != sorted(rows)
    # Only what was in the buffer by then has a chance.
    assert max(rows) < 150


def test_no_further_is_read_than_needed(tmp_path):
    """The line after it is broken: reading it would set it aside."""
    path = tmp_path / "a.jsonl"
    # The first 1,000 rows are looked at for their columns.
    good = [json.dumps({"question": f"q{i}", "answer": "1"}) for i in range(1200)]
    path.write_text("\n".join([*good, "{broken", ""]))
    assert len(load(path, limit=1100)) == 1100
    assert not load(path, limit=1100).quarantined
    (row,) = load(path, limit=1201).quarantined
    assert row.reason.startswith("line 1201 is not JSON")


def test_memory_is_bounded():
    endless = itertools.count()
    assert len(window(endless, offset=10, limit=5, shuffle=0, buffer=8)) == 5
    assert next(endless) <= 10 + 5 + 8 + 1


def test_every_item_comes_once_and_far_ones_stay_far():
    items = list(shuffled(range(1000), seed=3, buffer=50))
    assert sorted(items) == list(range(1000))
    assert all(item <= place + 50 for place, item in enumerate(items))
    few = list(shuffled(range(5), seed=3, buffer=50))
    assert sorted(few) == list(range(5))


def test_every_item_of_a_buffer_is_as_likely_to_come_first():
    firsts = [next(shuffled(range(8), seed=seed, buffer=4)) for seed in range(400)]
    assert {firsts.count(item) > 60 for item in range(4)} == {True}


def test_a_file_that_is_one_value_cannot_be_streamed(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))
    with pytest.raises(DataError, match=r"\.json files cannot be streamed.*\.jsonl"):
        load(path, limit=5)


def test_sets_on_the_hub_are_streamed(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, subset, *, split, streaming):
        asked.append((name, subset, split, streaming))
        return ({"question": f"q{i}", "answer": f"so #### {i}"} for i in itertools.count())

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = SourceConfig(source="gsm8k", streaming=True, limit=3)
    assert [p.answer for p in load_problems(config, seed=0).problems] == ["0", "1", "2"]
    assert asked == [("openai/gsm8k", "main", "train", True)]


def test_a_stream_that_breaks_off_is_one_sentence(monkeypatch):
    import datasets

    def load_dataset(*args, **kwargs):
        def rows():
            yield {"question": "q", "answer": "#### 1"}
            raise ConnectionError("the line went dead")

        return rows()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="the Hub cannot be reached"):
        load_problems(SourceConfig(source="gsm8k", streaming=True, limit=3), seed=0)
