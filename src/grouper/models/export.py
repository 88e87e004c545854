"""Exporting: one whole model folder out of a base and its adapter, checked against both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from grouper.config.schema import LoraConfig, ModelConfig
from grouper.errors import ModelError
from grouper.files import whole_folder
from grouper.models.device import DTYPES
from grouper.models.folders import read_adapter, require_model_folder
from grouper.models.loading import load_policy, load_tokenizer, save_policy
from grouper.models.policy import Policy

# How far log-probs may be from the source's: merging adds two products in another order, and
# bfloat16 rounds every weight to 8 bits.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """How well an exported model agrees with what it was made from."""

    gap: float
    """The largest difference between log-probs of source and export on the probe, in nats."""
    same_choice: float
    """The share of positions at which both find the same token most likely."""


def export_model(source: str, target: Path, *, dtype: str = "float32") -> Exported:
    """Write `source` as one folder that `from_pretrained` loads, an adapter merged in.

    The saved folder is loaded again and compared with the source: base and adapter side by side.

    Args:
        source: a model or adapter folder, or a Hub name.
        target: must not exist yet.
        dtype: of the saved weights, `float32` or `bfloat16`; merging is done in float32.

    Raises:
        ModelError: nothing loadable there, the target exists, or the two disagree; then nothing
            is left behind.
    """
    require_model_folder(source, where="SOURCE")
    if target.exists():
        raise ModelError(
            f"{target} exists already", where="export", fix="Name a folder that does not exist."
        )
    adapter = read_adapter(source)
    lora = None if adapter is None else LoraConfig(rank=adapter["r"])
    expected = _probe(_load(source, lora))
    merged = _load(source)
    merged.model.to(DTYPES[dtype])
    with whole_folder(target) as folder:
        save_policy(merged, load_tokenizer(source), folder)
        del merged
        origin = json.dumps({"exported_from": source}, indent=2)
        (folder / "export.json").write_text(origin + "\n", encoding="utf-8")
        found = _probe(_load(str(folder)))
        gap = float((found - expected).abs().max())
        if not gap <= BOUNDS[dtype]:
            raise ModelError(
                f"the exported model disagrees with {source}: log-probs differ by {gap:.3g}, "
                f"allowed {BOUNDS[dtype]:g}",
                where="export",
                fix="Export as float32; if it disagrees there, too, please report it.",
            )
    same = float((found.argmax(-1) == expected.argmax(-1)).double().mean())
    return Exported(gap=gap, same_choice=same)


def _load(path: str, lora: LoraConfig | None = None) -> Policy:
    return load_policy(ModelConfig(path=path, dtype="float32", lora=lora), path, seed=0)


@torch.no_grad()
def _probe(policy: Policy) -> Tensor:
    """Log-probs [rows, tokens, V] in float32 on token ids spread over the vocabulary."""
    ids = (torch.arange(128).view(4, 32) * 7919 + 11) % policy.vocabulary
    logprobs: Tensor = policy.model(ids, use_cache=False).logits.float().log_softmax(-1)
    return logprobs
