"""The cache against plain attention over what each sequence has really seen."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_models import make_prompt, tiny_model
from torch import Tensor
from transformers import AutoConfig

from grouper.advice.plan import ModelMemory
from grouper.config.schema import ModelConfig
from grouper.models.attention import AttentionSpec
from grouper.models.loading import weightless_policy
from grouper.models.policy import Policy
from grouper.sampling import engine as engine_module
from grouper.sampling import kv_cache
from grouper.sampling.base import SampleRequest
from grouper.sampling.decode_attention import Decode, DecodeState, Prefill
from grouper.sampling.engine import Engine, OpByOp
from grouper.sampling.kv_cache import CacheSize, KVCache, fitting_size, slots_that_fit
from grouper.types import SamplingParams

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

    def __init__(self, slots: int, lengths: list[int], completion: int, width: int = 4) -> None:
        size = CacheSize(slots, len(lengths), max(lengths), completion)
        self.cache = KVCache(size, width, CPU)
        self.lengths = lengths
        self.rows: list[Row] = []
        self.cache.make_places(len(lengths))
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
        self.cache.make_columns(max(row.written for row in self.rows) + 1)
        self.cache.column.add_(1).remainder_(self.cache.width)
        for i, row in enumerate(self.rows):
            row.add(key[0, :, i], value[0, :, i])
        owners = [row.place for row in self.rows]
        state = DecodeState(
            column=self.cache.column,
            lengths=torch.tensor([row.written for row in self.rows]),
            owners=torch.tensor(owners),
            prompt_lengths=torch.tensor(self.lengths),
            members=members_of(owners, len(self.lengths)),
        )
        out = Decode(self.cache, state).attend(query, key, value, what)
        for i, row in enumerate(self.rows):
            expected = plain_attention(row, query[0, :, i], what)
            torch.testing.assert_close(out[0, :, i], expected, rtol=1e-12, atol=1e-12)

    def compact(self, slots: list[int]) -> None:
        self.rows = [self.rows[slot] for slot in slots]
        self.cache.compact(slots)


def members_of(owners: list[int], places: int) -> Tensor:
    groups = [[row for row, owner in enumerate(owners) if owner == p] for p in range(places)]
    size = max(map(len, groups))
    return torch.tensor([group + [-1] * (size - len(group)) for group in groups])


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
    one.compact([4, 1, 3])
    for _ in range(4):
        one.step(CASES[name])


@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_rings_that_wrap_and_grow(seed: int) -> None:
    """Sequences of any age, written over one another for much longer than the ring is."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    one = Simulation(4, [2, 3], completion=96, width=32)
    for slot in range(4):
        one.begin(slot, chance.randrange(len(one.prompts)))
    widths = set()
    for number in range(160):
        one.step(CASES["plain"])
        widths.add(one.cache.width)
        for slot, row in enumerate(one.rows):
            longest = 64 if slot == 0 else 16
            if row.written >= longest or chance.random() < 0.02 * (slot > 0):
                one.begin(slot, chance.randrange(len(one.prompts)))
        if number == 128:
            one.compact([0, 2])
    assert widths == {32, 64}


def test_a_ring_is_never_wider_than_the_longest_completion() -> None:
    cache = KVCache(CacheSize(1, 1, 1, 40), 512, CPU)
    assert cache.width == 40
    narrow = KVCache(CacheSize(1, 1, 1, 40), 32, CPU)
    widths = []
    for longest in (32, 33, 1000):
        narrow.make_columns(longest)
        widths.append(narrow.width)
    assert widths == [32, 40, 40]


def test_places_double_and_stop_at_all_prompts() -> None:
    cache = KVCache(CacheSize(8, 5, 1, 1), 1, CPU)
    grown = []
    for prompts in (1, 2, 3, 5, 5):
        cache.make_places(prompts)
        grown.append(cache.places)
    assert grown == [1, 2, 4, 5, 5]


QWEN = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 4,  # of 28: every layer takes as much
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
}


@pytest.fixture(scope="module")
def planned_model() -> ModelMemory:
    """The shape of Qwen2.5-1.5B in bfloat16, but for its depth."""
    config = ModelConfig(path="x", dtype="bfloat16", compute_dtype="bfloat16")
    return ModelMemory(config, weightless_policy(config, AutoConfig.for_model(**QWEN)), "cuda")


@pytest.mark.parametrize(("prompt", "completion"), [(256, 64), (256, 4096), (2048, 64)])
def test_never_more_slots_than_the_plan_says(
    planned_model: ModelMemory, prompt: int, completion: int
) -> None:
    """For the same free memory, whatever a plan has beside weights."""
    size = CacheSize(256, 32, prompt, completion)
    policy = planned_model._policy

    def planned(slots: int) -> int:
        prompts = -(-slots // 8)
        part = planned_model.sampling(
            "sample", CacheSize(slots, prompts, prompt, completion), together=prompts
        )
        return part.peak - part.weights

    assert slots_that_fit(policy, size, 0) == 1
    assert slots_that_fit(policy, size, 1 << 33) == 256, "and not much fewer"
    for free in (1 << 28, 1 << 29, 1 << 31):
        slots = slots_that_fit(policy, size, free)
        assert slots == 1 or planned(slots) <= free


def test_only_a_gpu_bounds_the_slots(
    planned_model: ModelMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, size = planned_model._policy, CacheSize(256, 32, 256, 4096)
    assert fitting_size(policy, size) is size
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 2 << 30)
    bounded = fitting_size(policy, size)
    assert bounded.slots == slots_that_fit(policy, size, 2 << 30) < 256
    assert bounded[1:] == (min(32, bounded.slots), 256, 4096)
    monkeypatch.setattr(policy, "reserved_bytes", 1 << 30)
    reserved = fitting_size(policy, size)
    assert reserved.slots == slots_that_fit(policy, size, 1 << 30) < bounded.slots


def test_the_size_is_that_of_the_requests() -> None:
    asked = [
        SampleRequest(
            prompt=make_prompt(number, 3 + number),
            params=SamplingParams(max_new_tokens=5 + sample),
            key=0,
        )
        for number in range(3)
        for sample in range(8)
    ]
    assert CacheSize.of(asked, 12) == (12, 3, 5, 12)
    assert CacheSize.of(asked, 2) == (2, 2, 5, 12)


@torch.no_grad()
def test_long_prompts_are_run_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, from less memory."""
    asked = [ask(number) for number in range(5)]
    logits, sizes = [], []
    plain = Policy.hidden_states

    def counted(policy: Policy, layout: Any, token_ids: Tensor, positions: Tensor) -> Tensor:
        sizes.append(token_ids.shape[1])
        return plain(policy, layout, token_ids, positions)

    monkeypatch.setattr(Policy, "hidden_states", counted)
    for most in (1 << 14, 11):
        monkeypatch.setattr(kv_cache, "PREFILL_TOKENS", most)
        engine = Engine(Policy(tiny_model("qwen3")), CacheSize(5, 5, 5, 4), [2], OpByOp())
        engine.begin(asked)
        prompts = [request.prompt.token_ids for request in asked]
        logits.append(engine._prefill(prompts, range(5), range(5)))
    torch.testing.assert_close(logits[1], logits[0])
    assert sizes == [25, 10, 10, 5]


@torch.no_grad()
def test_a_prompt_is_run_once_while_somebody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, ...]] = []
    plain = Prefill

    def counted(
        cache: KVCache, prompts: list[tuple[int, ...]], places: Tensor, **sizes: int
    ) -> Prefill:
        ran.extend(prompts)
        return plain(cache, prompts, places, **sizes)

    monkeypatch.setattr(engine_module, "Prefill", counted)
    engine = Engine(Policy(tiny_model("qwen3")), CacheSize(2, 2, 8, 4), [2], OpByOp())
    a, b, c = (ask(i) for i in range(3))
    engine.begin([a, b])
    engine.admit([a, b], [0, 1])
    engine.advance(1, 1)
    engine.free([1])
    engine.admit([a], [1])
    assert ran == [a.prompt.token_ids, b.prompt.token_ids]
    engine.free([1])
    engine.admit([c], [1])
    assert ran[2:] == [c.prompt.token_ids], "b was read by nobody any more"
    engine.free([0])
    engine.admit([b], [0])
    assert ran[3:] == [b.prompt.token_ids]
    engine.begin([a])
    engine.admit([a], [0])
    assert ran[4:] == [a.prompt.token_ids], "the weights may have changed"


def ask(number: int) -> SampleRequest:
    return SampleRequest(
        prompt=make_prompt(number), params=SamplingParams(max_new_tokens=4), key=number
    )
