"""How many tokens' logits a CPU should hold at a time, for heads of three vocabularies.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.head_chunks

Log-probs of 1,024 tokens from random hidden states, and their gradients, with the logits of 128 to
1,024 tokens held at a time, in float32. The heads are those of SmolLM2-135M, Qwen2.5-Coder-0.5B and
Gemma 3 270M. Variants take turns, and the best of three rounds counts. Written to
benchmarks/results/head_chunks.json: seconds, and the same over those of the rows that Grouper held
before it looked at the vocabulary (2^25 logits).
"""

from __future__ import annotations

import json
import time

import torch

from benchmarks.checkout import RESULTS
from benchmarks.machine import where
from grouper.models import token_scores
from grouper.models.token_scores import LinearHead, LogitScaling

SHAPES = {
    "SmolLM2-135M": (49_152, 576),
    "Qwen2.5-Coder-0.5B": (151_936, 896),
    "Gemma 3 270M": (262_144, 640),
}
"""Vocabulary and width of a model."""
TOKENS = 1024
ROWS = (128, 256, 512, 1024)
ROUNDS = 3


def seconds_of(vocabulary: int, width: int, rows: int) -> float:
    """Time one forward and backward with this many rows at a time."""
    token_scores.CPU_ROWS = 1
    token_scores.CHUNK_ELEMENTS = rows * vocabulary
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) * 0.02).requires_grad_()
    targets = torch.randint(vocabulary, (TOKENS,))
    head = LinearHead(
        scaling=LogitScaling(), temperature=1.0, dtype=torch.float32, entropy_gradient=False
    )
    started = time.perf_counter()
    logprobs, _ = head.scores(hidden, weight, None, targets)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return time.perf_counter() - started


def main() -> None:
    before = token_scores.CHUNK_ELEMENTS
    results = {}
    for name, (vocabulary, width) in SHAPES.items():
        usual = before // vocabulary
        variants = sorted({usual, *ROWS})
        best = dict.fromkeys(variants, float("inf"))
        for _ in range(ROUNDS):
            for rows in variants:
                best[rows] = min(best[rows], seconds_of(vocabulary, width, rows))
        results[name] = {
            "vocabulary": vocabulary,
            "width": width,
            "rows_before": usual,
            "seconds": best,
            "over_before": {rows: seconds / best[usual] for rows, seconds in best.items()},
        }
        print(name, {rows: round(seconds, 2) for rows, seconds in best.items()}, flush=True)
    record = {"where": where(), "tokens": TOKENS, "heads": results}
    (RESULTS / "head_chunks.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
