"""Divergences from a teacher: enumerated, their gradients, and what merging tokens does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCABULARY, make_batch, tiny_model, tiny_teachers, with_exact_norms
from torch import Tensor

from grouper.advice.tracing import Live
from grouper.algorithms.batching import TrainBatch
from grouper.config.schema import TeacherConfig
from grouper.models import token_scores
from grouper.models.divergences import (
    SAMPLED_DIVERGENCES,
    TENSORS,
    forward_kl,
    reverse_kl,
    top_and_rest,
)
from grouper.models.policy import Policy
from grouper.training.teachers import Teachers

TEMPERATURE = 0.7


def student() -> Policy:
    return Policy(with_exact_norms(tiny_model(dtype=torch.float64, scale=2.0)))


def taught(temperature: float = TEMPERATURE) -> TrainBatch:
    """Every target token has the same weight; rows of group 1 have the second teacher."""
    batch = make_batch(dtype=torch.float64)
    return replace(
        batch,
        teacher_weights=batch.weights,
        teacher=(batch.group_ids == 1).long(),
        temperature=temperature,
    )


def distributions(policy: Policy, batch: TrainBatch) -> Tensor:
    """Log-probs [N, V] of every completion token, all kept."""
    logits = policy.logits(policy.completion_states(batch))
    return torch.log_softmax(logits / batch.temperature, dim=-1)


def enumerated(policy: Policy, batch: TrainBatch, kl: str, top_k: int) -> Tensor:
    """The divergence [N] of whole distributions that are all kept."""
    assert batch.teacher is not None
    ours = distributions(policy, batch)
    of_row = batch.teacher[:, None].expand(batch.mask.shape)[batch.is_completion]
    found = ours.new_zeros(len(ours))
    for number, teacher in enumerate(tiny_teachers().policies):
        with torch.no_grad():
            theirs = distributions(teacher, batch)
        mine = ours
        if top_k:
            kept = theirs.topk(top_k, dim=-1).indices
            rest_is = torch.ones_like(theirs, dtype=torch.bool).scatter(1, kept, False)
            pairs = []
            for values in (mine, theirs):
                rest = (values.exp() * rest_is).sum(-1, keepdim=True).log()
                pairs.append(torch.cat([values.gather(1, kept), rest], dim=1))
            mine, theirs = pairs
        first, second = (mine, theirs) if kl == "reverse" else (theirs, mine)
        values = (first.exp() * (first - second)).sum(-1)
        found = torch.where(of_row == number, values, found)
    return found


def gradients(policy: Policy, loss: Tensor) -> Tensor:
    policy.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCABULARY])
@pytest.mark.parametrize("rows_of_a_chunk", [3, 1000])
def test_the_gradient_is_that_of_the_enumerated_kl(
    kl: str, top_k: int, rows_of_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, in chunks and at once, equal a sum over the whole vocabulary."""
    monkeypatch.setattr(token_scores, "chunk_rows", lambda *_: rows_of_a_chunk)
    policy = student()
    batch = taught()
    guidance = tiny_teachers(kl, top_k).guide(batch)
    outputs = policy(batch, guidance=guidance)
    assert outputs.divergences is not None
    expected = enumerated(policy, batch, kl, top_k % VOCABULARY)
    found = outputs.divergences[batch.is_completion]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (found > 1e-3).all()
    weights = torch.linspace(0.5, 1.5, len(found), dtype=torch.float64)
    way = gradients(policy, (found * weights).sum())
    there = gradients(policy, (enumerated(policy, batch, kl, top_k % VOCABULARY) * weights).sum())
    assert float((way - there).norm() / there.norm()) < 1e-10


def test_the_sampled_divergence_has_the_gradient_of_the_reverse_kl() -> None:
    """In expectation over the policy's own samples, summed over all tokens here."""
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theirs = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits.requires_grad_()
    logprobs = logits.log_softmax(-1)
    teacher = theirs.log_softmax(-1)
    sampled = SAMPLED_DIVERGENCES["sampled"](logprobs, teacher)
    expected = (logprobs.detach().exp() * sampled).sum()
    (found,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (exact,) = torch.autograd.grad(reverse_kl(logprobs, teacher).sum(), logits)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


def test_the_sampled_divergence_is_of_the_sampled_tokens() -> None:
    policy = student()
    batch = taught()
    outputs = policy(batch, guidance=tiny_teachers("sampled").guide(batch))
    assert outputs.divergences is not None
    assert batch.teacher is not None
    for number, teacher in enumerate(tiny_teachers().policies):
        rows = batch.teacher == number
        difference = outputs.logprobs - teacher(batch).logprobs
        expected = (0.5 * difference**2)[rows]
        torch.testing.assert_close(outputs.divergences[rows], expected, rtol=1e-10, atol=1e-12)


def test_rows_without_a_weight_are_not_read_by_a_teacher() -> None:
    policy = student()
    batch = taught()
    assert batch.teacher_weights is not None
    batch.teacher_weights[3:] = 0.0
    guidance = tiny_teachers().guide(batch)
    (lecture,) = guidance.lectures  # all rows of the second one are left out
    assert len(lecture.tokens) == int(batch.completion_lengths[:3].sum())
    outputs = policy(batch, guidance=guidance)
    assert outputs.divergences is not None
    assert not outputs.divergences[3:].any()
    assert (outputs.divergences[:3][batch.mask[:3]] > 0).all()


def test_an_equal_teacher_has_no_divergence_and_no_gradient() -> None:
    policy = student()
    batch = taught()
    teachers = tiny_teachers()
    same = type(teachers)([student(), student()], teachers.config)
    outputs = policy(batch, guidance=same.guide(batch))
    assert outputs.divergences is not None
    assert float(outputs.divergences.detach().abs().max()) < 1e-12
    assert float(gradients(policy, outputs.divergences.sum()).norm()) < 1e-10


@given(seed=st.integers(0, 10**6), kept=st.integers(1, 11))
def test_merging_tokens_never_raises_a_divergence(seed: int, kept: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(2, 4, 12, dtype=torch.float64, generator=generator)
    ours, theirs = logits.log_softmax(-1)
    top = theirs.topk(kept, dim=-1).indices
    for divergence in (reverse_kl, forward_kl):
        merged = divergence(top_and_rest(ours, top), top_and_rest(theirs, top))
        assert (merged <= divergence(ours, theirs) + 1e-12).all()
        assert (merged >= -1e-12).all()


def test_a_larger_vocabulary_of_the_teacher_is_cut() -> None:
    """Embeddings are padded to round sizes; ids that the policy does not have are left out."""
    policy = student()
    batch = taught()
    teachers = tiny_teachers()
    wide = Policy(with_exact_norms(tiny_model(dtype=torch.float64, vocab_size=VOCABULARY + 31)))
    wide_teachers = type(teachers)([wide, wide], teachers.config)
    outputs = policy(batch, guidance=wide_teachers.guide(batch))
    assert outputs.divergences is not None
    with torch.no_grad():
        logits = wide.logits(wide.completion_states(batch))[:, :VOCABULARY]
    theirs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    expected = reverse_kl(distributions(policy, batch), theirs)
    found = outputs.divergences[batch.is_completion]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kl", "top_k"), [("reverse", 0), ("forward", 0), ("reverse", 32)])
def test_a_chunk_takes_as_many_tensors_as_plans_count(kl: str, top_k: int) -> None:
    """Storages that live at a time, in the forward and in the backward, as logits of a chunk."""
    vocabulary = 20_000
    policy = Policy(tiny_model(vocab_size=vocabulary)).requires_grad_(False)
    teacher = Policy(tiny_model(vocab_size=vocabulary)).requires_grad_(False)
    batch = make_batch()
    batch = replace(batch, teacher_weights=batch.weights)
    config = TeacherConfig(path="nowhere", kl=kl, top_k=top_k)
    guidance = Teachers([teacher], config).guide(batch)
    hidden = policy.completion_states(batch).detach().requires_grad_()
    targets = batch.completion_ids[batch.is_completion]
    with Live() as live:
        values = guidance.divergences(policy, hidden, targets, torch.zeros(len(hidden)), 1.0)
        values.sum().backward()
    tensors = live.peak / (4 * vocabulary * len(hidden))
    assert TENSORS - 1 < tensors < TENSORS + 0.1
