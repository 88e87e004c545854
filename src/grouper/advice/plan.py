"""The plan of a run: memory of every part, the GPUs that it fits on, steps, tokens and time.

No weight is loaded. Weights, gradients, optimizer states and the cache are counted; activations are
traced (`tracing`): the model's code runs on tensors without content. Of several processes, the
memory is that of each one. The formulas are in docs/memory.md.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from grouper.advice.checks import found
from grouper.advice.live_checks import worst_slices
from grouper.advice.tracing import Tracer, pretended_processes
from grouper.algorithms.batching import Rows
from grouper.config.schema import (
    ModelConfig,
    NewModelConfig,
    OptimizerConfig,
    Recipe,
    TeacherConfig,
)
from grouper.errors import ConfigError, GrouperError, plural
from grouper.kernels.cpu.graph import packable
from grouper.kernels.cpu.library import library
from grouper.models.device import DTYPES
from grouper.models.divergences import HEAD_TENSORS, KL_DIVERGENCES, TENSORS
from grouper.models.loading import computed_on, context_length, shape_of, weightless_policy
from grouper.models.merging import own_shard
from grouper.models.new_model import make_new_model, new_model_config
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.models.token_scores import chunk_rows
from grouper.prompts import make_format
from grouper.sampling.engine import CpuGraphs, multiplied
from grouper.sampling.kv_cache import (
    CacheSize,
    cache_bytes,
    drawing_bytes,
    prompts_at_once,
    slots_for,
    slots_that_fit,
)
from grouper.sampling.step_ahead import require_step_ahead
from grouper.sampling.weights import (
    SamplingWeights,
    copy_dtype,
    describe_dtypes,
)
from grouper.training.curriculum import total_steps
from grouper.training.optimizers import state_bytes
from grouper.training.prepare import Prepared, named_base
from grouper.training.problem_sets import ProblemSets, load_problem_sets
from grouper.training.run import require_shareable
from grouper.training.teachers import paths_of, teacher_model, teachers_of_phases

GIB = 2**30

# Memory of common GPUs in GiB.
CARDS = (24, 40, 80, 141)

# GiB of a GPU that are not available: the context, kernels, and fragmentation.
RESERVE = 1.25

# GiB that vLLM takes beside weights and cache: activations and its graphs. Not measured on a GPU.
VLLM_ITSELF = 1.5

# Bytes of an NF4 weight: half a byte, a byte of scale for 64 of them, a float for 256 scales.
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)


# --- memory of a model in each part of a run ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak memory of one part of a run in bytes; the entries add up to `peak`."""

    name: str
    weights: int
    reference: int = 0
    """The frozen trainable weights of a KL term."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Temporary memory: tensors that the backward needs, intermediate tensors, logits, and weights
    that are gathered from other processes."""
    logits_chunk: int = 0
    """Bytes of `activations` that a chunk of logits takes at most; not added again."""
    cache: int = 0
    """Keys and values of the sampler."""
    sampling_copy: int = 0
    teacher: int = 0
    """Weights of the teachers, where they are on the device of the policy."""

    @property
    def peak(self) -> int:
        training = self.weights + self.reference + self.gradients + self.optimizer
        return training + self.activations + self.cache + self.sampling_copy + self.teacher


class ModelMemory:
    """Computes the memory of one model in each part of a run.

    Args:
        config: how the model would be loaded.
        policy: on the meta device; its tensors are replaced.
        device: `cpu`, `cuda` or `mps`: which kernels and optimizer loops are counted.
        copy: dtype of the sampler's copy of the weights; None: it uses those of training.
        processes: those that split the weights (`pretended_processes`); one if they are not split.
        copied_whole: whether the sampler copies all weights before they are split.
    """

    def __init__(
        self,
        config: ModelConfig,
        policy: Policy,
        device: str,
        copy: torch.dtype | None = None,
        *,
        processes: ProcessGroup | None = None,
        copied_whole: bool = False,
    ) -> None:
        self._config = config
        self._policy = policy
        self._device = device
        self._shape: Any = policy.model.config.get_text_config()
        # Before a tracer replaces the tensors.
        weights = SamplingWeights(policy, copy, copy_now=copied_whole, device=device)
        self.sampler = weights.current()
        """The policy that samples."""
        self._copy_bytes = _bytes(weights.copied())
        trained = list(policy.trainable().values())
        self.parameters = sum(parameter.numel() for parameter in policy.parameters())
        self.trainable = sum(parameter.numel() for parameter in trained)
        self.loading = Memory(
            name="load",
            weights=_bytes(policy.parameters()) + _bytes(policy.buffers()),
            sampling_copy=self._copy_bytes,
        )
        """Memory before the weights are split: a process holds all of them."""
        self._largest = max((_bytes([parameter]) for parameter in trained), default=0)
        tracer = Tracer(policy, device)
        sampling_tracer = tracer if self.sampler is policy else Tracer(self.sampler, device)
        self._gathered = 0
        """Bytes that it takes to gather the largest weight into the sampler's copy."""
        if processes is not None and processes.size > 1:
            tracer.split(processes)
            self._gathered = tracer.gathering()
            if copied_whole:
                # Weights that it shared with the policy are its own now.
                self._copy_bytes = _bytes(self.sampler.parameters())
        # Cached: a plan needs the same rows several times, and a trace takes seconds.
        self._update = functools.cache(tracer.update)
        self._prefill = functools.cache(sampling_tracer.forward)
        self.vocabulary = policy.vocabulary
        self._gradients = _bytes(map(own_shard, policy.trainable().values()))
        self.weights = tracer.weights
        self._dequantized = 0
        if config.quantization is not None:
            quantized = _quantized_weights(policy)
            four_bit_bytes = sum(round(weight.numel() * FOUR_BITS) for weight in quantized)
            self.weights += four_bit_bytes - _bytes(quantized)
            # One layer at a time is dequantized.
            self._dequantized = max(_bytes([weight]) for weight in quantized)

    def update(
        self,
        name: str,
        rows: Rows,
        optimizer: OptimizerConfig,
        *,
        accumulated: bool,
        reference: bool = False,
        teachers: TeachersMemory | None = None,
    ) -> Memory:
        """Compute the memory of a step.

        It is the larger one of a forward and backward of the largest slice, and the optimizer step.

        Args:
            name: of the part.
            rows: the largest slice.
            optimizer: its states exist from the second step on.
            accumulated: whether earlier slices of the step have left their gradient.
            reference: whether there is a frozen copy of the trainable weights.
            teachers: those of the phase, if it has some.
        """
        for_backward, peak = self._update(rows, accumulated=accumulated)
        gradients = self._gradients
        vocabulary = self._policy.vocabulary
        if accumulated:
            peak += gradients
        if self._config.activation_offload and self._device != "cpu":
            # One layer at a time comes back from the host.
            layers = int(self._shape.num_hidden_layers)
            peak -= for_backward * (layers - 1) // layers
        stepping = gradients
        if optimizer.name != "adamw":  # fused AdamW needs no temporary tensors
            stepping += 2 * self._largest
        targets = min(rows.count * rows.completion, chunk_rows(vocabulary, self._device))
        if teachers is not None:
            # A teacher reads before the policy does; distributions are compared after it.
            reading = teachers.reading(rows)
            comparing = for_backward + teachers.comparing(rows, vocabulary, self._device)
            peak = max(peak, gradients + reading, gradients + comparing)
        return Memory(
            name=name,
            weights=self.weights,
            reference=gradients if reference else 0,
            gradients=gradients,
            optimizer=state_bytes(optimizer, self._policy, own=True),
            activations=max(peak, stepping) + self._dequantized - gradients,
            logits_chunk=targets * vocabulary * 4,
            sampling_copy=self._copy_bytes,
            teacher=0 if teachers is None else teachers.weights,
        )

    def reading(self, rows: Rows) -> int:
        """Compute the bytes that a forward without a gradient takes beside the weights."""
        return self._prefill(rows) + self._dequantized

    def sampling(
        self,
        name: str,
        size: CacheSize,
        *,
        together: int,
        optimizer: int = 0,
        reference: bool = False,
    ) -> Memory:
        """Compute the memory of sampling when all slots are filled.

        Args:
            name: of the part.
            size: of the cache.
            together: number of different prompts that begin together.
            optimizer: bytes of optimizer states that are in memory at the same time.
            reference: as in `update`.
        """
        prompts = min(together, prompts_at_once(size.prompt))
        prefill = self._prefill(Rows(prompt=size.prompt, completion=1, count=prompts))
        vocabulary = self._policy.vocabulary
        sampling_copy = self._copy_bytes
        if self._device == "cpu" and library() is not None and size.completion >= CpuGraphs.fewest:
            # Recorded steps have a second copy of the weights, in another order.
            sampling_copy += _bytes(packable(multiplied(self.sampler.model)))
        decode = drawing_bytes(size.slots, vocabulary)
        return Memory(
            name=name,
            weights=self.weights,
            reference=self._gradients if reference else 0,
            optimizer=optimizer,
            activations=max(prefill, decode, self._gathered) + self._dequantized,
            logits_chunk=size.slots * vocabulary * 4,
            cache=cache_bytes(self._shape, self.sampler.products_dtype, size),
            sampling_copy=sampling_copy,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachersMemory:
    """The memory of the teachers of a phase."""

    models: tuple[ModelMemory, ...]
    config: TeacherConfig

    @property
    def weights(self) -> int:
        """Bytes of their weights on the device of the policy."""
        if self.config.device != "same":
            return 0
        return sum(model.weights for model in self.models)

    def reading(self, rows: Rows) -> int:
        """Compute the bytes that the largest forward takes on the device of the policy."""
        if self.config.device != "same":
            return 0
        return max(model.reading(rows) for model in self.models)

    def comparing(self, rows: Rows, vocabulary: int, device: str) -> int:
        """Compute the bytes of the largest chunk of distributions that are compared.

        Nothing of a chunk is kept: it is computed again in the backward.
        """
        if self.config.kl not in KL_DIVERGENCES:
            return 0
        logits = max(vocabulary, *(model.vocabulary for model in self.models))
        tokens = min(
            rows.count * rows.completion, chunk_rows(logits * TENSORS // HEAD_TENSORS, device)
        )
        return TENSORS * tokens * logits * 4


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _quantized_weights(policy: Policy) -> list[Tensor]:
    """Return the weights that quantization stores in 4 bits: frozen linear layers but the head."""
    head = policy.model.get_output_embeddings()
    weights = []
    for name, module in policy.model.named_modules():
        if not isinstance(module, nn.Linear) or module is head or ".lora_" in name:
            continue
        if not module.weight.requires_grad:
            weights.append(module.weight)
    return weights


# --- a whole run ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """Length of a phase."""

    name: str
    steps: int | None
    """None if the data are not on this machine."""
    tokens_per_step: int
    """Tokens trained or sampled, prompts included; of GRPO at most."""
    seconds: float | None
    tokens: int | None
    """Tokens of all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """Settings that fit on a GPU."""

    gib: int
    fits: bool
    tokens_per_micro_batch: dict[str, int | None]
    """Phase -> the largest setting that fits; None: not even one row."""
    max_slots: int | None
    """The most slots that a run takes there; None: not even one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Memory, length and time of a run."""

    device: str
    parameters: int
    trainable: int
    memory: tuple[Memory, ...]
    cards: tuple[CardPlan, ...]
    phases: tuple[PhasePlan, ...]
    notes: tuple[str, ...]
    peak: int
    """Peak memory of the whole run in bytes."""

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values: bytes, tokens and seconds."""
        memory = [{**asdict(entry), "peak": entry.peak} for entry in self.memory]
        return {**asdict(self), "memory": memory}


def plan_run(
    recipe: Recipe,
    *,
    device: str | None = None,
    tokens_per_second: float | None = None,
    with_cards: bool = True,
    processes: int = 1,
) -> RunPlan:
    """Plan a run without loading weights and without a network.

    Args:
        recipe: of the run.
        device: device to plan for; default: that of the recipe.
        tokens_per_second: measured speed, for the times of the phases.
        with_cards: also find what fits on each GPU, which takes twice as long as everything else.
        processes: of the run, one per GPU; the memory is that of each.

    Raises:
        ConfigError: several processes cannot share the run, or have too little to share.
        ModelError: the configuration of the model is not on this machine.
    """
    require_step_ahead(recipe, processes)
    if processes > 1:
        require_shareable(recipe, processes)
        _require_rows(recipe, processes)
    if device is None:
        device = recipe.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
    with pretended_processes(processes) as group:
        planner = _Planner(recipe, device, group)
        return _plan(planner, tokens_per_second, with_cards=with_cards)


def _require_rows(recipe: Recipe, processes: int) -> None:
    """Raise `ConfigError` if a step has fewer rows than there are processes."""
    for phase in recipe.phases:
        config = getattr(recipe, phase)
        # How many a step has does not depend on their length.
        rows = worst_slices(config, 1, 1)[0][1]
        if rows < processes:
            setting = "sft.batch_size"
            if phase == "grpo":
                setting = "grpo.prompts_per_step"
            raise ConfigError(
                f"{processes} processes share the rows of an optimizer step, and a step of {phase} "
                f"has {plural(rows, 'row')}: some processes would never train on one",
                where="--nproc",
                fix=f"Use --nproc {rows} or fewer, or raise {setting}.",
            )


def _plan(planner: _Planner, tokens_per_second: float | None, *, with_cards: bool) -> RunPlan:
    """Put the plan of a run together; the arguments are those of `plan_run`."""
    recipe = planner.recipe
    device = planner.device
    updates = {name: planner.update(name) for name in planner.slices}
    sampling = [planner.sampling(name, recipe.sampling.max_slots) for name in planner.sampled]
    loading = planner.loading()
    memory = [*loading, *updates.values(), *sampling]
    if device == "cuda" and planner.policy.native and not recipe.skip_grpo:
        # On CUDA the sampler keeps its cache from step to step; if an update runs out of memory,
        # the cache is freed.
        update = updates["grpo"]
        memory[memory.index(update)] = replace(update, cache=sampling[0].cache)
    cards = _card_plans(planner, [*loading, *updates.values()]) if with_cards else []
    notes = []
    if device == "cuda":  # other devices compute in model.dtype
        notes.append(describe_dtypes(recipe.sampling, planner.computed))
    notes += planner.share_of_processes()
    notes += planner.share_of_vllm()
    notes += planner.notes
    if not planner.policy.native:
        notes.append(str(found("padded-rows")))
    phases = [planner.phase(name, tokens_per_second) for name in planner.slices]
    return RunPlan(
        device=device,
        parameters=planner.model.parameters,
        trainable=planner.model.trainable,
        memory=tuple(memory),
        cards=tuple(cards),
        phases=tuple(phases),
        notes=tuple(notes),
        peak=max(entry.peak for entry in memory),
    )


def _card_plans(planner: _Planner, trained: Collection[Memory]) -> list[CardPlan]:
    """Find the settings that fit on each GPU of `CARDS`.

    Args:
        planner: of the run.
        trained: memory of the update of each phase, and of loading.
    """
    curves = {name: planner.token_curve(name) for name in planner.slices}
    most_slots = 4 * planner.recipe.sampling.max_slots
    cards = []
    for gib in CARDS:
        room = int((gib - RESERVE) * GIB)
        slots = [planner.slots(name, most_slots, room) for name in planner.sampled]
        # If memory is short, a run samples with fewer slots; it needs at least one.
        fits = all(memory.peak <= room for memory in trained) and all(slots)
        card = CardPlan(
            gib=gib,
            fits=fits,
            tokens_per_micro_batch={name: _largest(curves[name], room) for name in curves},
            max_slots=min(slots, default=0) or None,
        )
        cards.append(card)
    return cards


class _Planner:
    """Computes the parts of a plan from a run's problems, row lengths and model."""

    def __init__(self, recipe: Recipe, device: str, processes: ProcessGroup | None = None) -> None:
        self.recipe = recipe
        self.device = device
        self._processes = processes or ProcessGroup()
        self._is_split = recipe.parallel == "fsdp" and self._processes.size > 1
        self.sets = ProblemSets()
        self.prepared: Prepared | None = None
        self.notes: list[str] = []
        shape = self._prepare(recipe)
        self.computed = computed_on(recipe.model, shape, device)
        """The settings of the model with the dtype of its products on the device."""
        self.sampled: list[str] = []
        """Names of the parts of the run that sample."""
        if not recipe.skip_grpo:
            self.sampled.append("grpo sample")
        data = recipe.data
        if data.test or data.test_share or data.validation or data.validation_share:
            self.sampled.append("evaluation")
        copy = None
        if self.sampled:
            copy = copy_dtype(recipe.sampling, self.computed, device)
        self.policy = weightless_policy(recipe.model, shape, device)
        self.model = ModelMemory(
            recipe.model,
            self.policy,
            device,
            copy,
            processes=self._processes if self._is_split else None,
            copied_whole=self._is_split and recipe.sampling.engine == "native",
        )
        self.prompts, self.demonstrations, self.completion = self._lengths()
        self.slices: dict[str, list[tuple[Rows, int]]] = {}
        """Phase -> the rows that may take the most memory, and how many of them a step has."""
        if not recipe.skip_sft:
            prompt_lengths, completion_lengths = zip(*self.demonstrations, strict=True)
            self.slices["sft"] = worst_slices(
                recipe.sft, max(prompt_lengths), max(completion_lengths)
            )
        if not recipe.skip_grpo:
            self.slices["grpo"] = worst_slices(recipe.grpo, max(self.prompts), self.completion)
        self.teachers = {
            phase: self._teachers(config, device)
            for phase, config in teachers_of_phases(recipe).items()
        }
        """Phase -> its teachers; phases without one are left out."""

    def _teachers(self, config: TeacherConfig, device: str) -> TeachersMemory:
        """Return the memory of the teachers of a phase.

        Raises:
            ModelError: the configuration of one is not on this machine.
        """
        models = []
        for path in paths_of(config):
            model = teacher_model(self.recipe, config, path, device)
            shape = shape_of(path, config.revision, cached=True)
            policy = weightless_policy(model, shape, device).requires_grad_(False)
            models.append(ModelMemory(model, policy, device))
        return TeachersMemory(models=tuple(models), config=config)

    def _prepare(self, recipe: Recipe) -> PretrainedConfig:
        """Load the data and prepare them, if they are on this machine.

        Returns:
            The configuration of the model.

        Raises:
            ModelError: it is not on this machine.
        """
        path = named_base(recipe)
        new = recipe.model.new
        shape = None
        if path is not None:
            revision = recipe.model.revision_of(path)
            # Before the data: this refuses a model that is not on this machine.
            shape = shape_of(path, revision, cached=True)
        # The plan may be meant for another machine.
        local_recipe = recipe.override("device=cpu", "threads=null", "grading.symbolic=false")
        with tempfile.TemporaryDirectory(prefix="grouper-plan-") as folder:
            try:
                self.sets = load_problem_sets(recipe)
                if path is None and new is not None:
                    self._save_new_model(new, folder)
                # Quiet: a dry run lists the problems that are left out, a plan only counts.
                self.prepared = Prepared(local_recipe, self.sets, model=path or folder, quiet=True)
            except GrouperError as error:  # data that are missing or damaged
                reason = error.paragraph().removesuffix(".")
                self.notes.append(str(found("unmeasured", why=reason)))
        if path is None and new is not None:
            vocabulary = new.vocab_size
            if self.prepared is not None:
                vocabulary = len(self.prepared.tokenizer)
            shape = new_model_config(new, vocabulary=vocabulary)
        assert shape is not None, "a recipe has a path or a new model"
        return shape

    def _save_new_model(self, new: NewModelConfig, folder: str) -> None:
        """Save a new model without its weights."""
        fmt = make_format(self.recipe.prompt)
        problems = self.sets.for_fitting
        with torch.device("meta"):
            model, tokenizer = make_new_model(new, problems, fmt, seed=self.recipe.seed)
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _lengths(self) -> tuple[list[int], list[tuple[int, int]], int]:
        """Return tokens of GRPO's prompts, of demonstrations (prompt, completion), of a completion.

        Measured if data and tokenizer are on this machine, else as long as the recipe allows.
        """
        prepared = self.prepared
        if prepared is not None:
            prompts = [len(prompt.token_ids) for _, prompt in prepared.train]
            demonstrations = [
                (len(demonstration.prompt.token_ids), len(demonstration.token_ids))
                for demonstration in prepared.demonstrations
            ]
            return prompts, demonstrations, prepared.max_new_tokens
        recipe = self.recipe
        completion = recipe.sampling.max_new_tokens
        prompt = recipe.prompt.max_prompt_tokens
        total = recipe.sampling.max_total_tokens
        context = context_length(self.policy.model.config)
        if total is not None:
            # Prompts may be as short as one token, or as long as allowed.
            completion = total - 1
            prompt = min(prompt, total - 1)
        elif context is not None:
            prompt = max(1, min(prompt, context - completion))
        demonstration = (prompt, completion)
        if recipe.sft.max_tokens is not None:
            # The longest demonstration with the shortest prompt, which trains the most tokens.
            longest = min(prompt + completion, recipe.sft.max_tokens)
            demonstration = (1, max(1, longest - 1))
        return [prompt], [demonstration], completion

    def phase(self, name: str, speed: float | None) -> PhasePlan:
        """Plan a phase at `speed` tokens per second, if it is known."""
        config = getattr(self.recipe, name)
        grpo = self.recipe.grpo
        if name == "sft":
            per_step = self.recipe.sft.batch_size
            tokens_per_item = _mean([sum(lengths) for lengths in self.demonstrations])
        else:
            per_step = grpo.prompts_per_step
            tokens_per_item = _mean(self.prompts) + grpo.group_size * self.completion
        steps = config.steps
        if self.prepared is not None:
            size = self.prepared.sizes["sft" if name == "sft" else "train"]
            steps = total_steps(config, size=size, per_step=per_step)
        tokens_per_step = per_step * tokens_per_item
        tokens = None
        seconds = None
        if steps is not None:
            tokens = steps * tokens_per_step
            if speed is not None:
                seconds = tokens / speed
        return PhasePlan(
            name=name,
            steps=steps,
            tokens_per_step=tokens_per_step,
            seconds=seconds,
            tokens=tokens,
        )

    def update(self, name: str, budget: int | None = None) -> Memory:
        """Compute the memory of a phase's update, with the rows that take the most.

        Args:
            name: of the phase.
            budget: replaces `tokens_per_micro_batch`.
        """
        config = getattr(self.recipe, name)
        size = self._processes.size
        candidates = []
        for worst_rows, most in self.slices[name]:
            tokens = budget or config.tokens_per_micro_batch
            if size > 1:
                # Slices are as small as it takes for the step to reach every process.
                tokens_per_step = replace(worst_rows, count=most).tokens
                tokens = min(tokens, -(-tokens_per_step // size))
            rows = worst_rows.filling(tokens, most=most, shared=self.policy.native)
            memory = self.model.update(
                f"{name} update",
                rows,
                config.optimizer,
                accumulated=rows.count * size < most,
                reference=name == "grpo" and self.recipe.grpo.beta > 0,
                teachers=self.teachers.get(name),
            )
            candidates.append(memory)
        return max(candidates, key=lambda memory: memory.peak)

    def loading(self) -> list[Memory]:
        """Compute the memory of loading, where it may be the most: before weights are split."""
        if not self._is_split:
            return []
        return [self.model.loading]

    def share_of_processes(self) -> list[str]:
        """Return a note on how the processes share the run; empty if there is one."""
        size = self._processes.size
        if size == 1:
            if self.recipe.parallel == "fsdp":
                return [str(found("plan-of-one"))]
            return []
        if self._is_split:
            return [str(found("plan-fsdp", processes=size))]
        return [str(found("plan-ddp", processes=size))]

    def token_curve(self, name: str) -> list[tuple[int, int]]:
        """Return (tokens_per_micro_batch, peak) of a phase's update at up to three settings.

        They are one row, the recipe's setting, and all rows of a process, above which the peak is
        constant.
        """
        slices = self.slices[name]
        setting = getattr(self.recipe, name).tokens_per_micro_batch
        one_row = max(replace(rows, count=1).tokens for rows, _ in slices)
        tokens_per_step = max(replace(rows, count=most).tokens for rows, most in slices)
        all_rows = max(one_row, -(-tokens_per_step // self._processes.size))
        points = sorted({one_row, min(setting, all_rows), all_rows})
        return [(tokens, self.update(name, tokens).peak) for tokens in points if tokens >= one_row]

    def sampling(self, name: str, slots: int) -> Memory:
        """Compute the memory of a part that samples, with at most `slots` slots."""
        recipe = self.recipe
        samples, size = self._native_sizes(name, slots)
        optimizer = recipe.sft.optimizer if recipe.skip_grpo else recipe.grpo.optimizer
        memory = self.model.sampling(
            name,
            size,
            together=-(-size.slots // samples),
            optimizer=state_bytes(optimizer, self.policy, own=True),
            reference=recipe.grpo.beta > 0 and not recipe.skip_grpo,
        )
        # The last phase's teachers are still there when it is measured, and while it samples.
        teachers = [self.teachers[phase] for phase in recipe.phases[-1:] if phase in self.teachers]
        return replace(memory, teacher=sum(entry.weights for entry in teachers))

    def slots(self, name: str, most: int, room: int) -> int:
        """Return how many of `most` slots fit into `room` bytes; 0: not even one."""
        if self.sampling(name, 1).peak > room:
            return 0
        memory = self.sampling(name, most)
        _, size = self._native_sizes(name, most)
        free = room - (memory.peak - memory.activations - memory.cache)
        fitting = slots_that_fit(self.model.sampler, size, free)
        return most if fitting == size.slots else fitting

    def share_of_vllm(self) -> list[str]:
        """Return a note on `gpu_memory_utilization` by GPU; empty if vLLM does not sample."""
        sampling = self.recipe.sampling
        if sampling.engine != "vllm" or not self.sampled:
            return []
        _, size = self._sizes(self.sampled[0], sampling.max_slots)
        size = size._replace(prompts=size.slots)  # only whole blocks of a prompt are shared
        dtype = DTYPES.get(sampling.dtype, self.policy.products_dtype)
        cache = cache_bytes(self.policy.model.config.get_text_config(), dtype, size)
        needed = self.model.parameters * dtype.itemsize + cache + VLLM_ITSELF * GIB
        cards = []
        for gib in CARDS:
            share = math.ceil(20 * needed / (gib * GIB)) / 20  # in steps of 5 %
            if share < 1:
                cards.append(f"{share:.2f} on {gib} GB")
        shares = ", ".join(cards) or "none"
        return [str(found("vllm-share", gib=f"{needed / GIB:.1f}", shares=shares))]

    def _native_sizes(self, name: str, slots: int) -> tuple[int, CacheSize]:
        """Return the same as `_sizes` for the native sampler, with the largest of later turns.

        Their prompts are all turns before, which no two completions share; one with a long prompt
        may be beside one that has hardly begun. The same holds of rollouts that begin one step
        ahead.
        """
        samples, size = self._sizes(name, slots)
        continued = name != "evaluation" and self.recipe.grpo.max_staleness
        if continued or make_format(self.recipe.prompt).tools:
            longest = size.prompt + size.completion
            return 1, size._replace(prompts=size.slots, prompt=longest)
        return samples, size

    def _sizes(self, name: str, slots: int) -> tuple[int, CacheSize]:
        """Return the completions of a prompt, and the cache size of at most `slots` slots."""
        recipe = self.recipe
        completion = self.completion
        prompts = self.prompts
        samples = recipe.grpo.group_size
        begun = recipe.grpo.prompts_per_step * samples
        # Replacements of flat groups begin while others are drawn, on a GPU perhaps all at once.
        completions = begun * (1 + recipe.grpo.dynamic_sampling_rounds)
        if self.device == "cuda":
            begun = completions
        if name == "evaluation":
            samples = recipe.evaluation.samples
            completion = recipe.evaluation.max_new_tokens or completion
            begun = completions = slots
            if self.sets.test is not None:
                begun = completions = len(self.sets.test) * samples
            if self.prepared is not None:
                items = (*self.prepared.validation, *self.prepared.test)
                prompts = [len(prompt.token_ids) for _, prompt in items]
        # Neighbors are shared out, so only the first and the last prompt of a share may be parts.
        size = self._processes.size
        parts = completions % (size * samples) != 0
        begun = -(-begun // size)
        completions = -(-completions // size)
        slots = min(slots, slots_for(begun, completions))
        # Slots are refilled one by one, so each may have another prompt.
        different_prompts = -(-completions // samples)
        if size > 1 and parts:
            different_prompts += 1
        different_prompts = min(slots, different_prompts)
        return samples, CacheSize(slots, different_prompts, max(prompts), completion)


def _mean(lengths: list[int]) -> int:
    """Return the mean, rounded up."""
    return -(-sum(lengths) // len(lengths))


def _largest(curve: list[tuple[int, int]], room: int) -> int | None:
    """Return the largest setting at which the peak fits; None: not even the smallest.

    Between two points of the curve the peak is linear: every row takes the same memory.

    >>> [_largest([(1, 10), (11, 110)], room) for room in (5, 10, 65, 200)]
    [None, 1, 6, 11]
    """
    largest = None
    next_points = [*curve[1:], curve[-1]]
    for (tokens, peak), (next_tokens, next_peak) in zip(curve, next_points, strict=True):
        if peak > room:
            break
        share = 1.0
        if next_peak > room:
            share = (room - peak) / (next_peak - peak)
        largest = int(tokens + share * (next_tokens - tokens))
    return largest
