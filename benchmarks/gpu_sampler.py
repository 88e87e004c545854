"""The sampler on a GPU beside `generate`, and its share of what memory bandwidth allows.

    python benchmarks/gpu_sampler.py

`generate` is what TRL samples with by default. The bound of decoding is the bytes that a step
cannot do without (all weights once; the keys and values of every live token once, a prompt's once
for its group) over the bandwidth of a copy, measured here. Written to
benchmarks/results/gpu_sampler.json on a CUDA device; `--device cpu` only tries the script out.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from gpu_limits import copy_rate
from gpu_workload import Ours, Theirs, Work, arguments, medians, save, seconds_of

from grouper.models.policy import Policy


def step_bytes(work: Work, policy: Policy) -> float:
    """Bytes that a decoding step reads at least, on average over all steps."""
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    config = policy.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    token *= torch.empty((), dtype=work.dtype).element_size()
    own = work.rows * (work.new_tokens + 1) / 2
    return weights + token * (work.prompts * work.prompt_tokens + own)


def decoding(ours: Ours, device: torch.device) -> dict[str, Any]:
    """Where the time of our sampler goes."""
    work = ours.work
    ours.sampler.times.take()
    whole, prefill = [], []
    for _ in range(work.tries):
        whole.append(seconds_of(ours.sample, device))
        prefill.append(ours.sampler.times.take())
    step = statistics.median(
        (a - b) / max(1, work.new_tokens - 1) for a, b in zip(whole, prefill, strict=True)
    )
    rate, needed = copy_rate(device), step_bytes(work, ours.policy)
    return {
        "prefill_seconds": round(statistics.median(prefill), 4),
        "decode_milliseconds_a_step": round(1000 * step, 4),
        "copy_bytes_a_second": round(rate),
        "bytes_a_step": round(needed),
        "bound_milliseconds_a_step": round(1000 * needed / rate, 4),
        "share_of_the_bound": round(needed / rate / step, 4),
    }


def main() -> None:
    work, device = arguments(__doc__)
    ours, theirs = Ours(work, device), Theirs(work, device, checkpointing=False)
    runs = {"grouper": ours.sample, "generate": theirs.sample}
    middle, seconds = medians(runs, work.tries, device)
    ratio = round(middle["generate"] / middle["grouper"], 2)
    split = decoding(ours, device)
    tokens = work.rows * work.new_tokens
    save(
        "gpu_sampler",
        {
            "seconds": seconds,
            "ratio": ratio,
            "tokens_a_second": round(tokens / middle["grouper"]),
            "decoding": split,
        },
        work,
        device,
    )
    print(f"sampler: {ratio} x generate, {round(tokens / middle['grouper'])} tokens a second")
    print(
        f"decode: {split['decode_milliseconds_a_step']} ms a step, "
        f"{split['share_of_the_bound']:.1%} of the bandwidth bound"
    )


if __name__ == "__main__":
    main()
