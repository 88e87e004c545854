"""What can be wrong with problem sets, prepared folders, and questions that are asked."""

from __future__ import annotations

import json
from pathlib import Path

from frozen_calls import Row, called


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def sums(count: int, first: int = 1) -> list[dict[str, str]]:
    return [{"question": f"What is {i} + 2?", "answer": str(i + 2)}
            for i in range(first, first + count)]  # fmt: skip


def shown(name: str, content: str | bytes, more: str = "", file: str = "rows.jsonl") -> Row:
    return Row(
        name=f"data/{name}", command=f"data show ./{file} {more}", files={f"{file}": content}
    )


SETTINGS = (
    Row(name="data/no-source", command="data show gms8k"),
    Row(name="data/path-of-recipe", command="data show demo --path x"),
    Row(name="data/split-of-recipe", command="data show demo --split x"),
    shown("no-setting", lines(*sums(3)), "numeric_only"),
    shown("setting-not-yaml", lines(*sums(3)), "'limit=[1'"),
    shown("setting-unknown", lines(*sums(3)), "lmit=3"),
    shown("share", lines(*sums(3)), "validation_share=1"),
    shown("seed", lines(*sums(3)), "seed=-1"),
    shown("share-of-two", lines(*sums(3)), "validation_share=0.5 --split a --split b"),
    shown("share-leaves-nothing", lines(*sums(3)), "validation_share=0.01"),
    Row(name="data/no-such-file", command="data show gsm8k --path ./nowhere"),
    Row(
        name="data/no-such-split",
        command="data show gsm8k --path here --split tset",
        files={"here/test.jsonl": lines(*sums(3))},
    ),
    Row(name="data/no-split-at-all", command="data show gsm8k --path here", folders=("here",)),
    Row(name="data/not-on-this-machine", command="data show gsm8k"),
    Row(name="data/hub-name-nearly", command="data show hub --path opena/gsm8k"),
    Row(name="data/hub-name-streamed", command="data show gsm8k streaming=true limit=3"),
)
ROWS_OF_FILES = (
    shown("type", "x", file="rows.txt"),
    shown("empty", ""),
    shown("not-json", "{\n[\n"),
    shown("no-objects", lines(3, 4)),
    shown("whole-not-json", '[{"question": }]', file="rows.json"),
    shown("whole-no-list", '{"question": 3}', file="rows.json"),
    shown("whole-streamed", json.dumps(sums(3)), "streaming=true limit=2", file="rows.json"),
    shown("not-utf8", b'{"question": "\xff"}\n'),
    shown("not-parquet", "nothing of the kind", file="rows.parquet"),
    shown("no-question", lines({"query": "2 + 2?", "answer": "4"})),
    shown("no-answer", lines({"question": "2 + 2?", "result": "4"})),
    shown("named-column", lines(*sums(3)), "'columns={question: qestion}'"),
    shown("same-ids", lines(*[{**row, "id": "5"} for row in sums(3)])),
    shown("unusable-rows", lines({"question": "", "answer": "4"}, {"question": 4, "answer": []})),
    shown("offset", lines(*sums(3)), "offset=9"),
    shown("only-correct", lines({"question": "2?", "response": "4"}), "only_correct=true"),
    shown("unreadable-references", lines(*[{"question": f"{i}?", "answer": r"\frac{1}{2"}
                                           for i in range(30)]), "-n 30"),
    shown("filter-leaves-nothing", lines({"question": "Which?", "answer": "x + y"}),
          "numeric_only=true"),
    Row(
        name="data/only-correct-without-references",
        command="data show prompt-response --path rows.jsonl only_correct=true",
        files={"rows.jsonl": lines({"prompt": "2?", "response": "4"})},
    ),
    Row(
        name="data/layout-without-answer",
        command="data show math --path rows.jsonl",
        files={"rows.jsonl": lines({"problem": "Why?", "solution": "Nobody knows."})},
    ),
)  # fmt: skip
TWO = {"a.jsonl": lines(*sums(9)), "b.jsonl": lines(*sums(1, 50))}


def mixed(name: str, settings: str, **more: object) -> Row:
    return Row(
        name=f"data/{name}",
        command="data show demo --count 9 data.sft=null data.validation=null data.test=null "
        f'skip_sft=true "data.train={settings}"',
        files=TWO,
        **more,  # type: ignore[arg-type]  # of a row
    )


A, B = "{source: file, path: a.jsonl, weight: 1}", "{source: file, path: b.jsonl, weight: 1000}"
MIXTURES = (
    mixed("mixture-weight", f"{{mixture: [{A}, {B}]}}"),
    mixed("mixture-offset", "{mixture: [{source: file, path: a.jsonl}], offset: 50}"),
)


PREPARE = "data prepare gsm8k --path train.jsonl --output ready"


def _prepared(folder: Path) -> None:
    (folder / "train.jsonl").write_text(
        lines(*[{**row, "answer": f"So it is. #### {row['answer']}"} for row in sums(9)])
    )
    told = called([*PREPARE.split()])
    assert told.code == 0, told.err


def prepared(name: str, command: str) -> Row:
    return Row(name=f"prepared/{name}", command=command, prepare=_prepared)


PREPARED = (
    prepared("not-a-folder", f"{PREPARE}/train.jsonl/more"),
    prepared("another", f"{PREPARE} limit=3"),
    prepared("split", "data show ./ready --split tarin"),
)


PARTS = "run demo --dry-run skip_sft=true data.sft=null data.test=null "
RUNS = (
    Row(
        name="data/quarantine",
        command=f'{PARTS} data.validation=null "data.train={{source: file, path: a.jsonl}}"',
        files={"a.jsonl": lines(*sums(9), {"question": "half?", "answer": r"\frac{1}{2"})},
    ),
    Row(
        name="data/everything-held-out",
        command="run demo --dry-run data.validation=null data.test=null "
        '"data.train={source: file, path: a.jsonl}" "data.sft={source: file, path: b.jsonl}" '
        "data.validation_share=0.9",
        files={
            "a.jsonl": lines(*sums(9)),
            "b.jsonl": lines(*[{**row, "solution": "So it is."} for row in sums(2, 4)]),
        },
    ),
)

ASKED = "generate ./tiny --input rows.jsonl --output out.jsonl"


def asked(name: str, content: str, command: str = ASKED) -> Row:
    return Row(name=f"asking/{name}", command=command, files={"rows.jsonl": content}, run=True)


ASKING = (
    asked("no-rows", ""),
    asked("not-json", "{\n"),
    asked("no-question", lines({"question": "2+2?"}, {"text": "x"})),
    asked("column-taken", lines({"question": "2+2?", "response": "4"})),
    asked("a-folder", "", "generate ./tiny --input tiny"),
    asked("output-exists", lines({"question": "2+2?"}),
          "generate ./tiny --input rows.jsonl --output rows.jsonl"),
    asked("samples", "", "generate ./tiny -Q 2+2? --samples 3"),
    asked("too-long", "", f"generate ./tiny --quiet -Q '{'9 ' * 17_000}'"),
    asked("format", "", "generate ./tiny -Q 2+2? --format bxed"),
    Row(name="asking/elsewhere", command="generate ./models/mine -Q 2+2?",
        folders=("models/mine",), files={"models/mine/config.json": "{}"}),
    Row(name="asking/missing-model", command="generate ./models/mine --format xml -Q 2+2?",
        folders=("models/mini",)),
    Row(name="asking/hub-name", command="generate nobody/nothing --format xml -Q 2+2?"),
)  # fmt: skip
GRADING = (
    Row(name="grading/format", command="grade 4 --answer 4 --format xlm"),
    Row(name="grading/file-empty", command="grade rows.jsonl",
        files={"rows.jsonl": ""}),
    Row(name="grading/file-column", command="grade rows.jsonl --text said",
        files={"rows.jsonl": lines({"text": "4", "answer": "4"})}),
    Row(name="grading/file-not-gzip", command="grade rows.jsonl.gz",
        files={"rows.jsonl.gz": "nothing of the kind"}),
    Row(name="grading/file-not-json", command="grade rows.jsonl",
        files={"rows.jsonl": "{\n"}),
)  # fmt: skip

ROWS = (*SETTINGS, *ROWS_OF_FILES, *MIXTURES, *PREPARED, *RUNS, *ASKING, *GRADING)
