"""TRL's GRPOTrainer, one step at a time on request; started by `step.py` in TRL's environment.

Requests: `versions`; `open` (a trainer with given settings, which then waits in its own training
loop); `step` (lets it do one step; seconds from its `on_step_begin` to its `on_step_end`, which
spans generation, rewards, all micro-batches and the optimizer); `close`.

Nothing of TRL's is replaced. Fixed lengths are its own `generation_kwargs` (min_new_tokens). Ragged
lengths need a stop token at a place of each row's own: a subclass of the model hands `generate` one
more logits processor that allows nothing else there and no stop before.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import transformers
import trl  # it has its own environment
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from transformers.utils import logging as transformers_logging

from benchmarks.cpu.mixed_reward import SEEN, even_share
from benchmarks.workers import Requests, peak_memory

EITHER_TRAINER: dict[str, Any] = {
    "max_steps": 10_000,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "fp16": False,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
# Settings that both trainers get: one plain step after another on the CPU, nothing saved.


class StopAt(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """Row i draws `stop` as its lengths[i]-th token and not before."""

    def __init__(self, lengths: list[int], stop: int) -> None:
        self._lengths = torch.tensor(lengths)
        self._stop = stop
        self._prompt: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._prompt is None:
            self._prompt = input_ids.shape[1]
        ends = self._lengths <= input_ids.shape[1] - self._prompt + 1
        scores = scores.clone()
        scores[:, self._stop] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, self._stop] = 0.0
        return scores


class Timed:
    """What a model class has in addition: a clock, and completions that end where they are told to.

    Used as a base class before that of the model.
    """

    config: Any
    lengths: list[int] | None = None
    generate_seconds = 0.0

    def generate(self, *arguments: Any, **options: Any) -> Any:
        if self.lengths is not None:
            processor = StopAt(self.lengths, self.config.eos_token_id)
            options["logits_processor"] = LogitsProcessorList([processor])
        started = time.perf_counter()
        made = super().generate(*arguments, **options)  # type: ignore[misc]  # the model's
        self.generate_seconds = time.perf_counter() - started
        return made


class Gate(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Waits before each step until it is asked for.

    Args:
        requests: who asks.
        report: what to answer of a step beside its seconds, from what the trainer logged of it.
    """

    def __init__(
        self, requests: Requests, report: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self._requests = requests
        self._report = report
        self._started = 0.0
        self._waiting = False
        """A step has been answered but for what the trainer logs after it."""
        self.seconds = 0.0

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._reply(state)
        request = self._requests.next()
        if request is None or request[0] == "close":
            raise KeyboardInterrupt  # the trainer's own loop has no gentler end at this place
        self._waiting = True
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self._started

    def _reply(self, state: Any) -> None:
        """Answer the last request: `open`, or a step with what the trainer has logged of it."""
        if not self._waiting:
            self._requests.answer({"open": True})
            return
        self._requests.answer({"seconds": self.seconds, **self._report(state.log_history[-1])})


def load_timed(model: str, **options: Any) -> Any:
    """Load a model whose class is its own with `Timed` in front of it."""
    config = AutoConfig.from_pretrained(model)
    own = getattr(transformers, config.architectures[0])
    return type("AtLengths", (Timed, own), {}).from_pretrained(model, **options)  # type: ignore[attr-defined]


def step_report(model: Timed, logged: dict[str, Any]) -> dict[str, Any]:
    """What there is to compare of a GRPO step."""
    calls, SEEN[:] = list(SEEN), []
    return {
        "sample_seconds": model.generate_seconds,
        "tokens": sum(len(ids) for call in calls for ids in call[1]),
        "loss": logged["loss"],
        "grad_norm": float(logged["grad_norm"]),
        "reward": logged["reward"],
        "reward_std": logged["reward_std"],
        "groups_without_signal": logged.get("frac_reward_zero_std"),
        "prompts": [prompt for call in calls for prompt in call[0]],
        "completion_ids": [ids for call in calls for ids in call[1]],
        "peak_bytes": peak_memory(),
    }


def settings(
    folder: str,
    *,
    rows: int,
    group: int,
    new_tokens: int,
    fixed: bool,
    micro_batch: int,
    checkpointing: bool,
    cache: str | None,
    autocast: bool,
) -> trl.GRPOConfig:
    """What the trainer is told; `fixed`: no stop token before `new_tokens`."""
    return trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        num_generations=group,
        max_completion_length=new_tokens,
        shuffle_dataset=False,
        gradient_checkpointing=checkpointing,
        cache_implementation=cache,
        generation_kwargs={"min_new_tokens": new_tokens} if fixed else {},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
        bf16=autocast,
        **EITHER_TRAINER,
    )


def train(
    requests: Requests,
    *,
    model: str,
    dtype: str,
    prompts: list[str],
    group: int,
    new_tokens: int,
    lengths: list[int] | None,
    micro_batch: int = 16,
    checkpointing: bool = False,
    attention: str = "sdpa",
    threads: int = 2,
    cache: str | None = None,
    autocast: bool = False,
) -> None:
    """A trainer that does steps until it is closed."""
    torch.set_num_threads(threads)
    policy = load_timed(model, dtype=getattr(torch, dtype), attn_implementation=attention)
    policy.lengths = lengths
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=policy,
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=even_share,
            train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
            callbacks=[Gate(requests, partial(step_report, policy))],
            args=settings(
                folder,
                rows=len(prompts) * group,
                group=group,
                new_tokens=new_tokens,
                fixed=not lengths,
                micro_batch=micro_batch,
                checkpointing=checkpointing,
                cache=cache,
                autocast=autocast,
            ),
        )
        SEEN.clear()
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        trainer.accelerator.free_memory()


def serve_trainer(train: Callable[..., None]) -> None:
    """Answer `versions`, and give `open` to a trainer that does steps until it is closed."""
    transformers_logging.set_verbosity_error()
    requests = Requests()
    while (request := requests.next()) is not None:
        verb, arguments = request
        if verb == "open":
            train(requests, **arguments)
            gc.collect()
            requests.answer({"closed": True})
        else:
            packages = ("trl", "torch", "transformers", "accelerate")
            requests.answer({name: version(name) for name in packages})


if __name__ == "__main__":
    serve_trainer(train)
