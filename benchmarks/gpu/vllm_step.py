"""The sampler on a GPU beside vLLM, on the same model, prompts and lengths.

    python -m benchmarks.gpu.vllm_step

In turns in one process where vLLM is installed and a CUDA device is there; otherwise it says so and
measures nothing. Written to benchmarks/results/gpu_vllm.json.
"""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

from benchmarks.gpu.workload import Ours, Work, arguments, medians, save


def served(work: Work, folder: str) -> Any:
    """An engine of vLLM over a saved model; it gets a third of the device."""
    import vllm  # no dependency of this project

    engine = vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=str(work.dtype).removeprefix("torch."),
        gpu_memory_utilization=0.33,
        max_model_len=work.prompt_tokens + work.new_tokens,
        max_num_seqs=work.rows,
    )
    settings = vllm.SamplingParams(
        n=work.group,
        max_tokens=work.new_tokens,
        min_tokens=work.new_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
    )
    prompts = [{"prompt_token_ids": ids} for ids in work.prompt_ids().tolist()]

    def run() -> None:
        made = engine.generate(prompts, settings, use_tqdm=False)
        drawn = sum(len(one.token_ids) for request in made for one in request.outputs)
        assert drawn == work.rows * work.new_tokens

    return run


def main() -> None:
    work, device = arguments(__doc__)
    if device.type != "cuda" or importlib.util.find_spec("vllm") is None:
        print("vllm: not measured here (it needs a CUDA device and vLLM)")
        return
    ours = Ours(work, device)
    with tempfile.TemporaryDirectory() as folder:
        ours.policy.model.save_pretrained(folder)
        runs = {"grouper": ours.sample, "vllm": served(work, folder)}
        middle, seconds = medians(runs, work.tries, device)
    ratio = round(middle["vllm"] / middle["grouper"], 2)
    save("gpu_vllm", {"seconds": seconds, "ratio": ratio}, work, device)
    print(f"vllm: takes {ratio} x our time")


if __name__ == "__main__":
    main()
