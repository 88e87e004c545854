"""The cache against plain attention over what each sequence has really seen."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_models import make_prompt, tiny_model
from torch import Tensor

from grouper.models.attention import AttentionSpec
from grouper.models.policy import Policy
from grouper.sampling import engines
from grouper.sampling.engines import SlotEngine
from grouper.sampling.layouts import Decode, Groups, Prefill
from grouper.sampling.slots import GROWTH, SlotCache

HEADS, GROUP, DIM = 2, 3, 4
CPU = torch.device("cpu")


def spec(window: int | None = None, softcap: float | None = None) -> AttentionSpec:
    return AttentionSpec(layer=0, scaling=0.4, window=window, softcap=softcap)


class Row:
    """One sequence and everything it was given, prompt first: [tokens, Hkv, D] each."""

    def __init__(self, place: int, keys: Tensor, values: Tensor) -> None:
        self.place = place
        self.prompt = keys.shape[0]
        self.keys, self.values = keys, values

    def add(self, key: Tensor, value: Tensor) -> None:
        self.keys = torch.cat([self.keys, key[None]])
        self.values = torch.cat([self.values, value[None]])

    @property
    def written(self) -> int:
        return self.keys.shape[0] - self.prompt


def plain_attention(row: Row, query: Tensor, what: AttentionSpec) -> Tensor:
    """[Hq, D] by the book: every head, every key, one after the other."""
    heads = []
    for head in range(query.shape[0]):
        keys, values = row.keys[:, head // GROUP], row.values[:, head // GROUP]
        scores = (keys @ query[head]) * what.scaling
        if what.softcap is not None:
            scores = torch.tanh(scores / what.softcap) * what.softcap
        if what.window is not None:
            scores[: max(0, len(scores) - what.window)] = -torch.inf
        heads.append(scores.softmax(0) @ values)
    return torch.stack(heads)


class Simulation:
    """Sequences that begin, write and end, in the cache and beside it."""

    def __init__(self, slots: int, lengths: list[int], completion: int) -> None:
        self.cache = SlotCache(slots, max(lengths), completion)
        self.lengths = lengths
        self.rows: list[Row] = []
        self.cache.make_room(len(lengths))
        total = sum(lengths)
        keys, values = (torch.randn(1, HEADS, total, DIM).double() for _ in range(2))
        prompts = [tuple(range(n)) for n in lengths]
        layout = Prefill(self.cache, prompts, torch.arange(len(lengths)))
        layout.attend(torch.randn(1, HEADS * GROUP, total, DIM).double(), keys, values, spec())
        self.prompts = [
            (k.transpose(0, 1), v.transpose(0, 1))
            for k, v in zip(keys[0].split(lengths, 1), values[0].split(lengths, 1), strict=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        ]

    def begin(self, slot: int, place: int) -> None:
        fresh = Row(place, *self.prompts[place])
        if slot == len(self.rows):
            self.rows.append(fresh)
        else:
            self.rows[slot] = fresh

    def step(self, what: AttentionSpec) -> None:
        """One token everywhere; every row's attention is what plain attention gives."""
        count = len(self.rows)
        query = torch.randn(1, HEADS * GROUP, count, DIM).double()
        key, value = (torch.randn(1, HEADS, count, DIM).double() for _ in range(2))
        self.cache.turn(max(row.written for row in self.rows))
        for i, row in enumerate(self.rows):
            row.add(key[0, :, i], value[0, :, i])
        groups = Groups([row.place for row in self.rows], len(self.lengths), CPU)
        lengths = [row.written for row in self.rows]
        out = Decode(self.cache, groups, lengths, self.lengths, CPU).attend(query, key, value, what)
        for i, row in enumerate(self.rows):
            expected = plain_attention(row, query[0, :, i], what)
            torch.testing.assert_close(out[0, :, i], expected, rtol=1e-12, atol=1e-12)

    def keep(self, slots: list[int]) -> None:
        self.rows = [self.rows[slot] for slot in slots]
        places = sorted({row.place for row in self.rows})
        self.cache.keep(slots, places, max(row.written for row in self.rows))
        self.lengths = [self.lengths[place] for place in places]
        self.prompts = [self.prompts[place] for place in places]
        for row in self.rows:
            row.place = places.index(row.place)


CASES = {
    "plain": spec(),
    "window-in-the-prompt": spec(window=9),
    "window-within-the-completion": spec(window=2),
    "softcap": spec(softcap=0.7),
    "both": spec(window=7, softcap=0.7),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 6, 3]], ids=["equal", "ragged"])
@torch.no_grad()
def test_every_row_sees_its_prompt_and_what_it_wrote(name: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    one = Simulation(6, lengths, completion=9)
    for slot, place in enumerate([0, 0, 1, 1, 2, 2]):
        one.begin(slot, place)
    one.step(CASES[name])
    one.begin(3, 0)  # groups of different sizes, in no order
    for _ in range(3):
        one.step(CASES[name])
    one.keep([4, 1, 3])
    for _ in range(4):
        one.step(CASES[name])


@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_rings_that_wrap_grow_and_shrink(seed: int) -> None:
    """Sequences of any age, written over one another for much longer than the ring is."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    one = Simulation(4, [2, 3], completion=3 * GROWTH)
    for slot in range(4):
        one.begin(slot, chance.randrange(len(one.prompts)))
    widths = set()
    for number in range(5 * GROWTH):
        one.step(CASES["plain"])
        widths.add(one.cache.width)
        for slot, row in enumerate(one.rows):
            longest = 2 * GROWTH if slot == 0 else GROWTH // 2
            if row.written >= longest or chance.random() < 0.02 * (slot > 0):
                one.begin(slot, chance.randrange(len(one.prompts)))
        if number == 4 * GROWTH:
            one.begin(0, 0)
            one.step(CASES["plain"])
            one.keep([0, 2])
            assert one.cache.width == GROWTH
    assert widths == {GROWTH, 2 * GROWTH}


@torch.no_grad()
def test_half_precision_is_as_near_as_its_rounding() -> None:
    torch.manual_seed(0)
    cache = SlotCache(4, 6, 8)
    cache.make_room(1)
    key, value = (torch.randn(1, HEADS, 6, DIM).bfloat16() for _ in range(2))
    query = torch.randn(1, HEADS * GROUP, 6, DIM).bfloat16()
    Prefill(cache, [tuple(range(6))], torch.tensor([0])).attend(query, key, value, spec())
    new_key, new_value = (torch.randn(1, HEADS, 4, DIM).bfloat16() for _ in range(2))
    query = torch.randn(1, HEADS * GROUP, 4, DIM).bfloat16()
    cache.turn(0)
    layout = Decode(cache, Groups([0] * 4, 1, CPU), [1] * 4, [6], CPU)
    out = layout.attend(query, new_key, new_value, spec())
    for i in range(4):
        row = Row(0, key[0].transpose(0, 1).float(), value[0].transpose(0, 1).float())
        row.add(new_key[0, :, i].float(), new_value[0, :, i].float())
        expected = plain_attention(row, query[0, :, i].float(), spec())
        torch.testing.assert_close(out[0, :, i].float(), expected, rtol=0.02, atol=0.02)


@torch.no_grad()
def test_a_prompt_is_run_once_while_somebody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, ...]] = []
    plain = Prefill

    def counted(cache: SlotCache, prompts: list[tuple[int, ...]], places: Tensor) -> Prefill:
        ran.extend(prompts)
        return plain(cache, prompts, places)

    monkeypatch.setattr(engines, "Prefill", counted)
    engine = SlotEngine(Policy(tiny_model("qwen3")), slots=2, prompt=8, completion=4)
    a, b, c = (make_prompt(i).token_ids for i in range(3))
    first = engine.prefill([a, b], [0, 1], [0, 1])
    engine.decode(torch.tensor([5, 6]), torch.tensor([len(a), len(b)]))
    again = engine.prefill([a], [1], [0])
    torch.testing.assert_close(again[0], first[0])
    assert ran == [a, b]
    engine.close(1)
    engine.prefill([c], [1], [0])
    assert ran == [a, b, c], "b was read by nobody any more"
    engine.prefill([b], [0], [0])
    assert ran == [a, b, c, b]
