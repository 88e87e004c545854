"""The plan of a run: memory of every part, what fits on which card, steps, tokens and time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grouper.advice.checks import find
from grouper.advice.findings import Assumed
from grouper.advice.lengths import Lengths, find_lengths
from grouper.advice.memory import GIB, Memory, ModelMemory
from grouper.algorithms.rows import Rows, worst_rows
from grouper.config.schema import GRPOConfig, PhaseConfig, Recipe, SFTConfig
from grouper.errors import GrouperError
from grouper.models.model_files import context_length_of, shape_of, weightless_policy
from grouper.models.new_model import new_model_config
from grouper.sampling.weights import copy_dtype
from grouper.training.optimizers import state_bytes
from grouper.training.problem_sets import ProblemSets, load_problem_sets
from grouper.training.stream import total_steps

__all__ = ["CardPlan", "PhasePlan", "RunPlan", "Speed", "plan_run"]

CARDS = (24, 40, 80, 141)
"""GiB of common cards."""

RESERVE = 1.25
"""GiB of a card that nothing can be put into: the context, kernels, and fragmentation."""


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
        for part, told in zip(self.memory, plan["memory"], strict=True):
            told["peak"] = part.peak
        for phase, told in zip(self.phases, plan["phases"], strict=True):
            told["tokens"] = phase.tokens
        return {**plan, "peak": self.peak}


def plan_run(recipe: Recipe, *, device: str | None = None, speed: Speed | None = None) -> RunPlan:
    """Plan a run without loading weights and without a network.

    Args:
        recipe: the run.
        device: what to plan for; left out: as the recipe says.
        speed: for times; left out: none are told.

    Raises:
        ModelError: the configuration of the model is not on this machine.
    """
    return _Planner(recipe, device or _device(recipe.device), speed or Speed()).plan()


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


class _Planner:
    """Everything that is known of one run."""

    def __init__(self, recipe: Recipe, device: str, speed: Speed) -> None:
        self.recipe, self.device, self.speed = recipe, device, speed
        self.sets = _problem_sets(recipe)
        path = recipe.model.path
        shape = None if path is None else shape_of(path, recipe.model.revision)
        context = None if path is None else context_length_of(path, recipe.model.revision)
        if recipe.model.new is not None:
            context = recipe.model.new.max_position_embeddings
        self.lengths: Lengths = find_lengths(recipe, self.sets, context)
        if shape is None:
            assert recipe.model.new is not None
            assert self.lengths.vocabulary is not None
            shape = new_model_config(recipe.model.new, vocabulary=self.lengths.vocabulary)
        self.policy = weightless_policy(recipe.model, shape)
        self.model = ModelMemory(recipe.model, self.policy, device)
        self.updates = dict(self._updates())

    def plan(self) -> RunPlan:
        memory = (*self._update_parts(), *self._sampling_parts())
        curves = self._curves(memory)
        assumed = Assumed(measured=self.lengths.measured, native=self.policy.native)
        return RunPlan(
            device=self.device,
            parameters=self.model.parameters,
            trainable=self.model.trainable,
            memory=memory,
            cards=tuple(self._card(gib, curves, memory) for gib in CARDS),
            phases=tuple(self._phases()),
            notes=tuple(map(str, find(assumed))),
        )

    def _updates(self) -> list[tuple[str, _Update]]:
        recipe, lengths = self.recipe, self.lengths
        found = []
        if not recipe.skip_sft:
            rows = worst_rows(lengths.sft_prompt or 1, lengths.sft_completion or 1, 1)
            found.append(("sft", _Update(recipe.sft, rows, recipe.sft.batch_size, False)))
        if not recipe.skip_grpo:
            grpo = recipe.grpo
            rows = worst_rows(lengths.grpo_prompt, lengths.completion, grpo.group_size)
            most = -(-grpo.prompts_per_step * grpo.group_size // grpo.updates_per_batch)
            found.append(("grpo", _Update(grpo, rows, most, grpo.beta > 0)))
        return found

    @functools.cache  # noqa: B019 - a planner lives as long as its plan is made
    def _at(self, name: str, budget: int) -> Memory:
        """The part `<name> update` at a budget, of the worse kind of rows."""
        update = self.updates[name]
        options = []
        for kind in update.rows:
            rows = kind.filling(budget, most=update.most, shared=self.policy.native)
            options.append(
                self.model.update(
                    f"{name} update",
                    rows,
                    update.config.optimizer,
                    accumulated=rows.count < update.most,
                    reference=update.reference,
                )
            )
        return max(options, key=lambda part: part.peak)

    def _update_parts(self) -> list[Memory]:
        return [self._at(n, u.config.tokens_per_micro_batch) for n, u in self.updates.items()]

    def _sampling_parts(self) -> list[Memory]:
        recipe, parts = self.recipe, []
        if not recipe.skip_grpo:
            parts.append(self._sampling("grpo sample", recipe.sampling.max_slots))
        if recipe.evaluation.base or recipe.data.test or recipe.data.has_validation:
            parts.append(self._sampling("evaluation", recipe.sampling.max_slots))
        return parts

    def _sampling(self, name: str, slots: int) -> Memory:
        """The part with at most this many slots."""
        recipe, lengths = self.recipe, self.lengths
        lora = recipe.model.lora is not None
        copy = copy_dtype(recipe.sampling, recipe.model, self.device, lora=lora)
        beta = recipe.grpo.beta > 0
        if name == "evaluation":
            samples = recipe.evaluation.samples
            test = None if self.sets is None else self.sets.test
            most = slots if test is None else len(test) * samples
            config = recipe.sft if recipe.skip_grpo else recipe.grpo
            completion = lengths.evaluation_completion
        else:
            samples, config = recipe.grpo.group_size, recipe.grpo
            most = recipe.grpo.prompts_per_step * samples
            completion = lengths.completion
        slots = min(slots, most)
        prompts = -(-slots // samples)
        return self.model.sampling(
            name,
            slots=slots,
            prompts=prompts,
            # Slots that are refilled one by one end up with a prompt each.
            held=prompts if slots == most else min(slots, -(-most // samples)),
            prompt=lengths.grpo_prompt,
            completion=completion,
            copy=copy,
            optimizer=state_bytes(config.optimizer, self.policy),
            reference=beta and not recipe.skip_grpo,
        )

    def _card(self, gib: int, curves: _Curves, memory: tuple[Memory, ...]) -> CardPlan:
        room = int((gib - RESERVE) * GIB)
        slots = [_largest(curve, room) for curve in curves.slots]
        known = [number for number in slots if number is not None]
        return CardPlan(
            gib=gib,
            fits=all(part.peak <= room for part in memory),
            tokens_per_micro_batch={n: _largest(c, room) for n, c in curves.tokens.items()},
            max_slots=min(known) if known and len(known) == len(slots) else None,
        )

    def _curves(self, memory: tuple[Memory, ...]) -> _Curves:
        """Peaks at one row, at the recipe's setting, and where more changes nothing."""
        tokens = {}
        for name, update in self.updates.items():
            one, whole = (
                max(dataclasses.replace(rows, count=count).tokens for rows in update.rows)
                for count in (1, update.most)
            )
            points = sorted({one, min(update.config.tokens_per_micro_batch, whole), whole})
            tokens[name] = [(b, self._at(name, b).peak) for b in points if one <= b]
        slots = sorted({1, self.recipe.sampling.max_slots, 4 * self.recipe.sampling.max_slots})
        names = [part.name for part in memory if part.cache]
        return _Curves(tokens, [[(n, self._sampling(m, n).peak) for n in slots] for m in names])

    def _phases(self) -> list[PhasePlan]:
        recipe, lengths, found = self.recipe, self.lengths, []
        if not recipe.skip_sft:
            sft = None if self.sets is None else self.sets.sft or self.sets.train
            tokens = recipe.sft.batch_size * lengths.sft_mean
            steps = _steps(recipe.sft, None if sft is None else len(sft), recipe.sft.batch_size)
            found.append(self._phase("sft", steps, tokens))
        if not recipe.skip_grpo:
            train = None if self.sets is None else self.sets.train
            grpo = recipe.grpo
            prompts, rows = grpo.prompts_per_step, grpo.prompts_per_step * grpo.group_size
            tokens = prompts * lengths.grpo_mean_prompt + rows * lengths.completion
            steps = _steps(grpo, None if train is None else len(train), prompts)
            found.append(self._phase("grpo", steps, tokens))
        return found

    def _phase(self, name: str, steps: int | None, tokens: int) -> PhasePlan:
        seconds = self.speed.seconds_per_step.get(name)
        if seconds is None and self.speed.tokens_per_second is not None:
            seconds = tokens / self.speed.tokens_per_second
        known = steps is not None and seconds is not None
        total = steps * seconds if known else None  # type: ignore[operator]  # both are known
        return PhasePlan(name=name, steps=steps, tokens_per_step=tokens, seconds=total)


@dataclass(frozen=True, slots=True)
class _Update:
    """What the updates of a phase are made of."""

    config: SFTConfig | GRPOConfig
    rows: tuple[Rows, ...]
    most: int
    """Rows of one optimizer step."""
    reference: bool


@dataclass(frozen=True, slots=True)
class _Curves:
    """(setting, peak) at a few settings."""

    tokens: dict[str, list[tuple[int, int]]]
    slots: list[list[tuple[int, int]]]


def _problem_sets(recipe: Recipe) -> ProblemSets | None:
    try:
        return load_problem_sets(recipe)
    except GrouperError:
        return None  # not on this machine, or not in order: a dry run tells


def _steps(config: PhaseConfig, size: int | None, per_step: int) -> int | None:
    if size is None:
        return config.steps
    return total_steps(config, size=size, per_step=per_step)


def _largest(curve: Sequence[tuple[int, int]], room: int) -> int | None:
    """The largest number whose peak fits, between points (number, peak); None: not the least.

    Peaks grow in straight lines: every row takes the same.

    >>> [_largest([(1, 10), (11, 110)], room) for room in (5, 10, 65, 200)]
    [None, 1, 6, 11]
    """
    found = None
    for (x0, y0), (x1, y1) in zip(curve, [*curve[1:], curve[-1]], strict=True):
        if y0 > room:
            break
        share = 1.0 if y1 <= room else (room - y0) / (y1 - y0)
        found = int(x0 + share * (x1 - x0))
    return found
