"""The plan of a run: memory of every part, what fits on which card, steps, tokens and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grouper.advice.checks import find
from grouper.advice.findings import Assumed
from grouper.advice.lengths import find_lengths
from grouper.advice.memory import GIB, Memory, ModelMemory
from grouper.algorithms.rows import Rows
from grouper.config.schema import GRPOConfig, Recipe, SFTConfig
from grouper.errors import GrouperError
from grouper.models.loading import context_length, shape_of, weightless_policy
from grouper.models.new_model import new_model_config
from grouper.sampling.weights import copy_dtype
from grouper.training.curriculum import total_steps
from grouper.training.optimizers import state_bytes
from grouper.training.problem_sets import ProblemSets, load_problem_sets
from grouper.training.rehearsal import worst_slices

__all__ = ["CardPlan", "PhasePlan", "RunPlan", "Speed", "plan_run"]

# GiB of common cards.
CARDS = (24, 40, 80, 141)

# GiB of a card that nothing can be put into: the context, kernels, and fragmentation.
RESERVE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a run is, as measured."""

    tokens_per_second: float | None = None
    seconds_per_step: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Phase -> seconds of one of its steps in an earlier run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """How long a phase is."""

    name: str
    steps: int | None
    """None where the data are not on this machine."""
    tokens_per_step: int
    """Trained or sampled, prompts included; of GRPO at most."""
    seconds: float | None

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.tokens_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """What fits on one card."""

    gib: int
    fits: bool
    tokens_per_micro_batch: dict[str, int | None]
    """Phase -> the largest that fits; None: not even one row."""
    max_slots: int | None
    """The largest that fits; None: not even one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run takes."""

    device: str
    parameters: int
    trainable: int
    memory: tuple[Memory, ...]
    cards: tuple[CardPlan, ...]
    phases: tuple[PhasePlan, ...]
    notes: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Bytes, at the worst moment of the whole run."""
        return max(part.peak for part in self.memory)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes, tokens and seconds."""
        plan = dataclasses.asdict(self)
        for part, values in zip(self.memory, plan["memory"], strict=True):
            values["peak"] = part.peak
        for phase, values in zip(self.phases, plan["phases"], strict=True):
            values["tokens"] = phase.tokens
        return {**plan, "peak": self.peak}


def plan_run(recipe: Recipe, *, device: str | None = None, speed: Speed | None = None) -> RunPlan:
    """Plan a run without loading weights and without a network.

    Args:
        recipe: the run.
        device: what to plan for; left out: as the recipe says.
        speed: for times; left out: none are given.

    Raises:
        ModelError: the configuration of the model is not on this machine.
    """
    if device is None:
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = auto if recipe.device == "auto" else recipe.device
    return _Planner(recipe, device).plan(speed or Speed())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """What the updates of a phase are made of."""

    name: str
    config: SFTConfig | GRPOConfig
    size: int | None
    """Items of the phase; None where the data are not on this machine."""
    per_step: int
    tokens: int
    """Of one step, prompts included."""
    slices: list[tuple[Rows, int]]
    """The kinds of rows that may take the most memory, and how many of them one step has."""
    reference: bool = False

    def plan(self, speed: Speed) -> PhasePlan:
        steps = self.config.steps
        if self.size is not None:
            steps = total_steps(self.config, size=self.size, per_step=self.per_step)
        seconds = speed.seconds_per_step.get(self.name)
        if seconds is None and speed.tokens_per_second is not None:
            seconds = self.tokens / speed.tokens_per_second
        whole = None if steps is None or seconds is None else steps * seconds
        return PhasePlan(name=self.name, steps=steps, tokens_per_step=self.tokens, seconds=whole)


# (setting, peak) at a few settings.
Curve = list[tuple[int, int]]


class _Planner:
    """Everything that is known of one run."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        self.recipe, self.device = recipe, device
        try:
            self.sets: ProblemSets | None = load_problem_sets(recipe)
        except GrouperError:
            self.sets = None  # not on this machine, or not in order: a dry run says which
        path, revision, new = recipe.model.path, recipe.model.revision, recipe.model.new
        if new is not None:
            self.lengths = find_lengths(recipe, self.sets, new.max_position_embeddings)
            assert self.lengths.vocabulary is not None
            shape = new_model_config(new, vocabulary=self.lengths.vocabulary)
        else:
            assert path is not None
            shape = shape_of(path, revision, cached=True)
            self.lengths = find_lengths(recipe, self.sets, context_length(shape))
        self.policy = weightless_policy(recipe.model, shape)
        self.model = ModelMemory(recipe.model, self.policy, device)
        self.updates = list(self._updates())

    def plan(self, speed: Speed) -> RunPlan:
        own, updates, sampled = self.recipe.sampling.max_slots, self.updates, self._sampled()
        memory = (
            *(self._update(update, update.config.tokens_per_micro_batch) for update in updates),
            *(self._sampling(name, own) for name in sampled),
        )
        tokens = {update.name: self._token_curve(update) for update in updates}
        settings = sorted({1, own, 4 * own})
        slots = [[(n, self._sampling(name, n).peak) for n in settings] for name in sampled]
        rooms = {gib: int((gib - RESERVE) * GIB) for gib in CARDS}
        assumed = Assumed(measured=self.lengths.measured, native=self.policy.native)
        return RunPlan(
            device=self.device,
            parameters=self.model.parameters,
            trainable=self.model.trainable,
            memory=memory,
            cards=tuple(
                CardPlan(
                    gib=gib,
                    fits=all(part.peak <= room for part in memory),
                    tokens_per_micro_batch={n: _largest([c], room) for n, c in tokens.items()},
                    max_slots=_largest(slots, room),
                )
                for gib, room in rooms.items()
            ),
            phases=tuple(update.plan(speed) for update in updates),
            notes=tuple(map(str, find(assumed))),
        )

    def _updates(self) -> Iterator[_Update]:
        recipe, lengths, sets = self.recipe, self.lengths, self.sets
        sft, grpo = recipe.sft, recipe.grpo
        if not recipe.skip_sft:
            trained = None if sets is None else sets.sft or sets.train
            yield _Update(
                name="sft",
                config=sft,
                size=None if trained is None else len(trained),
                per_step=sft.batch_size,
                tokens=sft.batch_size * lengths.sft_mean,
                slices=worst_slices(sft, lengths.sft_prompt or 1, lengths.sft_completion or 1),
            )
        if not recipe.skip_grpo:
            train = None if sets is None else sets.train
            prompts, rows = grpo.prompts_per_step, grpo.prompts_per_step * grpo.group_size
            yield _Update(
                name="grpo",
                config=grpo,
                size=None if train is None else len(train),
                per_step=prompts,
                tokens=prompts * lengths.grpo_mean_prompt + rows * lengths.completion,
                slices=worst_slices(grpo, lengths.grpo_prompt, lengths.completion),
                reference=grpo.beta > 0,
            )

    def _update(self, update: _Update, budget: int) -> Memory:
        """The memory of an update at a budget, with the worse kind of rows."""
        options = []
        for kind, most in update.slices:
            rows = kind.filling(budget, most=most, shared=self.policy.native)
            part = self.model.update(
                f"{update.name} update",
                rows,
                update.config.optimizer,
                accumulated=rows.count < most,
                reference=update.reference,
            )
            options.append(part)
        return max(options, key=lambda part: part.peak)

    def _token_curve(self, update: _Update) -> Curve:
        """Peaks at one row, at the recipe's setting, and where more changes nothing."""
        one = max(dataclasses.replace(kind, count=1).tokens for kind, _ in update.slices)
        whole = max(dataclasses.replace(kind, count=most).tokens for kind, most in update.slices)
        points = sorted({one, min(update.config.tokens_per_micro_batch, whole), whole})
        return [(b, self._update(update, b).peak) for b in points if one <= b]

    def _sampled(self) -> list[str]:
        recipe = self.recipe
        measured = recipe.evaluation.base or recipe.data.test or recipe.data.has_validation
        parts = {"grpo sample": not recipe.skip_grpo, "evaluation": measured}
        return [name for name, wanted in parts.items() if wanted]

    def _sampling(self, name: str, slots: int) -> Memory:
        """The part with at most this many slots."""
        recipe, lengths = self.recipe, self.lengths
        samples, completion = recipe.grpo.group_size, lengths.completion
        most = recipe.grpo.prompts_per_step * samples
        if name == "evaluation":
            samples, completion = recipe.evaluation.samples, lengths.evaluation_completion
            test = None if self.sets is None else self.sets.test
            most = slots if test is None else len(test) * samples
        optimizer = recipe.sft.optimizer if recipe.skip_grpo else recipe.grpo.optimizer
        slots = min(slots, most)
        prompts = -(-slots // samples)
        lora = recipe.model.lora is not None
        return self.model.sampling(
            name,
            slots=slots,
            prompts=prompts,
            # Slots that are refilled one by one end up with a prompt each.
            held=prompts if slots == most else min(slots, -(-most // samples)),
            prompt=lengths.grpo_prompt,
            completion=completion,
            copy=copy_dtype(recipe.sampling, recipe.model, self.device, lora=lora),
            optimizer=state_bytes(optimizer, self.policy),
            reference=recipe.grpo.beta > 0 and not recipe.skip_grpo,
        )


def _largest(curves: Sequence[Curve], room: int) -> int | None:
    """The largest setting at which the peaks of all curves fit; None: not even the least.

    Peaks grow in straight lines: every row takes the same.

    >>> [_largest([[(1, 10), (11, 110)], [(1, 0), (9, 8)]], room) for room in (5, 10, 65, 200)]
    [None, 1, 6, 9]
    """
    smallest: list[int] = []
    for curve in curves:
        found = None
        for (x0, y0), (x1, y1) in zip(curve, [*curve[1:], curve[-1]], strict=True):
            if y0 > room:
                break
            share = 1.0 if y1 <= room else (room - y0) / (y1 - y0)
            found = int(x0 + share * (x1 - x0))
        if found is None:
            return None
        smallest.append(found)
    return min(smallest, default=None)
