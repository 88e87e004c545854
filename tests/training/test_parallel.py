"""A replica of one: slices, stand-ins and weights; several processes are in invariants/."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_batch, tiny_model

from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.training.parallel import ParallelPolicy, TorchProcessGroup, make_parallel


class Member(ProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Split(ParallelPolicy):
    split = True


@settings(max_examples=25)
@given(size=st.integers(1, 5), budget=st.integers(10, 120), kind=st.sampled_from([Split, None]))
def test_every_slice_is_run_by_one_process(
    size: int, budget: int, kind: type[ParallelPolicy] | None
) -> None:
    policy, batch = Policy(tiny_model("qwen3")), make_batch()
    make = kind or ParallelPolicy
    by_rank = [list(make(policy, Member(r, size)).slices(batch, budget)) for r in range(size)]
    own = [part.number for slices in by_rank for part in slices if part.own]
    assert sorted(own) == list(range(len(own)))
    # Small enough for everybody.
    assert len(own) >= min(size, batch.rows)
    rows = torch.cat([p.batch.sequence_ids for slices in by_rank for p in slices if p.own])
    assert sorted(rows.tolist()) == list(range(batch.rows))
    counts = {len(slices) for slices in by_rank}
    if kind is None:  # nobody waits for anybody within a step
        assert max(counts) - min(counts) <= 1
        assert all(part.own for slices in by_rank for part in slices)
        return
    assert len(counts) == 1
    for slices in by_rank:
        # A stand-in has no weight: its gradient is zero.
        assert all(not part.batch.weights.any() for part in slices if not part.own)


def test_alone_the_policy_is_called_as_it_is() -> None:
    policy = Policy(tiny_model("qwen3"))
    replica = make_parallel(policy, ProcessGroup(), "fsdp")
    assert type(replica) is ParallelPolicy
    batch = make_batch()
    torch.testing.assert_close(replica.score(batch).logprobs, policy(batch).logprobs)
    weights = policy.snapshot()
    assert replica.shard(weights) is weights
    assert replica.whole_weights() is None
    before = policy.snapshot()
    changed = {name: value + 0.01 for name, value in weights.items()}
    assert not torch.equal(replica.score(batch, changed).logprobs, replica.score(batch).logprobs)
    assert all(before[name].equal(value) for name, value in policy.snapshot().items())


def test_work_within_the_work_of_rank_0_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for the answer of the whole, and would take a second broadcast for it."""
    sent: list[list[object]] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: sent.append(list(box)))
    group = TorchProcessGroup()
    assert group.on_rank0(lambda: ["whole", group.on_rank0(lambda: "part")]) == ["whole", "part"]
    assert sent == [[["whole", "part"], None]]
    assert group.on_rank0(lambda: "after") == "after"
    assert len(sent) == 2
