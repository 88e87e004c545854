"""A stand-in for llama.cpp's converter: the same arguments, and a file of the same layout.

`GROUPER_FAKE_FAULT` makes it fail: `unknown` (as for a tokenizer that it does not know), `missing`,
`other` (a changed weight) or `swapped` (two weights of one shape are exchanged).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gguf_files import TinyGguf
from transformers import AutoModelForCausalLM, AutoTokenizer

TYPES = {"f32": None, "f16": "F16", "q8_0": "Q8_0"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--outfile", type=Path)
    parser.add_argument("--outtype")
    given = parser.parse_args()
    fault = os.environ.get("GROUPER_FAKE_FAULT")
    if fault == "unknown":
        sys.exit("NotImplementedError: BPE pre-tokenizer was not recognized")
    exported = TinyGguf.__new__(TinyGguf)
    exported.architecture = "qwen3"
    exported.model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    exported.config = exported.model.config
    exported.tokenizer = AutoTokenizer.from_pretrained(given.model)
    tensors = exported.tensors()
    changes = {}
    if fault == "missing":
        changes["blk.0.ffn_up.weight"] = torch.empty(0)
    if fault == "other":
        changes["blk.0.ffn_down.weight"] = 1.1 * tensors["blk.0.ffn_down.weight"]
    if fault == "swapped":
        changes["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_gate.weight"]
        changes["blk.0.ffn_gate.weight"] = tensors["blk.0.ffn_up.weight"]
    exported.write(given.outfile, tensors=changes, quantized=TYPES[given.outtype])


if __name__ == "__main__":
    main()
