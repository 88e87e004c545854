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
from grouper.models.divergences import Guidance
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
# oneDNN compiles a product in bfloat16 for each new size and keeps it for good: 0.3 to 0.9 MB for
# each on a CPU with AMX. Rows of ever new lengths took 36 MB more in every step of SmolLM2. Sizes
# that are multiples of this are few.
BFLOAT16_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Log-probs and entropies of the completion tokens of a batch."""

    logprobs: Tensor
    """[R, T]: natural log-probability of each completion token at the batch's temperature, before
    any truncation, in float32 or higher; 0 on padding. Carries the gradient."""
    entropies: Tensor
    """[R, T]: entropy in nats of the distribution at each token; 0 on padding. Carries a gradient
    only if `forward` got `entropy_gradient`."""
    divergences: Tensor | None = None
    """[R, T]: from a teacher, in nats; 0 where none reads. Carries the gradient. None without
    `guidance`."""


class Policy(nn.Module):
    """A causal language model as training and sampling use it.

    Args:
        model: the causal language model, with its LoRA layers, if any, already inside.
        adapter: the PEFT wrapper around `model` when LoRA is used; only for saving.
        native: run each prompt once through our own attention; otherwise pad rows and use the
            attention the model was loaded with.
        compute_dtype: dtype of matrix products (autocast); None: that of the weights.
        gradient_checkpointing: keep only the input of each layer and run it again in the backward.
        activation_offload: keep activations for the backward in host memory (no change on the CPU).

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
        """Optimizer steps that these weights have taken."""
        self.token_limit: int | None = None
        """Maximum tokens of a forward and backward since memory ran out; None: it never did."""
        self.reserved_bytes = 0
        """Memory of the device that training will take for good and has not taken yet: the states
        of the optimizer, before its first step."""
        self.compute_dtype = compute_dtype
        self.gradient_checkpointing = gradient_checkpointing
        self._activation_offload = activation_offload
        self._scaling = LogitScaling.of(model.config)
        self.ropes = ropes_of(model.config)
        # Submodels of some families have configurations of their own.
        configs: dict[int, Any] = {}
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                configs[id(module.config)] = module.config
        self._configs = list(configs.values())
        # Our attention is used only if the model's code calls attention through the interface that
        # we register with, and if it has no recurrent state: that would run across the borders of
        # sequences in a flat row.
        has_interface = bool(getattr(model, "_supports_attention_backend", False))
        is_recurrent = getattr(model, "_is_stateful", False)
        self.native = native and has_interface and not is_recurrent
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
    def size_multiple(self) -> int:
        """The number that numbers of tokens in products are multiples of."""
        # Not `device`: a plan traces tensors without memory as those of another device.
        place = device_type(next(self.parameters()))
        if place == "cpu" and self.products_dtype is torch.bfloat16:
            return BFLOAT16_MULTIPLE
        return 1

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, by the model's configuration."""
        return int(self.model.config.get_text_config().vocab_size)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name, in a fixed order."""
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }

    @contextlib.contextmanager
    def native_attention(self, name: str = attention.NAME) -> Iterator[None]:
        """Use our attention inside this block, and nowhere else.

        The attribute is set directly: transformers' own `set_attn_implementation` walks over all
        modules each time, and the models read nothing but this attribute of their configuration.

        Args:
            name: of the attention function, as it is registered.
        """
        previous = [config._attn_implementation for config in self._configs]  # noqa: SLF001 - no other reader
        try:
            for config in self._configs:
                config._attn_implementation = name  # noqa: SLF001 - as above
            yield
        finally:
            for config, implementation in zip(self._configs, previous, strict=True):
                config._attn_implementation = implementation  # noqa: SLF001 - as above

    @contextlib.contextmanager
    def _as_now(self) -> Iterator[None]:
        """Use our attention and kernels inside this block, if the policy has them.

        Gradient checkpointing enters it for layers that it runs again in the backward.
        """
        if not self.native:
            yield
            return
        with self.native_attention(), running():
            yield

    def hidden_states(
        self, layout: attention.Layout, token_ids: Tensor, positions: Tensor
    ) -> Tensor:
        """Run the decoder over flat tokens.

        Args:
            layout: which tokens attend to which.
            token_ids: [1, N].
            positions: [1, N], of each token in its sequence.

        Returns:
            The last hidden states [N, H].
        """
        with self.native_attention(), running(), self.autocast():
            output = self.decoder(
                input_ids=token_ids, position_ids=positions, use_cache=False, layout=layout
            )
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of hidden states [..., H], for trainer and sampler alike."""
        head = self.model.get_output_embeddings()
        with self.autocast():
            if type(head) is nn.Linear and device_type(hidden) == "cuda":
                return self._scaling(head_product(hidden, head.weight, head.bias))
            return self._scaling(head(hidden))

    def forward(
        self,
        batch: TrainBatch,
        entropy_gradient: bool = False,
        guidance: Guidance | None = None,
    ) -> TokenOutputs:
        """Compute log-probs and entropies of the batch's completion tokens, each [R, T].

        Args:
            batch: the rows.
            entropy_gradient: whether a gradient flows through the entropies, for a bonus on them.
            guidance: of the teachers of these rows; None: there are none.
        """
        offloading: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._activation_offload and torch.is_grad_enabled():
            offloading = offloaded_activations(self)
        with offloading:
            mask = batch.is_completion
            targets = batch.completion_ids[mask]
            hidden = self.completion_states(batch)
            logprobs, entropies = self.score(
                hidden, targets, batch.temperature, entropy_gradient=entropy_gradient
            )
            zeros = logprobs.new_zeros(mask.shape)
            divergences = None
            if guidance is not None:
                values = guidance.divergences(self, hidden, targets, logprobs, batch.temperature)
                divergences = zeros.masked_scatter(mask, values)
            return TokenOutputs(
                logprobs=zeros.masked_scatter(mask, logprobs),
                entropies=zeros.masked_scatter(mask, entropies),
                divergences=divergences,
            )

    def completion_states(self, batch: TrainBatch) -> Tensor:
        """Compute the hidden states [N, H] that predict each completion token, row after row."""
        if not self.native:
            return self._padded(batch)
        layout = attention.SharedPrompts(
            batch, multiple=self.size_multiple, width_multiple=self.size_multiple
        )
        hidden = self.hidden_states(layout, layout.token_ids, layout.position_ids)
        return hidden.index_select(0, layout.sources)

    def _padded(self, batch: TrainBatch) -> Tensor:
        """Compute `completion_states` with right-padded rows, for models without the interface.

        A prompt runs once per row.
        """
        prompt_lengths = batch.prompt_lengths[batch.prompt_index]
        lengths = prompt_lengths + batch.completion_lengths
        columns = torch.arange(int(lengths.max()), device=lengths.device)
        is_prompt = columns < prompt_lengths[:, None]
        is_completion = ~is_prompt & (columns < lengths[:, None])
        prompts = batch.prompt_ids[batch.prompt_index, : len(columns)]
        ids = torch.zeros_like(is_prompt, dtype=prompts.dtype)
        ids[is_prompt] = prompts[is_prompt[:, : prompts.shape[1]]]
        ids[is_completion] = batch.completion_ids[batch.is_completion]
        # Padding is on the right, where no real token attends, so nothing needs to be masked.
        # Masking it would leave padded tokens without any key inside a sliding window, and a
        # softmax over nothing has NaN gradients.
        with self.autocast():
            output = self.decoder(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=columns.expand_as(ids),
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state
        # The state of each token predicts the next one.
        return hidden[:, :-1][is_completion[:, 1:]]

    def score(
        self, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies of tokens, in chunks.

        Args:
            hidden: [N, H].
            targets: [N] int64.
            temperature: logits are divided by it.
            entropy_gradient: whether a gradient flows through the entropies.

        Returns:
            Log-probs [N] and entropies [N] in nats.
        """
        head = self.model.get_output_embeddings()
        # A subclass (LoRA on the head, quantized, sharded) does more than multiply.
        if type(head) is nn.Linear:
            linear = LinearHead(
                scaling=self._scaling,
                temperature=temperature,
                dtype=self.compute_dtype or head.weight.dtype,
                entropy_gradient=entropy_gradient,
            )
            added = -len(targets) % self.size_multiple
            if added == 0:
                return linear.scores(hidden, head.weight, head.bias, targets)
            hidden = nn.functional.pad(hidden, (0, 0, 0, added))
            logprobs, entropies = linear.scores(
                hidden, head.weight, head.bias, nn.functional.pad(targets, (0, added))
            )
            return logprobs[:-added], entropies[:-added]
        return plain_token_scores(
            self.logits,
            hidden,
            targets,
            vocabulary=self.vocabulary,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with matrix products in `compute_dtype`."""
        if self.compute_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def snapshot(self) -> dict[str, Tensor]:
        """Return a frozen copy of the trainable weights: the reference of a KL term."""
        copies = {}
        for name, parameter in self.trainable().items():
            copies[name] = parameter.detach().clone()
        return copies


def ropes_of(shape: Any) -> list[dict[str, Any]]:
    """List the settings of a model's rotary embeddings.

    Models with several types of layers have one for each, inside the first one of the list.
    """
    config = shape.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes_of_types = [value for value in rope.values() if isinstance(value, dict)]
    return [rope, *ropes_of_types]
