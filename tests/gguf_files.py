"""A small random model, and GGUF files of it as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gates import package
from torch import Tensor

from grouper.config.schema import NewModelConfig, PromptConfig
from grouper.data.arithmetic import ArithmeticOptions, generate
from grouper.models.new_model import make_new_model
from grouper.prompts import make_format

gguf = package("gguf", extra="gguf")

COMPACT = make_format(PromptConfig(format="compact"))
PROBLEMS = generate(ArithmeticOptions(count=200), split="sft", seed=0)

# llama.cpp's names for the parts of a layer.
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The name of a weight in a GGUF file."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """The rows of a query or key matrix in llama.cpp's order: both of a rotated pair together."""
    half = weight.shape[0] // heads // 2
    return weight.view(heads, 2, half, -1).transpose(1, 2).reshape(weight.shape)


class TinyGguf:
    """A small model, its tokenizer, and a writer of GGUF files of it.

    Args:
        architecture: qwen3 or llama.
    """

    def __init__(self, architecture: str = "qwen3") -> None:
        config = NewModelConfig(hidden_size=64, layers=2)
        model, self.tokenizer = make_new_model(config, PROBLEMS, COMPACT, seed=0)
        self.architecture = architecture
        self.config = model.config
        if architecture == "llama":
            self.config = transformers.LlamaConfig(
                **{
                    name: getattr(model.config, name)
                    for name in (
                        "hidden_size",
                        "intermediate_size",
                        "num_hidden_layers",
                        "num_attention_heads",
                        "num_key_value_heads",
                        "head_dim",
                        "vocab_size",
                        "rms_norm_eps",
                        "max_position_embeddings",
                        "tie_word_embeddings",
                    )
                },
                rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            )
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(self.config)
        self.model = model.eval()

    def metadata(self) -> dict[str, Any]:
        config = self.config
        rows = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        added = self.tokenizer.get_added_vocab()
        prefix = self.architecture
        merges = json.loads(self.tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        return {
            "general.type": "model",
            "general.name": "Tiny",
            f"{prefix}.context_length": config.max_position_embeddings,
            f"{prefix}.embedding_length": config.hidden_size,
            f"{prefix}.block_count": config.num_hidden_layers,
            f"{prefix}.feed_forward_length": config.intermediate_size,
            f"{prefix}.attention.head_count": config.num_attention_heads,
            f"{prefix}.attention.head_count_kv": config.num_key_value_heads,
            f"{prefix}.attention.key_length": config.head_dim,
            f"{prefix}.attention.value_length": config.head_dim,
            f"{prefix}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            f"{prefix}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
            f"{prefix}.vocab_size": config.vocab_size,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": rows,
            "tokenizer.ggml.token_type": [
                3 if row in added and row.startswith("<|") else 4 if row in added else 1
                for row in rows
            ],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
            "tokenizer.ggml.eos_token_id": self.tokenizer.eos_token_id,
            "tokenizer.ggml.eot_token_id": 5,
            "tokenizer.ggml.padding_token_id": self.tokenizer.pad_token_id,
            "tokenizer.chat_template": self.tokenizer.chat_template,
        }

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, weight in self.model.state_dict().items():
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if self.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = self.config.num_attention_heads
                if "k_proj" in name:
                    heads = self.config.num_key_value_heads
                weight = in_pairs(weight, heads)  # noqa: PLW2901 - the same weight, in another order
            tensors[gguf_name(name)] = weight
        return tensors

    def write(
        self,
        file: Path,
        *,
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, Tensor] | None = None,
        quantized: str | None = None,
    ) -> Path:
        """Write a GGUF file.

        Args:
            file: to write.
            metadata: fields that differ; None leaves one out.
            tensors: what differs, in llama.cpp's order of rows; an empty one is left out.
            quantized: the type that matrices are rounded to.
        """
        writer = gguf.GGUFWriter(file, self.architecture)
        fields = {**self.metadata(), **(metadata or {})}
        for name, value in fields.items():
            self._add(writer, name, value)
        for name, weight in {**self.tensors(), **(tensors or {})}.items():
            values = weight.detach().float().numpy()
            if values.size == 0:
                continue
            if quantized is not None and values.ndim == 2:
                kind = gguf.GGMLQuantizationType[quantized]
                writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, np.ascontiguousarray(values))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    @staticmethod
    def _add(writer: Any, name: str, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
