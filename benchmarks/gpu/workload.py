"""What the GPU comparisons share: one random model, one step's worth of rollouts, two engines.

The models have the shapes of Qwen2.5-0.5B and 1.5B; the work is 16 prompts x 8 completions x 512
new tokens. `Theirs` is what TRL 1.16's GRPO trainer does by default where no vLLM serves it,
rebuilt from its parts so that it runs where TRL is not installed: `generate` of transformers;
padded rows through the model in micro-batches with gradient checkpointing, log-probs and entropies
of the completion from logits of its positions; AdamW.

Only torch, transformers and the rooms of Grouper below its recipe are imported; PEFT where LoRA is
measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from benchmarks.checkout import LENGTHS, RESULTS, ROOT
from grouper.algorithms.batching import TrainBatch, rollout_rows, step_batches
from grouper.algorithms.losses import Bounds, ppo_clip
from grouper.algorithms.weighting import token_mean
from grouper.models.policy import Policy, TokenOutputs
from grouper.sampling.base import SampleRequest
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.training.optimizers import Optimizer
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import Objective, update
from grouper.types import (
    Completion,
    Grade,
    Problem,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Tally,
    Verdict,
)

__all__ = [
    "ON_POLICY",
    "QWEN3_FOUR_BILLION",
    "QWEN_HALF_BILLION",
    "QWEN_ONE_AND_A_HALF_BILLION",
    "Ours",
    "Theirs",
    "Work",
    "arguments",
    "machine",
    "make_model",
    "medians",
    "save",
    "seconds_of",
    "synchronize",
    "work_on",
]

LORA_RANK = 16
STOP = 151645
LEARNING_RATE = 1e-6

QWEN_HALF_BILLION: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": STOP,
    "bos_token_id": 151643,
    "pad_token_id": 151643,
}
QWEN_ONE_AND_A_HALF_BILLION: dict[str, Any] = {
    **QWEN_HALF_BILLION,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
# Of Qwen3-4B, whose head dimension is not hidden size over heads.
QWEN3_FOUR_BILLION: dict[str, Any] = {
    **QWEN_HALF_BILLION,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TOY: dict[str, Any] = {
    **QWEN_HALF_BILLION,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Work:
    """One step's worth of rollouts."""

    shape: dict[str, Any]
    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 256
    new_tokens: int = 512
    tries: int = 3
    mode: str = "full"
    """`full`: bfloat16 weights, all trained. `float32`: float32 weights, products in bfloat16, as
    a recipe with `dtype: float32` runs on CUDA. `lora`: adapters on bfloat16 weights."""
    ragged: bool = False
    """Completions end at lengths of `ragged_lengths.json`, scaled to `new_tokens`."""
    counts: bool = True
    """Whether what is measured is a result, or the script is only tried out."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def stop(self) -> int:
        return int(self.shape["eos_token_id"])

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.float32 if self.mode == "float32" else torch.bfloat16

    def lengths(self) -> list[int]:
        """New tokens of each row."""
        if not self.ragged:
            return [self.new_tokens] * self.rows
        known = json.loads(LENGTHS.read_text())
        scale = self.new_tokens / max(known)
        return [max(1, round(known[i % len(known)] * scale)) for i in range(self.rows)]

    def prompt_ids(self) -> Tensor:
        """[prompts, prompt_tokens], the same ones in every run."""
        chance = torch.Generator().manual_seed(1)
        shape = (self.prompts, self.prompt_tokens)
        return torch.randint(6, int(self.shape["vocab_size"]) - 400, shape, generator=chance)

    def described(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "counts"}


QUICK: dict[str, Any] = {
    "prompts": 4,
    "group": 4,
    "prompt_tokens": 64,
    "new_tokens": 64,
    "tries": 2,
}
SMOKE: dict[str, Any] = {"prompts": 2, "group": 2, "prompt_tokens": 9, "new_tokens": 6, "tries": 1}


def arguments(doc: str | None) -> tuple[Work, torch.device]:
    """The work and the device that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="little work, nothing written")
    parser.add_argument("--tries", type=int)
    given = parser.parse_args()
    device = torch.device(given.device)
    work = work_on(device, QWEN_HALF_BILLION)
    if given.quick:
        work = replace(work, **QUICK, counts=False)
    if given.tries:
        work = replace(work, tries=given.tries)
    return work, device


def work_on(device: torch.device, shape: dict[str, Any], **settings: Any) -> Work:
    """The work for a device; without a card a toy, only to see that the script runs."""
    if device.type == "cuda":
        return Work(shape, **settings)
    toy = Work(TOY | {name: shape[name] for name in ("head_dim",) if name in shape}, **settings)
    return replace(toy, **SMOKE, counts=False)


def make_model(work: Work, device: torch.device) -> PreTrainedModel:
    """Random weights, the same ones every time."""
    torch.manual_seed(0)
    shape = work.shape
    config = Qwen3Config(**shape) if "head_dim" in shape else Qwen2Config(**shape)
    before = torch.get_default_dtype()
    torch.set_default_dtype(work.dtype)
    try:
        with device:
            return AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)


def make_policy(work: Work, device: torch.device) -> Policy:
    """The model as it is trained, in one of the modes."""
    model = make_model(work, device)
    if work.mode == "full":
        return Policy(model)
    adapter = None
    if work.mode == "lora":
        import peft

        settings = peft.LoraConfig(
            r=LORA_RANK,
            lora_alpha=2 * LORA_RANK,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        # Its own default: adapters are float32 whatever the base is.
        adapter = peft.get_peft_model(model, settings)
    return Policy(model, adapter=adapter, compute_dtype=torch.bfloat16)


class _Letters:
    """A tokenizer: nobody reads the texts."""

    def __init__(self, size: int) -> None:
        self._size = size

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return "x" * len(token_ids)

    def __len__(self) -> int:
        return self._size


def _on_policy(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tally]]:
    """GRPO's clipped surrogate where old log-probs are the current ones."""
    ratios = outputs.logprobs - outputs.logprobs.detach()
    bounds = Bounds(low=0.2, high=0.2)
    loss = -ppo_clip(ratios, outputs.logprobs, batch.advantages[:, None], bounds)
    return loss * batch.weights, {}


ON_POLICY = Objective(_on_policy)


class Ours:
    """Grouper's sampler and update over one model."""

    def __init__(self, work: Work, device: torch.device, *, micro_tokens: int = 65536) -> None:
        self.work = work
        self._micro_tokens = micro_tokens
        self.policy = make_policy(work, device)
        letters = _Letters(int(work.shape["vocab_size"]))
        # As `sampling.dtype: auto` resolves on CUDA.
        weights = SamplingWeights(self.policy, None if work.mode == "full" else torch.bfloat16)
        self.sampler = NativeSampler(weights, letters, stop_token_ids=[work.stop])
        adam = torch.optim.AdamW(
            self.policy.trainable().values(), lr=LEARNING_RATE, fused=device.type == "cuda"
        )
        self.optimizer = Optimizer([adam])
        self._prompts = [
            Prompt(problem_id=str(i), text="", token_ids=tuple(ids))
            for i, ids in enumerate(work.prompt_ids().tolist())
        ]
        self._requests = [
            SampleRequest(
                prompt=self._prompts[i // work.group],
                params=SamplingParams(max_new_tokens=length, min_new_tokens=length),
                key=i,
            )
            for i, length in enumerate(work.lengths())
        ]

    def sample(self) -> list[Completion]:
        drawn = dict(self.sampler.sample(self._requests))
        assert sum(len(c.token_ids) for c in drawn.values()) == sum(self.work.lengths())
        return [drawn[i] for i in range(self.work.rows)]

    def batch(self, drawn: list[Completion]) -> TrainBatch:
        """Every other completion is right."""
        size = self.work.group
        groups = []
        for number, prompt in enumerate(self._prompts):
            rollouts = tuple(
                _rollout(completion, float(i % 2))
                for i, completion in enumerate(drawn[number * size : (number + 1) * size])
            )
            problem = Problem(id=prompt.problem_id, question="q", answer="1", source="benchmark")
            params = self._requests[0].params
            groups.append(
                RolloutGroup(problem=problem, prompt=prompt, params=params, rollouts=rollouts)
            )
        rows = rollout_rows(groups)
        assert rows is not None
        advantages = torch.arange(rows.rows) % size % 2 * 2.0 - 1
        (step,) = step_batches(replace(rows, advantages=advantages), token_mean)
        return step

    def update(self, batch: TrainBatch) -> None:
        done = update(
            ParallelPolicy(self.policy),
            batch,
            ON_POLICY,
            self.optimizer,
            scale=1.0,
            max_grad_norm=1.0,
            token_budget=self._micro_tokens,
        )
        assert done.applied

    def step(self) -> None:
        self.update(self.batch(self.sample()))


def _rollout(completion: Completion, reward: float) -> Rollout:
    verdict = Verdict.CORRECT if reward else Verdict.INCORRECT
    return Rollout(
        completion=completion,
        grade=Grade(verdict=verdict, extracted="", stage="", reason=""),
        reward=Reward(components={"r": reward}, weights={"r": 1.0}),
    )


class Theirs:
    """TRL's default step from its parts.

    Args:
        work: what to run.
        device: where.
        micro_batch: rows of a forward and backward; 8 is TRL's default.
        checkpointing: TRL's default is on.
    """

    def __init__(
        self,
        work: Work,
        device: torch.device,
        *,
        micro_batch: int = 8,
        checkpointing: bool = True,
    ) -> None:
        self.work = work
        self._device = device
        self._micro_batch = micro_batch
        self.model = make_model(work, device)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda"
        )
        self._ids = work.prompt_ids().repeat_interleave(work.group, 0).to(device)
        self._settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=work.new_tokens,
            min_new_tokens=work.new_tokens,
            pad_token_id=int(work.shape["pad_token_id"]),
            eos_token_id=work.stop,
        )

    @torch.no_grad()
    def sample(self) -> Tensor:
        """[rows, prompt + new] token ids."""
        self.model.eval()
        ids: Tensor = self.model.generate(
            input_ids=self._ids,
            attention_mask=torch.ones_like(self._ids),
            generation_config=self._settings,
        )
        assert ids.shape[1] == self.work.prompt_tokens + self.work.new_tokens
        return ids

    def update(self, ids: Tensor) -> None:
        self.model.train()
        advantages = torch.arange(len(ids), device=ids.device) % 2 * 2.0 - 1
        parts = [torch.split(both, self._micro_batch) for both in (ids, advantages)]
        for part, advantage in zip(*parts, strict=True):
            loss: Any = self._loss(part, advantage).div(len(parts[0]))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _loss(self, ids: Tensor, advantage: Tensor) -> Tensor:
        new = self.work.new_tokens
        out = self.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            logits_to_keep=new + 1,
            use_cache=False,
        )
        logits = out.logits[:, :-1]
        targets = ids[:, -new:]
        # In half precision TRL goes row by row, with a log-softmax each.
        logprobs = torch.stack(
            [
                row.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
                for row, wanted in zip(logits, targets, strict=True)
            ]
        )
        with torch.no_grad():  # it logs entropies of every token
            for row in logits.flatten(0, 1).split(128):
                shares = row.log_softmax(-1)
                (shares.exp() * shares).sum(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        kept = torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
        return -kept.mean()

    def step(self) -> None:
        self.update(self.sample())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock seconds of a call and all it started."""
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started


def medians(
    runs: dict[str, Callable[[], Any]], tries: int, device: torch.device
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Median seconds of each, in turns after one round of warming up; and all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for attempt in range(tries + 1):
        for name, run in runs.items():
            taken = seconds_of(run, device)
            if attempt:
                seconds[name].append(round(taken, 4))
    return {name: statistics.median(found) for name, found in seconds.items()}, seconds


def save(name: str, record: dict[str, Any], work: Work, device: torch.device) -> None:
    """Print what was measured; the result of a GPU is also written."""
    whole = {"machine": machine(device), "work": work.described(), **record}
    print(json.dumps(whole, indent=2))
    if work.counts:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=2) + "\n")


def machine(device: torch.device) -> dict[str, Any]:
    """Device, versions and commit."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    on_gpu = device.type == "cuda"
    return {
        "commit": commit,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
