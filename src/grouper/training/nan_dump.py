"""The evidence of a step whose numbers are not finite."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from grouper.algorithms.batching import TrainBatch, broken_tensors
from grouper.files import dumps, whole_folder

# Steps whose metrics are kept.
LAST_METRICS = 20

README = """# Stopped at {folder}

{what} The update was skipped every time, so the weights were never touched by these numbers.

- `batch.safetensors` has every tensor of the last optimizer step that was skipped, `texts.jsonl`
  its rows as text and what of each is not finite: `sampler_logprobs` come from the sampler,
  `old_logprobs` from the policy, `reference_logprobs` from the reference.
- `metrics.jsonl` has the last {count} steps. A `grad_norm` that grows for many steps means a
  learning rate that is too high; one that jumps from nothing means a single row.
- `rollouts.jsonl.gz`, `recipe.yaml` and `run.json` are copies of the run's. Where `model.dtype` or
  `model.compute_dtype` is bfloat16, the same step may pass in float32.

Go on from the last checkpoint with other settings: `grouper run ... --resume --allow-changes`.
"""


def write_nan_dump(
    run: Path, name: str, batch: TrainBatch | None, tokenizer: Any, *, what: str
) -> Path:
    """Save what is needed to understand a stop: `<run>/nan_dump/<name>/`.

    Args:
        run: the run folder, with the metrics of the step already written.
        name: `<phase>-<step>`, the step in six digits.
        batch: the step that was skipped.
        tokenizer: to write the rows as text.
        what: one sentence for the README.

    Raises:
        RunFolderError: the disk is full or not writable.
    """
    target = run / "nan_dump" / name
    with whole_folder(target) as folder:
        if batch is not None:
            tensors = {
                key: value.detach().cpu().contiguous().clone()
                for key in batch.__slots__
                if isinstance(value := getattr(batch, key), Tensor)
            }
            save_file(tensors, folder / "batch.safetensors")
            rows = [_row(batch, row, tokenizer) for row in range(batch.rows)]
            text = "".join(dumps(row) + "\n" for row in rows)
            (folder / "texts.jsonl").write_text(text, encoding="utf-8")
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        last = lines[-LAST_METRICS:]
        (folder / "metrics.jsonl").write_text("".join(last), encoding="utf-8")
        for source in (run / "recipe.yaml", run / "run.json"):
            if source.exists():
                shutil.copyfile(source, folder / source.name)
        rollouts = run / "rollouts" / f"{name}.jsonl.gz"
        if rollouts.exists():
            shutil.copyfile(rollouts, folder / "rollouts.jsonl.gz")
        text = README.format(folder=name, what=what, count=len(last))
        (folder / "README.md").write_text(text, encoding="utf-8")
    return target


def _row(batch: TrainBatch, row: int, tokenizer: Any) -> dict[str, Any]:
    prompt = int(batch.prompt_index[row])
    ids = batch.prompt_ids[prompt, : int(batch.prompt_lengths[prompt])]
    sampled = batch.completion_ids[row, : int(batch.completion_lengths[row])]
    return {
        "row": row,
        "group": int(batch.group_ids[row]),
        "prompt": tokenizer.decode(ids.tolist(), skip_special_tokens=False),
        "completion": tokenizer.decode(sampled.tolist(), skip_special_tokens=False),
        "advantage": float(batch.advantages[row]),
        "not_finite": list(broken_tensors(batch, row)),
    }
