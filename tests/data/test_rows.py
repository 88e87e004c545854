"""Files in every layout we read, and one clear sentence for those we cannot."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from grouper.data.hub import read_hub
from grouper.data.rows import find_file, read_files
from grouper.errors import DataError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "line\u2028two", "answer": "3"}]


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), "utf-8")
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(r.values()) for r in rows)]
        path.write_text("\n".join(lines) + "\n", "utf-8")
    else:
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_file_type_gives_the_same_rows(tmp_path, suffix):
    path = write(tmp_path / f"a.{suffix}")
    assert read_files(find_file(path, split="any", subset=None)) == ROWS


@pytest.mark.parametrize(
    "name",
    [
        "train.jsonl",
        "data/train.parquet",
        "main/train-00000-of-00001.parquet",
        "data/main/train.csv",
        "train/part.json",
    ],
)
def test_folders_in_the_layouts_of_the_hub(tmp_path, name):
    path = write(tmp_path / name)
    write(tmp_path / "test.jsonl", [{"question": "no", "answer": "no"}])
    assert find_file(tmp_path, split="train", subset="main") == (path,)


def test_shards_are_read_in_order_and_no_other_split_with_them(tmp_path):
    second = write(tmp_path / "train-00001-of-00002.jsonl", [{"a": 2}])
    first = write(tmp_path / "train-00000-of-00002.jsonl", [{"a": 1}])
    write(tmp_path / "training.jsonl", [{"a": 3}])
    files = find_file(tmp_path, split="train", subset=None)
    assert files == (first, second)
    assert read_files(files) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl: line 2 is not JSON"),
        ("a.jsonl", "[" * 100_000, r"line 1 is not JSON: it is nested too deeply"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}", r"line 1 is not JSON: Exceeds the limit"),
        ("a.json", "[" * 100_000, r"not JSON: it is nested too deeply"),
        ("a.json", '[{"a": ' + "9" * 5000 + "}]", r"not JSON: Exceeds the limit"),
        ("a.jsonl", "[1]\n", r"line 1.*list"),
        ("a.json", '{"a": 1}', "must be a list"),
        ("a.json", "[1", "not JSON"),
        ("a.parquet", "no", "not a Parquet file"),
        ("a.txt", "hello", r"files of type \.txt"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_files(find_file(path, split="train", subset=None))


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(DataError, match="cannot be read"):
        read_files((path,))


def test_a_missing_file_names_its_neighbour(tmp_path):
    write(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"Did you mean '.*/train\.jsonl'"):
        find_file(tmp_path / "trian.jsonl", split="train", subset=None)


def test_a_missing_split_names_those_that_exist(tmp_path):
    write(tmp_path / "train.jsonl")
    write(tmp_path / "data" / "validation-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"no split 'test'.*train, validation"):
        find_file(tmp_path, split="test", subset=None)


@pytest.fixture(scope="module")
def hub_layout(tmp_path_factory):
    """A folder as a set with two configurations lies on the Hub."""
    folder = tmp_path_factory.mktemp("hub") / "school"
    for subset in ("main", "other"):
        for split in ("train", "test"):
            rows = [{"question": f"{subset} {split}?", "answer": "1"}]
            write(folder / subset / f"{split}-00000-of-00001.parquet", rows)
    configs = "".join(
        f"- config_name: {subset}\n  data_files:\n"
        f"  - split: train\n    path: {subset}/train-*\n"
        f"  - split: test\n    path: {subset}/test-*\n"
        for subset in ("main", "other")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n# School\n")
    return folder


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_the_datasets_library_reads_a_hub_layout(hub_layout, own_cache):
    rows = read_hub(str(hub_layout), split="test", subset="other")
    assert rows == [{"question": "other test?", "answer": "1"}]
    # and our own reader agrees, without the library
    assert read_files(find_file(hub_layout, split="test", subset="other")) == rows


@pytest.mark.parametrize(
    ("split", "subset", "message"),
    [
        ("tset", "main", "no split 'tset'.*test"),
        ("train", "mian", "the subset is missing or wrong.*main"),
        ("train", None, "the subset is missing or wrong.*main"),
    ],
)
def test_wrong_split_or_subset_on_the_hub(hub_layout, own_cache, split, subset, message):
    with pytest.raises(DataError, match=message):
        read_hub(str(hub_layout), split=split, subset=subset)


def test_an_unknown_name_without_network_is_one_sentence(own_cache):
    with pytest.raises(DataError, match=r"Hub set nobody/nothing/train.*Without a network"):
        read_hub("nobody/nothing", split="train", subset=None)


def test_a_gated_set_says_what_to_do(monkeypatch):
    import datasets

    def refuse(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError(
            "Dataset 'a/b' is a gated dataset on the Hub. You must be authenticated to access it."
        )

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"gated.*Accept them"):
        read_hub("a/b", split="train", subset=None)
