"""Memory and hours of GRPO for models of 0.5B to 7B on common cards: planned, not measured.

    python -m benchmarks.planning.cost_table

Memory is what `grouper plan` says for the real shapes of the models, without weights. Hours are
arithmetic: 6 N FLOPs a trained token at a share of the card's matrix rate, and for every decoded
token of all sequences the weights and the cache once at a share of its bandwidth. Both shares are
the goals of benchmarks/gpu/first_card.sh, which has never run on a card. Rates and bandwidths are
those of the makers' data sheets (dense bfloat16). Writes results/cost_table.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.checkout import RESULTS
from benchmarks.machine import where
from grouper.advice.plan import RunPlan, plan_run
from grouper.config.schema import DataConfig, ModelConfig, Recipe, SourceConfig
from grouper.models.loading import weightless_policy

RESULT = RESULTS / "cost_table.json"

# hidden, intermediate, layers, heads, key heads, head dimension, tied.
MODELS = {
    "0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, True),
    "1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 128, True),
    "3B": ("qwen2", 2048, 11_008, 36, 16, 2, 128, True),
    "4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, True),
    "7B": ("qwen2", 3584, 18_944, 28, 28, 4, 128, False),
}
VOCABULARY = 151_936
KINDS: dict[str, list[str]] = {
    "full, float32 weights": ["model.dtype=float32"],
    "full, bfloat16 weights, 8-bit AdamW": [
        "model.dtype=bfloat16",
        "grpo.optimizer.name=adamw_8bit",
    ],
    "LoRA, bfloat16 base": ["model.dtype=bfloat16", "model.lora={rank: 32}"],
}
# GB, dense bfloat16 FLOP/s, bytes/s.
CARDS = {
    24: ("RTX 4090", 165e12, 1.01e12),
    40: ("A100 40 GB", 312e12, 1.56e12),
    80: ("H100", 989e12, 3.35e12),
    141: ("H200", 989e12, 4.8e12),
}
UPDATE_SHARE, DECODE_SHARE = 0.3, 0.25
STEPS, PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 200, 16, 8, 256, 512


def save_shape(name: str, folder: Path) -> None:
    """The config.json of a model, without weights."""
    kind, hidden, inner, layers, heads, keys, dim, tied = MODELS[name]
    config = AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=dim,
        tie_word_embeddings=tied,
        vocab_size=VOCABULARY,
        max_position_embeddings=32_768,
    )
    config.save_pretrained(folder)


def planned(folder: Path, settings: list[str]) -> tuple[Recipe, RunPlan]:
    recipe = Recipe(
        name="cost",
        skip_sft=True,
        model=ModelConfig(path=str(folder)),
        data=DataConfig(train=SourceConfig(source="gsm8k", path="no-data-here")),
    ).override(
        "model.compute_dtype=bfloat16",
        "model.gradient_checkpointing=true",
        f"grpo.steps={STEPS}",
        f"grpo.prompts_per_step={PROMPTS}",
        f"grpo.group_size={GROUP}",
        f"prompt.max_prompt_tokens={PROMPT_TOKENS}",
        f"sampling.max_new_tokens={NEW_TOKENS}",
        *settings,
    )
    return recipe, plan_run(recipe, device="cuda")


def hours(recipe: Recipe, plan: RunPlan, slots: int, rate: float, bandwidth: float) -> float:
    """Of all steps, if every completion has the largest length."""
    shape: Any = weightless_policy(
        recipe.model, AutoConfig.from_pretrained(str(recipe.model.path)), "cuda"
    ).model.config
    rows = PROMPTS * GROUP
    tokens = PROMPTS * PROMPT_TOKENS + rows * NEW_TOKENS
    # Recomputation runs the forward twice; a frozen base has no gradient of its weights.
    flops = (8 if recipe.model.lora is None else 6) * plan.parameters * tokens
    bytes_each = torch.bfloat16.itemsize
    cache = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * bytes_each
    rounds = -(-rows // min(rows, slots))
    read = rounds * NEW_TOKENS * plan.parameters * bytes_each
    read += rows * NEW_TOKENS * (PROMPT_TOKENS + NEW_TOKENS / 2) * cache
    seconds = flops / (UPDATE_SHARE * rate) + read / (DECODE_SHARE * bandwidth)
    return float(STEPS * seconds / 3600)


def main() -> None:
    rows = []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as place:
            save_shape(name, Path(place))
            for kind, settings in KINDS.items():
                recipe, plan = planned(Path(place), settings)
                # Without the cache of the sampler, which gives way where memory is short.
                peak = max(p.peak - p.cache for p in plan.memory if "sample" not in p.name)
                cards = {}
                for card in plan.cards:
                    maker, rate, bandwidth = CARDS[card.gib]
                    slots = card.max_slots or 0
                    value = hours(recipe, plan, slots, rate, bandwidth) if card.fits else None
                    cards[str(card.gib)] = {"card": maker, "hours": value and round(value, 2)}
                rows.append({"model": name, "kind": kind, "gib": peak / 2**30, "cards": cards})
                print(name, kind, f"{peak / 2**30:.1f} GiB", cards, flush=True)
    found = {"machine": where(), "steps": STEPS, "rows": rows}
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
