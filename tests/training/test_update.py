"""The update: nothing non-finite reaches the optimizer, tiny steps add up, dropout is seeded."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import (
    LetterTokenizer,
    make_batch,
    make_prompt,
    tiny_model,
    tokens,
    with_exact_norms,
)
from torch import Tensor

from grouper.algorithms.batching import TrainBatch, demonstration_batch
from grouper.algorithms.weighting import token_mean
from grouper.config.schema import GRPOConfig, LoraConfig, OptimizerConfig
from grouper.errors import ModelError
from grouper.kernels.cpu import ops
from grouper.kernels.cpu.library import library
from grouper.models.loading import _new_adapter
from grouper.models.policy import Policy, TokenOutputs
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.training.optimizers import LossScale, make_optimizer, schedule
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import (
    Objective,
    UpdateResult,
    _tally,
    accumulate_gradient,
    grpo_objective,
    sft_objective,
    update,
    validation_loss,
)
from grouper.types import Demonstration, Tally

GRPO = grpo_objective(GRPOConfig())


def lora_policy(dropout: float = 0.0) -> Policy:
    model = tiny_model()
    adapter = _new_adapter(model, LoraConfig(rank=4, alpha=8, dropout=dropout), "base", seed=0)
    return Policy(adapter.get_base_model(), adapter=adapter)


def weights_of(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.trainable().values()]


def step(policy: Policy, batch: TrainBatch, **changes: Any) -> UpdateResult:
    optimizer = make_optimizer(policy, OptimizerConfig(learning_rate=1e-2, weight_decay=0.5))
    arguments: dict[str, Any] = {"scale": 1.0, "max_grad_norm": 1.0, "token_budget": 64}
    return update(ParallelPolicy(policy), batch, GRPO, optimizer, **{**arguments, **changes})


def test_an_update_moves_the_weights_and_counts() -> None:
    policy = Policy(tiny_model())
    before = weights_of(policy)
    result = step(policy, make_batch())
    assert result.applied
    assert policy.version == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, weights_of(policy), strict=True))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_loss_never_reaches_the_optimizer(poison: float) -> None:
    policy = Policy(tiny_model())
    batch = make_batch()
    advantages = batch.advantages.clone()
    advantages[0] = poison
    before = weights_of(policy)
    result = step(policy, replace(batch, advantages=advantages))
    assert not result.applied
    assert policy.version == 0
    # Weight decay would have moved them, too.
    for a, b in zip(before, weights_of(policy), strict=True):
        assert torch.equal(a, b)


def test_the_gradient_is_scaled_down_to_the_norm() -> None:
    norms = []
    for bound in (1e9, 1e-3):
        policy = Policy(tiny_model())
        optimizer = make_optimizer(policy, OptimizerConfig())
        before = weights_of(policy)
        result = update(
            ParallelPolicy(policy),
            make_batch(),
            GRPO,
            optimizer,
            scale=1.0,
            max_grad_norm=bound,
            token_budget=64,
        )
        norms.append(result.tallies["grad_norm"].mean)
        assert len(before) == len(weights_of(policy))
    assert norms[0] == pytest.approx(norms[1])  # reported before clipping
    assert norms[0] > 1e-3


PER_TOKEN = ("sampler_logprobs", "old_logprobs", "reference_logprobs")


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("poison", [float("nan"), float("-inf")])
def test_one_log_prob_of_one_row_is_enough_to_skip(name: str, poison: float) -> None:
    policy = Policy(tiny_model())
    batch = make_batch()
    values = torch.zeros_like(batch.weights)
    values[7, 1] = poison
    before = weights_of(policy)
    result = step(policy, replace(batch, **{name: values}))
    assert not result.applied
    assert result.events == (f"not-finite: {name} of row 7 (1 of 10 rows); update skipped",)
    assert result.batch is not None
    for a, b in zip(before, weights_of(policy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_what_stands_on_padding_may_be_anything(name: str) -> None:
    batch = make_batch()
    values = torch.where(batch.mask, -1.0, float("nan"))
    assert not batch.mask.all()
    result = step(Policy(tiny_model()), replace(batch, **{name: values}))
    assert result.applied
    assert result.events == ()
    assert result.batch is None


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is() -> None:
    policy = Policy(tiny_model())

    def shifted(outputs: TokenOutputs, piece: TrainBatch) -> Any:
        return outputs.logprobs + torch.nan, {}

    before = weights_of(policy)
    result = update(
        ParallelPolicy(policy),
        make_batch(),
        Objective(shifted),
        make_optimizer(policy, OptimizerConfig(weight_decay=0.5)),
        scale=1.0,
        max_grad_norm=1.0,
        token_budget=64,
    )
    assert not result.applied
    assert re.fullmatch(r"not-finite: loss nan, gradient norm \d.*; update skipped", *result.events)
    for a, b in zip(before, weights_of(policy), strict=True):
        assert torch.equal(a, b)


def test_a_gradient_that_is_not_finite_is_told_and_skipped() -> None:
    """The loss is finite, only its derivative is not: of sqrt at zero."""
    policy = Policy(tiny_model())

    def root(outputs: TokenOutputs, piece: TrainBatch) -> Any:
        logprobs = outputs.logprobs
        return (logprobs - logprobs.detach()).abs().sqrt(), {}

    before = weights_of(policy)
    optimizer = make_optimizer(policy, OptimizerConfig(weight_decay=0.5))
    result = update(
        ParallelPolicy(policy),
        make_batch(),
        Objective(root),
        optimizer,
        scale=1.0,
        max_grad_norm=1.0,
        token_budget=64,
    )
    assert not result.applied
    assert result.events[0].startswith("not-finite: loss 0, gradient norm nan")
    assert not any(part.state for part in optimizer.parts)
    for a, b in zip(before, weights_of(policy), strict=True):
        assert torch.equal(a, b)


def thousand_steps(dtype: torch.dtype) -> float:
    """How far AdamW moves one weight in 1000 steps of 1e-6 in one direction."""
    policy = Policy(tiny_model(dtype=dtype))
    name, parameter = next(iter(policy.trainable().items()))
    assert "embed" in name
    optimizer = make_optimizer(policy, OptimizerConfig(learning_rate=1e-6))
    with torch.no_grad():
        parameter.fill_(0.02)
    start = float(parameter.detach().flatten()[0])
    for _ in range(1000):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(1.0)
    return start - float(parameter.detach().flatten()[0])


def test_a_thousand_tiny_steps_add_up() -> None:
    """T25: with weights in float32; in bfloat16 every one of them is rounded away."""
    assert thousand_steps(torch.float32) == pytest.approx(1e-3, rel=0.01)
    assert thousand_steps(torch.bfloat16) == 0.0


def test_bf16_products_leave_weights_gradients_and_moments_in_float32() -> None:
    policy = Policy(tiny_model(), compute_dtype=torch.bfloat16)
    optimizer = make_optimizer(policy, OptimizerConfig())
    seen: list[torch.dtype] = []
    layer = policy.model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    for parameter in policy.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    update(
        ParallelPolicy(policy),
        make_batch(),
        GRPO,
        optimizer,
        scale=1.0,
        max_grad_norm=1.0,
        token_budget=64,
    )
    assert set(seen) == {torch.bfloat16, torch.float32}
    assert seen[0] == torch.bfloat16
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    moments = [
        v for part in optimizer.parts for state in part.state.values() for v in state.values()
    ]
    assert {v.dtype for v in moments} == {torch.float32}


@pytest.mark.skipif(library() is None, reason="no C++ compiler, or kernels are off")
def test_bf16_products_attend_with_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings leave queries in float32, but values are in bfloat16: both are rounded."""
    dtypes: list[torch.dtype] = []
    plain = ops.attend

    def attend(query: torch.Tensor, *others: Any) -> torch.Tensor:
        dtypes.append(query.dtype)
        return plain(query, *others)

    monkeypatch.setattr(ops, "attend", attend)
    gradients = {}
    for name, dtype in (("rounded", torch.bfloat16), ("exact", None)):
        policy = Policy(tiny_model(scale=1.0), compute_dtype=dtype)
        policy(make_batch()).logprobs.sum().backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in policy.parameters()])
    layers = policy.model.config.num_hidden_layers
    # Prompts, then completions.
    assert dtypes[: 2 * layers] == [torch.bfloat16] * 2 * layers
    distance = (gradients["rounded"] - gradients["exact"]).norm() / gradients["exact"].norm()
    assert 0 < distance < 0.02


def test_lora_trains_only_the_adapter_and_starts_as_the_base() -> None:
    batch = make_batch()
    policy = lora_policy()
    with torch.no_grad():
        assert torch.equal(policy(batch).logprobs, Policy(tiny_model())(batch).logprobs)
    assert all("lora_" in name for name in policy.trainable())
    frozen = {n: p.detach().clone() for n, p in policy.named_parameters() if not p.requires_grad}
    step(policy, batch)
    step(policy, batch)
    for name, parameter in policy.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name])
    with torch.no_grad():
        assert not torch.equal(policy(batch).logprobs, Policy(tiny_model())(batch).logprobs)


def test_dropout_is_off_unless_seeded_and_then_repeatable() -> None:
    """T18: GRPO scores without LoRA's dropout, whatever the adapter says."""
    policy = lora_policy(dropout=0.5)
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter.data, std=0.2)
    batch = make_batch()

    def gradient(seed: int | None) -> torch.Tensor:
        policy.zero_grad()
        chosen = None if seed is None else (lambda micro: seed + micro)
        accumulate_gradient(
            ParallelPolicy(policy), batch, sft_objective, token_budget=64, dropout_seed=chosen
        )
        return torch.cat(
            [p.grad.flatten() for p in policy.trainable().values() if p.grad is not None]
        )

    state = torch.get_rng_state()
    assert torch.equal(gradient(None), gradient(None))
    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))
    assert not torch.equal(gradient(1), gradient(None))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_state_round_trips(name: Any) -> None:
    config = OptimizerConfig(name=name, learning_rate=1e-2)

    def train(policy: Policy, steps: int, state: Any = None) -> Any:
        optimizer = make_optimizer(policy, config)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(steps):
            update(
                ParallelPolicy(policy),
                make_batch(),
                GRPO,
                optimizer,
                scale=0.5,
                max_grad_norm=1.0,
                token_budget=64,
            )
        return optimizer.state_dict()

    straight = Policy(tiny_model())
    train(straight, 4)
    halves = Policy(tiny_model())
    train(halves, 2, train(halves, 2))
    for a, b in zip(weights_of(straight), weights_of(halves), strict=True):
        assert torch.equal(a, b)


def test_muon_takes_the_matrices_between_embedding_and_head() -> None:
    policy = Policy(tiny_model(tie_word_embeddings=False))
    muon, adamw = make_optimizer(policy, OptimizerConfig(name="muon")).parts
    ends = {
        id(policy.model.get_input_embeddings().weight),
        id(policy.model.get_output_embeddings().weight),
    }
    inner = {id(p) for group in muon.param_groups for p in group["params"]}
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert not inner & ends
    assert ends <= rest
    assert inner | rest == {id(p) for p in policy.trainable().values()}


def test_muon_leaves_embeddings_of_positions_to_adamw() -> None:
    policy = Policy(tiny_model("gpt2"))
    muon, _ = make_optimizer(policy, OptimizerConfig(name="muon")).parts
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    assert id(policy.model.transformer.wpe.weight) not in taken
    assert len(taken) == 8, "four matrices in each of two layers"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1, 1, 0.868198, 0.55, 0.231802]),
    ],
)
def test_schedules_by_hand(name: Any, expected: list[float]) -> None:
    config = OptimizerConfig(schedule=name, warmup_ratio=0.3, final_ratio=0.1)
    assert [schedule(config, s, 6) for s in range(6)] == pytest.approx(expected, abs=1e-6)


def test_a_share_of_the_steps_is_what_its_decimals_say() -> None:
    config = OptimizerConfig(warmup_ratio=0.07)
    assert [schedule(config, s, 100) for s in (5, 6)] == pytest.approx([6 / 7, 1])


def test_warm_up_in_steps_does_not_grow_with_the_run() -> None:
    config = OptimizerConfig(schedule="linear", warmup_steps=2)
    assert [schedule(config, s, 6) for s in range(6)] == pytest.approx(
        [0.5, 1, 1, 3 / 4, 2 / 4, 1 / 4]
    )
    assert [schedule(config, s, 100) for s in range(2)] == pytest.approx([0.5, 1])
    assert schedule(OptimizerConfig(warmup_steps=0), 0, 6) == 1


# --- memory that runs out: the same gradient from smaller slices, and a last word where none fits


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
    accumulate_gradient(
        ParallelPolicy(policy), make_batch(dtype=torch.float64), GRPO, token_budget=budget
    )
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


def test_the_smaller_budget_is_remembered_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    policy = exact_policy()
    shortage = Shortage(backwards=(0,))
    shortage.install(policy)
    optimizer = make_optimizer(policy, OptimizerConfig())
    batch = make_batch(dtype=torch.float64)

    def step() -> None:
        update(
            ParallelPolicy(policy),
            batch,
            GRPO,
            optimizer,
            scale=1.0,
            max_grad_norm=1.0,
            token_budget=10_000,
        )

    with caplog.at_level(logging.WARNING):
        step()
    assert policy.token_limit is not None
    assert f"at most {policy.token_limit} tokens" in caplog.text
    # Masks are drawn per slice: the same step in others is another sample of them.
    assert "the gradient is the same, except that LoRA's dropout" in caplog.text
    shortage.rows.clear()
    limit = policy.token_limit
    step()
    assert policy.token_limit == limit
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
        accumulate_gradient(
            ParallelPolicy(policy), make_batch(dtype=torch.float64), GRPO, token_budget=64
        )


class _KeptEngine:
    """What a sampler may hold between calls."""

    released = False

    def release(self) -> None:
        self.released = True


def test_memory_that_runs_out_takes_what_samplers_hold_before_slices_are_halved() -> None:
    """V5: the first time, slices were halved for the rest of the run, and engines never kept."""
    sampler = NativeSampler(
        SamplingWeights(Policy(tiny_model())), LetterTokenizer(), stop_token_ids=[2]
    )
    held = _KeptEngine()
    sampler._kept = held  # type: ignore[assignment]
    expected, _ = gradient(None)
    assert not held.released
    shortage = Shortage(forwards=(0,))
    found, policy = gradient(shortage)
    assert held.released
    assert sampler._kept is None
    assert policy.token_limit is None
    assert shortage.rows == [10, 10], "the same slice again, and it fits"
    assert float((found - expected).norm() / expected.norm()) < 1e-12
    # Another time it does not help.
    sampler._kept = _KeptEngine()  # type: ignore[assignment]
    found, policy = gradient(Shortage(forwards=(0, 1)))
    assert policy.token_limit is not None
    assert float((found - expected).norm() / expected.norm()) < 1e-12


def test_the_memory_of_an_optimizer_is_reserved_until_its_first_step() -> None:
    policy = exact_policy()
    optimizer = make_optimizer(policy, OptimizerConfig())
    weights = sum(parameter.nbytes for parameter in policy.parameters())
    assert policy.reserved_bytes == 2 * weights
    copy = SamplingWeights(policy, torch.float32)
    assert copy.current().reserved_bytes == 2 * weights
    update(
        ParallelPolicy(policy),
        make_batch(dtype=torch.float64),
        GRPO,
        optimizer,
        scale=1.0,
        max_grad_norm=1.0,
        token_budget=10_000,
    )
    assert policy.reserved_bytes == copy.current().reserved_bytes == 0


# --- validation loss: the mean over held-out tokens, however they are cut


def test_it_is_the_mean_over_tokens_whatever_the_budget() -> None:
    policy = Policy(tiny_model("qwen3"))
    shown = [
        Demonstration(prompt=make_prompt(i, 3 + i), token_ids=(*tokens(2 + 3 * i, i), 2))
        for i in range(4)
    ]
    batch = demonstration_batch(shown, token_mean)
    with torch.no_grad():
        expected = float(-(policy(batch).logprobs * batch.weights).sum())
    for budget in (20, 10_000):
        loss = validation_loss(ParallelPolicy(policy), shown, token_budget=budget)
        assert loss.mean == pytest.approx(expected, rel=1e-6)
        assert loss.count == sum(len(d.token_ids) for d in shown)
        assert loss.max >= loss.mean >= loss.min > 0


class _OnMps(torch.Tensor):
    """Refuses float64, as that device does."""

    def double(self) -> Any:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor)


def test_a_device_without_float64_can_be_measured() -> None:
    values = torch.tensor([[1.0, 2.0, 6.0]]).as_subclass(_OnMps)
    tally = _tally(values, torch.tensor([[True, False, True]]))
    assert tally == Tally(7.0, 2.0, 1.0, 6.0)


# --- products in float16: the loss is scaled, and gradients that overflow are computed again


def half_policy() -> Policy:
    return Policy(tiny_model(scale=1.0), compute_dtype=torch.float16)


def gradient_of(policy: Policy) -> Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def test_a_loss_scale_changes_no_gradient_but_the_lost_ones() -> None:
    """Of a loss so small that float16 holds few of its gradients."""
    small = replace(make_batch(), weights=make_batch().weights * 1e-5)
    found = {}
    for name, dtype, scale in (
        ("exact", None, 1.0),
        ("exact, scaled", None, 2.0**16),
        ("lost", torch.float16, 1.0),
        ("kept", torch.float16, 2.0**16),
    ):
        policy = Policy(tiny_model(scale=1.0), compute_dtype=dtype)
        accumulate_gradient(
            ParallelPolicy(policy), small, GRPO, token_budget=10_000, loss_scale=scale
        )
        found[name] = gradient_of(policy)
    assert torch.equal(found["exact"], found["exact, scaled"])
    size = found["exact"].norm()
    assert float((found["lost"] - found["exact"]).norm() / size) > 0.2
    assert float((found["kept"] - found["exact"]).norm() / size) < 0.01


def half_step(policy: Policy, optimizer: Any, batch: TrainBatch) -> UpdateResult:
    return update(
        ParallelPolicy(policy),
        batch,
        GRPO,
        optimizer,
        scale=1.0,
        max_grad_norm=1.0,
        token_budget=10_000,
    )


def test_gradients_that_overflow_are_computed_again_at_half_the_scale() -> None:
    policy = half_policy()
    optimizer = make_optimizer(policy, OptimizerConfig(learning_rate=1e-3))
    assert optimizer.loss_scale is not None
    optimizer.loss_scale.value = 2.0**26
    result = half_step(policy, optimizer, make_batch())
    assert result.applied
    assert result.events
    assert all(
        event.startswith("overflow: gradients at a loss scale of") for event in result.events
    )
    assert optimizer.loss_scale.value == 2.0 ** (26 - len(result.events))
    assert result.tallies["loss_scale"].mean == optimizer.loss_scale.value
    # The step is the one of a scale that does not overflow.
    other = half_policy()
    plain = make_optimizer(other, OptimizerConfig(learning_rate=1e-3))
    assert plain.loss_scale is not None
    plain.loss_scale.value = optimizer.loss_scale.value
    assert not half_step(other, plain, make_batch()).events
    for one, two in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_what_is_not_finite_for_another_reason_leaves_the_scale_as_it_was() -> None:
    policy = half_policy()
    optimizer = make_optimizer(policy, OptimizerConfig())
    next(policy.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    result = half_step(policy, optimizer, make_batch())
    assert not result.applied
    assert "update skipped" in result.events[-1]
    assert all(map(torch.equal, before, policy.parameters()))
    assert optimizer.loss_scale is not None
    assert optimizer.loss_scale.value == LossScale.FIRST


def test_a_loss_scale_grows_and_is_saved_with_the_optimizer() -> None:
    policy = half_policy()
    optimizer = make_optimizer(policy, OptimizerConfig())
    assert optimizer.loss_scale is not None
    for _ in range(130):
        optimizer.loss_scale.worked()
    assert optimizer.loss_scale.value == 2.0**17
    other = make_optimizer(half_policy(), OptimizerConfig())
    other.load_state_dict(optimizer.state_dict())
    assert other.loss_scale is not None
    assert (other.loss_scale.value, other.loss_scale.clean) == (2.0**17, 30)
    assert make_optimizer(exact_policy(), OptimizerConfig()).loss_scale is None
