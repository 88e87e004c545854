"""Assembling: who gets which advantage, what is scored, how steps are cut, which groups teach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_group, tiny_model
from torch import Tensor

from grouper.algorithms.batching import TrainBatch, broken_rows
from grouper.config.schema import GRPOConfig, TeacherConfig
from grouper.models.policy import Policy, TokenOutputs
from grouper.training.assemble import (
    Lessons,
    advantages_of,
    assemble,
    top_entropy_selection,
)
from grouper.training.metrics import rollout_tallies
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import Scorer, accumulate_gradient, grpo_objective
from grouper.types import (
    Demonstration,
    FinishReason,
    RolloutGroup,
)


class Noted:
    """Scores by row number and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int]]] = []

    def current(self, batch: TrainBatch) -> TokenOutputs:
        self.asked.append(("current", batch.sequence_ids.tolist()))
        rows = batch.sequence_ids[:, None].float()
        slots = torch.arange(batch.mask.shape[1])
        return TokenOutputs(-(rows + 1).expand(batch.mask.shape), rows + slots / 100.0)

    def reference(self, batch: TrainBatch) -> Tensor:
        self.asked.append(("reference", batch.sequence_ids.tolist()))
        return torch.full(batch.mask.shape, -1.0)


def config(**settings: Any) -> GRPOConfig:
    return GRPOConfig(**{"require_correct_in_group": False, **settings})


def lengths_of(groups: Sequence[RolloutGroup]) -> list[int]:
    """Tokens of every completion."""
    return [len(r.completion.token_ids) for group in groups for r in group.rollouts]


def some_groups(count: int = 4, size: int = 4) -> list[RolloutGroup]:
    """Mixed groups, but for number 2, whose rewards are equal."""
    return [
        make_group(
            g,
            [1.0] * size if g == 2 else [float((g + i) % 2) for i in range(size)],
            [1 + (3 * g + 5 * i) % 7 for i in range(size)],
        )
        for g in range(count)
    ]


def test_with_one_update_nothing_is_scored_and_the_ratio_is_exactly_one() -> None:
    scores = Noted()
    (step,) = assemble(some_groups(), config(), scores, max_new_tokens=8).batches
    assert scores.asked == []
    assert step.old_logprobs is None
    assert step.reference_logprobs is None
    # The flat group's rows are gone, but its tokens count in the denominator.
    assert step.rows == 12
    assert float(step.weights[step.mask][0]) == pytest.approx(1 / sum(lengths_of(some_groups())))


def test_old_logprobs_are_those_before_the_first_update() -> None:
    """T19: one scoring of the rows that have a gradient, shared by all updates."""
    scores = Noted()
    settings = config(updates_per_batch=2, num_iterations=3)
    orders = ([0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3])
    assembled = assemble(some_groups(), settings, scores, max_new_tokens=8, orders=orders)
    assert [what for what, _ in scores.asked] == ["current"]
    assert len(scores.asked[0][1]) == 12
    assert len(assembled.batches) == 6
    for step in assembled.batches:
        assert step.old_logprobs is not None
        wanted = -(step.sequence_ids[:, None] + 1.0)
        assert torch.where(step.mask, step.old_logprobs - wanted, 0.0).abs().max() == 0


@given(
    updates=st.integers(1, 4),
    passes=st.integers(1, 3),
    orders=st.permutations(range(4)),
)
def test_every_rollout_is_used_exactly_once_a_pass(
    updates: int, passes: int, orders: list[int]
) -> None:
    """T20: an index trace."""
    settings = config(updates_per_batch=updates, num_iterations=passes, beta=0.1)
    steps = assemble(
        some_groups(), settings, Noted(), max_new_tokens=8, orders=[orders] * passes
    ).batches
    assert len(steps) == updates * passes
    used: Counter[int] = Counter()
    for step in steps:
        used.update(step.sequence_ids.tolist())
        # Each is normalized: the weights of a token mean add up to 1 in every step.
        assert float(step.weights.sum()) == pytest.approx(1.0)
    assert used == dict.fromkeys(range(16), passes)


def test_groups_stay_whole_and_in_the_order_dealt() -> None:
    settings = config(updates_per_batch=2, beta=0.1)
    first, second = assemble(
        some_groups(), settings, Noted(), max_new_tokens=8, orders=[[3, 1, 0, 2]]
    ).batches
    assert set(first.group_ids.tolist()) == {1, 3}
    assert set(second.group_ids.tolist()) == {0, 2}


@given(updates=st.integers(5, 16))
def test_fewer_groups_than_steps_are_cut_between_their_rows(updates: int) -> None:
    """One prompt with sixteen samples in four steps; advantages are those of the whole group."""
    settings = config(updates_per_batch=updates, beta=0.1)
    assembled = assemble(some_groups(), settings, Noted(), max_new_tokens=8, orders=[[2, 0, 3, 1]])
    steps = assembled.batches
    assert len(steps) == updates
    rows = [step.sequence_ids.tolist() for step in steps]
    assert sorted(r for part in rows for r in part) == list(range(16))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    for step in steps:
        assert float(step.weights.sum()) == pytest.approx(1.0)
        for row, group, advantage in zip(
            step.sequence_ids.tolist(), step.group_ids.tolist(), step.advantages, strict=True
        ):
            whole = assembled.advantages[group][row - 4 * group]
            assert float(advantage) == pytest.approx(whole, abs=1e-6)


def test_a_step_without_a_gradient_is_no_step() -> None:
    """No optimizer step, no weight decay: T9."""
    flat = [make_group(g, [1.0, 1.0], [3, 4]) for g in range(2)]
    assert assemble(flat, config(), Noted(), max_new_tokens=8).batches == ()
    settings = config(updates_per_batch=2)
    mixed = [flat[0], make_group(1, [1.0, 0.0], [3, 4])]
    assert len(assemble(mixed, settings, Noted(), max_new_tokens=8).batches) == 1
    unscored = [make_group(0, [None, None], [3, 4])]
    assert assemble(unscored, config(), Noted(), max_new_tokens=8).batches == ()


def test_a_masked_completion_counts_in_the_baseline_and_nowhere_else() -> None:
    """T8: masking equals leaving the row out of numerator and denominator."""
    group = make_group(0, [1.0, 0.0, 0.0], [3, 8, 4], truncated=[False, True, False])
    settings = config(overlong="mask", advantage="mean")
    assembled = assemble([group], settings, Noted(), max_new_tokens=8)
    assert assembled.advantages == (pytest.approx((2 / 3, -1 / 3, -1 / 3)),)
    (step,) = assembled.batches
    assert step.sequence_ids.tolist() == [0, 2]
    assert step.weights[step.mask].tolist() == pytest.approx([1 / 7] * 7)


@pytest.mark.parametrize("extra", [{}, {"beta": 0.1}, {"entropy_bonus": 0.01}])
def test_a_batch_whose_every_row_is_masked_is_no_step(extra: dict[str, float]) -> None:
    """T9."""
    group = make_group(0, [1.0, 0.0], [8, 8], truncated=[True, True])
    settings = config(overlong="mask", **extra)
    assert assemble([group], settings, Noted(), max_new_tokens=8).batches == ()


def test_the_constant_weighting_divides_by_the_completion_budget() -> None:
    settings = GRPOConfig(algorithm="dr-grpo")
    assembled = assemble(some_groups(), settings, Noted(), max_new_tokens=50)
    (step,) = assembled.batches
    assert step.weights[step.mask].tolist() == pytest.approx([1 / (16 * 50)] * int(step.mask.sum()))


def test_a_kl_in_the_reward_is_taken_off_before_the_baseline() -> None:
    group = make_group(0, [1.0, 1.0], [2, 3])
    settings = config(beta=0.1, kl="k1", advantage="mean")
    scores = Noted()
    assembled = assemble([group], settings, scores, max_new_tokens=8)
    # Old log-probs are -1 and -2, the reference's -1: the second row has a KL of -1 a token.
    assert assembled.advantages == (pytest.approx((-0.15, 0.15)),)
    assert assembled.tallies["policy/kl"].sum == pytest.approx(-3.0)
    (step,) = assembled.batches
    assert step.old_logprobs is None


def test_top_entropy_keeps_the_denominators() -> None:
    settings = config(top_entropy=0.25)
    assembled = assemble(some_groups(), settings, Noted(), max_new_tokens=8)
    (step,) = assembled.batches
    chosen = step.weights > 0
    with_advantage = sum(n for i, n in enumerate(lengths_of(some_groups())) if i // 4 != 2)
    assert chosen.sum() == -(-with_advantage // 4)
    assert float(step.weights[chosen][0]) == pytest.approx(1 / sum(lengths_of(some_groups())))
    # The most uncertain tokens are those of the last rows; rows without one are left out.
    assert step.sequence_ids.tolist() == [12, 13, 14, 15]


@given(
    values=st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=30),
    share=st.floats(0.01, 1.0),
)
def test_at_least_the_share_is_selected(values: list[float], share: float) -> None:
    entropies = torch.tensor([values])
    mask = torch.ones_like(entropies, dtype=torch.bool)
    selected = top_entropy_selection(entropies, mask, share)
    assert int(selected.sum()) >= share * len(values)
    if not selected.all():
        assert float(entropies[selected].min()) >= float(entropies[~selected].max())


def real(groups: Sequence[RolloutGroup], settings: GRPOConfig) -> tuple[Policy, list[TrainBatch]]:
    policy = Policy(tiny_model("qwen3"))
    reference = policy.snapshot() if settings.beta else None
    scores = Scorer(ParallelPolicy(policy), 40, reference)
    orders = [None] * settings.num_iterations
    return policy, list(assemble(groups, settings, scores, max_new_tokens=8, orders=orders).batches)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_first_inner_step_has_a_ratio_of_one(temperature: float) -> None:
    """T2, T18, T19: old log-probs come from other slices than the update's."""
    groups = [make_group(g, [1.0, 0.0, 0.5], [3, 5, 4], temperature=temperature) for g in range(3)]
    settings = config(num_iterations=2)
    policy, (step, *_) = real(groups, settings)
    _, tallies = accumulate_gradient(
        ParallelPolicy(policy), step, grpo_objective(settings), token_budget=25
    )
    assert tallies["policy/ratio"].min == pytest.approx(1.0, abs=2e-5)
    assert tallies["policy/ratio"].max == pytest.approx(1.0, abs=2e-5)
    assert tallies["policy/clip_fraction"].sum == 0


def test_the_reference_is_the_policy_at_the_start() -> None:
    """T23: a KL of exactly zero where the slices are the same."""
    settings = config(beta=0.1)
    policy, (step, *_) = real(some_groups(2), settings)
    _, tallies = accumulate_gradient(
        ParallelPolicy(policy), step, grpo_objective(settings), token_budget=40
    )
    assert tallies["policy/kl"].sum == 0.0


@pytest.mark.parametrize("overlong", ["keep", "mask"])
def test_a_sampler_that_draws_from_no_numbers_is_not_taken_for_a_lack_of_signal(
    overlong: str,
) -> None:
    """A broken model writes the same nonsense everywhere: no group has a signal, or even a row."""
    groups = [make_group(0, [0.0, 0.0], [4, 3])]
    broken = [
        replace(
            rollout,
            completion=replace(
                rollout.completion,
                logprobs=(float("nan"),) * len(rollout.completion.token_ids),
                finish_reason=FinishReason.LENGTH,
            ),
        )
        for rollout in groups[0].rollouts
    ]
    settings = config(overlong=overlong)
    assert assemble(groups, settings, Noted(), max_new_tokens=8).batches == ()
    assembled = assemble(
        [replace(groups[0], rollouts=tuple(broken))], settings, Noted(), max_new_tokens=8
    )
    (step,) = assembled.batches
    assert step.rows == 2
    assert broken_rows(step)["sampler_logprobs"][0]


# --- signal: which groups teach, what the status word says, what the numbers count


def test_an_all_wrong_group_teaches_nothing_about_format() -> None:
    """T14: who was wrong in the nicer format earns no update, unless the recipe wants that."""
    group = make_group(0, [0.0, 0.1, 0.0], [3, 3, 3], correct=[False] * 3)
    assert advantages_of([group], GRPOConfig()) == ((0.0, 0.0, 0.0),)
    shaped = advantages_of([group], GRPOConfig(require_correct_in_group=False))
    assert shaped[0][1] > 0 > shaped[0][0]


def test_the_epsilon_beside_the_standard_deviation_can_be_set() -> None:
    """`math-r1-zero`'s 1e-6: rewards a thousandth apart keep almost their whole size."""
    group = make_group(0, [0.001, 0.0], [3, 3])
    std = 0.001 / 2**0.5
    for eps, config in [
        (1e-4, GRPOConfig()),
        (1e-6, GRPOConfig(advantage_eps=1e-6)),
        (1e-2, GRPOConfig(advantage_eps=1e-2, advantage="batch_standardised")),
    ]:
        assert advantages_of([group], config)[0] == pytest.approx(
            (0.0005 / (std + eps), -0.0005 / (std + eps))
        )


def test_an_unscored_rollout_leaves_its_group_before_the_baseline() -> None:
    """T8, T29: None is not zero."""
    group = make_group(0, [1.0, None, 0.0], [3, 3, 3])
    config = GRPOConfig(advantage="mean")
    assert advantages_of([group], config) == ((0.5, -0.5),)
    assert rollout_tallies([group], [(0.5, -0.5)])["rollouts/not_scored"].sum == 1


def test_a_step_without_any_score_is_no_error() -> None:
    group = make_group(0, [None, None], [3, 3])
    assert advantages_of([group], GRPOConfig()) == ((),)


def test_worked_solutions_of_unsolved_groups_become_rows() -> None:
    """Of the two groups without a correct rollout, one has a solution."""
    groups = [
        make_group(0, [1.0, 0.0], [3, 5]),
        make_group(1, [0.0, 0.0], [2, 4]),
        make_group(2, [0.0, 0.0], [4, 6]),
    ]
    asked: list[str] = []

    def solution(group: RolloutGroup) -> Demonstration | None:
        asked.append(group.problem.id)
        if group.problem.id != "p/2":
            return None
        # A tool wrote the second token.
        return Demonstration(prompt=group.prompt, token_ids=(7, 8, 9), tool_spans=((1, 2),))

    settings = config(solution_weight=0.5, overlong="mask")
    lessons = Lessons(solution=solution)
    (step,) = assemble(groups, settings, Noted(), max_new_tokens=8, lessons=lessons).batches
    assert asked == ["p/1", "p/2"]
    assert step.is_solution is not None
    assert step.likelihood_weights is not None
    # Rollouts of the flat groups have no gradient.
    assert step.is_solution.tolist() == [False, False, True]
    assert step.completion_ids[2, :3].tolist() == [7, 8, 9]
    assert step.weights[2].tolist() == [0.0] * step.mask.shape[1]
    # The denominator of each stream is its own tokens, those of flat groups included.
    assert float(step.weights[0, 0]) == pytest.approx(1 / (3 + 5 + 2 + 4 + 4 + 6))
    weights = step.likelihood_weights[2, :3].tolist()
    assert weights == pytest.approx([0.5 / 2, 0.0, 0.5 / 2])
    assert not step.likelihood_weights[:2].any()


def test_without_a_weight_solutions_are_not_looked_at() -> None:
    def never(_: RolloutGroup) -> None:
        raise AssertionError

    groups = some_groups()
    plain = assemble(groups, config(), Noted(), max_new_tokens=8)
    same = assemble(groups, config(), Noted(), max_new_tokens=8, lessons=Lessons(solution=never))
    assert len(plain.batches) == len(same.batches)
    assert same.batches[0].is_solution is None


def test_a_teacher_reads_every_scored_rollout_with_the_prompt_it_is_given() -> None:
    settings = config(teacher=TeacherConfig(path="teacher", weight=2.0))
    groups = some_groups()
    lessons = Lessons(
        teacher=lambda group: int(group.problem.id == "p/1"),
        teacher_prompt=lambda group: (5, 5, *group.prompt.token_ids),
    )
    (step,) = assemble(groups, settings, Noted(), max_new_tokens=8, lessons=lessons).batches
    assert step.rows == 16
    assert step.teacher is not None
    assert step.teacher_weights is not None
    assert step.teacher.tolist() == [0] * 4 + [1] * 4 + [0] * 8
    assert float(step.teacher_weights.sum()) == pytest.approx(2.0)
    read = step.select(torch.tensor([3, 12])).as_the_teacher_reads()
    assert read.prompt_lengths.tolist() == [7, 7]
    assert read.prompt_ids[1, :2].tolist() == [5, 5]
    assert read.prompt_ids[1, 2:].tolist() == list(groups[3].prompt.token_ids)
