"""A whole GRPO training with TRL's GRPOTrainer; started by `time_to_accuracy.py`.

    python -m benchmarks.learning.trl_train RECIPE MODEL FOLDER [SETTING=VALUE ...]

MODEL is a folder. Prompts, their order, rewards, batch, learning rate and its schedule are those
of Grouper's recipe. Each step's seconds, from the trainer's `on_step_begin` to its `on_step_end`,
go to FOLDER/steps.jsonl. After every `grpo.evaluate_every` steps the model goes to FOLDER/step-N,
outside of that time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging as transformers_logging

from grouper.api import prepare
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.training.curriculum import first_met
from grouper.training.prepare import Prepared

# Rows of a micro-batch, and the cache that its `generate` uses: the fastest of
# `benchmarks.cpu.step --tries` in float32.
MICRO_BATCH = 16
CACHE = "static"


class Recorder(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Writes the seconds of each step, and the model where it is due."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder = folder
        self._every = every
        self._started = 0.0
        self._seconds = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **others: Any) -> None:
        seconds = time.perf_counter() - self._started
        self._seconds += seconds
        step = int(state.global_step)
        row = {"step": step, "seconds": round(seconds, 3), "elapsed": round(self._seconds, 3)}
        with (self._folder / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
        if step % self._every == 0:
            target = self._folder / f"step-{step}"
            others["model"].save_pretrained(target)
            others["processing_class"].save_pretrained(target)

    def on_log(
        self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any], **__: Any
    ) -> None:
        kept = {name: logs[name] for name in ("reward", "grad_norm", "loss") if name in logs}
        print(kept, flush=True)


def rows_in_order(prepared: Prepared, steps: int) -> list[dict[str, Any]]:
    """The prompts that Grouper's GRPO would draw, in its order."""
    recipe = prepared.recipe
    count = steps * recipe.grpo.prompts_per_step
    order = first_met(len(prepared.train), count, seed=recipe.seed)
    rows = []
    for number in order:
        _, prompt = prepared.train[number]
        ids = prepared.tokenizer(prompt.text).input_ids
        assert tuple(ids) == prompt.token_ids, "TRL would tokenize the prompt differently"
        rows.append({"prompt": prompt.text, "number": number})
    return rows


def make_reward(prepared: Prepared) -> Any:
    """Make the recipe's whole reward a reward function of TRL's."""

    def recipe_reward(
        completions: Sequence[str], number: Sequence[int], **_: Any
    ) -> list[float | None]:
        paid = zip(completions, number, strict=True)
        return [prepared.reward(text, which).total for text, which in paid]

    return recipe_reward


def settings(recipe: Recipe, folder: Path, steps: int) -> trl.GRPOConfig:
    """What the trainer is told."""
    grpo = recipe.grpo
    optimizer = grpo.optimizer
    rows = grpo.prompts_per_step * grpo.group_size
    micro_batch = min(MICRO_BATCH, rows)
    return trl.GRPOConfig(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        num_generations=grpo.group_size,
        max_completion_length=recipe.sampling.max_new_tokens,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        cache_implementation=CACHE,
        temperature=recipe.sampling.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=grpo.clip_low,
        epsilon_high=grpo.clip_high,
        loss_type="dapo",
        scale_rewards="group",
        max_steps=steps,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=round(optimizer.warmup_ratio * steps),
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        seed=recipe.seed,
        bf16=False,
        fp16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    name, model, place, *changes = sys.argv[1:]
    transformers_logging.set_verbosity_error()
    # The tokenizer is that of the model that is trained; the recipe's own may be on no disk here.
    recipe = load_recipe(name, [*changes, f"model.path={model}", "grpo.start_from=null"])
    folder = Path(place)
    folder.mkdir(parents=True)
    torch.set_num_threads(recipe.threads or 2)
    steps = recipe.grpo.steps
    assert steps is not None
    assert recipe.grpo.optimizer.schedule == "constant"
    with prepare(recipe) as prepared:
        rows = rows_in_order(prepared, steps)
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=make_reward(prepared),
            train_dataset=Dataset.from_list(rows),
            callbacks=[Recorder(folder, int(recipe.grpo.evaluate_every))],
            args=settings(recipe, folder, steps),
        )
        trainer.train()


if __name__ == "__main__":
    main()
