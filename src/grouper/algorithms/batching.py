"""TrainBatch: exactly one optimizer step, its normalization included.

A method is a way to fill three streams of weights over the tokens of a step: the surrogate's
(`weights`, times an advantage), the likelihood's and the teacher's. Each has a denominator of its
own over the whole step.

Prompts are stored once and rows point at them, because the update runs each prompt's forward
once. A batch can be cut into row slices in any way: each slice keeps the weights computed over
the whole step, so the losses of the slices add up to the loss of the step. Nothing here may
depend on how it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grouper.algorithms.weighting import WeightingFunction
from grouper.types import Completion, Demonstration, RolloutGroup

# Fields of a batch: one value per row, and one per token of a row.
_LOGPROBS = ("sampler_logprobs", "old_logprobs", "reference_logprobs")
_STREAMS = ("weights", "likelihood_weights", "teacher_weights")
_PER_TOKEN = ("completion_ids", "mask", *_STREAMS, *_LOGPROBS, "selection")
_PER_ROW = (
    "completion_lengths",
    "sequence_ids",
    "group_ids",
    "advantages",
    "is_solution",
    "teacher",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """Rows of one optimizer step: P prompts, R completions of at most T tokens.

    All id tensors are padded on the right with 0; lengths say what is real, never a token value.
    """

    prompt_ids: Tensor
    """[P, Tp] int64."""
    prompt_lengths: Tensor
    """[P] int64, each at least 1."""
    prompt_index: Tensor
    """[R] int64: the prompt of each row."""
    completion_ids: Tensor
    """[R, T] int64."""
    completion_lengths: Tensor
    """[R] int64, each at least 1."""
    mask: Tensor
    """[R, T] bool: the target tokens."""
    weights: Tensor
    """[R, T] float32 (float64 in tests): of the surrogate, and of a KL and an entropy term; in SFT,
    of the likelihood. Zero off the mask; fixed over the whole step, as all weights here are."""
    sequence_ids: Tensor
    """[R] int64: the row's number within the step; survives slicing."""
    group_ids: Tensor
    """[R] int64: rows with equal ids share a baseline."""
    advantages: Tensor
    """[R], or [R, T] where tokens of a row differ; zeros in SFT."""
    sampler_logprobs: Tensor | None = None
    """[R, T]: what the sampler reported; for the gap metric."""
    old_logprobs: Tensor | None = None
    """[R, T]: the trainer's own, before the first update on these rows; None means on-policy:
    the current ones, detached."""
    reference_logprobs: Tensor | None = None
    """[R, T]: of the frozen reference; None without a KL term."""
    selection: Tensor | None = None
    """[R, T] bool: the target tokens that get a gradient; None: all. The others keep their place
    in the denominators."""
    likelihood_weights: Tensor | None = None
    """[R, T]: of the negative log-likelihood; None: no such term."""
    is_solution: Tensor | None = None
    """[R] bool: rows that hold a worked solution and were not sampled; None: there are none."""
    teacher_weights: Tensor | None = None
    """[R, T]: of the divergence from a teacher; None: there is no teacher."""
    teacher: Tensor | None = None
    """[R] int64: the number of the row's teacher; None: 0 for all."""
    teacher_prompt_ids: Tensor | None = None
    """[P, Tq] int64: the prompts as a teacher reads them; None: as the policy does."""
    teacher_prompt_lengths: Tensor | None = None
    """[P] int64, each at least 1."""
    temperature: float = 1.0
    """Log-probs are taken of logits divided by this; 1 in SFT."""

    def __post_init__(self) -> None:
        rows, tokens = self.completion_ids.shape
        assert self.mask.shape == self.weights.shape == (rows, tokens), "mask, weights: [R, T]"
        assert self.prompt_index.shape == (rows,), "one a row"
        assert self.advantages.shape in {(rows,), (rows, tokens)}, "advantages: [R] or [R, T]"
        for name in _STREAMS:
            stream = getattr(self, name)
            assert stream is None or not stream[~self.mask].any(), f"{name}: zero off the mask"

    @property
    def rows(self) -> int:
        return self.completion_ids.shape[0]

    @property
    def is_completion(self) -> Tensor:
        """Where the rows hold tokens: [R, T] bool; target tokens are some of them."""
        columns = torch.arange(self.completion_ids.shape[1], device=self.completion_ids.device)
        return columns < self.completion_lengths[:, None]

    @property
    def token_advantages(self) -> Tensor:
        """The advantage of each token: [R, T], or [R, 1] where those of a row have the same."""
        if self.advantages.dim() == 2:
            return self.advantages
        return self.advantages[:, None]

    @property
    def is_rollout(self) -> Tensor:
        """Which rows [R] bool the policy has drawn itself."""
        if self.is_solution is None:
            return torch.ones_like(self.sequence_ids, dtype=torch.bool)
        return ~self.is_solution

    @property
    def sampled(self) -> Tensor:
        """The target tokens [R, T] bool of the rows that the policy has drawn itself."""
        if self.is_solution is None:
            return self.mask
        return self.mask & ~self.is_solution[:, None]

    @property
    def has_weight(self) -> bool:
        """Tell whether any token has a weight in any stream."""
        return any(bool(stream.any()) for stream in self._streams().values())

    def _streams(self) -> dict[str, Tensor]:
        """Return the weights [R, T] of each stream that there is."""
        streams = {name: getattr(self, name) for name in _STREAMS}
        return {name: stream for name, stream in streams.items() if stream is not None}

    def without_weight(self) -> TrainBatch:
        """Return the same rows with weights of zero in every stream."""
        zeros: dict[str, Any] = {
            name: torch.zeros_like(stream) for name, stream in self._streams().items()
        }
        return replace(self, **zeros)

    def as_the_teacher_reads(self) -> TrainBatch:
        """Return the rows with the prompts of a teacher, for a forward of it."""
        if self.teacher_prompt_ids is None:
            return self
        assert self.teacher_prompt_lengths is not None
        return replace(
            self,
            prompt_ids=self.teacher_prompt_ids,
            prompt_lengths=self.teacher_prompt_lengths,
            teacher_prompt_ids=None,
            teacher_prompt_lengths=None,
        )

    def select(self, index: Tensor) -> TrainBatch:
        """The rows `index` [rows] int64 as a batch of their own, trimmed to their lengths.

        Weights, advantages and ids are the step's own values: slices add up.
        """
        prompts, prompt_index = torch.unique(self.prompt_index[index], return_inverse=True)
        width = int(self.completion_lengths[index].max())
        prompt_width = int(self.prompt_lengths[prompts].max())
        changes: dict[str, Any] = {
            "prompt_ids": self.prompt_ids[prompts, :prompt_width],
            "prompt_lengths": self.prompt_lengths[prompts],
            "prompt_index": prompt_index,
        }
        if self.teacher_prompt_ids is not None:
            assert self.teacher_prompt_lengths is not None
            lengths = self.teacher_prompt_lengths[prompts]
            changes["teacher_prompt_ids"] = self.teacher_prompt_ids[prompts, : int(lengths.max())]
            changes["teacher_prompt_lengths"] = lengths
        for name in _PER_ROW:
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)[index]
        if self.advantages.dim() == 2:
            changes["advantages"] = self.advantages[index, :width]
        for name in _PER_TOKEN:
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)[index, :width]
        return replace(self, **changes)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> TrainBatch:
        """The batch on `device`; floating tensors in `dtype` where given."""
        changes: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                floating = dtype if value.is_floating_point() else None
                changes[item.name] = value.to(device=device, dtype=floating)
        return replace(self, **changes)


def unweighted_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    prompt_index: Sequence[int],
) -> TrainBatch:
    """Make rows whose completion tokens are all targets, with weights and advantages of zero.

    Args:
        prompts: token ids of each.
        completions: token ids of each row, at least one.
        prompt_index: the prompt of each row, which is its group, too.
    """
    prompt_of_row = torch.tensor(prompt_index)
    lengths = torch.tensor([len(row) for row in completions])
    ids = pad_sequence([torch.tensor(row) for row in completions], batch_first=True)
    return TrainBatch(
        prompt_ids=pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        prompt_index=prompt_of_row,
        completion_ids=ids,
        completion_lengths=lengths,
        mask=torch.arange(ids.shape[1]) < lengths[:, None],
        weights=torch.zeros(ids.shape),
        sequence_ids=torch.arange(len(completions)),
        group_ids=prompt_of_row,
        advantages=torch.zeros(len(completions)),
    )


def demonstration_batch(
    demonstrations: Sequence[Demonstration],
    weighting: WeightingFunction,
    *,
    weighting_constant: float = 0.0,
) -> TrainBatch:
    """Make the batch of an SFT step: every completion token and the stop token is a target.

    Tokens that tools wrote are read and no targets.
    """
    prompts = [d.prompt.token_ids for d in demonstrations]
    rows = unweighted_rows(prompts, [d.token_ids for d in demonstrations], range(len(prompts)))
    mask = _without_tools(rows.mask, [d.tool_spans for d in demonstrations])
    return replace(rows, mask=mask, weights=weighting(mask, weighting_constant).float())


def _without_tools(mask: Tensor, spans: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return a mask [R, T] without the tokens that tools wrote, given as spans of each row."""
    if not any(spans):
        return mask
    mask = mask.clone()
    for row, of_row in enumerate(spans):
        for start, end in of_row:
            mask[row, start:end] = False
    return mask


def rollout_rows(
    groups: Sequence[RolloutGroup],
    *,
    mask_truncated: bool = False,
    solutions: Mapping[int, Demonstration] | None = None,
    teacher_prompts: Sequence[Sequence[int]] | None = None,
) -> TrainBatch | None:
    """Make a row of every scored rollout of some groups, without advantages and weights yet.

    Weights are given by `step_batches`, which knows what makes up an optimizer step.

    Args:
        groups: with or without signal.
        mask_truncated: a completion that was cut off has no target tokens: it leaves numerator
            and denominator, while its reward has counted in its group's baseline.
        solutions: number of a group -> a worked solution of its problem, which becomes a row of its
            own after all rollouts.
        teacher_prompts: of each group, token ids of the prompt that a teacher reads; None: the
            same prompts.

    Returns:
        The rows; None where no rollout has a reward and there is no solution.
    """
    completions: list[Completion] = []
    group_numbers: list[int] = []
    for number, group in enumerate(groups):
        for rollout in group.scored:
            completions.append(rollout.completion)
            group_numbers.append(number)
    written = dict(solutions or {})
    texts: list[Completion | Demonstration] = [*completions, *written.values()]
    token_ids = [text.token_ids for text in texts]
    if not token_ids:
        return None
    rows = unweighted_rows(
        [group.prompt.token_ids for group in groups], token_ids, [*group_numbers, *written]
    )
    truncated = [completion.truncated for completion in completions]
    spans = [text.tool_spans for text in texts]
    mask = _without_tools(rows.mask, spans)
    if mask_truncated:
        mask &= ~torch.tensor([*truncated, *(False for _ in written)])[:, None]
    logprobs = [
        *(torch.tensor(completion.logprobs) for completion in completions),
        *(torch.zeros(len(solution.token_ids)) for solution in written.values()),
    ]
    changes: dict[str, Any] = {}
    if written:
        changes["is_solution"] = torch.arange(rows.rows) >= len(completions)
    if teacher_prompts is not None:
        tensors = [torch.tensor(ids) for ids in teacher_prompts]
        changes["teacher_prompt_ids"] = pad_sequence(tensors, batch_first=True)
        changes["teacher_prompt_lengths"] = torch.tensor([len(ids) for ids in teacher_prompts])
    return replace(
        rows,
        mask=mask,
        sampler_logprobs=pad_sequence(logprobs, batch_first=True),
        temperature=groups[0].params.temperature,
        **changes,
    )


def with_gradient(batch: TrainBatch) -> TrainBatch | None:
    """Return the rows that have a gradient in some stream, or None where there are none.

    A row has one in the surrogate's stream where a token has an advantage and a weight. The
    gradient of the others is zero, so leaving them out changes the time and nothing else. A KL or
    entropy term has a gradient at advantage 0, too: do not call it then.
    """
    live = ((batch.token_advantages != 0) & (batch.weights != 0)).any(dim=1)
    for stream in (batch.likelihood_weights, batch.teacher_weights):
        if stream is not None:
            live |= stream.any(dim=1)
    index = live.nonzero().flatten()
    return batch.select(index) if index.numel() else None


def step_batches(
    batch: TrainBatch,
    weighting: WeightingFunction,
    *,
    weighting_constant: float = 0.0,
    updates: int = 1,
    order: Sequence[int] | None = None,
    solution_weight: float = 0.0,
    teacher_weight: float = 0.0,
) -> list[TrainBatch]:
    """Cut rows into the batches of one or several optimizer steps, each normalized over its own.

    Every row is in exactly one of the results. Groups stay whole, so that their prompt runs once,
    unless there are fewer of them than steps; advantages are those of whole groups anyway. A part
    without a row (nothing in its groups could be scored) is left out.

    Args:
        batch: all scored rows of a rollout batch, advantages included.
        weighting: from `algorithms.weighting`.
        weighting_constant: divisor of the constant weighting.
        updates: optimizer steps to cut it into.
        order: group ids in the order in which they are dealt out; left out: as they are.
        solution_weight: of the likelihood of worked solutions, whose tokens are its denominator.
        teacher_weight: of the divergence from a teacher; 0: there is no teacher.
    """

    def weights_of(targets: Tensor, factor: float = 1.0) -> Tensor:
        """Return the weights [R, T] of a stream over the target tokens [R, T] bool."""
        return factor * weighting(targets, weighting_constant).to(batch.weights.dtype)

    groups = sorted(set(batch.group_ids.tolist())) if order is None else list(order)
    # What stays together: the rows of a group, or single rows where groups are too few.
    units = [(batch.group_ids == group).nonzero().flatten() for group in groups]
    if len(units) < updates:
        units = list(torch.cat(units)[:, None].unbind())
    edges = [round(number * len(units) / updates) for number in range(updates + 1)]
    no_rows = batch.group_ids[:0]
    steps = []
    for start, end in pairwise(edges):
        rows = torch.cat([no_rows, *units[start:end]]).sort().values
        if not rows.numel():
            continue
        step = batch if rows.numel() == batch.rows else batch.select(rows)
        weights = weights_of(step.sampled)
        if step.selection is not None:
            weights = weights * step.selection
        streams: dict[str, Tensor] = {}
        if step.is_solution is not None:
            written = step.mask & step.is_solution[:, None]
            streams["likelihood_weights"] = weights_of(written, solution_weight)
        if teacher_weight > 0:
            streams["teacher_weights"] = weights_of(step.sampled, teacher_weight)
        steps.append(replace(step, weights=weights, **streams))  # type: ignore[arg-type]  # only tensors
    return steps


def micro_batches(
    batch: TrainBatch, token_budget: int, *, shared_prompts: bool = True
) -> list[TrainBatch]:
    """Cut a step into slices of at most `token_budget` tokens.

    Each prompt counts once a slice, or once a row where the layout repeats it
    (`shared_prompts=False`).

    Rows are ordered by the longest completion of their prompt, so that slices are padded little
    and rows of one prompt stay together. A single row over the budget makes a slice of its own.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be 1 or more, got {token_budget}")
    lengths = batch.completion_lengths.tolist()
    owners = batch.prompt_index.tolist()
    prompt_lengths = batch.prompt_lengths.tolist()
    longest: dict[int, int] = {}
    for owner, length in zip(owners, lengths, strict=True):
        longest[owner] = max(longest.get(owner, 0), length)

    def place(row: int) -> tuple[int, ...]:
        return longest[owners[row]], owners[row], lengths[row], row

    slices: list[list[int]] = []
    used_tokens = 0
    prompts_in_slice = set[int]()
    for row in sorted(range(batch.rows), key=place):
        owner = owners[row]
        cost = lengths[row]
        if not shared_prompts or owner not in prompts_in_slice:
            cost += prompt_lengths[owner]
        if slices and used_tokens + cost <= token_budget:
            slices[-1].append(row)
        else:
            slices.append([row])
            used_tokens = 0
            prompts_in_slice = set()
            cost = lengths[row] + prompt_lengths[owner]
        used_tokens += cost
        prompts_in_slice.add(owner)
    return [batch.select(torch.tensor(rows)) for rows in slices]


def broken_rows(batch: TrainBatch) -> dict[str, Tensor]:
    """Find advantages, and log-probs of target tokens, that are infinite or not a number.

    What stands on padding may be anything.

    Returns:
        Name of the field -> the rows [R] bool in which it is so; without fields that are fine.
    """
    broken = {"advantages": ~torch.isfinite(batch.token_advantages).all(1)}
    for name in _LOGPROBS:
        values: Tensor | None = getattr(batch, name)
        if values is not None:
            broken[name] = (~torch.isfinite(values) & batch.mask).any(1)
    return {name: rows for name, rows in broken.items() if rows.any()}


# --- the rows that take the most memory -----------------------------------------------------------

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
        """Return as many of these rows as fit `budget` tokens: at least one, at most `most`."""
        per_prompt = self.per_prompt if shared else 1
        tokens_of_prompt = self.prompt + per_prompt * self.completion
        count = budget // tokens_of_prompt * per_prompt
        # A last prompt with fewer rows.
        left = budget % tokens_of_prompt - self.prompt
        count += max(0, left // self.completion)
        return replace(self, count=max(1, min(count, most)), per_prompt=per_prompt)

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
