"""TRL's own GRPO trainer at its defaults, for `first_card.sh` where TRL is installed."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from typing import Any

import torch

from benchmarks.gpu.workload import LEARNING_RATE, Work, make_model, synchronize

__all__ = ["installed", "trl_seconds"]

MICRO_BATCH = 8


def installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))
    except ModuleNotFoundError:  # one that is there without what it needs itself
        return False


def trl_seconds(work: Work, device: torch.device) -> list[float]:
    """Seconds of each step after a first one: generation, rewards, micro-batches and optimizer."""
    import trl  # an environment of its own
    from datasets import Dataset
    from transformers import TrainerCallback

    seconds: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            seconds.append(round(time.perf_counter() - self.started, 4))

    def every_other(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    prompts = [" ".join(f"t{i}" for i in ids) for ids in work.prompt_ids().tolist()]
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=MICRO_BATCH if work.rows % MICRO_BATCH == 0 else work.rows,
            gradient_accumulation_steps=max(1, work.rows // MICRO_BATCH),
            num_generations=work.group,
            max_completion_length=work.new_tokens,
            generation_kwargs={"min_new_tokens": work.new_tokens},
            max_steps=work.tries + 1,
            learning_rate=LEARNING_RATE,
            bf16=work.mode == "full",
            use_cpu=device.type == "cpu",
            report_to="none",
            save_strategy="no",
        )
        trainer = trl.GRPOTrainer(
            model=make_model(work, device),
            reward_funcs=every_other,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": p} for p in prompts] * (work.tries + 1)),
            processing_class=_tokenizer(work),
            callbacks=[Clock()],
        )
        trainer.train()
    return seconds[1:]


def _tokenizer(work: Work) -> Any:
    """One that reads `t7` as token 7."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = {int(work.shape["pad_token_id"]): "<pad>", work.stop: "<eos>"}
    names = {special.get(i, f"t{i}"): i for i in range(int(work.shape["vocab_size"]))}
    plain = Tokenizer(WordLevel(names, unk_token="<pad>"))
    plain.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
