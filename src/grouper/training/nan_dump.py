"""The evidence that is saved of a step whose numbers are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from grouper.algorithms.batching import TrainBatch, broken_rows
from grouper.files import dumps, whole_folder

# Number of last steps whose metrics are saved.
LAST_METRICS = 20


def write_nan_dump(run: Path, name: str, batch: TrainBatch | None, tokenizer: Any) -> Path:
    """Save the evidence of a step that stopped the run to `<run>/nan_dump/<name>/`.

    `batch.safetensors` has every tensor of the last step that was skipped. `texts.jsonl` has its
    rows as text, with the names of the values that are not finite. `metrics.jsonl` has the last
    steps, because a resumed run removes them from its own file.

    Args:
        run: the run folder, with the metrics of the step already written.
        name: `<phase>-<step>`, the step in six digits.
        batch: the step that was skipped.
        tokenizer: to write the rows as text.

    Returns:
        The folder.

    Raises:
        RunFolderError: the disk is full or not writable.
    """
    target = run / "nan_dump" / name
    with whole_folder(target) as folder:
        if batch is not None:
            save_file(_tensors(batch), folder / "batch.safetensors")
            broken = broken_rows(batch)
            records = [_row(batch, row, broken, tokenizer) for row in range(batch.rows)]
            texts = "".join(dumps(record) + "\n" for record in records)
            texts_file = folder / "texts.jsonl"
            texts_file.write_text(texts, encoding="utf-8")
        metrics = (run / "metrics.jsonl").read_text(encoding="utf-8")
        lines = metrics.splitlines(keepends=True)
        last_metrics = "".join(lines[-LAST_METRICS:])
        metrics_file = folder / "metrics.jsonl"
        metrics_file.write_text(last_metrics, encoding="utf-8")
    return target


def _tensors(batch: TrainBatch) -> dict[str, Tensor]:
    """Return contiguous copies of all tensors of a batch on the CPU, by field."""
    tensors = {}
    for name in batch.__slots__:
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            on_cpu = value.detach().cpu()
            tensors[name] = on_cpu.contiguous().clone()
    return tensors


def _row(
    batch: TrainBatch, row: int, broken: Mapping[str, Tensor], tokenizer: Any
) -> dict[str, Any]:
    """Return a row of a batch as JSON values, with its prompt and completion as text."""

    def decode(ids: Tensor, length: int) -> str:
        text = tokenizer.decode(ids[:length].tolist(), skip_special_tokens=False)
        return str(text)

    prompt = int(batch.prompt_index[row])
    prompt_length = int(batch.prompt_lengths[prompt])
    completion_length = int(batch.completion_lengths[row])
    not_finite = [name for name, is_broken in broken.items() if is_broken[row]]
    return {
        "row": row,
        "group": int(batch.group_ids[row]),
        "prompt": decode(batch.prompt_ids[prompt], prompt_length),
        "completion": decode(batch.completion_ids[row], completion_length),
        "advantage": float(batch.token_advantages[row].mean()),
        "not_finite": not_finite,
    }
