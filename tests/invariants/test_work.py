"""How much work a step does, counted: what grows is what must grow, and shared prompts once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tiny_models import LetterTokenizer, make_group, make_prompt, one_step, tiny_model

from grouper.algorithms.batching import TrainBatch, micro_batches
from grouper.config.schema import GRPOConfig
from grouper.kernels.cpu import graph
from grouper.models.policy import Policy
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.engine import BaseEngine, CpuGraphs, Engine, OpByOp, make_engine
from grouper.sampling.kv_cache import CacheSize
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import accumulate_gradient, grpo_objective
from grouper.types import SamplingParams


@pytest.fixture(autouse=True)
def _nothing_is_played_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is played back runs no module that could be counted; here it runs again."""

    def record(step: Callable[[], None], weights: object) -> Callable[[], None]:
        del weights
        step()
        return step

    monkeypatch.setattr(graph, "record", record)


@contextlib.contextmanager
def counted(policy: Policy) -> Iterator[Counter[str]]:
    """Rows that pass through each linear layer of the decoder, and through the head's module."""
    rows: Counter[str] = Counter()

    def watch(name: str, module: torch.nn.Linear) -> Any:
        def count(_: object, arguments: tuple[torch.Tensor, ...]) -> None:
            rows[name] += arguments[0].numel() // module.in_features

        return module.register_forward_pre_hook(count)

    handles = [
        watch(name, module)
        for name, module in policy.model.named_modules()
        if name.endswith(("q_proj", "k_proj", "o_proj", "down_proj", "lm_head"))
    ]
    yield rows
    for handle in handles:
        handle.remove()


def op_by_op(policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> BaseEngine:
    return Engine(policy, size, stop_ids, OpByOp())


def recorded(policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> BaseEngine:
    return Engine(policy, size, stop_ids, CpuGraphs(policy.model))


def in_layers(rows: Counter[str]) -> int:
    """Tokens run: every linear layer of every layer saw as many."""
    found = {count for name, count in rows.items() if name != "lm_head"}
    assert len(found) == 1, rows
    return found.pop()


def sampled(
    policy: Policy,
    lengths: list[list[int]],
    prompt: int = 5,
    slots: int = 64,
    engine: Callable[[Policy, CacheSize, Sequence[int]], BaseEngine] = make_engine,
) -> Counter[str]:
    """Rows of sampling completions of these lengths, a list for each prompt."""
    requests = [
        SampleRequest(
            prompt=make_prompt(number, prompt),
            params=SamplingParams(max_new_tokens=length, min_new_tokens=length),
            key=draw_seed(number, sample),
        )
        for number, group in enumerate(lengths)
        for sample, length in enumerate(group)
    ]
    sampler = NativeSampler(
        SamplingWeights(policy),
        LetterTokenizer(),
        stop_token_ids=[2],
        max_slots=slots,
        engine=engine,
    )
    with counted(policy) as rows:
        drawn = dict(sampler.sample(requests))
    assert sum(len(c.token_ids) for c in drawn.values()) == sum(map(sum, lengths))
    return rows


SIZES = {
    "base": (2, 2, 4, 5),
    "group": (2, 8, 4, 5),
    "prompts": (8, 2, 4, 5),
    "completion": (2, 2, 16, 5),
    "prompt": (2, 2, 4, 20),
}
"""What is four times the base -> prompts, group, tokens of a completion, of a prompt."""


@pytest.mark.parametrize("name", SIZES)
def test_sampling_runs_each_prompt_once_and_each_token_but_the_last(name: str) -> None:
    prompts, group, new, prompt = SIZES[name]
    rows = sampled(Policy(tiny_model()), [[new] * group] * prompts, prompt)
    assert in_layers(rows) == prompts * prompt + prompts * group * (new - 1)
    assert rows["lm_head"] == prompts + prompts * group * (new - 1), "logits of last tokens only"


@pytest.mark.parametrize("slots", [3, 4, 8])
def test_refills_run_no_prompt_again_while_it_is_read(slots: int) -> None:
    """Groups come one after the other, so a prompt's slots are filled while others go on."""
    lengths = [[4, 6, 3, 5], [7, 2, 5, 4]]
    rows = sampled(Policy(tiny_model()), lengths, slots=slots, engine=op_by_op)
    tokens = 2 * 5 + sum((4, 6, 3, 5, 7, 2, 5, 4)) - 8
    assert in_layers(rows) == tokens


@pytest.mark.parametrize(
    ("engine", "share"), [(op_by_op, OpByOp.share), (recorded, CpuGraphs.share)]
)
def test_finished_rows_are_left_out(engine: Any, share: float) -> None:
    """Lengths 1 to 64: rows that ended may run along only while they are few."""
    lengths = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(8)]
    rows = sampled(Policy(tiny_model()), lengths, engine=engine)
    live = 8 * 5 + sum(map(sum, lengths)) - 64
    assert in_layers(rows) <= live / share
    longest = 8 * 5 + 64 * 63
    assert in_layers(rows) < 0.62 * longest, "and not all of them to the end of the longest"


@pytest.mark.parametrize(("slots", "most"), [(8, 56), (16, 24), (32, 8)])
def test_slots_are_refilled_an_eighth_at_a_time(slots: int, most: int) -> None:
    """G9: a prefill, op by op, is not worth a single slot; all 64 are answered nonetheless."""
    prefills = []

    def counting(policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> BaseEngine:
        class Counting(Engine):
            def admit(self, requests: Any, slots: Any) -> Any:
                prefills.append(len(slots))
                return super().admit(requests, slots)

        return Counting(policy, size, stop_ids, OpByOp())

    lengths = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(8)]
    sampled(Policy(tiny_model()), lengths, slots=slots, engine=counting)
    assert sum(prefills) == 64
    assert prefills[0] == slots
    # The last ones are as many as are left.
    assert all(count >= slots / 8 for count in prefills[:-1])
    assert len(prefills) <= 1 + most


def step_batch(prompts: int, group: int, new: int, prompt: int) -> TrainBatch:
    groups = [
        make_group(i, [1.0, 0.0] * (group // 2), [new] * group, prompt_length=prompt)
        for i in range(prompts)
    ]
    return one_step(groups, [[1.0, -1.0] * (group // 2)] * prompts)


def updated(batch: TrainBatch, budget: int) -> int:
    """Tokens run forward by one update."""
    policy = Policy(tiny_model())
    with counted(policy) as rows:
        accumulate_gradient(
            ParallelPolicy(policy), batch, grpo_objective(GRPOConfig()), token_budget=budget
        )
    return in_layers(rows)


@pytest.mark.parametrize("name", SIZES)
def test_the_update_runs_each_prompt_once_and_each_token_but_the_last(name: str) -> None:
    prompts, group, new, prompt = SIZES[name]
    tokens = updated(step_batch(prompts, group, new, prompt), 10_000)
    assert tokens == prompts * prompt + prompts * group * (new - 1)


@pytest.mark.parametrize("budget", [40, 100, 300])
def test_a_slice_repeats_at_most_the_prompt_it_begins_with(budget: int) -> None:
    batch = step_batch(4, 8, 9, 12)
    whole = updated(batch, 10_000)
    slices = len(micro_batches(batch, budget))
    assert slices > 1
    assert whole <= updated(batch, budget) <= whole + (slices - 1) * 12


def test_groups_without_a_signal_cost_nothing() -> None:
    groups = [make_group(i, [1.0, 0.0], [6, 8]) for i in range(4)]
    advantages = [[1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert updated(one_step(groups, advantages), 10_000) == 5 + 5 + 7
