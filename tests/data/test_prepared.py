"""A prepared folder gives back exactly what was prepared, and says when it was touched."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from grouper.config.schema import SourceConfig
from grouper.data import load_problems
from grouper.data.prepared import read_manifest, write_prepared
from grouper.errors import DataError

LAYOUTS = Path(__file__).parent / "layouts"
CONFIG = SourceConfig(
    source="openmath-mini", path=str(LAYOUTS / "openmath-mini"), numeric_only=True, offset=2
)


@pytest.fixture
def original():
    return load_problems(CONFIG, seed=0)


@pytest.fixture
def folder(tmp_path, original):
    write_prepared(tmp_path / "ready", {"train": (CONFIG, original)})
    return tmp_path / "ready"


def load(folder, **config):
    return load_problems(SourceConfig(path=str(folder), **config), seed=0)


def test_the_same_problems_under_any_of_the_three_names(folder, original):
    for config in (
        {"source": "file"},
        {"source": "file", "split": "train"},
        # The recipe may keep its filters: they are not applied twice.
        {"source": "openmath-mini", "numeric_only": True, "offset": 2},
    ):
        again = load(folder, **config)
        assert again.problems == original.problems
        assert again.fingerprint == original.fingerprint
        assert again.name == original.name


def test_other_settings_choose_among_what_is_prepared(folder, original):
    assert load(folder, source="file", offset=1, limit=3).problems == original.problems[1:4]
    assert load(folder, source="file", streaming=True, limit=2).problems == original.problems[:2]
    assert len(load(folder, source="file", only_correct=True)) == len(original) - 1


def test_the_manifest_says_what_was_done(folder, original):
    entry = read_manifest(folder)["sets"]["train"]
    assert entry["fingerprint"] == original.fingerprint
    assert entry["problems"] == len(original) == 10
    assert entry["notes"] == list(original.notes)
    assert entry["source"]["numeric_only"] is True
    assert (folder / "quarantine.jsonl").read_text() == ""


def test_equal_problems_give_equal_bytes(folder, tmp_path, original):
    write_prepared(tmp_path / "again", {"train": (CONFIG, original)})
    for name in ("train.jsonl", "manifest.json", "quarantine.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_no_check_and_no_library_is_needed_to_read_it(folder, monkeypatch):
    from grouper.data import loading

    for name in ("check_references", "read_hub", "stream_hub"):
        monkeypatch.delattr(loading, name)
    assert len(load(folder, source="file")) == 10


def test_splits_are_added_and_never_replaced_unasked(folder, original):
    config = SourceConfig(source="numina-tir", path=str(LAYOUTS / "numina-tir"))
    other = load_problems(config, seed=0)
    write_prepared(folder, {"more": (config, other)})
    assert list(read_manifest(folder)["sets"]) == ["train", "more"]
    with pytest.raises(DataError, match=r"another 'train' is prepared here.*--overwrite"):
        write_prepared(folder, {"train": (config, other)})
    assert load(folder, source="file").problems == original.problems
    write_prepared(folder, {"train": (config, other)}, overwrite=True)
    assert load(folder, source="file").problems == other.problems


def test_rows_that_cannot_be_used_are_listed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n{"question": "", "answer": "1"}\n')
    config = SourceConfig(source="file", path=str(path))
    write_prepared(tmp_path / "ready", {"train": (config, load_problems(config, seed=0))})
    line = (tmp_path / "ready" / "quarantine.jsonl").read_text()
    assert json.loads(line) == {"set": "train", "row": 1, "reason": "the question is empty"}


def test_columns_that_json_does_not_know_keep_the_fingerprint(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    rows = [{"question": "q", "answer": "1", "when": date(2020, 1, 2), "raw": b"\x00"}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = SourceConfig(source="file", path=str(tmp_path / "a.parquet"))
    before = load_problems(config, seed=0)
    write_prepared(tmp_path / "ready", {"train": (config, before)})
    assert load(tmp_path / "ready", source="file").fingerprint == before.fingerprint


def test_what_was_touched_is_refused(folder):
    file = folder / "train.jsonl"
    file.write_text(file.read_text().replace("243", "244"))
    with pytest.raises(DataError, match="changed after it was prepared"):
        load(folder, source="file")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"source": "file", "split": "trian"}, "no split 'trian' is prepared.*'train'"),
        ({"source": "gsm8k"}, "prepared from openmath-mini, not from gsm8k.*source: file"),
    ],
)
def test_what_is_not_there(folder, config, message):
    with pytest.raises(DataError, match=message):
        load(folder, **config)


def test_folders_of_others(tmp_path, original):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="holds something else"):
        write_prepared(tmp_path / "mine", {"train": (CONFIG, original)})
    # Somebody else's manifest does not make it ours.
    (tmp_path / "mine" / "manifest.json").write_text('{"name": "app"}')
    assert read_manifest(tmp_path / "mine") is None
    (tmp_path / "mine" / "manifest.json").write_text('{"sets": {}, "format": 99}')
    with pytest.raises(DataError, match="format 99"):
        read_manifest(tmp_path / "mine")
