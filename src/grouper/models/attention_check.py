"""Comparison of our attention and logits with those of a model's own code, when it is loaded.

For attention, there are two passes over the same few tokens. The first runs padded rows through the
model's own eager attention with its own masks, in float32; the second runs them in our layout. In
the second, every layer starts from the hidden states of the first pass, so that rounding does not
add up over layers. Two things must then agree:

- the queries and keys of both passes, up to one rounding (they depend on positions);
- the results of attention: ours over the first pass's queries and keys, in float32, with those of
  the first pass (they depend on scale, mask and window).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from grouper.algorithms.batching import unweighted_rows
from grouper.errors import ModelError, as_model_error
from grouper.models.attention import AttentionSpec, SharedPrompts
from grouper.models.policy import Policy
from grouper.models.token_scores import accurate

NAME = "grouper-check"

# Tokens of each prompt, tokens of each completion, and the prompt that each completion continues.
PROMPTS = (3, 7)
COMPLETIONS = (8, 1, 5, 3)
OWNERS = (0, 1, 0, 1)
# Longer sliding windows are shortened to this in both passes, so that the few tokens exceed them.
WINDOW = 4
# Allowed differences of heads, as a share of the largest: with everything in float32, after one
# rounding to bfloat16, and with all of attention in bfloat16.
EXACT = 1e-3
ROUNDED = 0.05
ROUGH = 0.1


def _require_weights(policy: Policy) -> None:
    """Raise `ModelError` if a matrix holds nothing but zeros, as in a truncated file."""
    for name, weight in policy.model.named_parameters():
        # The second factor of a new adapter is zero.
        if weight.dim() == 2 and ".lora_" not in name and not weight.any():
            raise ModelError(
                f"every logit of the model is 0, and so is every number in {name}",
                where="the model",
                fix="The file of its weights was not written or copied completely: copy it again.",
            )


def check_native_attention(policy: Policy) -> None:
    """Compare our attention with the model's own, layer by layer.

    Raises:
        ModelError: the two disagree, so that this model must not be run natively; or its weights
            are not finite.
    """
    if not policy.native:
        return
    problem = f"Grouper's attention does not fit {type(policy.model).__name__}"
    with as_model_error(problem, fix="Set model.attention: sdpa (or eager)."):
        _Comparison(policy).run()


@torch.no_grad()
def check_logits(policy: Policy) -> None:
    """Compare our logits of a few tokens with those of the model's own forward.

    Model families scale or cap their logits in different ways. A way that we do not know would go
    unnoticed without this, because sampler and trainer would make the same mistake.

    Raises:
        ModelError: the logits disagree; those of a token depend on the tokens after it; the model
            cannot be run; or its weights are not finite.
    """
    name = type(policy.model).__name__
    # Two rows that have their first tokens in common and no others.
    shared, length = PROMPTS
    tokens = torch.arange(length, device=policy.device).repeat(2, 1)
    tokens[1, shared:] += length
    rows = {"input_ids": tokens % policy.vocabulary, "use_cache": False}
    with as_model_error(f"{name} cannot be run", fix="Use another model."), policy.autocast():
        theirs = accurate(policy.model(**rows).logits)
        body = policy.decoder(**rows)
    if not theirs.isfinite().all():
        _require_finite_weights(policy)
    if not theirs.any():
        _require_weights(policy)
    # In a causal model, the logits of the common tokens are the same in both rows. The one that
    # moves least counts: rounding may send a token to another expert.
    size = theirs.abs().max()
    distances = (theirs[0] - theirs[1])[:shared].abs()
    change = float(distances.amax(-1).min() / size)
    if change > EXACT:
        raise ModelError(
            f"{name} sees the tokens after each token (its logits move by {change:.2g} of their "
            "size), so it is not a causal language model",
            where="the model",
            fix="Name a model that continues text.",
        )
    share = math.inf
    # Llama 4 keeps its decoder in another place; `policy.decoder` returns no hidden states then.
    hidden = getattr(body, "last_hidden_state", None)
    if hidden is not None:
        ours = policy.logits(hidden)
        if ours.shape == theirs.shape:
            share = float((ours - theirs).abs().max() / size)
    if not share <= bound_of(policy):  # written so that a NaN is an error, too
        fix = "This version of Grouper cannot train the model: please report it."
        if math.isnan(share):
            fix = "They are not numbers: if training diverged, use an earlier checkpoint."
        raise ModelError(
            f"Grouper's logits disagree with those of {name} (they differ by {share:.2g} of their "
            "size)",
            fix=fix,
        )


def bound_of(policy: Policy) -> float:
    """Return the allowed difference of results, as a share of the largest."""
    if policy.products_dtype in {torch.float32, torch.float64}:
        return EXACT
    return ROUNDED


class _Comparison:
    """Both passes: the first is recorded, and each layer of the second is compared with it.

    It is also the layout of both passes (an `attention.Layout`).
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        prompts, completions = _texts(policy.vocabulary)
        batch = unweighted_rows(prompts, completions, OWNERS)
        self._layout = SharedPrompts(batch.to(policy.device))
        texts = []
        for owner, completion in zip(OWNERS, completions, strict=True):
            texts.append(prompts[owner] + completion)
        self._rows = self._padded(texts)
        self._places = self._flat_places()
        self._recorded = False
        """Whether the first pass is over."""
        self._inputs: dict[nn.Module, Tensor] = {}
        """The hidden states that each layer got in the first pass."""
        self._outputs: dict[nn.Module, Tensor] = {}
        """The results of each layer in the first pass."""
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        """Layer -> queries, keys, values [R, H, L, D] and results [R, L, H, D]."""

    def _padded(self, texts: list[list[int]]) -> dict[str, Tensor]:
        """Return the first pass's inputs, [R, L] each.

        All tokens are in the mask: padding on the right of a row does not affect its left.
        """
        device = self._policy.device
        longest = max(len(text) for text in texts)
        padded = [text + [0] * (longest - len(text)) for text in texts]
        ids = torch.tensor(padded, device=device)
        columns = torch.arange(longest, device=device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": columns.expand_as(ids),
        }

    def _flat_places(self) -> tuple[Tensor, ...]:
        """Return (row, column) of each flat token of the layout in the first pass's rows.

        Prompts come first, each from one of its rows; then the inputs of completions, which are
        all of their tokens but the last.
        """
        places = []
        for prompt, length in enumerate(PROMPTS):
            row = OWNERS.index(prompt)
            places += [(row, column) for column in range(length)]
        for row, (owner, length) in enumerate(zip(OWNERS, COMPLETIONS, strict=True)):
            start = PROMPTS[owner]
            places += [(row, start + column) for column in range(length - 1)]
        return torch.tensor(places, device=self._policy.device).unbind(1)

    def run(self) -> None:
        """Run both passes, and raise as `check_native_attention` does."""
        policy = self._policy
        layout = self._layout
        with torch.no_grad(), short_windows(policy.model), self._hooks():
            with policy.native_attention(NAME), policy.autocast():
                output = policy.decoder(**self._rows, use_cache=False, layout=self)
            if not output.last_hidden_state.isfinite().all():
                _require_finite_weights(policy)
            self._recorded = True
            policy.hidden_states(self, layout.token_ids, layout.position_ids)

    def _flat(self, states: Tensor) -> Tensor:
        """Return the rows' [R, L, ...] as [1, N, ...] of the layout's flat tokens."""
        return states[self._places][None]

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """Record the inputs and outputs of layers in the first pass; use them in the second.

        There, each layer gets its input of the first pass, and its output must be the same as in
        the first pass. A convolution or a recurrence in place of attention fails here, since it
        runs over the borders of sequences.
        """

        def exchange(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            by_name = "hidden_states" in options
            states = options.pop("hidden_states") if by_name else args[0]
            if not self._recorded:
                self._inputs[module] = states
            elif module in self._inputs:
                states = self._flat(self._inputs[module])
            other_args = args if by_name else args[1:]
            return (states, *other_args), options

        def compare(module: Any, _: Any, output: Any) -> None:
            states = accurate(output[0] if isinstance(output, tuple) else output)
            if not self._recorded:
                self._outputs[module] = states
            elif module in self._outputs:
                expected = self._flat(self._outputs[module])
                gap = (states - expected).abs()
                size = expected.abs().max()
                layer = module.layer_idx or 0
                name = f"results of {type(module).__name__}"
                self._require(gap, size, bound_of(self._policy), layer, name)

        with contextlib.ExitStack() as hooks:
            for module in self._policy.decoder.modules():
                if hasattr(module, "layer_idx"):
                    input_hook = module.register_forward_pre_hook(exchange, with_kwargs=True)
                    hooks.enter_context(input_hook)
                    output_hook = module.register_forward_hook(compare)
                    hooks.enter_context(output_hook)
            yield

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Compare heads [1, H, N, D] and attention with the first pass, whose result it returns."""
        queries, keys, values, out = self.layers[spec.layer]
        # [1, H, N, D] each, of the flat tokens.
        q = self._flat(queries.transpose(1, 2)).transpose(1, 2)
        k = self._flat(keys.transpose(1, 2)).transpose(1, 2)
        v = self._flat(values.transpose(1, 2)).transpose(1, 2)
        expected = self._flat(out).transpose(1, 2)

        bound = bound_of(self._policy)
        heads = {"queries": (query, q), "keys": (key, k), "values": (value, v)}
        for name, (ours, theirs) in heads.items():
            # Each dimension by itself: some rotate fast with the position, and others are a hundred
            # times as large and hardly rotate at all.
            gap = (accurate(ours) - accurate(theirs)).abs().amax(2)
            size = accurate(theirs).abs().amax(2)
            self._require(gap, size, bound, spec.layer, name)

        size = expected.abs().max()
        with torch.autocast(query.device.type, enabled=False):
            exact = self._layout.attend(accurate(q), accurate(k), accurate(v), spec)
        gap = (exact - expected).abs()
        self._require(gap, size, EXACT, spec.layer, "results")
        # Training in half precision may use another kernel, so that is run, too; not with a soft
        # cap, where the scores themselves are rounded.
        if bound > EXACT and spec.softcap is None:
            rough = accurate(self._layout.attend(q, k, v, spec))
            gap = (rough - expected).abs()
            self._require(gap, size, ROUGH, spec.layer, "results in bfloat16")
        return expected.to(query.dtype)

    def _require(self, gap: Tensor, size: Tensor, bound: float, layer: int, name: str) -> None:
        """Raise `ModelError` if a gap, as a share of `size`, is larger than the bound."""
        smallest = torch.finfo(size.dtype).tiny
        share = float((gap / size.clamp(min=smallest)).max())
        if not share <= bound:  # written so that a NaN is an error, too
            raise ModelError(
                "Grouper's attention disagrees with the eager attention of "
                f"{type(self._policy.model).__name__} in layer {layer} ({name} differ by "
                f"{share:.2g} of their size, allowed {bound:g})",
                fix="Set model.attention: sdpa (or eager), and please report the model.",
            )


def _texts(vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and completions of arbitrary tokens."""
    tokens = ((7919 * i + 11) % vocabulary for i in itertools.count())
    prompts = [list(islice(tokens, length)) for length in PROMPTS]
    completions = [list(islice(tokens, length)) for length in COMPLETIONS]
    return prompts, completions


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: _Comparison,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run the model's own eager attention in float32, and record it in `layout`."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    mask = None if attention_mask is None else accurate(attention_mask)
    with torch.autocast(query.device.type, enabled=False):
        out, _ = eager(module, accurate(query), accurate(key), accurate(value), mask, **options)
    layout.layers[int(getattr(module, "layer_idx", 0))] = (query, key, value, out)
    return out.to(query.dtype), None


AttentionInterface.register(NAME, _eager)
AttentionMaskInterface.register(NAME, eager_mask)


@contextlib.contextmanager
def short_windows(model: nn.Module, longest: float = math.inf) -> Iterator[None]:
    """Shorten sliding windows to `WINDOW` tokens inside this block.

    A model keeps the length of its windows in its configuration and in some of its modules.

    Args:
        model: its windows are restored afterwards.
        longest: tokens of the longest text; a window that is not shorter stays as it is.
    """
    # By id: one configuration is shared by many modules.
    holders: dict[int, Any] = {}
    for module in model.modules():
        holders[id(module)] = module
        config = getattr(module, "config", None)
        holders[id(config)] = config
    windows: list[tuple[Any, int]] = []
    for holder in holders.values():
        length = getattr(holder, "sliding_window", None)
        if isinstance(length, int) and length < longest:
            windows.append((holder, length))
    try:
        for holder, length in windows:
            holder.sliding_window = min(length, WINDOW)
        yield
    finally:
        for holder, length in windows:
            holder.sliding_window = length


def _require_finite_weights(policy: Policy) -> None:
    """Raise `ModelError` if a weight is infinite or not a number, which no model file has."""
    for name, weight in policy.model.named_parameters():
        count = int((~torch.isfinite(weight)).sum())
        if count:
            raise ModelError(
                f"{count:,} of {weight.numel():,} numbers of the weight {name} are infinite or "
                "not a number",
                where=str(policy.model.config._name_or_path),  # noqa: SLF001 - where it is from
                fix="The model file is damaged, or its training diverged: get it again, or use "
                "an earlier checkpoint.",
            )
