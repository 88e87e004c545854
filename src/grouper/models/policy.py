"""Policy: the model being trained as one module whose forward returns per-token log-probs.

`Policy(batch)` is the only thing the update calls, so that FSDP2 can wrap exactly it. The
LM head is applied in chunks inside it; no tensor of [tokens, vocabulary] outlives its chunk.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grouper.algorithms.batching import TrainBatch
from grouper.kernels.modules import attach
from grouper.kernels.switch import device_type, running
from grouper.models import attention
from grouper.models.memory_savers import checkpoint_layers, offloaded_activations
from grouper.models.token_scores import (
    LinearHead,
    LogitScaling,
    head_product,
    plain_token_scores,
)

log = logging.getLogger(__name__)

# The name that PEFT gives to a model's only adapter.
ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What the policy says of the completion tokens of a batch."""

    logprobs: Tensor
    """[R, T]: natural log-probability of each completion token at the batch's temperature, before
    any truncation, in float32 or higher; 0 on padding. Carries the gradient."""
    entropies: Tensor
    """[R, T]: entropy in nats of the distribution each token was drawn from; 0 on padding. Carries
    a gradient only where `forward` was asked for it."""


class Policy(nn.Module):
    """A causal language model as seen by training.

    Args:
        model: the causal language model, with LoRA layers already inside where they are used.
        adapter: the PEFT wrapper around `model` when LoRA is used; only for saving.
        native: run each prompt once through our own attention; otherwise pad rows and use the
            attention the model was loaded with.
        compute_dtype: dtype of matrix products (autocast) where it differs from the weights'.
        gradient_checkpointing: keep only the input of each layer and run it again in the backward.
        activation_offload: keep what the backward needs in host memory (no change on the CPU).

    Raises:
        ModelError: the model cannot be checkpointed.
    """

    adapter: Any
    decoder: nn.Module
    """The model without its LM head."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        adapter: Any = None,
        native: bool = True,
        compute_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        # Not submodules: they hold the same parameters under other names.
        object.__setattr__(self, "adapter", adapter)
        object.__setattr__(self, "decoder", model.base_model)
        self.version = 0
        """Optimizer steps these weights have seen."""
        self.token_limit: int | None = None
        """Most tokens of a forward and backward since memory ran out; None: it never did."""
        self.compute_dtype = compute_dtype
        self.gradient_checkpointing = gradient_checkpointing
        self._activation_offload = activation_offload
        self._scaling = LogitScaling.of(model.config)
        self.ropes = ropes_of(model.config)
        # Submodels of some families have configurations of their own.
        parts = (m for m in model.modules() if isinstance(m, PreTrainedModel))
        self._configs: list[Any] = list({id(m.config): m.config for m in parts}.values())
        # Whether the model's code sends attention through the interface we register with.
        # A recurrent state beside the cache would run on over the borders of sequences.
        through = getattr(model, "_supports_attention_backend", False)
        self.native = native and bool(through) and not getattr(model, "_is_stateful", False)
        if native and not self.native:
            log.warning(
                "%s does not go through transformers' attention interface: rows are padded and "
                "sampling falls back to a plain cache, which is slower.",
                type(model).__name__,
            )
        if gradient_checkpointing:
            checkpoint_layers(model, self._as_now)
        if self.native:
            attach(model)
        self.eval()  # dropout is off unless `training.update` turns LoRA's on

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def products_dtype(self) -> torch.dtype:
        """The dtype of matrix products, and so of cached keys and values."""
        return self.compute_dtype or self.model.dtype

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, by the model's configuration."""
        return int(self.model.config.get_text_config().vocab_size)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, in a fixed order."""
        return {n: p for n, p in self.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def native_attention(self, name: str = attention.NAME) -> Iterator[None]:
        """Attention goes through our layouts inside this block, and nowhere else.

        Args:
            name: of the attention function, as it is registered.

        transformers' own `set_attn_implementation` walks over all modules each time; the models
        read nothing but this attribute of their configuration.
        """
        before = [config._attn_implementation for config in self._configs]  # noqa: SLF001 - no other reader
        try:
            for config in self._configs:
                config._attn_implementation = name  # noqa: SLF001 - as above
            yield
        finally:
            for config, previous in zip(self._configs, before, strict=True):
                config._attn_implementation = previous  # noqa: SLF001 - as above

    @contextlib.contextmanager
    def _as_now(self) -> Iterator[None]:
        """A pass of ours: our attention and our kernels, for layers that are run again, too."""
        if not self.native:
            yield
            return
        with self.native_attention(), running():
            yield

    def hidden_states(
        self, layout: attention.Layout, token_ids: Tensor, positions: Tensor
    ) -> Tensor:
        """Last hidden states [N, H] of flat tokens [1, N] under a layout."""
        with self.native_attention(), running(), self.autocast():
            output = self.decoder(
                input_ids=token_ids, position_ids=positions, use_cache=False, layout=layout
            )
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H]: the one head of trainer and sampler."""
        head = self.model.get_output_embeddings()
        with self.autocast():
            if type(head) is nn.Linear and device_type(hidden) == "cuda":
                return self._scaling(head_product(hidden, head.weight, head.bias))
            return self._scaling(head(hidden))

    def forward(self, batch: TrainBatch, entropy_gradient: bool = False) -> TokenOutputs:
        """Log-probs and entropies of the batch's completion tokens, each [R, T].

        Args:
            batch: the rows.
            entropy_gradient: whether a gradient flows through the entropies, for a bonus on them.
        """
        offloading = self._activation_offload and torch.is_grad_enabled()
        with offloaded_activations(self) if offloading else contextlib.nullcontext():
            shape = batch.completion_ids.shape
            slots = torch.arange(shape[1], device=batch.completion_ids.device)
            live = slots < batch.completion_lengths[:, None]
            if self.native:
                layout = attention.SharedPrompts(batch)
                hidden = self.hidden_states(layout, layout.token_ids, layout.position_ids)
                hidden = hidden.index_select(0, layout.sources)
            else:
                hidden = self._padded(batch, live)
            logprobs, entropies = self.score(
                hidden,
                batch.completion_ids[live],
                batch.temperature,
                entropy_gradient=entropy_gradient,
            )
            blank = logprobs.new_zeros(shape)
            return TokenOutputs(
                blank.masked_scatter(live, logprobs), blank.masked_scatter(live, entropies)
            )

    def _padded(self, batch: TrainBatch, live: Tensor) -> Tensor:
        """Hidden states [targets, H] that predict each completion token, from right-padded rows.

        For models without the attention interface; a prompt runs once per row.
        """
        prompt_lengths = batch.prompt_lengths[batch.prompt_index]
        lengths = prompt_lengths + batch.completion_lengths
        slots = torch.arange(int(lengths.max()), device=lengths.device)
        is_prompt = slots < prompt_lengths[:, None]
        is_completion = ~is_prompt & (slots < lengths[:, None])
        prompts = batch.prompt_ids[batch.prompt_index, : len(slots)]
        ids = torch.zeros_like(is_prompt, dtype=prompts.dtype)
        ids[is_prompt] = prompts[is_prompt[:, : prompts.shape[1]]]
        ids[is_completion] = batch.completion_ids[live]
        # Padding is on the right, where no real token attends, so nothing needs to be masked.
        # Masking it would leave padded tokens without any key inside a sliding window, and a
        # softmax over nothing has NaN gradients.
        with self.autocast():
            output = self.decoder(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=slots.expand_as(ids),
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden[:, :-1][is_completion[:, 1:]]

    def score(
        self, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of targets [N] from hidden states [N, H], in chunks."""
        head = self.model.get_output_embeddings()
        # A subclass (LoRA on the head, quantised, sharded) does more than multiply.
        if type(head) is nn.Linear:
            linear = LinearHead(
                scaling=self._scaling,
                temperature=temperature,
                dtype=self.compute_dtype or head.weight.dtype,
                entropy_gradient=entropy_gradient,
            )
            return linear.scores(hidden, head.weight, head.bias, targets)
        return plain_token_scores(
            self.logits,
            hidden,
            targets,
            vocabulary=self.vocabulary,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Matrix products in `compute_dtype` inside this block."""
        if self.compute_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def snapshot(self) -> dict[str, Tensor]:
        """A frozen copy of the trainable weights: the reference of a KL term."""
        return {name: p.detach().clone() for name, p in self.trainable().items()}


def ropes_of(shape: Any) -> list[dict[str, Any]]:
    """The settings of a model's rotary embeddings: one, or one per kind of layer."""
    text = shape.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]
