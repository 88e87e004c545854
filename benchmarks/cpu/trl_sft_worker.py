"""TRL's SFTTrainer, one step at a time on request; started by `sft.py` in TRL's environment.

Requests as in `trl_worker.py`. Nothing of TRL's is replaced: prompt and completion are columns of
the dataset, its tokenizer adds the stop token, and its default collator pads each micro-batch.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import torch
import trl  # it has its own environment
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cpu.trl_worker import EITHER_TRAINER, Gate, serve_trainer
from benchmarks.workers import Requests, peak_memory


def report(logged: dict[str, Any]) -> dict[str, Any]:
    return {
        "loss": float(logged["loss"]),
        "grad_norm": float(logged["grad_norm"]),
        "peak_bytes": peak_memory(),
    }


def train(
    requests: Requests,
    *,
    model: str,
    dtype: str,
    prompts: list[str],
    completions: list[str],
    micro_batch: int,
    threads: int,
) -> None:
    """A trainer that does steps, each over all rows, until it is closed."""
    torch.set_num_threads(threads)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    rows = [
        {"prompt": prompt, "completion": completion}
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=policy,
            processing_class=AutoTokenizer.from_pretrained(model),
            train_dataset=Dataset.from_list(rows),
            callbacks=[Gate(requests, report)],
            args=trl.SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=len(rows) // micro_batch,
                completion_only_loss=True,
                max_length=None,
                gradient_checkpointing=False,
                bf16=False,
                **EITHER_TRAINER,
            ),
        )
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        trainer.accelerator.free_memory()


if __name__ == "__main__":
    serve_trainer(train)
