"""Named algorithms: each is a choice of the parts that `grpo` combines.

A preset fills in what a recipe does not say; whatever stands in the recipe wins. The values are
those of the papers named; where a paper leaves one open, what its users settled on.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300: standardised within the group, KL in the loss (0.04).
    "grpo": {
        "advantage": "standardised",
        "weighting": "sequence_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "beta": 0.04,
        "kl": "k3",
        "require_correct_in_group": False,
    },
    # Understanding R1-Zero-like training, arXiv 2503.20783: neither the division by the standard
    # deviation nor the one by the length.
    "dr-grpo": {
        "advantage": "mean",
        "weighting": "constant",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "require_correct_in_group": False,
    },
    # DAPO, arXiv 2503.14476: token mean, a higher upper bound, groups without signal replaced.
    # Its soft overlong punishment is the reward `soft_overlong`.
    "dapo": {
        "advantage": "standardised",
        "weighting": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dynamic_sampling_rounds": 3,
        "require_correct_in_group": False,
    },
    # Group sequence policy optimisation, arXiv 2507.18071: one ratio a sequence with its narrow
    # bounds, four updates on each rollout batch.
    "gspo": {
        "advantage": "standardised",
        "weighting": "sequence_mean",
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "updates_per_batch": 4,
        "require_correct_in_group": False,
    },
    # MiniMax-M1, arXiv 2506.13585: the ratio weighs tokens and is bounded above only; the paper
    # does not give the bound, 5 is what users settled on.
    "cispo": {
        "advantage": "standardised",
        "weighting": "token_mean",
        "surrogate": "cispo",
        "clip_low": 1.0,
        "clip_high": 5.0,
        "updates_per_batch": 2,
        "require_correct_in_group": False,
    },
    # Back to basics, arXiv 2402.14740: leave-one-out baseline, KL in the reward, no ratio.
    "rloo": {
        "advantage": "leave_one_out",
        "weighting": "constant",
        "surrogate": "policy_gradient",
        "beta": 0.05,
        "kl": "k1",
        "kl_in_reward": True,
        "require_correct_in_group": False,
    },
    # Williams, 1992: the reward itself, no baseline.
    "reinforce": {
        "advantage": "none",
        "weighting": "constant",
        "surrogate": "policy_gradient",
        "require_correct_in_group": False,
    },
    # REINFORCE++, arXiv 2501.03262: standardised over the batch, KL in the reward, clipped.
    "reinforce++": {
        "advantage": "batch_standardised",
        "weighting": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "beta": 0.01,
        "kl": "k1",
        "kl_in_reward": True,
        "require_correct_in_group": False,
    },
}
