"""Problem sets written as JSONL are read back as the same problems."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from grouper.config.schema import SourceConfig
from grouper.data import load_problems
from grouper.data.problem_set import write_problems
from grouper.errors import DataError
from grouper.prompts.formats import FORMATS

LAYOUTS = Path(__file__).parent / "layouts"


def load(path, **config):
    return load_problems(SourceConfig(path=str(path), **config), seed=0)


def contents(problems):
    return [
        (p.question, p.answer, p.solution, p.response, p.prompt, p.subject, p.level)
        for p in problems.problems
    ]


ROWS = {
    "gsm8k": {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    "svamp": {"Question": "How many?", "Body": "One and one", "Answer": 2.0, "ID": "chal-1"},
    "prompt-response": {
        "prompt": FORMATS["r1-zero"].plain_text("1+1?"),
        "response": " so </think> <answer> 2 </answer>",
    },
}


@pytest.mark.parametrize("source", ["openmath-mini", "numina-tir", *ROWS])
def test_the_same_problems_are_read_back(tmp_path, source):
    path, settings = LAYOUTS / source, {"numeric_only": True, "offset": 2}
    if source in ROWS:
        path, settings = tmp_path / "rows.jsonl", {}
        path.write_text(json.dumps(ROWS[source]))
    before = load(path, source=source, **settings)
    sources = write_problems(tmp_path / "ready", {"train": before})
    after = load(tmp_path / "ready", source=sources["train"], split="train")
    assert contents(after) == contents(before)
    assert len({p.id for p in after.problems}) == len(before)


def test_equal_problems_give_equal_bytes_and_others_are_never_replaced_unasked(tmp_path):
    before = load(LAYOUTS / "numina-tir", source="numina-tir")
    write_problems(tmp_path, {"train": before})
    written = (tmp_path / "train.jsonl").read_bytes()
    write_problems(tmp_path, {"train": before, "test": before})
    assert (tmp_path / "train.jsonl").read_bytes() == (tmp_path / "test.jsonl").read_bytes()
    other = load(LAYOUTS / "numina-tir", source="numina-tir", limit=1)
    with pytest.raises(DataError, match=r"train.jsonl: a file with other content.*--overwrite"):
        write_problems(tmp_path, {"train": other})
    assert (tmp_path / "train.jsonl").read_bytes() == written
    write_problems(tmp_path, {"train": other}, overwrite=True)
    assert len(load(tmp_path, source="file")) == 1


def test_rows_that_cannot_be_used_are_listed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n{"question": "", "answer": "1"}\n')
    write_problems(tmp_path / "ready", {"train": load(path, source="file")})
    line = (tmp_path / "ready" / "train.invalid.jsonl").read_text()
    assert json.loads(line) == {"row": 1, "reason": "the question is empty"}


def test_columns_that_json_does_not_know_are_written_as_text(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    rows = [{"question": "q", "answer": "1", "when": date(2020, 1, 2), "raw": b"\x00"}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_problems(tmp_path / "ready", {"train": load(tmp_path / "a.parquet", source="file")})
    (row,) = (json.loads(line) for line in (tmp_path / "ready/train.jsonl").open())
    assert row["when"] == "datetime.date(2020, 1, 2)"


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "ready").write_text("a file")
    before = load(LAYOUTS / "numina-tir", source="numina-tir")
    with pytest.raises(DataError, match=r"ready: cannot write here"):
        write_problems(tmp_path / "ready", {"train": before})
