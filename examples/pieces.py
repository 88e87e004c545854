"""The pieces of SFT and GRPO one at a time, for study, notebooks and comparisons.

Training itself does not go through here: a step's normalization is fixed once, as weights, and log-
probs come straight from hidden states (`weighting`, `losses`, `policy`). These are the same
formulas in the form in which they are taught: plain right-padded rows of B responses and T tokens,
logits in full, a reduction at the end. `mask` is 1 or True on response tokens and 0 elsewhere.

    python examples/pieces.py    # one GRPO update: two answers to one question, the first one right
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from grouper.algorithms.advantages import mean_baseline, standardised
from grouper.algorithms.losses import Bounds, log_ratio, nll, policy_gradient, ppo_clip

__all__ = [
    "LossType",
    "entropy_from_logits",
    "group_normalized_rewards",
    "grpo_clip_loss",
    "grpo_microbatch_step",
    "masked_mean",
    "masked_normalize",
    "naive_policy_gradient_loss",
    "policy_gradient_loss",
    "response_log_probs",
    "sft_microbatch_step",
    "tokenize_prompt_and_output",
]

# The raw reward, the advantage, or the advantage with a clipped ratio.
LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]


def tokenize_prompt_and_output(
    prompts: Sequence[str], outputs: Sequence[str], tokenizer: Any
) -> dict[str, Tensor]:
    """Prompts and outputs as token ids, each text encoded on its own, as they are sampled.

    Encoded together, a token could reach over the border, and neither prompt nor mask would be
    what the policy saw.

    Args:
        prompts: B texts.
        outputs: B texts, one for each prompt.
        tokenizer: a Hugging Face tokenizer. Rows are padded on the right with its padding token,
            or its end-of-text token where it has none.

    Returns:
        With T + 1 the tokens of the longest row: `input_ids` [B, T], all tokens but the last;
        `labels` [B, T], all tokens but the first; `response_mask` [B, T] bool, True where the
        label is a token of the output.

    Raises:
        ValueError: not as many outputs as prompts, or a prompt without a token.
    """
    if len(prompts) != len(outputs):
        raise ValueError(f"{len(prompts)} prompts but {len(outputs)} outputs")
    rows = [
        [tokenizer.encode(text, add_special_tokens=False) for text in pair]
        for pair in zip(prompts, outputs, strict=True)
    ]
    if not all(prompt for prompt, _ in rows):
        raise ValueError("a prompt without a token: nothing predicts the first of its output")
    padding = tokenizer.pad_token_id
    padding = tokenizer.eos_token_id if padding is None else padding
    width = max(len(prompt) + len(output) for prompt, output in rows)
    ids = torch.full((len(rows), width), padding, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, output) in enumerate(rows):
        end = len(prompt) + len(output)
        ids[row, :end] = torch.tensor([*prompt, *output])
        mask[row, len(prompt) : end] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of the values under the mask, over all of them or along `dim`.

    Args:
        values: any shape; what stands off the mask may be anything, NaN included.
        mask: of the same shape.
        dim: left out: over everything.

    Returns:
        `values` without `dim`; NaN where the mask has nothing.

    >>> values, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> masked_mean(values, mask).item(), masked_mean(values, mask, dim=1).tolist()
    (3.0, [2.0, 5.0])
    """
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_normalize(values, mask, 1.0, dim) / count


def masked_normalize(
    values: Tensor, mask: Tensor, constant: float, dim: int | None = None
) -> Tensor:
    """The sum of the values under the mask divided by a constant: long responses count more.

    Args:
        values: any shape; what stands off the mask may be anything, NaN included.
        mask: of the same shape.
        constant: the divisor (the length of the longest response in Dr. GRPO, arXiv 2503.20783).
        dim: left out: over everything.

    Returns:
        `values` without `dim`.

    >>> values, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> masked_normalize(values, mask, 2.0).item(), masked_normalize(values, mask, 2.0, 0).tolist()
    (4.5, [3.0, 1.5])
    """
    kept = torch.where(mask.bool(), values, 0.0)
    return (kept.sum() if dim is None else kept.sum(dim)) / constant


def entropy_from_logits(logits: Tensor) -> Tensor:
    """`H = logsumexp(z) - sum_v p_v z_v` of the next-token distribution, in nats.

    Args:
        logits: [B, T, V].

    Returns:
        [B, T], in float32 or higher.

    >>> entropy_from_logits(torch.tensor([[[0.0, 0.0], [9e9, 0.0]]])).tolist()   # ln 2, and none
    [[0.693..., 0.0]]
    """
    accurate = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = accurate.log_softmax(-1)
    # A token that cannot be drawn (log-prob of minus infinity) adds nothing.
    finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    return (logprobs.exp() * -finite).sum(-1)


def response_log_probs(
    model: Callable[..., Any], input_ids: Tensor, labels: Tensor, *, with_entropy: bool = False
) -> dict[str, Tensor]:
    """What a causal model says of the tokens that follow: `log p(labels_t | input_ids_<=t)`.

    Args:
        model: `model(input_ids=...)` returns an object with `logits` [B, T, V], as transformers'
            causal models do.
        input_ids: [B, T], all tokens but the last.
        labels: [B, T], all tokens but the first; any valid id on padding.
        with_entropy: also the entropy at each place.

    Returns:
        `log_probs` [B, T], which carries the gradient, and `token_entropy` [B, T], which does
        not. Nothing is masked.
    """
    logits: Tensor = model(input_ids=input_ids).logits
    accurate = logits if logits.dtype == torch.float64 else logits.float()
    chosen = accurate.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    found = {"log_probs": chosen - accurate.logsumexp(-1)}
    if with_entropy:
        found["token_entropy"] = entropy_from_logits(logits.detach())
    return found


def group_normalized_rewards(
    reward: Callable[[str, str], Mapping[str, float]],
    responses: Sequence[str],
    ground_truths: Sequence[str],
    group_size: int,
    *,
    eps: float = 1e-6,
    divide_by_std: bool = True,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """`A = (r - mean(group)) / (std(group) + eps)`, or without the division (Dr. GRPO).

    GRPO, arXiv 2402.03300, eq. 3; the standard deviation divides by n - 1. Equal rewards give
    exactly 0.

    Args:
        reward: (response, ground truth) -> the parts of its reward, with the total as `reward`.
        responses: B texts, the responses to one prompt next to each other.
        ground_truths: B reference answers, one a response.
        group_size: responses to a prompt; B is a multiple of it.
        eps: added to the standard deviation.
        divide_by_std: False: only the mean is taken off.

    Returns:
        The advantages [B], the raw rewards [B], and the mean of each part of the reward with the
        mean, standard deviation, minimum and maximum of the total.

    Raises:
        ValueError: not as many ground truths as responses, or no whole groups.
    """
    if len(responses) != len(ground_truths):
        raise ValueError(f"{len(responses)} responses but {len(ground_truths)} ground truths")
    if group_size < 1 or not responses or len(responses) % group_size:
        raise ValueError(f"{len(responses)} responses are no whole groups of {group_size}")
    scores = [reward(*pair) for pair in zip(responses, ground_truths, strict=True)]
    raw = torch.tensor([score["reward"] for score in scores], dtype=torch.float32)
    groups = torch.arange(len(raw)) // group_size
    advantages = standardised(raw, groups, eps) if divide_by_std else mean_baseline(raw, groups)
    metadata = {name: sum(s[name] for s in scores) / len(scores) for name in scores[0]}
    metadata |= {
        "reward_mean": float(raw.mean()),
        "reward_std": float(raw.std(correction=0)),
        "reward_min": float(raw.min()),
        "reward_max": float(raw.max()),
    }
    return advantages.float(), raw, metadata


def naive_policy_gradient_loss(rewards_or_advantages: Tensor, log_probs: Tensor) -> Tensor:
    """`-A log p` per token: REINFORCE (Williams, 1992).

    Args:
        rewards_or_advantages: [B, 1], the same for every token of a response.
        log_probs: [B, T].

    Returns:
        [B, T].

    Raises:
        ValueError: the rewards or advantages are no column.

    >>> naive_policy_gradient_loss(torch.tensor([[2.0]]), torch.tensor([[-1.0, -3.0]])).tolist()
    [[2.0, 6.0]]
    """
    _check_column(rewards_or_advantages, log_probs)
    return policy_gradient(log_probs, log_probs, rewards_or_advantages, Bounds())


def grpo_clip_loss(
    advantages: Tensor, log_probs: Tensor, old_log_probs: Tensor, clip_range: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-min(rho A, clip(rho, 1 - e, 1 + e) A)` per token (arXiv 1707.06347, eq. 7).

    Args:
        advantages: [B, 1].
        log_probs: [B, T].
        old_log_probs: [B, T], of the policy that drew the responses; no gradient.
        clip_range: e.

    Returns:
        The loss [B, T], and `clipped` [B, T] bool: where the bound has taken effect.

    Raises:
        ValueError: the advantages are no column.

    >>> old, new = torch.zeros(1, 2), torch.tensor([[2.0, 1.1]]).log()
    >>> loss, parts = grpo_clip_loss(torch.tensor([[1.0]]), new, old)
    >>> [round(v, 2) for v in loss[0].tolist()], parts["clipped"].tolist()
    ([-1.2, -1.1], [[True, False]])
    """
    _check_column(advantages, log_probs)
    ratios = log_ratio(log_probs, old_log_probs)
    bounds = Bounds(low=clip_range, high=clip_range)
    loss = ppo_clip(ratios, log_probs, advantages, bounds)
    free = -ratios.exp() * advantages
    return loss, {"clipped": loss > free}


def _check_column(values: Tensor, log_probs: Tensor) -> None:
    """A row [B] would go to the tokens in place of the responses, in silence where B is T."""
    if values.shape != (len(log_probs), 1):
        raise ValueError(
            f"rewards or advantages are {list(values.shape)}, and one a response is needed, as a "
            f"column: [{len(log_probs)}, 1]; `.unsqueeze(1)` makes one of a row"
        )


def policy_gradient_loss(
    log_probs: Tensor,
    loss_type: LossType,
    *,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    clip_range: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss per token of one of three kinds.

    Args:
        log_probs: [B, T].
        loss_type: `no_baseline` takes `raw_rewards`, `reinforce_with_baseline` takes `advantages`,
            `grpo_clip` takes `advantages`, `old_log_probs` and `clip_range`.
        raw_rewards: [B, 1].
        advantages: [B, 1].
        old_log_probs: [B, T].
        clip_range: of `grpo_clip`.

    Returns:
        The loss [B, T], and what else the loss says (`clipped` of `grpo_clip`).

    Raises:
        ValueError: no such loss, or something that it needs is missing.
    """
    given = {"raw_rewards": raw_rewards, "advantages": advantages, "old_log_probs": old_log_probs}
    if loss_type not in _NEEDS:
        raise ValueError(f"there is no loss {loss_type!r}; there are {', '.join(_NEEDS)}")
    needed = [given[name] for name in _NEEDS[loss_type]]
    present = [tensor for tensor in needed if tensor is not None]
    if len(present) < len(needed):
        raise ValueError(f"the loss {loss_type} needs {' and '.join(_NEEDS[loss_type])}")
    if loss_type == "grpo_clip":
        return grpo_clip_loss(present[0], log_probs, present[1], clip_range)
    return naive_policy_gradient_loss(present[0], log_probs), {}


_NEEDS: dict[str, tuple[str, ...]] = {
    "no_baseline": ("raw_rewards",),
    "reinforce_with_baseline": ("advantages",),
    "grpo_clip": ("advantages", "old_log_probs"),
}


def sft_microbatch_step(
    log_probs: Tensor,
    response_mask: Tensor,
    accumulation_steps: int,
    constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-likelihood of a micro-batch, and its backward.

    Each response's sum is divided by `constant`; the mean over the micro-batch is divided by
    `accumulation_steps`, so that the gradients of all micro-batches of a step add up to its mean.

    Args:
        log_probs: [B, T], with a gradient.
        response_mask: [B, T].
        accumulation_steps: micro-batches in an optimizer step.
        constant: what a response's sum is divided by.

    Returns:
        The loss (a scalar, without a gradient), and `tokens`, how many were trained.
    """
    sums = masked_normalize(nll(log_probs), response_mask, constant, dim=1)
    return _stepped(sums.mean() / accumulation_steps, response_mask)


def grpo_microbatch_step(
    log_probs: Tensor,
    response_mask: Tensor,
    accumulation_steps: int,
    loss_type: LossType,
    *,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    clip_range: float = 0.2,
    constant: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy-gradient loss of a micro-batch, and its backward.

    Args:
        log_probs: [B, T], with a gradient.
        response_mask: [B, T]; every response has a token.
        accumulation_steps: micro-batches in an optimizer step.
        loss_type: and its inputs, as in `policy_gradient_loss`.
        raw_rewards: [B, 1].
        advantages: [B, 1].
        old_log_probs: [B, T].
        clip_range: of `grpo_clip`.
        constant: left out: the mean over each response's tokens (GRPO); else their sum divided by
            this (Dr. GRPO).

    Returns:
        The loss (a scalar, without a gradient), `tokens`, and with `grpo_clip` the share of the
        response tokens that were clipped, `clip_fraction`.

    Raises:
        ValueError: as `policy_gradient_loss`.
    """
    per_token, parts = policy_gradient_loss(
        log_probs,
        loss_type,
        raw_rewards=raw_rewards,
        advantages=advantages,
        old_log_probs=old_log_probs,
        clip_range=clip_range,
    )
    rows = (
        masked_mean(per_token, response_mask, dim=1)
        if constant is None
        else masked_normalize(per_token, response_mask, constant, dim=1)
    )
    loss, metadata = _stepped(rows.mean() / accumulation_steps, response_mask)
    if "clipped" in parts:
        metadata["clip_fraction"] = masked_mean(parts["clipped"].float(), response_mask)
    return loss, metadata


def _stepped(loss: Tensor, response_mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss.detach(), {"tokens": response_mask.bool().sum()}


def main() -> None:
    logits = torch.zeros(2, 3, 5, requires_grad=True)  # [responses, tokens, vocabulary]
    tokens, mask = torch.tensor([[1, 2, 0], [3, 4, 4]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    log_probs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    advantages, rewards, _ = group_normalized_rewards(
        lambda response, truth: {"reward": float(response == truth)}, ["4", "5"], ["4", "4"], 2
    )
    grpo_microbatch_step(
        log_probs,
        mask,
        accumulation_steps=1,
        loss_type="grpo_clip",
        advantages=advantages[:, None],
        old_log_probs=log_probs.detach(),
    )
    raised = (logits.grad.gather(-1, tokens[..., None])[..., 0] < 0).tolist()
    print(rewards.tolist(), [round(a, 3) for a in advantages.tolist()], raised)


if __name__ == "__main__":
    main()
