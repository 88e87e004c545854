"""Whether our attention and logits are those of a model's own code: looked at when it is loaded.

For attention, two passes over the same few tokens. The first runs padded rows through the model's
own eager attention with its own masks, in float32; the second runs them in our layout. There every
layer starts from the hidden states of the first pass, so that rounding does not add up over layers.
Its queries and keys must then be those of the first pass up to one rounding (they depend on
positions), and our attention over the first pass's queries and keys must give in float32 what it
gave there (which depends on scale, mask and window).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from itertools import count, islice
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

# Tokens of each prompt and of each completion, and the prompts that these continue.
PROMPTS, COMPLETIONS, OWNERS = (3, 7), (8, 1, 5, 3), (0, 1, 0, 1)
# A longer window is made this short in both passes.
WINDOW = 4
# How far heads may be apart, as a share of the largest: with everything in float32, after one
# rounding to bfloat16, and with all of attention in bfloat16.
EXACT, ROUNDED, ROUGH = 1e-3, 0.05, 0.1


def _require_weights(policy: Policy) -> None:
    """Raise `ModelError` if a matrix holds nothing but zeros, as in a file that was cut."""
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
    what = f"Grouper's attention does not fit {type(policy.model).__name__}"
    with as_model_error(what, fix="Set model.attention: sdpa (or eager)."):
        _Comparison(policy).run()


@torch.no_grad()
def check_logits(policy: Policy) -> None:
    """Compare our logits of a few tokens with those that the model's own forward gives.

    Families do various things before and after their head, and one that we do not know would go
    unnoticed: sampler and trainer agree about it.

    Raises:
        ModelError: the two disagree; those of a token depend on the tokens after it; the model
            cannot be run, or its weights are not finite.
    """
    name, (shared, length) = type(policy.model).__name__, PROMPTS
    tokens = torch.arange(length, device=policy.device).repeat(2, 1)
    tokens[1, shared:] += length
    rows = {"input_ids": tokens % policy.vocabulary, "use_cache": False}
    with as_model_error(f"{name} cannot be run", fix="Use another model."), policy.autocast():
        theirs, body = accurate(policy.model(**rows).logits), policy.decoder(**rows)
    if not theirs.isfinite().all():
        _require_finite_weights(policy)
    if not theirs.any():
        _require_weights(policy)
    # Of the tokens that both rows share, the one that moves least: rounding may choose an expert.
    moved = float((theirs[0] - theirs[1])[:shared].abs().amax(-1).min() / theirs.abs().max())
    if moved > EXACT:
        raise ModelError(
            f"{name} sees the tokens after each token (its logits move by {moved:.2g} of their "
            "size), so it is not a causal language model",
            where="the model",
            fix="Name a model that continues text.",
        )
    # Llama 4 keeps its decoder in another place; what is called instead has no hidden states.
    hidden, share = getattr(body, "last_hidden_state", None), math.inf
    if hidden is not None and (ours := policy.logits(hidden)).shape == theirs.shape:
        share = float((ours - theirs).abs().max() / theirs.abs().max())
    if not share <= bound_of(policy):
        raise ModelError(
            f"Grouper's logits disagree with those of {name} (they differ by {share:.2g} of their "
            "size)",
            fix="They are not numbers: if training diverged, use an earlier checkpoint."
            if math.isnan(share)
            else "This version of Grouper cannot train the model: please report it.",
        )


def bound_of(policy: Policy) -> float:
    """How far results may be apart; below float32 only norms are computed in float32."""
    return EXACT if policy.products_dtype in {torch.float32, torch.float64} else ROUNDED


class _Comparison:
    """Both passes: the first is recorded, and each layer of the second compared with it.

    It is the layout of both (an `attention.Layout`).
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, device = policy, policy.device
        tokens = ((7919 * i + 11) % policy.vocabulary for i in count())
        texts = [list(islice(tokens, length)) for length in PROMPTS + COMPLETIONS]
        prompts, completions = texts[: len(PROMPTS)], texts[len(PROMPTS) :]
        self._layout = SharedPrompts(unweighted_rows(prompts, completions, OWNERS).to(device))
        rows = [prompts[owner] + text for owner, text in zip(OWNERS, completions, strict=True)]
        longest = max(map(len, rows))
        # Padding on the right of a row does not affect what is on its left.
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        columns = torch.arange(longest, device=device).expand_as(ids)
        masks = torch.ones_like(ids)
        self._rows = {"input_ids": ids, "attention_mask": masks, "position_ids": columns}
        # The place of each flat token of the layout in these rows: prompts, then completions, of
        # which the last token is no input.
        places = [(OWNERS.index(p), column) for p, n in enumerate(PROMPTS) for column in range(n)]
        for row, (owner, length) in enumerate(zip(OWNERS, COMPLETIONS, strict=True)):
            places += [(row, PROMPTS[owner] + column) for column in range(length - 1)]
        self._places = torch.tensor(places, device=device).unbind(1)
        self._recorded = False
        self._hidden: dict[nn.Module, Tensor] = {}
        self._made: dict[nn.Module, Tensor] = {}
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        """Layer -> queries, keys, values [R, H, L, D] and what came out [R, L, H, D]."""

    def run(self) -> None:
        """Run both passes; raises as `check_native_attention` does."""
        policy, layout = self._policy, self._layout
        with torch.no_grad(), short_windows(policy.model), self._hooks():
            with policy.native_attention(NAME), policy.autocast():
                output = policy.decoder(**self._rows, use_cache=False, layout=self)
            if not output.last_hidden_state.isfinite().all():
                _require_finite_weights(policy)
            self._recorded = True
            policy.hidden_states(self, layout.token_ids, layout.position_ids)

    def _flat(self, states: Tensor) -> Tensor:
        """[R, L, ...] of the rows as [1, N, ...] of the layout's flat tokens."""
        return states[self._places][None]

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """Layers leave here what they are given, or once all is recorded are given that.

        What they make of it must be the same then: a convolution or a recurrence in place of
        attention would run over the borders of sequences.
        """

        def exchange(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            by_name = "hidden_states" in options
            states = options.pop("hidden_states") if by_name else args[0]
            if not self._recorded:
                self._hidden[module] = states
            elif module in self._hidden:
                states = self._flat(self._hidden[module])
            return (states, *args[0 if by_name else 1 :]), options

        def compare(module: Any, _: Any, output: Any) -> None:
            made = accurate(output[0] if isinstance(output, tuple) else output)
            if not self._recorded:
                self._made[module] = made
            elif module in self._made:
                theirs = self._flat(self._made[module])
                what = f"results of {type(module).__name__}"
                gap = (made - theirs).abs()
                size, layer = theirs.abs().max(), module.layer_idx or 0
                self._require(gap, size, bound_of(self._policy), layer, what)

        with contextlib.ExitStack() as hooks:
            for module in self._policy.decoder.modules():
                if hasattr(module, "layer_idx"):
                    before = module.register_forward_pre_hook(exchange, with_kwargs=True)
                    hooks.enter_context(before)
                    hooks.enter_context(module.register_forward_hook(compare))
            yield

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        *heads, out = self.layers[spec.layer]
        # [1, H, N, D] of flat tokens.
        q, k, v, expected = (
            self._flat(rows).transpose(1, 2) for rows in (*(h.transpose(1, 2) for h in heads), out)
        )
        bound = bound_of(self._policy)
        for name, ours, theirs in (("queries", query, q), ("keys", key, k), ("values", value, v)):
            # Each dimension by itself: some turn with every position, others are a hundred times
            # as large and hardly turn at all.
            gap = (accurate(ours) - accurate(theirs)).abs().amax(2)
            size = accurate(theirs).abs().amax(2)
            self._require(gap, size, bound, spec.layer, name)
        size = expected.abs().max()
        with torch.autocast(query.device.type, enabled=False):
            exact = self._layout.attend(accurate(q), accurate(k), accurate(v), spec)
        self._require((exact - expected).abs(), size, EXACT, spec.layer, "results")
        # What runs in training may be another kernel; soft-capped scores are rounded themselves.
        if bound > EXACT and spec.softcap is None:
            rough = accurate(self._layout.attend(q, k, v, spec))
            gap = (rough - expected).abs()
            self._require(gap, size, ROUGH, spec.layer, "results in bfloat16")
        return expected.to(query.dtype)

    def _require(self, gap: Tensor, size: Tensor, bound: float, layer: int, what: str) -> None:
        share = float((gap / size.clamp(min=torch.finfo(size.dtype).tiny)).max())
        if not share <= bound:
            raise ModelError(
                "Grouper's attention disagrees with the eager attention of "
                f"{type(self._policy.model).__name__} in layer {layer} ({what} differ by "
                f"{share:.2g} of their size, allowed {bound:g})",
                fix="Set model.attention: sdpa (or eager), and please report the model.",
            )


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
    """The model's own eager attention in float32, which `layout` records."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    mask = None if attention_mask is None else accurate(attention_mask)
    with torch.autocast(query.device.type, enabled=False):
        out, _ = eager(module, *map(accurate, (query, key, value)), mask, **options)
    layout.layers[int(getattr(module, "layer_idx", 0))] = (query, key, value, out)
    return out.to(query.dtype), None


AttentionInterface.register(NAME, _eager)
AttentionMaskInterface.register(NAME, eager_mask)


@contextlib.contextmanager
def short_windows(model: nn.Module, longest: float = math.inf) -> Iterator[None]:
    """Sliding windows that a few tokens are longer than, wherever a model keeps their length.

    Args:
        model: its windows are restored afterwards.
        longest: tokens of a text; a window that no text is longer than stays as it is.
    """
    holders: dict[int, Any] = {
        id(holder): holder for m in model.modules() for holder in (m, getattr(m, "config", None))
    }
    held = {i: getattr(holder, "sliding_window", None) for i, holder in holders.items()}
    lengths = {i: n for i, n in held.items() if isinstance(n, int) and n < longest}
    try:
        for i, length in lengths.items():
            holders[i].sliding_window = min(length, WINDOW)
        yield
    finally:
        for i, length in lengths.items():
            holders[i].sliding_window = length


def _require_finite_weights(policy: Policy) -> None:
    """Raise `ModelError` if a weight is infinite or not a number, which no model file has."""
    for name, weight in policy.model.named_parameters():
        bad = int((~torch.isfinite(weight)).sum())
        if bad:
            raise ModelError(
                f"{bad:,} of {weight.numel():,} numbers of the weight {name} are infinite or "
                "not a number",
                where=str(policy.model.config._name_or_path),  # noqa: SLF001 - where it is from
                fix="The model file is damaged, or its training diverged: get it again, or use "
                "an earlier checkpoint.",
            )
