"""Bytes of every part of a run, phase by phase, without a weight being loaded.

Weights, gradients, optimizer states and the cache are counted; activations are traced
(`tracing`): the model's own code runs on tensors without content. The formulas are in
docs/memory.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grouper.advice.tracing import Tracer
from grouper.algorithms.rows import Rows
from grouper.config.schema import ModelConfig, OptimizerConfig
from grouper.models.loading import weightless_policy
from grouper.models.policy import Policy
from grouper.models.token_scores import chunk_rows
from grouper.sampling.kv_cache import (
    CacheSize,
    cache_bytes,
    drawing_bytes,
    prompts_at_once,
)
from grouper.training.optimizers import state_bytes

GIB = 2**30

# Bytes of an NF4 weight: half a byte, a byte of scale for 64 of them, a float for 256 scales.
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)


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
    """

    def __init__(self, config: ModelConfig, policy: Policy, device: str) -> None:
        self._config = config
        self._device = device
        self._shape: Any = policy.model.config.get_text_config()
        self._policy = policy
        self._tracer = Tracer(policy, device)
        # A plan asks for the same rows several times, and a trace takes seconds.
        self._traced = functools.cache(self._tracer.update)
        self.sampled = functools.cache(self._sample_from)
        """Dtype of the copy that samples, or None -> the policy, and the peak of its prefill."""
        self.parameters = sum(p.numel() for p in policy.parameters())
        self.trainable = sum(p.numel() for p in policy.trainable().values())
        self._trainable_bytes = _bytes(policy.trainable().values())
        self.weights = _bytes(policy.parameters()) + _bytes(policy.buffers())
        self._largest = max((_bytes([p]) for p in policy.trainable().values()), default=0)
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
        copy: torch.dtype | None = None,
    ) -> Memory:
        """A step: the worse of a forward and backward of its largest slice and the optimizer.

        Args:
            name: of the part.
            rows: the largest slice.
            optimizer: its states are there from the second step on.
            accumulated: whether earlier slices of the step have left their gradient.
            reference: whether a frozen copy of the trainable weights is held.
            copy: dtype of the copy that samples, which is held meanwhile, or None.
        """
        kept, peak = self._traced(rows, accumulated=accumulated)
        gradients = self._trainable_bytes
        peak += gradients if accumulated else 0
        if self._config.activation_offload and self._device != "cpu":
            # One layer at a time comes back from the host.
            layers = int(self._shape.num_hidden_layers)
            peak -= kept * (layers - 1) // layers
        # Fused AdamW needs nothing for itself, others a tensor or two.
        stepping = gradients + (0 if optimizer.name == "adamw" else 2 * self._largest)
        vocabulary = int(self._shape.vocab_size)
        targets = min(rows.count * rows.completion, chunk_rows(vocabulary, self._device))
        return Memory(
            name=name,
            weights=self.weights,
            reference=gradients if reference else 0,
            gradients=gradients,
            optimizer=state_bytes(optimizer, self._policy),
            activations=max(peak, stepping) + self._dequantised - gradients,
            logits_chunk=targets * vocabulary * 4,
            sampling_copy=self._copied(copy),
        )

    def sampling(
        self,
        name: str,
        *,
        slots: int,
        prompts: int,
        prompt: int,
        completion: int,
        held: int | None = None,
        copy: torch.dtype | None = None,
        optimizer: int = 0,
        reference: bool = False,
    ) -> Memory:
        """Drawing completions, at the moment all slots are filled.

        Args:
            name: of the part.
            slots: sequences at the same time.
            prompts: different prompts that begin together.
            prompt: tokens of the longest.
            completion: tokens that may be drawn.
            held: prompts that are remembered at the same time; None: those that begin together.
            copy: dtype of the sampler's own weights; None samples the training weights.
            optimizer: bytes of optimizer states that lie there meanwhile.
            reference: as in `update`.
        """
        policy, prefilled = self.sampled(copy)
        run = min(prompts, prompts_at_once(prompt))
        prefill = prefilled(Rows(prompt=prompt, completion=1, count=run))
        vocabulary = int(self._shape.vocab_size)
        room = CacheSize(slots, held or prompts, prompt, completion)
        return Memory(
            name=name,
            weights=self.weights,
            reference=self._trainable_bytes if reference else 0,
            optimizer=optimizer,
            activations=max(prefill, drawing_bytes(slots, vocabulary)) + self._dequantised,
            logits_chunk=slots * vocabulary * 4,
            cache=cache_bytes(self._shape, policy.products_dtype, room),
            sampling_copy=self._copied(copy),
        )

    def _copied(self, copy: torch.dtype | None) -> int:
        """Bytes of the copy that samples."""
        return 0 if copy is None else _bytes(self.sampled(copy)[0].parameters())

    def _sample_from(self, copy: torch.dtype | None) -> tuple[Policy, Callable[[Rows], int]]:
        """As `sampled`; a copy has its adapters merged."""
        policy, tracer = self._policy, self._tracer
        if copy is not None:
            dtype = str(copy).removeprefix("torch.")
            changes = {"dtype": dtype, "compute_dtype": dtype, "lora": None}
            config = self._config.model_copy(update=changes)
            policy = weightless_policy(config, policy.model.config, self._device)
            tracer = Tracer(policy, self._device)
        return policy, functools.cache(tracer.forward)


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
