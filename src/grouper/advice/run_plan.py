"""The plan of a run: memory of every part, what fits on which card, steps, tokens and time.

No weight is loaded. Weights, gradients, optimizer states and the cache are counted; activations are
traced (`tracing`): the model's own code runs on tensors without content. The formulas are in
docs/memory.md.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grouper.advice.checks import found
from grouper.advice.live_checks import worst_slices
from grouper.advice.tracing import Tracer
from grouper.algorithms.batching import Rows
from grouper.config.schema import ModelConfig, NewModelConfig, OptimizerConfig, Recipe
from grouper.errors import GrouperError
from grouper.kernels.cpu.graph import packable
from grouper.kernels.cpu.library import library
from grouper.models.device import DTYPES
from grouper.models.loading import context_length, shape_of, weightless_policy
from grouper.models.new_model import make_new_model, new_model_config
from grouper.models.policy import Policy
from grouper.models.token_scores import chunk_rows
from grouper.prompts import make_format
from grouper.sampling.engine import CpuGraphs, multiplied
from grouper.sampling.kv_cache import (
    CacheSize,
    cache_bytes,
    drawing_bytes,
    prompts_at_once,
    slots_that_fit,
)
from grouper.sampling.weights import (
    SamplingWeights,
    copy_dtype,
    describe_dtypes,
    is_shared,
)
from grouper.training.curriculum import total_steps
from grouper.training.optimizers import state_bytes
from grouper.training.prepare import Prepared, named_base
from grouper.training.problem_sets import ProblemSets, load_problem_sets

GIB = 2**30

# GiB of common cards.
CARDS = (24, 40, 80, 141)

# GiB of a card that nothing can be put into: the context, kernels, and fragmentation.
RESERVE = 1.25

# GiB that vLLM takes beside weights and cache: activations and its graphs. Not measured on a GPU.
VLLM_ITSELF = 1.5

# Bytes of an NF4 weight: half a byte, a byte of scale for 64 of them, a float for 256 scales.
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)


# --- what a model takes in each part of a run -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one part of a run at its worst moment; they add up to `peak`."""

    name: str
    weights: int
    reference: int = 0
    """The frozen trainable weights of a KL term."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """All that comes and goes: what the backward needs, temporary tensors, logits."""
    logits_chunk: int = 0
    """The part of `activations` that a chunk of logits is, at most; not added again."""
    cache: int = 0
    """Keys and values of the sampler."""
    sampling_copy: int = 0

    @property
    def peak(self) -> int:
        parts = (self.weights, self.reference, self.gradients, self.optimizer)
        return sum(parts) + self.activations + self.cache + self.sampling_copy


class ModelMemory:
    """What one model takes in each part of a run.

    Args:
        config: how it would be loaded.
        policy: on the meta device; its tensors are replaced.
        device: `cpu`, `cuda` or `mps`: which kernels and optimizer loops are counted.
        copy: dtype of the sampler's own weights; None samples those of training.
    """

    def __init__(
        self, config: ModelConfig, policy: Policy, device: str, copy: torch.dtype | None = None
    ) -> None:
        self._config, self._policy, self._device = config, policy, device
        self._shape: Any = policy.model.config.get_text_config()
        self.sampler = policy
        """The policy that samples."""
        self._copied = 0
        if copy is not None:
            # Before a tracer replaces the tensors.
            self.sampler = SamplingWeights(policy, copy).current()
            shared = {n for n, p in policy.named_parameters() if is_shared(p, copy)}
            own = (p for n, p in self.sampler.named_parameters() if n not in shared)
            self._copied = _bytes(own)
        tracer = Tracer(policy, device)
        sampling = tracer if copy is None else Tracer(self.sampler, device)
        # A plan asks for the same rows several times, and a trace takes seconds.
        self._update = functools.cache(tracer.update)
        self._prefill = functools.cache(sampling.forward)
        trained = policy.trainable().values()
        self.parameters = sum(p.numel() for p in policy.parameters())
        self.trainable = sum(p.numel() for p in trained)
        self._gradients = _bytes(trained)
        self.weights = _bytes(policy.parameters()) + _bytes(policy.buffers())
        self._largest = max((_bytes([p]) for p in trained), default=0)
        self._dequantised = 0
        if config.quantization is not None:
            # Linear layers, but for the head.
            head = policy.model.get_output_embeddings()
            linear = [
                module.weight
                for name, module in policy.model.named_modules()
                if isinstance(module, nn.Linear) and module is not head and ".lora_" not in name
            ]
            linear = [p for p in linear if not p.requires_grad]
            self.weights += sum(round(p.numel() * FOUR_BITS) for p in linear) - _bytes(linear)
            self._dequantised = max(_bytes([p]) for p in linear)

    def update(
        self,
        name: str,
        rows: Rows,
        optimizer: OptimizerConfig,
        *,
        accumulated: bool,
        reference: bool = False,
    ) -> Memory:
        """A step: the worse of a forward and backward of its largest slice and the optimizer.

        Args:
            name: of the part.
            rows: the largest slice.
            optimizer: its states are there from the second step on.
            accumulated: whether earlier slices of the step have left their gradient.
            reference: whether a frozen copy of the trainable weights is held.
        """
        kept, peak = self._update(rows, accumulated=accumulated)
        gradients, vocabulary = self._gradients, self._policy.vocabulary
        peak += gradients if accumulated else 0
        if self._config.activation_offload and self._device != "cpu":
            # One layer at a time comes back from the host.
            layers = int(self._shape.num_hidden_layers)
            peak -= kept * (layers - 1) // layers
        # Fused AdamW needs nothing for itself, others a tensor or two.
        stepping = gradients + (0 if optimizer.name == "adamw" else 2 * self._largest)
        targets = min(rows.count * rows.completion, chunk_rows(vocabulary, self._device))
        return Memory(
            name=name,
            weights=self.weights,
            reference=gradients if reference else 0,
            gradients=gradients,
            optimizer=state_bytes(optimizer, self._policy),
            activations=max(peak, stepping) + self._dequantised - gradients,
            logits_chunk=targets * vocabulary * 4,
            sampling_copy=self._copied,
        )

    def sampling(
        self,
        name: str,
        size: CacheSize,
        *,
        together: int,
        optimizer: int = 0,
        reference: bool = False,
    ) -> Memory:
        """Drawing completions, at the moment all slots are filled.

        Args:
            name: of the part.
            size: of the cache.
            together: different prompts that begin together.
            optimizer: bytes of optimizer states that lie there meanwhile.
            reference: as in `update`.
        """
        run = min(together, prompts_at_once(size.prompt))
        prefill = self._prefill(Rows(prompt=size.prompt, completion=1, count=run))
        vocabulary, copied = self._policy.vocabulary, self._copied
        if self._device == "cpu" and library() is not None and size.completion >= CpuGraphs.fewest:
            # Recorded steps hold the weights once more, in another order.
            copied += _bytes(packable(multiplied(self.sampler.model)))
        return Memory(
            name=name,
            weights=self.weights,
            reference=self._gradients if reference else 0,
            optimizer=optimizer,
            activations=max(prefill, drawing_bytes(size.slots, vocabulary)) + self._dequantised,
            logits_chunk=size.slots * vocabulary * 4,
            cache=cache_bytes(self._shape, self.sampler.products_dtype, size),
            sampling_copy=copied,
        )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# --- a whole run ----------------------------------------------------------------------------------


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
    with_cards: bool = True,
) -> RunPlan:
    """Plan a run without loading weights and without a network.

    Args:
        recipe: the run.
        device: what to plan for; left out: as the recipe says.
        tokens_per_second: measured speed, for the times of the phases.
        with_cards: also find what fits on each card, which takes twice as long as everything else.

    Raises:
        ModelError: the configuration of the model is not on this machine.
    """
    if device is None:
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = auto if recipe.device == "auto" else recipe.device
    planner = _Planner(recipe, device)
    own = recipe.sampling.max_slots
    updates = {name: planner.update(name) for name in planner.slices}
    sampling = [planner.sampling(name, own) for name in planner.sampled]
    memory = [*updates.values(), *sampling]
    if device == "cuda" and planner.policy.native and not recipe.skip_grpo:
        # There the sampler keeps its cache from step to step; where an update runs out of memory,
        # it is given back.
        memory[len(updates) - 1] = replace(updates["grpo"], cache=sampling[0].cache)
    curves = {name: planner.token_curve(name) for name in planner.slices if with_cards}
    cards = []
    for gib in CARDS if with_cards else ():
        room = int((gib - RESERVE) * GIB)
        slots = [planner.slots(name, 4 * own, room) for name in planner.sampled]
        # While sampling a run takes fewer slots where memory is short.
        fits = all(part.peak <= room for part in updates.values()) and all(slots)
        tokens = {name: _largest(curve, room) for name, curve in curves.items()}
        most = min(slots, default=0) or None
        cards.append(CardPlan(gib=gib, fits=fits, tokens_per_micro_batch=tokens, max_slots=most))
    # What `auto` means there; elsewhere all is in model.dtype.
    notes = [describe_dtypes(recipe.sampling, recipe.model)] if device == "cuda" else []
    notes += [*planner.share_of_vllm(), *planner.notes]
    notes += [] if planner.policy.native else [str(found("padded-rows"))]
    phases = [planner.phase(name, tokens_per_second) for name in planner.slices]
    return RunPlan(
        device=device,
        parameters=planner.model.parameters,
        trainable=planner.model.trainable,
        memory=tuple(memory),
        cards=tuple(cards),
        phases=tuple(phases),
        notes=tuple(notes),
        peak=max(part.peak for part in memory),
    )


class _Planner:
    """Everything that is known of one run: its problems, the lengths of its rows, its model."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        self.recipe = recipe
        self.sets = ProblemSets()
        self.prepared: Prepared | None = None
        path, new = named_base(recipe), recipe.model.new
        revision = recipe.model.revision if path == recipe.model.path else None
        # First of all: this refuses a model that is not here.
        shape = None if path is None else shape_of(path, revision, cached=True)
        self.notes: list[str] = []
        # What is planned may be meant for another machine.
        planned = recipe.override("device=cpu", "threads=null", "grading.symbolic=false")
        with tempfile.TemporaryDirectory(prefix="grouper-plan-") as folder:
            try:
                self.sets = load_problem_sets(recipe)
                if path is None and new is not None:
                    self._fit(new, folder)
                # A dry run lists what is left out, a plan only counts.
                self.prepared = Prepared(planned, self.sets, model=path or folder, quiet=True)
            except GrouperError as error:  # not on this machine, or not in order
                why = error.paragraph().removesuffix(".")
                self.notes.append(str(found("unmeasured", why=why)))
        if path is None and new is not None:
            fitted = new.vocab_size if self.prepared is None else len(self.prepared.tokenizer)
            shape = new_model_config(new, vocabulary=fitted)
        assert shape is not None, "a recipe has a path or a new model"
        self.sampled = [] if recipe.skip_grpo else ["grpo sample"]
        data = recipe.data
        measured = data.test or data.test_share or data.validation or data.validation_share
        self.sampled += ["evaluation"] if measured else []
        copy = copy_dtype(recipe.sampling, recipe.model, device) if self.sampled else None
        self.policy = weightless_policy(recipe.model, shape, device)
        self.model = ModelMemory(recipe.model, self.policy, device, copy)
        self.prompts, self.demonstrations, self.completion = self._lengths()
        self.slices: dict[str, list[tuple[Rows, int]]] = {}
        """Phase -> the kinds of rows that may take the most memory, and how many a step has."""
        if not recipe.skip_sft:
            longest = (max(lengths) for lengths in zip(*self.demonstrations, strict=True))
            self.slices["sft"] = worst_slices(recipe.sft, *longest)
        if not recipe.skip_grpo:
            self.slices["grpo"] = worst_slices(recipe.grpo, max(self.prompts), self.completion)

    def _fit(self, new: NewModelConfig, folder: str) -> None:
        """Everything of a new model but its weights, in a folder."""
        fmt, problems = make_format(self.recipe.prompt), self.sets.for_fitting
        with torch.device("meta"):
            model, tokenizer = make_new_model(new, problems, fmt, seed=self.recipe.seed)
        for part in (model.config, model.generation_config, tokenizer):
            part.save_pretrained(folder)

    def _lengths(self) -> tuple[list[int], list[tuple[int, int]], int]:
        """Tokens of GRPO's prompts, of demonstrations (prompt and completion), of a completion.

        Measured where data and tokenizer are on this machine, else as long as the recipe allows.
        """
        known, recipe = self.prepared, self.recipe
        if known is not None:
            solved = [(len(d.prompt.token_ids), len(d.token_ids)) for d in known.demonstrations]
            tokens = [len(prompt.token_ids) for _, prompt in known.train]
            return tokens, solved, known.max_new_tokens
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

    def phase(self, name: str, speed: float | None) -> PhasePlan:
        """A phase at `speed` tokens per second, where it is known."""
        config, grpo = getattr(self.recipe, name), self.recipe.grpo
        if name == "sft":
            part, per_step = "sft", self.recipe.sft.batch_size
            each = _mean([sum(lengths) for lengths in self.demonstrations])
        else:
            part, per_step = "train", grpo.prompts_per_step
            each = _mean(self.prompts) + grpo.group_size * self.completion
        steps, tokens = config.steps, per_step * each
        if self.prepared is not None:
            steps = total_steps(config, size=self.prepared.sizes[part], per_step=per_step)
        return PhasePlan(
            name=name,
            steps=steps,
            tokens_per_step=tokens,
            seconds=None if steps is None or speed is None else steps * tokens / speed,
            tokens=None if steps is None else steps * tokens,
        )

    def update(self, name: str, budget: int | None = None) -> Memory:
        """The update of a phase at `tokens_per_micro_batch`, with the worst kind of rows."""
        config = getattr(self.recipe, name)
        options = []
        for kind, most in self.slices[name]:
            rows = kind.filling(
                budget or config.tokens_per_micro_batch, most=most, shared=self.policy.native
            )
            part = self.model.update(
                f"{name} update",
                rows,
                config.optimizer,
                accumulated=rows.count < most,
                reference=name == "grpo" and self.recipe.grpo.beta > 0,
            )
            options.append(part)
        return max(options, key=lambda part: part.peak)

    def token_curve(self, name: str) -> list[tuple[int, int]]:
        """(setting, peak) at one row, at the recipe's setting, and where more changes nothing."""
        slices, own = self.slices[name], getattr(self.recipe, name).tokens_per_micro_batch
        one = max(replace(kind, count=1).tokens for kind, _ in slices)
        whole = max(replace(kind, count=most).tokens for kind, most in slices)
        points = sorted({one, min(own, whole), whole})
        return [(n, self.update(name, n).peak) for n in points if one <= n]

    def sampling(self, name: str, slots: int) -> Memory:
        """The part with at most this many slots."""
        recipe, (samples, size) = self.recipe, self._sizes(name, slots)
        optimizer = recipe.sft.optimizer if recipe.skip_grpo else recipe.grpo.optimizer
        return self.model.sampling(
            name,
            size,
            together=-(-size.slots // samples),
            optimizer=state_bytes(optimizer, self.policy),
            reference=recipe.grpo.beta > 0 and not recipe.skip_grpo,
        )

    def slots(self, name: str, most: int, room: int) -> int:
        """How many of `most` slots a run takes with `room` bytes for all; 0: not even one."""
        if self.sampling(name, 1).peak > room:
            return 0
        part, (_, size) = self.sampling(name, most), self._sizes(name, most)
        free = room - (part.peak - part.activations - part.cache)
        fitting = slots_that_fit(self.model.sampler, size, free)
        return most if fitting == size.slots else fitting

    def share_of_vllm(self) -> list[str]:
        """What to set `gpu_memory_utilization` to, by card; nothing where vLLM does not sample."""
        sampling = self.recipe.sampling
        if sampling.engine != "vllm" or not self.sampled:
            return []
        _, size = self._sizes(self.sampled[0], sampling.max_slots)
        size = size._replace(prompts=size.slots)  # only whole blocks of a prompt are shared
        dtype = DTYPES.get(sampling.dtype, self.policy.products_dtype)
        cache = cache_bytes(self.policy.model.config.get_text_config(), dtype, size)
        needed = self.model.parameters * dtype.itemsize + cache + VLLM_ITSELF * GIB
        shares = {gib: math.ceil(20 * needed / (gib * GIB)) / 20 for gib in CARDS}
        cards = [f"{share:.2f} on {gib} GB" for gib, share in shares.items() if share < 1]
        return [
            str(found("vllm-share", gib=f"{needed / GIB:.1f}", shares=", ".join(cards) or "none"))
        ]

    def _sizes(self, name: str, slots: int) -> tuple[int, CacheSize]:
        """Completions of a prompt, and what at most so many slots hold."""
        recipe, completion, prompts = self.recipe, self.completion, self.prompts
        samples = recipe.grpo.group_size
        most = recipe.grpo.prompts_per_step * samples
        if name == "evaluation":
            samples, test = recipe.evaluation.samples, self.sets.test
            completion = recipe.evaluation.max_new_tokens or completion
            most = slots if test is None else len(test) * samples
            if (known := self.prepared) is not None:
                prompts = [len(p.token_ids) for _, p in (*known.validation, *known.test)]
        slots = min(slots, most)
        # Slots that are refilled bit by bit end up with a prompt each.
        return samples, CacheSize(slots, min(slots, -(-most // samples)), max(prompts), completion)


def _mean(lengths: list[int]) -> int:
    """Rounded up."""
    return -(-sum(lengths) // len(lengths))


def _largest(curve: list[tuple[int, int]], room: int) -> int | None:
    """The largest setting at which the peak fits; None: not even the least.

    Peaks grow in straight lines: every row takes the same.

    >>> [_largest([(1, 10), (11, 110)], room) for room in (5, 10, 65, 200)]
    [None, 1, 6, 11]
    """
    largest = None
    for (x0, y0), (x1, y1) in zip(curve, [*curve[1:], curve[-1]], strict=True):
        if y0 > room:
            break
        share = 1.0 if y1 <= room else (room - y0) / (y1 - y0)
        largest = int(x0 + share * (x1 - x0))
    return largest
