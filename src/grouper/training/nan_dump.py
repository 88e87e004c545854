"""The evidence that is kept of a step whose numbers are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from grouper.algorithms.batching import TrainBatch, broken_rows
from grouper.files import dumps, whole_folder

# Steps whose metrics are kept.
LAST_METRICS = 20


def write_nan_dump(run: Path, name: str, batch: TrainBatch | None, tokenizer: Any) -> Path:
    """Save what is needed to understand a stop: `<run>/nan_dump/<name>/`.

    `batch.safetensors` has every tensor of the last step that was skipped, `texts.jsonl` its rows
    as text and what of each is not finite, and `metrics.jsonl` the last steps, which a resumed run
    cuts off its own.

    Args:
        run: the run folder, with the metrics of the step already written.
        name: `<phase>-<step>`, the step in six digits.
        batch: the step that was skipped.
        tokenizer: to write the rows as text.

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
        (folder / "metrics.jsonl").write_text("".join(lines[-LAST_METRICS:]), encoding="utf-8")
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
        "not_finite": [name for name, rows in broken_rows(batch).items() if rows[row]],
    }
