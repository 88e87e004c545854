"""Rows of files and of the Hub: whole, streamed, damaged."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from local_hub import COMMIT, GATED, SET, local_hub

from grouper.config.schema import SourceConfig
from grouper.data import SOURCES, load_problems, loading, reading
from grouper.data.reading import find_file, read_files, read_hub, shuffled, source_named
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
    assert find_file(tmp_path, split="train", subset="main") == [path]


def test_what_datasets_saved_to_disk_is_read_as_it_is(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    both = datasets.DatasetDict({"train": rows, "test": rows.select([0])})
    both.save_to_disk(tmp_path / "both", num_shards={"train": 2, "test": 1})
    rows.save_to_disk(tmp_path / "one")
    for folder in ("both", "one"):
        assert read_files(find_file(tmp_path / folder, split="train", subset=None)) == ROWS
    with pytest.raises(DataError, match=r"no split 'tset'.*Did you mean 'test'"):
        find_file(tmp_path / "both", split="tset", subset=None)
    (tmp_path / "both" / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="the split has 1 file and should have 2"):
        find_file(tmp_path / "both", split="train", subset=None)


def test_shards_are_read_in_order_and_no_other_split_with_them(tmp_path):
    second = write(tmp_path / "train-00001-of-00002.jsonl", [{"a": 2}])
    first = write(tmp_path / "train-00000-of-00002.jsonl", [{"a": 1}])
    write(tmp_path / "training.jsonl", [{"a": 3}])
    files = find_file(tmp_path, split="train", subset=None)
    assert files == [first, second]
    assert read_files(files) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["-0-of-2.jsonl"], "1 file and should have 2"),
        (["-0-of-1.jsonl", "-0-of-1.csv"], "2 files and should have 1"),
        ([".jsonl", ".csv"], "2 files and should have 1"),
    ],
)
def test_a_split_with_parts_that_are_missing_or_there_twice_is_refused(tmp_path, names, reason):
    for name in names:
        write(tmp_path / f"train{name}")
    with pytest.raises(DataError, match=reason):
        find_file(tmp_path, split="train", subset=None)


def test_hidden_files_are_no_data(tmp_path):
    shown = write(tmp_path / "train" / "a.jsonl")
    (tmp_path / "train" / "._a.jsonl").write_bytes(b"\xff what a file system left beside it")
    assert find_file(tmp_path, split="train", subset=None) == [shown]


def test_a_cell_of_a_csv_file_may_be_long(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"question,solution\n1+1?,{'so ' * 100_000}\n")
    (row,) = read_files([path])
    assert len(row["solution"]) == 300_000


def test_a_csv_row_with_a_bare_comma_is_set_aside_and_not_shifted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question,answer\nHe has 3, she 4. Sum?,7\n1+1?,2\n2+2?,4,,\n")
    found = load_problems(SourceConfig(source="file", path=str(path)), seed=0)
    assert [(p.question, p.answer) for p in found.problems] == [("1+1?", "2"), ("2+2?", "4")]
    (bad,) = found.quarantined
    assert (bad.row, bad.reason) == (0, "line 2 has more cells than there are columns")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", 'a,b\n"1+1?,2\n2+2?,4\n', r"a\.csv: not CSV after line.*unclosed quote"),
        ("a.csv", "a,b,b\n1,2,3\n", r"a\.csv: several columns are called 'b'\. Rename"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl: line 2 is not JSON"),
        ("a.jsonl", "[" * 100_000, r"line 1 is not JSON: it is nested too deeply"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}", r"line 1 is not JSON: Exceeds the limit"),
        ("a.jsonl", '{"a": 1, "a": 2}', r"line 1 is not JSON: it has two values for 'a'"),
        ("a.json", '[{"b": {"a": 1, "a": 1}}]', r"not JSON: it has two values for 'a'"),
        ("a.json", "[" * 100_000, r"not JSON: it is nested too deeply"),
        ("a.json", '[{"a": ' + "9" * 5000 + "}]", r"not JSON: Exceeds the limit"),
        ("a.jsonl", "[1]\n", r"line 1.*list"),
        ("a.json", '{"a": 1}', "must be a list"),
        ("a.json", "[1", "not JSON"),
        ("a.parquet", "no", "not a Parquet file"),
        ("a.arrow", "no", "not an Arrow stream"),
        ("a.txt", "hello", r"files of type \.txt"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_files(find_file(path, split="train", subset=None))


@pytest.mark.parametrize("on_the_hub", [False, True])
def test_short_floats_have_the_digits_that_they_were_written_with(
    tmp_path, monkeypatch, on_the_hub
):
    kinds = {"answer": np.float32, "half": np.float16, "exact": np.float64}
    row = {"answer": 0.1, "half": 0.2, "exact": 0.10000000149011612}
    gone = np.array([False, True])
    table = pa.table(
        {name: pa.array(np.array([row[name]] * 2, kind), mask=gone) for name, kind in kinds.items()}
    )
    if on_the_hub:
        import datasets

        found = datasets.Dataset(table)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
        rows = [*read_hub("a/b", split="train", subset=None)]
    else:
        pa.parquet.write_table(table, tmp_path / "a.parquet")
        rows = read_files([tmp_path / "a.parquet"])
    assert rows[0] == row
    assert rows[1]["answer"] is None


def test_csv_columns_without_a_name_may_be_several(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question,answer,,\n1+1?,2,,\n")
    (problem,) = load_problems(SourceConfig(source="file", path=str(path)), seed=0).problems
    assert problem.answer == "2"


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_cells_are_apart_by_what_the_first_line_has(tmp_path, name, mark):
    path = tmp_path / name
    lines = [f"question{mark}answer", f'"a, b; c?"{mark}2', f"1+1?{mark}2"]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8-sig")
    assert read_files(find_file(path, split="any", subset=None)) == [
        {"question": "a, b; c?", "answer": "2"},
        {"question": "1+1?", "answer": "2"},
    ]


@pytest.mark.parametrize("kind", ["feather", "file"])
def test_arrow_files_are_read_like_its_streams(tmp_path, kind):
    """What `write_feather`, pandas and polars write; as a stream it was no such thing."""
    table, path = pa.Table.from_pylist(ROWS), tmp_path / "a.arrow"
    if kind == "feather":
        pa.feather.write_feather(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as written:
            written.write_table(table, max_chunksize=1)
    assert read_files([path]) == ROWS


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(DataError, match=r"cannot be read .* Save it as UTF-8"):
        read_files([path])


def test_a_missing_file_names_its_neighbour(tmp_path):
    write(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"Did you mean '.*/train\.jsonl'"):
        find_file(tmp_path / "trian.jsonl", split="train", subset=None)


def test_a_missing_split_names_those_that_exist(tmp_path):
    write(tmp_path / "train.jsonl")
    write(tmp_path / "data" / "validation-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"no split 'test'.*train, validation"):
        find_file(tmp_path, split="test", subset=None)


def test_a_split_in_folders_below_is_pointed_at(tmp_path):
    for subset in ("main", "socratic"):
        write(tmp_path / subset / "train-00000-of-00001.parquet")
    write(tmp_path / "other" / "test.jsonl")
    with pytest.raises(
        DataError, match=r"no split 'train' in this folder.*add main or socratic to the path"
    ):
        find_file(tmp_path, split="train", subset=None)
    assert find_file(tmp_path / "main", split="train", subset=None)
    assert find_file(tmp_path, split="train", subset="main")


def test_lines_of_json_are_read_whatever_the_file_is_called(tmp_path):
    lines = write(tmp_path / "a.jsonl")
    path = lines.rename(tmp_path / "train.json")
    assert read_files(find_file(path, split="", subset=None)) == ROWS


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
    rows = list(read_hub(str(hub_layout), split="test", subset="other"))
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
        list(read_hub(str(hub_layout), split=split, subset=subset))


def test_an_unknown_name_without_network_is_one_sentence(own_cache):
    with pytest.raises(DataError, match=r"Hub set nobody/nothing/train.*Without a network"):
        list(read_hub("nobody/nothing", split="train", subset=None))


def test_a_gated_set_says_what_to_do(monkeypatch):
    import datasets

    def refuse(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError(
            "Dataset 'a/b' is a gated dataset on the Hub. You must be authenticated to access it."
        )

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"gated.*Accept them"):
        list(read_hub("a/b", split="train", subset=None))


@pytest.fixture
def fails(monkeypatch):
    """Reading a set whose download raises the exception."""
    import datasets

    def reading(name: str, error: Exception) -> str:
        def load_dataset(*args, **kwargs):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(DataError) as refused:
            list(read_hub(name, split="train", subset=None))
        text = str(refused.value)
        assert "\n" not in text
        return text

    return reading


@pytest.fixture
def online(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gsm8k", "openai/gsm8k"),
        ("openai/gsm-8k", "openai/gsm8k"),
        ("AI-MO/NuminaMath-TRI", "AI-MO/NuminaMath-TIR"),
        ("open-r1/DAPO-Math-17k", "open-r1/DAPO-Math-17k-Processed"),
        ("OpenMathReasoning-mini", "unsloth/OpenMathReasoning-mini"),
    ],
)
def test_a_missing_or_renamed_set_names_the_nearest(fails, online, name, meant):
    import datasets

    error = datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
    text = fails(name, error)
    assert "there is no such set on the Hub, or it was renamed" in text
    assert f"Did you mean '{meant}'?" in text


def test_a_name_like_no_other_suggests_nothing(fails, online):
    import datasets

    text = fails("somebody/poems", datasets.exceptions.DatasetNotFoundError("no"))
    assert "Did you mean" not in text


def test_offline_says_how_to_get_it(fails):
    text = fails("openai/gsm8k", ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub"))
    assert "not on this machine, and the Hub cannot be reached (HF_HUB_OFFLINE is set)" in text
    assert "grouper data prepare" in text
    assert "Did you mean" not in text


def test_no_network_is_told_without_the_setting(fails, online):
    text = fails("openai/gsm8k", ConnectionError("no route to host"))
    assert "the Hub cannot be reached. Read it once" in text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("403 Client Error: Forbidden"), "this set is gated.*hf auth login"),
        (Exception("Access to it is gated"), "this set is gated"),
        (KeyError("features"), "cannot be loaded: 'features'"),
        (ValueError("Unknown split \"tset\". Should be one of ['train']."), "no split 'train'"),
    ],
)
def test_other_failures(fails, online, error, message):
    import re

    assert re.search(message, fails("a/b", error))


def test_every_known_set_is_its_own_nearest():
    known = [source.hub for source in reading.SOURCES.values() if source.hub is not None]
    assert len(known) == 8
    assert [reading._nearest(name) for name in known] == [""] * 8


READ = """
import json, sys
from grouper.config.schema import SourceConfig
from grouper.data import load_problems
from grouper.errors import DataError
for settings in json.loads(sys.argv[1]):
    try:
        found = load_problems(SourceConfig(**settings), seed=0)
        print(found.fingerprint, found.revision)
    except DataError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_set_read_once_needs_no_network(tmp_path):
    """Against a Hub on this machine, in processes of their own: the library reads its settings
    when it is imported."""

    def read(*settings: dict[str, object], address: str, **more: str) -> list[str]:
        offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
        environment = {name: text for name, text in os.environ.items() if name not in offline}
        environment |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": address, "NO_PROXY": "127.0.0.1"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **more}
        command = [sys.executable, "-c", READ, json.dumps(settings)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    known = {"source": "hub", "path": SET, "subset": "main"}
    with local_hub() as address:
        first, few, missing, gated, split, subset = read(
            known,
            {**known, "streaming": True, "limit": 2},
            {**known, "path": "school/sumz"},
            {**known, "path": GATED},
            {**known, "split": "tset"},
            {**known, "subset": "mian"},
            address=address,
        )
    # The commit that was read is recorded; of a stream it is not known, and none is invented.
    assert first.split()[1] == COMMIT
    assert few.split()[1] == "None"
    assert len(first.split()[0]) == len(few.split()[0]) == 16
    assert first.split()[0] != few.split()[0]
    assert "there is no such set on the Hub" in missing
    assert "this set is gated" in gated
    assert "there is no split 'tset'" in split
    assert "the subset is missing or wrong" in subset
    # The Hub is gone. (Not told to be offline, the library tries for half a minute first.)
    again, other = read(
        known, {**known, "path": "school/sumz"}, address=address, HF_HUB_OFFLINE="1"
    )
    assert again == first
    assert "not on this machine" in other


MANY = [{"question": f"q{i}", "answer": str(i)} for i in range(500)]


@pytest.fixture(params=["jsonl", "parquet", "csv"])
def path(request, tmp_path):
    path = tmp_path / f"a.{request.param}"
    if request.param == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in MANY))
    elif request.param == "csv":
        lines = ["question,answer", *(f"{row['question']},{row['answer']}" for row in MANY)]
        path.write_text("\n".join(lines) + "\n")
    else:
        pa.parquet.write_table(pa.Table.from_pylist(MANY), path, row_group_size=64)
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
    assert len(list(itertools.islice(shuffled(endless, seed=0, buffer=8), 10, 15))) == 5
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
    path.write_text(json.dumps(MANY))
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


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_source_goes_by_its_own_name_and_by_that_on_the_hub(name):
    assert source_named(name) == {"source": name}
    hub = SOURCES[name].hub
    if hub:
        assert source_named(hub) == {"source": name}


def test_a_path_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source_named("mine/rows")["source"] == "hub"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows").touch()
    assert source_named("mine/rows") == {"source": "file", "path": "mine/rows"}
    assert source_named("/no/such")["source"] == "file"


def test_files_of_prompts_and_responses_are_recognised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("set").mkdir()
    for name, columns in (("set/train", ["prompt", "response"]), ("plain", ["prompt", "answer"])):
        Path(f"{name}.jsonl").write_text(json.dumps(dict.fromkeys(columns, "x")))
    Path("broken.json").write_text("{")
    found = [source_named(n)["source"] for n in ("set", "set/train.jsonl", "plain.jsonl")]
    assert found == ["prompt-response", "prompt-response", "file"]
    # TRL's name of it; a `file` has no such column.
    Path("trl.jsonl").write_text(json.dumps({"prompt": "x", "completion": "y", "answer": "z"}))
    assert source_named("trl.jsonl")["source"] == "prompt-response"
    # Messages are a question for the chat template, not a text to be used word for word.
    asked = [{"role": "user", "content": "1+1?"}]
    Path("chat.jsonl").write_text(json.dumps({"prompt": asked, "response": r"\boxed{2}"}))
    assert source_named("chat.jsonl")["source"] == "file"
    assert source_named("broken.json") == {"source": "file", "path": "broken.json"}


@pytest.mark.parametrize(
    ("name", "message", "is_gated"),
    [
        ("a/b", "revision 4011abc: timeout", False),
        ("a/gated-401", "a/gated-401: timeout", False),
        ("a/b", "GatedRepoError: ask its owner", True),
        ("a/gated-401", "a/gated-401: 401 Client Error", True),
    ],
)
def test_a_set_is_gated_by_the_answer_and_not_by_its_name(monkeypatch, name, message, is_gated):
    import datasets

    def load(*_, **__):
        raise RuntimeError(message)

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError) as caught:
        list(read_hub(name, split="train", subset=None))
    assert ("this set is gated" in str(caught.value)) == is_gated


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("question;answer, final\n1+1?;2\n", {"question": "1+1?", "answer, final": "2"}),
        # The mark that is not meant stands in quotes, and a cell holds a line break.
        (
            '"question; long",answer\n"line 1\nline 2",5\n',
            {"question; long": "line 1\nline 2", "answer": "5"},
        ),
        # The last cells of a row may be missing.
        ('a,"b;c",d\nx;y,2\n', {"a": "x;y", "b;c": "2", "d": None}),
        ("q\ta, final\tnote\nx, y\t2\n", {"q": "x, y", "a, final": "2", "note": None}),
        ("question,answer\n", None),
        ('"question, long";answer\n', None),
        ('"question\nor task";answer\n1+1?;2\n', {"question\nor task": "1+1?", "answer": "2"}),
        ("question;answer\nwhat?\n", {"question": "what?", "answer": None}),
    ],
)
def test_the_mark_between_cells_is_the_one_that_splits_header_and_first_row(tmp_path, text, row):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    rows = read_files(find_file(path, split="any", subset=None))
    assert rows == ([] if row is None else [row])
