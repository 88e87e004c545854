"""What the CPU comparisons run: shapes, prompts and lengths that every engine is given alike.

A case is one random model and one step's worth of prompts. The model is saved once and loaded by
each engine; prompts are token ids (and words that a tokenizer of whole words turns into them);
ragged lengths come from `ragged_lengths.json`.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.checkout import LENGTHS, REAL_MODELS

__all__ = [
    "ALL_CASES",
    "CASES",
    "REAL_CASES",
    "STOP",
    "Case",
    "lengths_of",
    "prompts_of",
    "random_tokens",
    "save_model",
    "shape_of",
    "stop_of",
    "text_of",
]

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
        # As many completions as make a step of each model take about half a minute.
        Case("SmolLM2", {}, "bfloat16", 8, 8, 96, 96, vocabulary=49_152, model="smollm2"),
        Case("Gemma 3", {}, "bfloat16", 4, 8, 96, 64, vocabulary=262_144, model="gemma270"),
        Case("Coder 0.5B", {}, "bfloat16", 4, 8, 96, 64, vocabulary=151_936, model="coder05"),
    )
}
"""Pretrained models."""
ALL_CASES = {**CASES, **REAL_CASES}


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
    """Token ids of each prompt, the same ones in every run.

    They are what the tokenizer makes of `text_of` them. A pretrained model's begin with whatever it
    begins every text with.
    """
    first = _tokenizer(case.model)("").input_ids if case.model else []
    lengths = [case.prompt_tokens - len(first)] * case.prompts
    return [[*first, *ids] for ids in random_tokens(case, lengths, seed=1)]


def random_tokens(case: Case, lengths: Sequence[int], *, seed: int) -> list[list[int]]:
    """Random token ids of these lengths, none of them special, that their text is read back as."""
    chance = random.Random(seed)
    if not case.model:
        return [
            [chance.randrange(6, case.vocabulary - 6) for _ in range(length)] for length in lengths
        ]
    tokenizer = _tokenizer(case.model)
    words = _words_of(case.model, case.vocabulary)
    texts: list[list[int]] = []
    while len(texts) < len(lengths):
        ids = [chance.choice(words) for _ in range(lengths[len(texts)])]
        if _reads_back(tokenizer, ids):
            texts.append(ids)
    return texts


@cache
def _words_of(model: str, vocabulary: int) -> list[int]:
    """Tokens that are a space and a word: a seventh of them."""
    tokenizer = _tokenizer(model)
    return [
        token
        for token in range(0, vocabulary, 7)
        if _is_one_word(tokenizer.decode([token])) and _reads_back(tokenizer, [token])
    ]


def stop_of(case: Case) -> int:
    """The token that ends a completion."""
    return int(_tokenizer(case.model).eos_token_id) if case.model else STOP


def _is_one_word(text: str) -> bool:
    return text[0] == " " and text[1:].isascii() and text[1:].isalpha() if text else False


def _reads_back(tokenizer: Any, ids: list[int]) -> bool:
    """Whether the tokenizer makes these ids of their own text."""
    made = tokenizer(tokenizer.decode(ids), add_special_tokens=False).input_ids
    return bool(made == ids)


@cache
def _tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(REAL_MODELS / model)


def shape_of(case: Case) -> dict[str, Any]:
    """The sizes of the case's model, by their names in a config."""
    if not case.model:
        return case.shape
    config = AutoConfig.from_pretrained(REAL_MODELS / case.model)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {name: getattr(config, name) for name in LARGE if name != "head_dim"}
    return {**sizes, "head_dim": head_dim}


def text_of(case: Case, ids: list[int]) -> str:
    """What the case's tokenizer reads as these ids."""
    if case.model:
        text: str = _tokenizer(case.model).decode(ids, skip_special_tokens=True)
        return text
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
