"""What the CPU comparisons run: shapes, prompts and lengths that every engine is given alike.

A case is one random model and one step's worth of prompts. The model is saved once and loaded by
each engine; prompts are token ids (and words that a tokenizer of whole words turns into them);
ragged lengths come from `ragged_lengths.json`.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from demo_seeds import machine
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

__all__ = [
    "CASES",
    "LENGTHS",
    "REAL_CASES",
    "RESULTS",
    "STOP",
    "Case",
    "lengths_of",
    "prompts_of",
    "save_model",
    "where",
    "words",
]

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LENGTHS = HERE / "ragged_lengths.json"
PAD, UNKNOWN, STOP = 0, 1, 2
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """One step: a Qwen3 shape, `prompts` x `group` completions."""

    name: str
    shape: dict[str, Any]
    dtype: str
    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 128
    ragged: bool = False
    """Completions end at the committed lengths, capped at `new_tokens`."""
    vocabulary: int = 512
    model: str = ""
    """The name of a pretrained model in real-models/; empty: a random one of `shape`."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    def smaller(self, prompts: int, group: int, new_tokens: int) -> Case:
        """The same on less work: for trying the script out."""
        return replace(self, prompts=prompts, group=group, new_tokens=new_tokens)


CASES = {
    case.name: case
    for case in (
        Case("25M bf16", LARGE, "bfloat16"),
        Case("25M float32", LARGE, "float32"),
        Case("0.5M", SMALL, "float32", prompt_tokens=24, new_tokens=48),
        Case("ragged", LARGE, "bfloat16", ragged=True),
        Case("ragged float32", LARGE, "float32", ragged=True),
    )
}
REAL_CASES = {
    case.name: case
    for case in (
        Case(
            "SmolLM2",
            {},
            "bfloat16",
            prompts=8,
            prompt_tokens=96,
            new_tokens=96,
            vocabulary=49_152,
            model="smollm2",
        ),
    )
}
"""Pretrained models: `make real-models` fetches them."""
REAL_MODELS = HERE.parent / "real-models"


def write_lengths(count: int = 128, mean: int = 48, cap: int = 128) -> None:
    """The committed file, from seed 0: lengths one by one with chance 1/mean to stop."""
    chance = random.Random(0)

    def one() -> int:
        length = 1
        while length < cap and chance.random() >= 1 / mean:
            length += 1
        return length

    LENGTHS.write_text(json.dumps([one() for _ in range(count)]) + "\n")


def lengths_of(case: Case) -> list[int]:
    """Tokens of each completion, row by row."""
    if not case.ragged:
        return [case.new_tokens] * case.rows
    lengths: list[int] = json.loads(LENGTHS.read_text())
    return [min(n, case.new_tokens) for n in lengths[: case.rows]]


def prompts_of(case: Case) -> list[list[int]]:
    """Token ids of each prompt, none of them special; the same ones in every run."""
    chance = random.Random(1)
    return [
        [chance.randrange(6, case.vocabulary - 6) for _ in range(case.prompt_tokens)]
        for _ in range(case.prompts)
    ]


def words(ids: list[int]) -> str:
    """What the tokenizer of `save_model` reads as these ids."""
    return " ".join(f"t{i}" for i in ids)


def save_model(case: Case, folder: Path) -> None:
    """A random model (seed 0) in the case's dtype, with a tokenizer of whole words.

    A pretrained one is copied as it is.
    """
    if case.model:
        shutil.copytree(REAL_MODELS / case.model, folder)
        return
    torch.manual_seed(0)
    config = Qwen3Config(
        **case.shape,
        vocab_size=case.vocabulary,
        max_position_embeddings=max(512, case.prompt_tokens + case.new_tokens),
        pad_token_id=PAD,
        bos_token_id=UNKNOWN,
        eos_token_id=STOP,
    )
    model = Qwen3ForCausalLM(config).to(getattr(torch, case.dtype))
    model.save_pretrained(folder)
    names = {PAD: "<pad>", UNKNOWN: "<unk>", STOP: "<eos>"}
    table = {names.get(i, f"t{i}"): i for i in range(case.vocabulary)}
    plain = Tokenizer(WordLevel(table, unk_token=names[UNKNOWN]))
    plain.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token=names[PAD],
        unk_token=names[UNKNOWN],
        eos_token=names[STOP],
    ).save_pretrained(folder)


def where(**more: str) -> dict[str, Any]:
    """Machine, versions and commit of a result."""
    return {**machine(), "transformers": version("transformers"), **more}
