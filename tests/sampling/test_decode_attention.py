"""Attention of a decode step, plain and by kernels, against attention by the book."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grouper.kernels.cpu.library import library
from grouper.kernels.switch import planned
from grouper.kernels.triton.language import AVAILABLE
from grouper.models.attention import AttentionSpec
from grouper.sampling import decode_attention as decode_attention_module
from grouper.sampling.decode_attention import (
    Attend,
    DecodeState,
    by_triton,
    compiled,
    decode_attention,
    kernel_for,
    plain,
)
from grouper.sampling.kv_cache import LayerCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS_TRITON = pytest.mark.skipif(
    not AVAILABLE,
    reason="Triton is not installed (pip install triton; 280 MB, Linux)",
)


class Situation:
    """A random cache: ragged prompts, groups of any size, rings that have wrapped."""

    def __init__(
        self, seed: int, *, share: int, dim: int, heads: int = 2, dtype: torch.dtype = torch.float32
    ) -> None:
        make = torch.Generator().manual_seed(seed)

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=make))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make).to(DEVICE, dtype)

        self.rows, places = number(1, 6), number(1, 3)
        width, prompt_width = number(3, 150), number(1, 150)
        self.query = normal(heads * share, self.rows, dim).transpose(0, 1)
        self.new = (normal(self.rows, heads, dim), normal(self.rows, heads, dim))
        self.prompts = (
            normal(places, heads, prompt_width, dim),
            normal(places, heads, prompt_width, dim),
        )
        # More slots than rows: those behind must not be touched.
        slots = self.rows + 1
        self.own = (normal(slots, heads, width, dim), normal(slots, heads, width, dim))
        owners = [number(0, places - 1) for _ in range(self.rows)]
        size = max(owners.count(place) for place in owners) + number(0, 1)
        members = [[row for row, owner in enumerate(owners) if owner == p] for p in range(places)]
        self.state = DecodeState(
            column=torch.tensor([number(0, width - 1)]).to(DEVICE),
            lengths=torch.tensor([number(1, width) for _ in owners]).to(DEVICE),
            owners=torch.tensor(owners).to(DEVICE),
            prompt_lengths=torch.tensor([number(1, prompt_width) for _ in range(places)]).to(
                DEVICE
            ),
            members=torch.tensor([m + [-1] * (size - len(m)) for m in members]).to(DEVICE),
        )

    def expected(self, spec: AttentionSpec) -> Tensor:
        """[rows, Hq, D] in float64, one row, head and key after the other."""
        state, width = self.state, self.own[0].shape[2]
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        share = self.query.shape[1] // self.new[0].shape[1]
        for row in range(self.rows):
            place, length = int(state.owners[row]), int(state.lengths[row])
            ring = [(int(state.column) - age) % width for age in range(length - 1, 0, -1)]
            keys, values = (
                torch.cat(
                    [
                        shared[place, :, : int(state.prompt_lengths[place])],
                        own[row][:, ring],
                        new[row][:, None],
                    ],
                    1,
                )
                .double()
                .cpu()
                for shared, own, new in zip(self.prompts, self.own, self.new, strict=True)
            )
            for head in range(self.query.shape[1]):
                scores = keys[head // share] @ self.query[row, head].double().cpu() * spec.scaling
                if spec.softcap is not None:
                    scores = torch.tanh(scores / spec.softcap) * spec.softcap
                if spec.window is not None:
                    scores[: max(0, len(scores) - spec.window)] = -torch.inf
                out[row, head] = scores.softmax(0) @ values[head // share]
        return out


def spec_of(kind: str) -> AttentionSpec:
    window = {"window": 5, "both": 40}.get(kind)
    softcap = {"softcap": 2.0, "both": 1.0}.get(kind)
    return AttentionSpec(layer=0, scaling=0.3, window=window, softcap=softcap)


def check(attend: Attend, one: Situation, spec: AttentionSpec, tolerance: float) -> None:
    expected = one.expected(spec)
    untouched = one.own[0][one.rows :].clone()
    out = attend(one.query, one.new, LayerCache(one.prompts, one.own), one.state, spec)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    column = int(one.state.column)
    for ring, new in zip(one.own, one.new, strict=True):
        assert torch.equal(ring[: one.rows, :, column], new), "the new token is in the ring"
    assert torch.equal(one.own[0][one.rows :], untouched)


@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "both"])
@pytest.mark.parametrize("share", [1, 2, 7])
def test_plain_decoding_is_attention_by_the_book(kind: str, share: int) -> None:
    for seed in range(6):
        check(plain, Situation(seed, share=share, dim=16), spec_of(kind), 1e-5)
        half = Situation(seed, share=share, dim=16, dtype=torch.bfloat16)
        check(plain, half, spec_of(kind), 0.03)


def test_a_row_that_continues_no_prompt_is_finite_and_changes_no_other() -> None:
    """What it leaves in the ring is masked later, and 0 times what is no number is none, either."""
    one, spec = Situation(5, share=2, dim=16), spec_of("plain")
    cache = LayerCache(one.prompts, one.own)
    whole = plain(one.query, one.new, cache, one.state, spec)
    left_out = one.state.members.masked_fill(one.state.members == 1, -1)
    out = plain(one.query, one.new, cache, replace(one.state, members=left_out), spec)
    assert one.rows > 2
    assert bool(out.isfinite().all())
    others = [row for row in range(one.rows) if row != 1]
    assert torch.equal(out[others], whole[others])


@pytest.mark.skipif(library() is None or DEVICE.type != "cpu", reason="no compiled kernels")
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "both"])
@pytest.mark.parametrize("share", [1, 7])
def test_the_compiled_kernel_is_attention_by_the_book(kind: str, share: int, dim: int) -> None:
    for seed in range(4):
        one = Situation(seed, share=share, dim=dim)
        assert kernel_for(one.own[0]) is compiled
        check(compiled, one, spec_of(kind), 5e-5)
        half = Situation(seed, share=share, dim=dim, dtype=torch.bfloat16)
        check(decode_attention, half, spec_of(kind), 0.03)


@NEEDS_TRITON
@pytest.mark.parametrize(
    "dim", [64, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (128, 256))]
)
@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "both"])
@pytest.mark.parametrize("share", [1, 2, 7])
def test_the_kernel_is_attention_by_the_book(kind: str, share: int, dim: int) -> None:
    # Scores grow with the dimension; their rounding in float32 does, too.
    for seed in range(2):
        check(by_triton, Situation(seed, share=share, dim=dim), spec_of(kind), 5e-5)


@NEEDS_TRITON
def test_a_dimension_that_is_no_power_of_two() -> None:
    check(by_triton, Situation(0, share=3, dim=80), spec_of("both"), 5e-5)


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.parametrize("share", [1, 7])
def test_the_kernel_in_half_precision(share: int) -> None:
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    for seed in range(4):
        one = Situation(seed, share=share, dim=64, dtype=dtype)
        check(by_triton, one, spec_of("plain"), 0.03)


@pytest.mark.slow
@NEEDS_TRITON
def test_large_groups_are_cut_into_tiles() -> None:
    one = Situation(0, share=7, dim=64)
    rows = 23
    one.rows = rows
    one.query = torch.randn(rows, 14, 64, device=DEVICE)
    one.new = (torch.randn(rows, 2, 64, device=DEVICE), torch.randn(rows, 2, 64, device=DEVICE))
    width = one.own[0].shape[2]
    one.own = (
        torch.randn(rows + 1, 2, width, 64, device=DEVICE),
        torch.randn(rows + 1, 2, width, 64, device=DEVICE),
    )
    places = one.prompts[0].shape[0]
    members = torch.full((places, rows + 3), -1, device=DEVICE)
    members[0, :rows] = torch.arange(rows)
    one.state = DecodeState(
        column=one.state.column,
        lengths=torch.arange(rows, device=DEVICE) % width + 1,
        owners=torch.zeros(rows, dtype=torch.long, device=DEVICE),
        prompt_lengths=one.state.prompt_lengths,
        members=members,
    )
    check(by_triton, one, spec_of("plain"), 5e-5)


def test_each_kernel_is_offered_only_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    one, half = torch.empty(1), torch.empty(1, dtype=torch.bfloat16, device="meta")
    assert kernel_for(one) is (None if library() is None else compiled)
    assert kernel_for(one.double()) is None
    with planned("cuda"):
        monkeypatch.delenv("GROUPER_KERNELS", raising=False)
        assert kernel_for(half) is by_triton
        assert kernel_for(half.double()) is None
        monkeypatch.setenv("GROUPER_KERNELS", "0")
        assert kernel_for(half) is None
    monkeypatch.setattr(decode_attention_module, "library", lambda: None)
    assert kernel_for(one) is None
