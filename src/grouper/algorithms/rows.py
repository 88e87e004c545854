"""The rows that take the most memory, as a batch: what a plan counts and a rehearsal runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from grouper.algorithms.batching import TrainBatch, unweighted_rows

# Completions this many times shorter than allowed are looked at, too: many short rows on a shared
# prompt copy its keys and values more often than a few long ones.
SHORT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of equal length, some of them sharing a prompt.

    Example: `Rows(prompt=100, completion=300, count=8, per_prompt=4)`.
    """

    prompt: int
    """Tokens."""
    completion: int
    """Tokens."""
    count: int
    per_prompt: int = 1
    """Rows that continue the same prompt."""

    @property
    def tokens(self) -> int:
        """As `micro_batches` counts them where prompts are shared."""
        return self.count * self.completion + -(-self.count // self.per_prompt) * self.prompt

    def filling(self, budget: int, *, most: int, shared: bool = True) -> Rows:
        """As many of these rows as fit `budget` tokens: at least one, at most `most`."""
        per_prompt = self.per_prompt if shared else 1
        group = self.prompt + per_prompt * self.completion
        count = budget // group * per_prompt
        left = budget % group - self.prompt
        count += max(0, left // self.completion)
        return replace(self, count=max(1, min(count, most)), per_prompt=per_prompt)

    def times(self, number: int) -> Rows:
        """So many slices of these rows."""
        return replace(self, count=self.count * number)

    def batch(self, vocabulary: int) -> TrainBatch:
        """A step of nothing but these rows, every completion token a target of equal weight."""

        def ids(number: int, length: int) -> list[list[int]]:
            return (torch.arange(number * length).view(number, length) % vocabulary).tolist()

        prompts = ids(-(-self.count // self.per_prompt), self.prompt)
        prompt_index = [row // self.per_prompt for row in range(self.count)]
        rows = unweighted_rows(prompts, ids(self.count, self.completion), prompt_index)
        weights = rows.mask / rows.mask.sum()
        return replace(rows, weights=weights, advantages=torch.ones(self.count))


def worst_rows(prompt: int, completion: int, group: int) -> tuple[Rows, ...]:
    """The rows of which one kind takes the most memory: full ones, and many short ones."""
    long = Rows(prompt=prompt, completion=completion, count=group, per_prompt=group)
    short = replace(long, completion=max(1, completion // SHORT))
    return (long,) if group == 1 else (long, short)
