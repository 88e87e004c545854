"""The plan of a run: memory of every part, what fits on which card, steps, tokens and time."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from grouper.advice.checks import Assumed, find
from grouper.advice.memory import GIB, Memory, ModelMemory
from grouper.algorithms.rows import Rows
from grouper.config.schema import Recipe
from grouper.errors import GrouperError
from grouper.models.loading import context_length, shape_of, weightless_policy
from grouper.models.new_model import make_new_model, new_model_config
from grouper.prompts import make_format
from grouper.sampling.kv_cache import CacheSize, slots_that_fit
from grouper.sampling.weights import copy_dtype, describe_dtypes
from grouper.training.curriculum import total_steps
from grouper.training.optimizers import state_bytes
from grouper.training.prepare import Prepared, prepare
from grouper.training.problem_sets import ProblemSets, load_problem_sets
from grouper.training.rehearsal import worst_slices

# GiB of common cards.
CARDS = (24, 40, 80, 141)

# GiB of a card that nothing can be put into: the context, kernels, and fragmentation.
RESERVE = 1.25

# (setting, peak) at a few settings.
Curve = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """How long a phase is."""

    name: str
    steps: int | None
    """None where the data are not on this machine."""
    tokens_per_step: int
    """Trained or sampled, prompts included; of GRPO at most."""
    seconds: float | None
    tokens: int | None
    """Of all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """What fits on one card."""

    gib: int
    fits: bool
    tokens_per_micro_batch: dict[str, int | None]
    """Phase -> the largest that fits; None: not even one row."""
    max_slots: int | None
    """As many as a run takes there at most; None: not even one."""


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
    peak: int
    """Bytes, at the worst moment of the whole run."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes, tokens and seconds."""
        memory = [{**asdict(part), "peak": part.peak} for part in self.memory]
        return {**asdict(self), "memory": memory}


def plan_run(
    recipe: Recipe,
    *,
    device: str | None = None,
    tokens_per_second: float | None = None,
    seconds_per_step: Mapping[str, float] | None = None,
) -> RunPlan:
    """Plan a run without loading weights and without a network.

    Args:
        recipe: the run.
        device: what to plan for; left out: as the recipe says.
        tokens_per_second: measured speed, for the times of phases that have none below.
        seconds_per_step: phase -> seconds of one of its steps in an earlier run.

    Raises:
        ModelError: the configuration of the model is not on this machine.
    """
    if device is None:
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = auto if recipe.device == "auto" else recipe.device
    planner = _Planner(recipe, device)
    model, own = planner.model, recipe.sampling.max_slots
    budgets = {name: getattr(recipe, name).tokens_per_micro_batch for name in planner.slices}
    updates = [planner.update(name, budget) for name, budget in budgets.items()]
    sampling = [planner.sampling(name, own) for name in planner.sampled]
    memory = [*updates, *sampling]
    if device == "cuda" and planner.policy.native and not recipe.skip_grpo:
        # There the sampler keeps its cache from step to step; where an update runs out of memory,
        # it is given back.
        memory[len(updates) - 1] = replace(updates[-1], cache=sampling[0].cache)
    tokens = {name: planner.token_curve(name, budget) for name, budget in budgets.items()}
    cards = []
    for gib in CARDS:
        room = int((gib - RESERVE) * GIB)
        slots = [planner.slots(name, 4 * own, room) for name in planner.sampled]
        card = CardPlan(
            gib=gib,
            # While sampling a run takes fewer slots where memory is short.
            fits=all(part.peak <= room for part in updates) and all(slots),
            tokens_per_micro_batch={n: _largest(curve, room) for n, curve in tokens.items()},
            max_slots=min((n or 0 for n in slots), default=0) or None,
        )
        cards.append(card)
    assumed = Assumed(measured=planner.prepared is not None, native=planner.policy.native)
    # What `auto` means there; elsewhere all is in model.dtype.
    dtypes = [describe_dtypes(recipe.sampling, recipe.model)] if device == "cuda" else []
    return RunPlan(
        device=device,
        parameters=model.parameters,
        trainable=model.trainable,
        memory=tuple(memory),
        cards=tuple(cards),
        phases=tuple(
            planner.phase(name, tokens_per_second, (seconds_per_step or {}).get(name))
            for name in planner.slices
        ),
        notes=(*dtypes, *map(str, find(assumed))),
        peak=max(part.peak for part in memory),
    )


class _Planner:
    """Everything that is known of one run: its problems, the lengths of its rows, its model."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        self.recipe, self.device = recipe, device
        self.sets = ProblemSets()
        self.prepared: Prepared | None = None
        path, new = recipe.model.path, recipe.model.new
        # First of all: this refuses a model that is not here.
        shape = None if path is None else shape_of(path, recipe.model.revision, cached=True)
        with (
            tempfile.TemporaryDirectory(prefix="grouper-plan-") as folder,
            # Not on this machine, or not in order: a dry run says which.
            contextlib.suppress(GrouperError),
        ):
            self.sets = load_problem_sets(recipe)
            self.prepared = self._prepare(path or folder)
        if new is not None:
            fitted = new.vocab_size if self.prepared is None else len(self.prepared.tokenizer)
            shape = new_model_config(new, vocabulary=fitted)
        assert shape is not None, "a recipe has a path or a new model"
        self.policy = weightless_policy(recipe.model, shape, device)
        self.copy = copy_dtype(recipe.sampling, recipe.model, device)
        self.model = ModelMemory(recipe.model, self.policy, device)
        self.prompts, self.demonstrations, self.completion = self._lengths()
        self.slices: dict[str, list[tuple[Rows, int]]] = {}
        """Phase -> the kinds of rows that may take the most memory, and how many a step has."""
        if not recipe.skip_sft:
            longest = (max(lengths) for lengths in zip(*self.demonstrations, strict=True))
            self.slices["sft"] = worst_slices(recipe.sft, *longest)
        if not recipe.skip_grpo:
            self.slices["grpo"] = worst_slices(recipe.grpo, max(self.prompts), self.completion)
        measured = recipe.evaluation.base or recipe.data.test or recipe.data.has_validation
        self.sampled = [] if recipe.skip_grpo else ["grpo sample"]
        if measured:
            self.sampled.append("evaluation")

    def _prepare(self, path: str) -> Prepared:
        """The preparation of the run; a new model's folder gets everything but weights."""
        recipe = self.recipe
        if recipe.model.new is not None:
            fmt, problems = make_format(recipe.prompt), self.sets.for_fitting
            with torch.device("meta"):
                model, tokenizer = make_new_model(recipe.model.new, problems, fmt, seed=recipe.seed)
            for part in (model.config, model.generation_config, tokenizer):
                part.save_pretrained(path)
        # What is planned may be meant for another machine.
        elsewhere: dict[str, Any] = {"device": "cpu", "threads": None}
        elsewhere["grading"] = {"symbolic": False}
        # A dry run lists what is left out, a plan only counts.
        return prepare(recipe.override(**elsewhere), self.sets, model=path, quiet=True)

    def _lengths(self) -> tuple[list[int], list[tuple[int, int]], int]:
        """Tokens of prompts, of demonstrations (prompt and completion), and of a completion.

        Measured where data and tokenizer are on this machine, else as long as the recipe allows.
        """
        known, recipe = self.prepared, self.recipe
        if known is not None:
            items = (*known.train, *known.validation, *known.test)
            solved = [(len(d.prompt.token_ids), len(d.token_ids)) for d in known.demonstrations]
            return [len(prompt.token_ids) for _, prompt in items], solved, known.max_new_tokens
        new, total = recipe.sampling.max_new_tokens, recipe.sampling.max_total_tokens
        limit, context = recipe.prompt.max_prompt_tokens, context_length(self.policy.model.config)
        if total is not None:
            # Prompts may be as short as one token, or as long as allowed.
            new, limit = total - 1, min(limit, total - 1)
        elif context is not None:
            limit = max(1, min(limit, context - new))
        if recipe.sft.max_tokens is None:
            return [limit], [(limit, new)], new
        # The longest demonstration, all but the shortest prompt of it trained.
        return [limit], [(1, max(1, min(limit + new, recipe.sft.max_tokens) - 1))], new

    def phase(self, name: str, speed: float | None, seconds: float | None) -> PhasePlan:
        """A phase at `speed` tokens per second, or `seconds` per step, where one is known."""
        config, grpo = getattr(self.recipe, name), self.recipe.grpo
        if name == "sft":
            part, per_step = self.sets.sft, self.recipe.sft.batch_size
            tokens = per_step * _mean([sum(lengths) for lengths in self.demonstrations])
        else:
            part, per_step = self.sets.train, grpo.prompts_per_step
            tokens = per_step * (_mean(self.prompts) + grpo.group_size * self.completion)
        steps = config.steps
        if part is not None:
            steps = total_steps(config, size=len(part), per_step=per_step)
        if seconds is None and speed is not None:
            seconds = tokens / speed
        return PhasePlan(
            name=name,
            steps=steps,
            tokens_per_step=tokens,
            seconds=None if steps is None or seconds is None else steps * seconds,
            tokens=None if steps is None else steps * tokens,
        )

    def update(self, name: str, budget: int) -> Memory:
        """The update of a phase at `tokens_per_micro_batch`, with the worst kind of rows."""
        options = []
        for kind, most in self.slices[name]:
            rows = kind.filling(budget, most=most, shared=self.policy.native)
            part = self.model.update(
                f"{name} update",
                rows,
                getattr(self.recipe, name).optimizer,
                accumulated=rows.count < most,
                reference=name == "grpo" and self.recipe.grpo.beta > 0,
                copy=self.copy if self.sampled else None,
            )
            options.append(part)
        return max(options, key=lambda part: part.peak)

    def token_curve(self, name: str, budget: int) -> Curve:
        """Peaks at one row, at the recipe's setting, and where more changes nothing."""
        slices = self.slices[name]
        one = max(replace(kind, count=1).tokens for kind, _ in slices)
        whole = max(replace(kind, count=most).tokens for kind, most in slices)
        points = sorted({one, min(budget, whole), whole})
        return [(n, self.update(name, n).peak) for n in points if one <= n]

    def sampling(self, name: str, slots: int) -> Memory:
        """The part with at most this many slots."""
        recipe, (samples, size) = self.recipe, self._sizes(name, slots)
        optimizer = recipe.sft.optimizer if recipe.skip_grpo else recipe.grpo.optimizer
        return self.model.sampling(
            name,
            slots=size.slots,
            prompts=-(-size.slots // samples),
            held=size.prompts,
            prompt=size.prompt,
            completion=size.completion,
            copy=self.copy,
            optimizer=state_bytes(optimizer, self.policy),
            reference=recipe.grpo.beta > 0 and not recipe.skip_grpo,
        )

    def slots(self, name: str, most: int, room: int) -> int | None:
        """How many of `most` slots a run takes with `room` bytes for all; None: not even one."""
        if self.sampling(name, 1).peak > room:
            return None
        part, (_, size) = self.sampling(name, most), self._sizes(name, most)
        free = room - (part.peak - part.activations - part.cache)
        fitting = slots_that_fit(self.model.sampled(self.copy)[0], size, free)
        return most if fitting == size.slots else fitting

    def _sizes(self, name: str, slots: int) -> tuple[int, CacheSize]:
        """Completions of a prompt, and what at most so many slots hold."""
        recipe, completion = self.recipe, self.completion
        samples = recipe.grpo.group_size
        most = recipe.grpo.prompts_per_step * samples
        if name == "evaluation":
            samples, test = recipe.evaluation.samples, self.sets.test
            completion = recipe.evaluation.max_new_tokens or completion
            most = slots if test is None else len(test) * samples
        slots = min(slots, most)
        # Slots that are refilled bit by bit end up with a prompt each.
        prompts = min(slots, -(-most // samples))
        return samples, CacheSize(slots, prompts, max(self.prompts), completion)


def _mean(lengths: Sequence[int]) -> int:
    """Rounded up."""
    return -(-sum(lengths) // len(lengths))


def _largest(curve: Curve, room: int) -> int | None:
    """The largest setting at which the peak fits; None: not even the least.

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
