"""Small data for each shipped recipe: real rows where they lie, else rows in the same columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYOUTS = Path(__file__).resolve().parents[1] / "data" / "layouts"

Row = dict[str, Any]


def _rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _shortest(rows: list[Row], count: int, *columns: str) -> list[Row]:
    return sorted(rows, key=lambda row: sum(len(row[name]) for name in columns))[:count]


def _write(file: Path, rows: list[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8")


def gsm8k(shared: Path, folder: Path) -> list[str]:
    """The shortest rows of both splits, word for word."""
    for split, count in (("train", 10), ("test", 4)):
        rows = _rows(shared / "gsm8k" / f"{split}.jsonl")
        _write(folder / f"{split}.jsonl", _shortest(rows, count, "question", "answer"))
    return [f"data.{part}.path={folder}" for part in ("train", "test")]


def math_with_sft(shared: Path, folder: Path) -> list[str]:
    """The shortest rows of the published SFT file, and the MATH problems they are about."""
    shown = _shortest(_rows(shared / "math" / "sft.jsonl"), 40, "prompt", "response")
    _write(folder / "sft.jsonl", shown)
    text = "".join(row["prompt"] for row in shown)
    train = _rows(shared / "math" / "train.jsonl")
    _write(folder / "train.jsonl", [row for row in train if f"User: {row['problem']}\n" in text])
    held_out = _rows(shared / "math" / "validation.jsonl")
    _write(folder / "validation.jsonl", _shortest(held_out, 6, "problem"))
    parts = [f"data.{part}.path={folder}" for part in ("train", "validation", "test")]
    return [
        *parts,
        f"data.sft.path={folder / 'sft.jsonl'}",
        "data.validation.limit=3",
        "data.test.offset=3",
    ]


def math_with_solutions(shared: Path, folder: Path) -> list[str]:
    """MATH problems in the columns of MATH's copy on the Hub, which has solutions."""
    for split, file, count in (("train", "train", 12), ("test", "validation", 4)):
        rows = _shortest(_rows(shared / "math" / f"{file}.jsonl"), count, "problem")
        whole = [
            {
                "problem": row["problem"],
                "level": row["level"],
                "type": row["subject"],
                "solution": f"This is quickly done. It is $\\boxed{{{row['answer']}}}$.",
            }
            for row in rows
        ]
        _write(folder / f"{split}.jsonl", whole)
    return [
        f"data.{part}={{source: math, path: {folder}, split: {part}}}" for part in ("train", "test")
    ]


def numina(shared: Path, folder: Path) -> list[str]:
    """Rows of our own in the columns of NuminaMath-TIR."""
    del shared, folder
    return [f"data.{part}.path={LAYOUTS / 'numina-tir'}" for part in ("train", "test")]


def numina_with_sft(shared: Path, folder: Path) -> list[str]:
    """The same rows as worked solutions, too."""
    return [*numina(shared, folder), f"data.sft.path={LAYOUTS / 'numina-tir'}"]


def openmath_and_dapo(shared: Path, folder: Path) -> list[str]:
    """Rows of our own in the columns of OpenMathReasoning-mini and DAPO-Math-17k-Processed."""
    del shared, folder
    return [
        f"data.sft.path={LAYOUTS / 'openmath-mini'}",
        f"data.train.path={LAYOUTS / 'dapo-math'}",
        f"data.test={{source: dapo-math, path: {LAYOUTS / 'dapo-math'}, limit: 4}}",
    ]


DATA: dict[str, Callable[[Path, Path], list[str]]] = {
    "gsm8k-xml": gsm8k,
    "math-r1-zero": math_with_sft,
    "gsm8k-lite": gsm8k,
    "openmath-dapo": openmath_and_dapo,
    "r1-zero-numina": numina,
    "numina-tir": numina_with_sft,
    "gsm8k": gsm8k,
    "math": math_with_solutions,
}
"""Recipe -> (shared data, a folder to write into) -> overrides that read it."""

NEEDS_SHARED = ("gsm8k-xml", "math-r1-zero", "gsm8k-lite", "gsm8k", "math")
