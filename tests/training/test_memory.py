"""Memory that runs out: the same gradient from smaller slices, and a last word where none fits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_models import make_batch, tiny_model, with_exact_norms
from torch import Tensor

from grouper.config.schema import GRPOConfig, OptimizerConfig
from grouper.errors import ModelError
from grouper.models.policy import Policy
from grouper.training.memory import is_out_of_memory
from grouper.training.objectives import grpo_objective
from grouper.training.optimizers import make_optimizer
from grouper.training.update import accumulate_gradient, update

GRPO = grpo_objective(GRPOConfig())


class Shortage:
    """Raises `torch.OutOfMemoryError` at chosen forwards or backwards, counted from 0."""

    def __init__(self, *, forwards: tuple[int, ...] = (), backwards: tuple[int, ...] = ()) -> None:
        self.forwards, self.backwards = forwards, backwards
        self.begun = self.ended = 0
        self.rows: list[int] = []

    def install(self, policy: Policy) -> None:
        def before(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            self.rows.append(arguments[0].rows)
            self.begun += 1
            if self.begun - 1 in self.forwards:
                raise torch.OutOfMemoryError("injected: forward")

        def in_backward(gradient: Tensor) -> None:
            self.ended += 1
            if self.ended - 1 in self.backwards:
                raise torch.OutOfMemoryError("injected: backward")

        policy.register_forward_pre_hook(before)
        # The embedding comes last in a backward: most of the slice's gradient is there already.
        embedding = policy.model.get_input_embeddings()
        embedding.register_forward_hook(
            lambda module, arguments, out: out.register_hook(in_backward) and None
        )


def exact_policy() -> Policy:
    return Policy(with_exact_norms(tiny_model(dtype=torch.float64, scale=2.0)))


def gradient(shortage: Shortage | None, budget: int = 10_000) -> tuple[Tensor, Policy]:
    policy = exact_policy()
    if shortage is not None:
        shortage.install(policy)
    accumulate_gradient(policy, make_batch(dtype=torch.float64), GRPO, token_budget=budget)
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]), policy


@pytest.mark.parametrize(
    "shortage",
    [
        Shortage(forwards=(0,)),
        Shortage(backwards=(0,)),
        Shortage(forwards=(0, 1, 4)),
        Shortage(backwards=(0, 1)),
    ],
    ids=["forward", "backward", "forwards", "backwards"],
)
def test_the_gradient_is_that_of_the_unsplit_step(shortage: Shortage) -> None:
    expected, _ = gradient(None)
    found, policy = gradient(shortage)
    assert float((found - expected).norm() / expected.norm()) < 1e-12
    assert policy.token_limit is not None
    assert max(shortage.rows[-2:]) < shortage.rows[0]


def test_later_slices_failing_are_not_counted_twice() -> None:
    """Slices that went through before the broken one are thrown away with it."""
    expected, _ = gradient(None, budget=30)
    found, _ = gradient(Shortage(backwards=(1,)), budget=30)
    assert float((found - expected).norm() / expected.norm()) < 1e-12


def test_the_smaller_budget_is_remembered_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    policy = exact_policy()
    shortage = Shortage(backwards=(0,))
    shortage.install(policy)
    optimizer = make_optimizer(policy, OptimizerConfig())
    batch = make_batch(dtype=torch.float64)

    def step() -> tuple[str, ...]:
        return update(
            policy, batch, GRPO, optimizer, scale=1.0, max_grad_norm=1.0, token_budget=10_000
        ).events

    with caplog.at_level(logging.WARNING):
        (event,) = step()
    assert event.startswith("nondeterministic_event: memory split")
    assert str(policy.token_limit) in event
    assert "Out of memory" in caplog.text
    shortage.rows.clear()
    assert step() == ()
    assert max(shortage.rows) < batch.rows


def test_a_row_that_does_not_fit_is_refused_with_what_helps() -> None:
    with pytest.raises(ModelError, match="one row of") as caught:
        gradient(Shortage(forwards=tuple(range(100))))
    assert "injected: forward" in caught.value.what
    for setting in ("sampling.max_new_tokens", "gradient_checkpointing", "model.lora"):
        assert setting in caught.value.fix
    assert "grouper plan" in caught.value.fix


def test_other_errors_go_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = exact_policy()
    monkeypatch.setattr(
        policy, "score", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("shape"))
    )
    with pytest.raises(RuntimeError, match="shape"):
        accumulate_gradient(policy, make_batch(dtype=torch.float64), GRPO, token_budget=64)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: RuntimeError, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
