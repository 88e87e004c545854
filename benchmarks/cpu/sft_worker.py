"""Grouper's SFT steps in a process of their own, asked for by `sft.py`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workers import peak_memory, serve
from grouper.config.loading import load_recipe
from grouper.runs.progress import Progress
from grouper.training.observe import take_step
from grouper.training.pipeline import fresh_state
from grouper.training.run import Run
from grouper.training.state import TrainState
from grouper.types import Demonstration, Prompt

OPEN: list[tuple[Run, TrainState]] = []


def begin(
    *,
    model: str,
    dtype: str,
    prompts: list[list[int]],
    completions: list[list[int]],
    folder: str,
    budget: int,
    threads: int,
) -> None:
    """A run whose demonstrations are these token ids."""
    place = Path(folder)
    place.mkdir()
    # The run takes the case's own demonstrations later on, whose words no format has: it is made
    # ready for GRPO, and these only give it problems.
    rows = [{"question": f"Question {i}?", "answer": "1"} for i in range(4)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "sft",
        "output_dir": str(place),
        "threads": threads,
        "skip_sft": True,
        "model": {"path": model, "dtype": dtype},
        "prompt": {"format": "compact", "template": "plain"},
        "data": {"train": {"source": "file", "path": str(place / "train.jsonl")}},
        "grading": {"symbolic": False},
        "sampling": {"max_new_tokens": 64},
        "sft": {
            "steps": 10_000,
            "batch_size": len(completions),
            "tokens_per_micro_batch": budget,
            "optimizer": {"learning_rate": 1e-6, "schedule": "constant", "warmup_ratio": 0.0},
        },
    }
    file = place / "sft.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    run = Run(load_recipe(file), Progress(quiet=True))
    torch.set_num_threads(threads)
    demonstrations = tuple(
        Demonstration(
            prompt=Prompt(problem_id=str(number), text="", token_ids=tuple(prompt)),
            token_ids=tuple(completion),
        )
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    )
    run.prepared.demonstrations = demonstrations
    policy = run.models.load(model)
    OPEN.append((run, fresh_state(run, "sft", policy, model)))


def step() -> dict[str, Any]:
    run, state = OPEN[0]
    started = time.perf_counter()
    report = take_step(run, state)
    seconds = time.perf_counter() - started
    assert report.status == "learning", report.status
    return {
        "seconds": seconds,
        "loss": report.tallies["loss"].mean,
        "grad_norm": report.tallies["grad_norm"].mean,
        "tokens": int(report.tallies["tokens"].sum),
        "peak_bytes": peak_memory(),
    }


def end() -> None:
    OPEN.pop()[0].__exit__(None, None, None)


if __name__ == "__main__":
    serve({"begin": begin, "step": step, "end": end})
