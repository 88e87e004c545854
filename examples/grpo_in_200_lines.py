"""GRPO in 200 lines: Grouper's public parts, and a loop of your own.

    grouper sft demo                                          # a model that answers in the format
    python examples/grpo_in_200_lines.py outputs/demo/sft/final

What `grouper grpo demo` adds to this: a prompt that is run once for all of its completions, slices
that fit into memory, several processes, dynamic sampling, a KL term, checkpoints, resume, the
record of every rollout, checks while it runs, and a report.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grouper import Completion, Prepared, Prompt, SamplingParams, load_recipe, prepare
from grouper.algorithms.advantages import standardised
from grouper.algorithms.losses import Bounds, log_ratio, ppo_clip
from grouper.models.policy import Policy
from grouper.sampling.base import ModelSampler, SampleRequest, draw_seed


@dataclass(frozen=True)
class Rollouts:
    """All completions of a step, the completions of one prompt next to each other."""

    prompts: list[Prompt]
    completions: list[Completion]
    groups: Tensor
    """Number of the prompt that each completion belongs to, [R]."""
    rewards: Tensor
    """[R]"""
    solved: Tensor
    """Whether the answer is right, [R] bool."""


# --- rollouts ------------------------------------------------------------------------------------


def draw(
    sampler: ModelSampler,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    samples: int,
    key: tuple[int | str, ...],
) -> list[Completion]:
    """Draw some completions of each prompt, those of a prompt next to each other.

    Every draw has an address, a function of `key`, the problem and the number of the sample. Equal
    addresses give equal completions, so that no random generator has to be kept.
    """
    requests = []
    for prompt in prompts:
        for sample in range(samples):
            address = draw_seed(*key, prompt.problem_id, sample)
            requests.append(SampleRequest(prompt=prompt, params=params, key=address))
    # They come in the order in which they finish.
    finished = dict(sampler.sample(requests))
    return [finished[number] for number in range(len(requests))]


def collect(
    prepared: Prepared, sampler: ModelSampler, problems: Sequence[int], *, step: int
) -> Rollouts:
    """Sample a group of completions for each problem, grade and reward them."""
    recipe = prepared.recipe
    size = recipe.grpo.group_size
    prompts = [prepared.train[number][1] for number in problems]
    completions = draw(
        sampler, prompts, prepared.sampling, samples=size, key=(recipe.seed, "rollouts", step)
    )
    numbers = [number for number in problems for _ in range(size)]
    rewards = []
    for completion, number in zip(completions, numbers, strict=True):
        rewards.append(prepared.reward(completion.text, number))
    return Rollouts(
        prompts=[prompt for prompt in prompts for _ in range(size)],
        completions=completions,
        groups=torch.arange(len(problems)).repeat_interleave(size),
        rewards=torch.tensor([reward.total for reward in rewards]),
        solved=torch.tensor([reward.components["correctness"] == 1 for reward in rewards]),
    )


# --- the loss ------------------------------------------------------------------------------------


def advantages_of(rollouts: Rollouts) -> Tensor:
    """Compare each rollout with its group: `(r - mean) / std`, [R] (arXiv 2402.03300, eq. 3).

    A group without a right answer teaches nothing: it would only learn to be wrong more nicely.
    """
    advantages = standardised(rollouts.rewards, rollouts.groups)
    solved_groups = rollouts.groups[rollouts.solved].unique()
    is_taught = torch.isin(rollouts.groups, solved_groups)
    return torch.where(is_taught, advantages, 0.0)


def token_logprobs(
    policy: Policy, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> tuple[Tensor, Tensor]:
    """Run the model over prompts and completions, padded on the right.

    Returns:
        log p of each token given those before it, [R, T - 1], and a mask of the same shape that is
        True for the tokens of completions. T is the length of the longest row.
    """
    rows = [
        [*prompt.token_ids, *completion.token_ids]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    is_token = torch.zeros(len(rows), longest, dtype=torch.int64)
    is_sampled = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[number, : len(row)] = torch.tensor(row)
        is_token[number, : len(row)] = 1
        is_sampled[number, len(prompt.token_ids) : len(row)] = True
    logits = policy.model(input_ids=ids, attention_mask=is_token).logits.float()
    # The logits at a place are those of the next token.
    logprobs = logits[:, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen, is_sampled[:, 1:]


def policy_loss(policy: Policy, rollouts: Rollouts, advantages: Tensor, bounds: Bounds) -> Tensor:
    """Return the clipped loss, averaged over all sampled tokens (arXiv 2503.14476, eq. 8)."""
    logprobs, mask = token_logprobs(policy, rollouts.prompts, rollouts.completions)
    # One update for each batch of rollouts: the old policy is the one that is being trained.
    log_ratios = log_ratio(logprobs, logprobs.detach())
    per_token = ppo_clip(log_ratios, logprobs, advantages[:, None], bounds)
    return torch.where(mask, per_token, 0.0).sum() / mask.sum()


# --- the loop ------------------------------------------------------------------------------------


def accuracy(prepared: Prepared, sampler: ModelSampler, count: int) -> float:
    """Answer the first validation problems greedily, and return the share that is right."""
    items = prepared.validation[:count]
    greedy = replace(prepared.sampling, temperature=0.0)
    prompts = [prompt for _, prompt in items]
    completions = draw(sampler, prompts, greedy, samples=1, key=(0, "validation"))
    right = 0
    for (problem, _), completion in zip(items, completions, strict=True):
        grade = prepared.grader.submit(completion.text, problem.answer).result()
        right += grade.correct
    return right / len(items)


def train(prepared: Prepared, policy: Policy, *, steps: int) -> list[float]:
    """Train a policy, and return its accuracy before and after."""
    config = prepared.recipe.grpo
    bounds = Bounds(low=config.clip_low, high=config.clip_high)
    weights = list(policy.trainable().values())
    optimizer = torch.optim.AdamW(
        weights, lr=config.optimizer.learning_rate, betas=config.optimizer.betas, weight_decay=0.0
    )
    sampler = prepared.samplers.over(policy)
    order = torch.randperm(len(prepared.train), generator=torch.Generator().manual_seed(0)).tolist()
    accuracies = [accuracy(prepared, sampler, 128)]
    for step in range(steps):
        start = step * config.prompts_per_step
        problems = [order[i % len(order)] for i in range(start, start + config.prompts_per_step)]
        rollouts = collect(prepared, sampler, problems, step=step)
        advantages = advantages_of(rollouts)
        loss = policy_loss(policy, rollouts, advantages, bounds)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # The sampler copies the weights anew where it has to.
        policy.version += 1
        solved = rollouts.solved.float().mean()
        print(f"step {step + 1}  reward {rollouts.rewards.mean():.3f}  solved {solved:.0%}")
    accuracies.append(accuracy(prepared, sampler, 128))
    return accuracies


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a model that knows the demonstration's format")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("settings", nargs="*", help="of the recipe, as section.key=value")
    options = parser.parse_args()
    # The model's own tokenizer; and half as many steps as the recipe has, so twice its rate.
    settings = [f"model={{path: {options.model}}}", "grpo.optimizer.learning_rate=1e-4"]
    recipe = load_recipe("demo", [*settings, *options.settings])
    with prepare(recipe) as prepared:
        policy = prepared.model
        before, after = train(prepared, policy, steps=options.steps)
    print(f"validation: {before:.1%} before, {after:.1%} after {options.steps} steps")


if __name__ == "__main__":
    main()
