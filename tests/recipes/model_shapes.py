"""Model folders with a configuration and a tokenizer and no weights: enough to plan a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grouper.config.schema import PromptConfig
from grouper.models.new_model import fit_tokenizer
from grouper.prompts import make_format

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-1.5B": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-Math-1.5B": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-4B-Base": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}
"""Shapes as published, by the name of the model on the Hub."""

SAME_SHAPE = {
    "Qwen/Qwen2.5-0.5B-Instruct": "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-1.5B-Instruct": "Qwen/Qwen2.5-1.5B",
}


def shape_folder(folder: Path, name: str) -> Path:
    """A folder with the configuration of a model of the Hub and nothing else."""
    folder.mkdir(parents=True)
    text = json.dumps(SHAPES[SAME_SHAPE.get(name, name)])
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def with_tokenizer(folder: Path, prompt: PromptConfig) -> Path:
    """A small tokenizer beside it, with a chat template, so that prompts can be rendered."""
    fmt = make_format(prompt)
    fit_tokenizer([], fmt, vocab_size=512).save_pretrained(folder)
    return folder
