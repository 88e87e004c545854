"""Attention over the slot cache: what a prompt leaves there, and one new token a slot.

Both are layouts (`attention.Layout`) and travel through the model's own code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grouper.kernels.cpu import ops
from grouper.kernels.cpu.attention import FLASH
from grouper.kernels.switch import is_running
from grouper.models.attention import AttentionSpec, attend, gather_heads
from grouper.sampling.slots import Layer, SlotCache

HALVES = frozenset({torch.bfloat16, torch.float16})
"""Scores of these dtypes come fastest on the CPU with the keys on the left, in float32 with the
queries there: up to twice, at 64 to 128 keys."""


class Prefill:
    """P prompts as one flat row, whose keys and values are kept for the slots that continue them.

    Args:
        cache: where to write.
        prompts: the token ids of each prompt.
        entries: [P] the place of each in the cache.
    """

    def __init__(self, cache: SlotCache, prompts: list[tuple[int, ...]], entries: Tensor) -> None:
        device = entries.device
        self._cache = cache
        self._entries = entries
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        columns = torch.arange(int(lengths.max()), device=device)
        live = columns < lengths[:, None]
        start = lengths.cumsum(0) - lengths
        self.token_ids = torch.tensor([[t for p in prompts for t in p]], device=device)
        """[1, N]."""
        self.position_ids = columns.expand_as(live)[live][None]
        """[1, N]."""
        self.last = start + lengths - 1
        """[P]: the flat index of each prompt's last token."""
        self._gather = start[:, None] + columns * live
        self._scatter = live.reshape(-1).nonzero().flatten()
        self._columns = columns

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        queries, keys, values = (gather_heads(t, self._gather) for t in (query, key, value))
        width = keys.shape[2]
        for store, block in zip(
            self._cache.layer(spec.layer, keys, values).prompts, (keys, values), strict=True
        ):
            store.data[self._entries, :, :width] = block.to(store.data.dtype)
        mask = None
        if spec.window is not None:
            distance = self._columns[:, None] - self._columns
            mask = ((distance >= 0) & (distance < spec.window))[None, None]
        blocks = attend(queries, keys, values, mask, spec)
        heads, dim = blocks.shape[1], blocks.shape[3]
        flat = blocks.transpose(0, 1).reshape(heads, -1, dim)
        return flat.index_select(1, self._scatter)[None]


class Groups:
    """Rows by the prompt they continue, padded to the largest group.

    Args:
        owners: the prompt of each row.
        count: prompts.
        device: of the model.
    """

    def __init__(self, owners: Sequence[int], count: int, device: torch.device) -> None:
        members: list[list[int]] = [[] for _ in range(count)]
        for row, owner in enumerate(owners):
            members[owner].append(row)
        self.count = count
        self.owners = torch.tensor(owners, device=device)
        self._size = size = max(map(len, members))
        places = [owner * size + members[owner].index(row) for row, owner in enumerate(owners)]
        self._regular = places == list(range(count * size))
        """Rows come group by group, all groups of one size: nothing needs to be moved."""
        padded = [row for rows in members for row in (*rows, *([0] * (size - len(rows))))]
        self._padded = torch.tensor(padded, device=device)
        self._places = torch.tensor(places, device=device)

    def grouped(self, rows: Tensor) -> Tensor:
        """[rows, H, Q, X] -> [count, H, size * Q, X]."""
        if not self._regular:
            rows = rows.index_select(0, self._padded)
        _, heads, queries, width = rows.shape
        blocks = rows.view(self.count, self._size, heads, queries, width).transpose(1, 2)
        return blocks.reshape(self.count, heads, self._size * queries, width)

    def rows(self, blocks: Tensor) -> Tensor:
        """[count, H, size * Q, X] -> [rows, H, Q, X]."""
        _, heads, queries, width = blocks.shape
        apart = blocks.view(self.count, heads, self._size, queries // self._size, width)
        rows = apart.transpose(1, 2).flatten(0, 1)
        return rows if self._regular else rows.index_select(0, self._places)


class Decode:
    """One new token in each of the first rows.

    The compiled kernel makes one softmax over a row's prompt and its own columns. Without it there
    are two, and the first one's log-sum-exp takes part in the second like the score of one more key
    (as in cascade inference, Ye et al., 2024, and FlashAttention's merging of blocks).

    Args:
        cache: where to read and append; it has been turned to the column of this step.
        groups: the prompts that the rows continue.
        lengths: completion tokens of each row, this step's included.
        prompt_lengths: tokens of each prompt, by its place in the cache.
        device: of the model.
    """

    def __init__(
        self,
        cache: SlotCache,
        groups: Groups,
        lengths: Sequence[int],
        prompt_lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._prompt_lengths = torch.tensor(prompt_lengths, device=device)
        self._whole_prompts = min(prompt_lengths) == cache.prompt_columns
        self._lengths = torch.tensor(lengths, device=device)
        self._column = torch.tensor([cache.column], device=device)
        self._biases: dict[tuple[str, int | None, int], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """As `Layout.attend`, the N flat tokens being one per row."""
        layer = self._cache.layer(spec.layer, key, value)
        own = (layer.own[0].data, layer.own[1].data)
        rows, heads, dim, dtype = key.shape[2], key.shape[1], query.shape[3], own[0].dtype
        new = (key[0].transpose(0, 1).to(dtype), value[0].transpose(0, 1).to(dtype))
        # Grouped query heads are folded into the query length: keys are read once per key head.
        folded = query[0].transpose(0, 1).reshape(rows, heads, -1, dim).to(dtype)
        prompts = (layer.prompts[0].data, layer.prompts[1].data)
        if is_running() and ops.decode_serves(folded, new, own, prompts):
            out = ops.decode(
                *(folded, new, own, prompts),
                (self._lengths, self._groups.owners, self._prompt_lengths),
                column=self._column,
                window=spec.window,
                scaling=spec.scaling,
                softcap=spec.softcap,
            )
        else:
            for store, block in zip(own, new, strict=True):
                store[:rows, :, self._cache.column] = block
            before = self._over_prompts(folded, layer, spec)
            out = self._over_own(folded, (own[0][:rows], own[1][:rows]), before, spec)
        return out.reshape(rows, -1, value.shape[3]).transpose(0, 1)[None]

    def _over_own(
        self,
        query: Tensor,
        own: tuple[Tensor, Tensor],
        prompts: tuple[Tensor, Tensor],
        spec: AttentionSpec,
    ) -> Tensor:
        """Attention over the rows' own keys and values, merged with that over their prompts."""
        (keys, values), (before, weight) = own, prompts
        scores = _products(query, keys)
        accurate = torch.float64 if scores.dtype == torch.float64 else torch.float32
        merged = scores.new_empty((*scores.shape[:3], scores.shape[3] + 1), dtype=accurate)
        merged[..., :1] = weight
        rest = merged[..., 1:]
        rest.copy_(scores).mul_(spec.scaling)
        if spec.softcap is not None:
            rest.div_(spec.softcap).tanh_().mul_(spec.softcap)
        rest.add_(self._own_bias(spec.window, accurate))
        shares = merged.softmax(-1).to(keys.dtype)
        return _mixed(shares[..., 1:], values).addcmul_(shares[..., :1], before)

    def _over_prompts(
        self, query: Tensor, layer: Layer, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attention over the prompts [rows, H, Q, D] and its log-sum-exp [rows, H, Q, 1]."""
        keys, values = (store.data[: self._groups.count] for store in layer.prompts)
        grouped = self._groups.grouped(query)
        out, weight = _attend(grouped, keys, values, self._prompt_bias(query, spec.window), spec)
        return self._groups.rows(out), self._groups.rows(weight)

    def _prompt_bias(self, query: Tensor, window: int | None) -> Tensor | None:
        """[prompts, 1, 1 or queries of a group, prompt columns]: 0 or, where unseen, -infinity."""
        if window is None and self._whole_prompts:
            return None
        queries = query.shape[2]
        if ("prompt", window, queries) not in self._biases:
            columns = torch.arange(self._cache.prompt_columns, device=query.device)
            seen = (columns < self._prompt_lengths[:, None])[:, None, None]
            if window is not None:
                place = self._prompt_lengths[self._groups.owners] + self._lengths - 1
                near = (place[:, None] - columns < window)[:, None, None]
                seen = seen & self._groups.grouped(near.expand(-1, -1, queries, -1))
            self._biases["prompt", window, queries] = _bias(seen, query.dtype)
        return self._biases["prompt", window, queries]

    def _own_bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[rows, 1, 1, width]."""
        if ("own", window, 0) not in self._biases:
            ages = self._cache.ages(self._lengths.device)
            seen = ages < self._lengths[:, None]
            if window is not None:
                seen = seen & (ages < window)
            self._biases["own", window, 0] = _bias(seen, dtype)[:, None, None]
        return self._biases["own", window, 0]


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Attention [n, H, Q, D] and log-sum-exp [n, H, Q, 1] of its scaled scores."""
    plain = spec.softcap is None and spec.window is None
    if plain and query.device.type == "cpu":
        out, weight = FLASH(query, key, value, attn_mask=bias, scale=spec.scaling)
        return out, weight[..., None]
    scores = _products(query, key)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if bias is not None:
        scores = scores + bias
    # A prompt that has left the window weighs nothing, and -infinity less itself is no number.
    weight = scores.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min / 2)
    return _mixed((scores - weight).exp().to(value.dtype), value), weight


def _products(query: Tensor, key: Tensor) -> Tensor:
    """[n, H, Q, K] of queries [n, H, Q, D] and keys [n, H, K, D]."""
    rows, heads, _, _ = query.shape
    query, key = query.flatten(0, 1), key.flatten(0, 1)
    if query.dtype in HALVES:
        out = torch.bmm(key, query.transpose(1, 2)).transpose(1, 2)
    else:
        out = torch.bmm(query, key.transpose(1, 2))
    return out.view(rows, heads, *out.shape[1:])


def _mixed(weights: Tensor, value: Tensor) -> Tensor:
    """[n, H, Q, D]: sums of values [n, H, K, D] with weights [n, H, Q, K]."""
    rows, heads, _, _ = weights.shape
    weights, value = weights.flatten(0, 1), value.flatten(0, 1)
    out = torch.bmm(weights, value)
    return out.view(rows, heads, *out.shape[1:])
