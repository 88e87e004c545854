"""Keeping the evidence of a step whose numbers are not finite."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from grouper.algorithms.batching import TrainBatch, broken_tensors
from grouper.files import dumps, whole_folder
from grouper.runs.records import metrics_row
from grouper.types import StepReport

# Steps whose metrics are kept.
LAST_METRICS = 20

README = """# Stopped at {phase} step {step}

{what}

The update was skipped every time, so the weights were never touched by these numbers. The run
stopped here so that they can be looked at.

| file | holds |
|---|---|
| batch.safetensors | every tensor of the last optimizer step that was skipped |
| texts.jsonl | its rows as text: prompt, completion, advantage, and what of the row is not finite |
| metrics.jsonl | the last {count} steps of the run |
| rollouts.jsonl.gz | every rollout of the step, where it had any |
| recipe.yaml, run.json | the settings, and the versions it ran with |

Where to look first:

- `grad_norm` and `loss` in metrics.jsonl, step by step: a norm that grows for many steps before the
  end means a learning rate that is too high; one that jumps from nothing means a single row.
- rows of texts.jsonl that name a tensor: a log-prob that is not finite comes from the sampler
  (`sampler_logprobs`), from the policy (`old_logprobs`) or from the reference
  (`reference_logprobs`).
- `model.dtype` and `model.compute_dtype` in recipe.yaml: with float32 the same step may pass.

Go on from the last checkpoint with other settings: `grouper run ... --resume --allow-changes`.
"""


def write_nan_dump(
    run: Path, batch: TrainBatch | None, reports: list[StepReport], tokenizer: Any, *, what: str
) -> Path:
    """Keep what is needed to understand a stop: `<run>/incident/<phase>-<step>/`.

    Args:
        run: the run folder.
        batch: the step that was skipped.
        reports: metrics of the run, the last one at its end.
        tokenizer: to write the rows as text.
        what: one sentence for the README.

    Raises:
        RunFolderError: the disk is full or not writable.
    """
    last = reports[-1]
    target = run / "incident" / f"{last.phase}-{last.step:06d}"
    with whole_folder(target) as folder:
        if batch is not None:
            tensors = {
                f.name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
                for f in fields(batch)
                if isinstance(value := getattr(batch, f.name), Tensor)
            }
            save_file(tensors, folder / "batch.safetensors")
            _write_lines(folder / "texts.jsonl", _texts(batch, tokenizer))
        _write_lines(folder / "metrics.jsonl", (metrics_row(r) for r in reports[-LAST_METRICS:]))
        sources = {
            "recipe.yaml": run / "recipe.yaml",
            "run.json": run / "run.json",
            "rollouts.jsonl.gz": run / "rollouts" / f"{target.name}.jsonl.gz",
        }
        for name, source in sources.items():
            if source.exists():
                shutil.copyfile(source, folder / name)
        count = min(len(reports), LAST_METRICS)
        text = README.format(phase=last.phase, step=last.step, what=what, count=count)
        (folder / "README.md").write_text(text, encoding="utf-8")
    return target


def _texts(batch: TrainBatch, tokenizer: Any) -> Iterator[dict[str, Any]]:
    for row in range(batch.rows):
        prompt = int(batch.prompt_index[row])
        ids = batch.prompt_ids[prompt, : int(batch.prompt_lengths[prompt])]
        sampled = batch.completion_ids[row, : int(batch.completion_lengths[row])]
        yield {
            "row": row,
            "group": int(batch.group_ids[row]),
            "prompt": tokenizer.decode(ids.tolist(), skip_special_tokens=False),
            "completion": tokenizer.decode(sampled.tolist(), skip_special_tokens=False),
            "advantage": float(batch.advantages[row]),
            "not_finite": list(broken_tensors(batch, row)),
        }


def _write_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(dumps(record) + "\n" for record in records), encoding="utf-8")
