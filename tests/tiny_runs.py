"""A whole run of base, SFT and GRPO in about a second, on problems that SFT half teaches."""

from __future__ import annotations

import json
import random
from pathlib import Path

PARTS = {"sft": 32, "train": 12, "validation": 4, "test": 4}
"""Data set -> problems."""

TINY_RUN = [
    "model.new.hidden_size=32",
    "model.new.intermediate_size=64",
    "model.new.layers=1",
    "prompt.system=''",
    "sft.batch_size=16",
    "sft.steps=24",
    "sft.optimizer={name: adamw, learning_rate: 2e-2}",
    "grpo.prompts_per_step=5",
    "grpo.group_size=4",
    "grpo.allow_truncation=true",
    "sampling.max_new_tokens=16",
    "grading.symbolic=false",
]
"""Overrides of the recipe `demo`; the data comes from `data_from`."""


def data_from(folder: str) -> list[str]:
    """Overrides that read what `write_problems` wrote."""
    return [f"data.{part}={{source: file, path: {folder}/{part}.jsonl}}" for part in PARTS]


def write_problems(folder: Path) -> None:
    """Questions whose answer is 0 or 1, and solutions that a coin has drawn.

    SFT teaches the format and to guess, so that groups are partly right.
    """
    coin = random.Random(0)
    for number, (part, count) in enumerate(PARTS.items()):
        rows = [
            {
                "question": f"Pick {100 * number + i}.",
                "answer": str(i % 2),
                "solution": str(coin.randrange(2)),
            }
            for i in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(text)
