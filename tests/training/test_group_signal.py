"""Signal: which groups teach, what the status word says, what the numbers count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import make_group

from grouper.advice.checks import NO_SIGNAL, NO_SIGNAL_FIXES
from grouper.config.schema import GRPOConfig
from grouper.training.group_signal import (
    advantages_of,
    rollout_tallies,
    shuffle_rewards,
    status_of,
)
from grouper.types import FinishReason, Grade, RolloutGroup, Verdict


def test_an_all_wrong_group_teaches_nothing_about_format() -> None:
    """T14: who was wrong in the nicer format earns no update, unless the recipe wants that."""
    group = make_group(0, [0.0, 0.1, 0.0], [3, 3, 3], correct=[False] * 3)
    assert advantages_of([group], GRPOConfig()) == ((0.0, 0.0, 0.0),)
    shaped = advantages_of([group], GRPOConfig(shaping_needs_a_correct=False))
    assert shaped[0][1] > 0 > shaped[0][0]


def test_the_epsilon_beside_the_standard_deviation_can_be_set() -> None:
    """System B's 1e-6: rewards a thousandth apart keep almost their whole size."""
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
    config = GRPOConfig(advantage="centred")
    assert advantages_of([group], config) == ((0.5, -0.5),)
    assert rollout_tallies([group], [(0.5, -0.5)])["rollouts/not_scored"].sum == 1


def test_a_step_without_any_score_is_no_error() -> None:
    group = make_group(0, [None, None], [3, 3])
    assert advantages_of([group], GRPOConfig()) == ((),)


def test_shuffling_deals_out_the_same_rewards_and_keeps_the_texts() -> None:
    groups = (
        make_group(0, [1.0, 0.0, 0.0], [3, 4, 5]),
        make_group(1, [1.0, 1.0, 0.0], [6, 7, 8]),
    )
    dealt = shuffle_rewards(groups, key=3)
    assert dealt == shuffle_rewards(groups, key=3)
    assert len({repr(shuffle_rewards(groups, key=k)) for k in range(8)}) > 4
    for before, after in zip(groups, dealt, strict=True):
        assert [r.completion for r in before.rollouts] == [r.completion for r in after.rollouts]
    totals = [r.reward.total for g in dealt for r in g.rollouts]
    assert sorted(total for total in totals if total is not None) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_means_are_over_rollouts_not_over_group_means() -> None:
    """T28."""
    groups = [make_group(0, [1.0], [3]), make_group(1, [0.0, 0.0, 0.0], [9, 9, 9])]
    tallies = rollout_tallies(groups, [(0.0,), (0.0, 0.0, 0.0)])
    assert tallies["solve_rate"].mean == 0.25
    assert tallies["completion/tokens"].mean == 7.5
    assert tallies["groups/all_right"].mean == 0.5
    assert tallies["groups/all_wrong"].mean == 0.5
    assert tallies["groups/mixed"].mean == 0.0


def _with(group: RolloutGroup, verdict: Verdict, reason: FinishReason) -> RolloutGroup:
    grade = Grade(verdict=verdict, extracted=None, rung="extract", reason="")
    rollouts = tuple(
        replace(r, grade=grade, completion=replace(r.completion, finish_reason=reason))
        for r in group.rollouts
    )
    return replace(group, rollouts=rollouts)


STOP, LENGTH = FinishReason.STOP_TOKEN, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("verdict", "reason", "word"),
    [
        (Verdict.INCORRECT, STOP, "no-signal:all-wrong"),
        (Verdict.NO_ANSWER, LENGTH, "no-signal:truncated"),
        (Verdict.CORRECT, STOP, "no-signal:all-right"),
        (Verdict.TIMEOUT, STOP, "no-signal:grader-error"),
    ],
)
def test_the_status_word_names_the_cause(verdict: Verdict, reason: FinishReason, word: str) -> None:
    groups = [_with(make_group(0, [0.0, 0.0], [3, 3]), verdict, reason)]
    assert status_of(groups, applied=False, any_advantage=False) == word


def test_rollouts_without_a_reward_are_not_called_wrong() -> None:
    """R10: the reward had failed, and the step was told as all-wrong."""
    groups = [make_group(0, [None, None], [3, 3]), make_group(1, [None, None], [3, 3])]
    word = status_of(groups, applied=False, any_advantage=False)
    assert word == "no-signal:not-scored"
    assert word.partition(":")[2] in NO_SIGNAL.keys() & NO_SIGNAL_FIXES.keys()


def test_the_other_status_words() -> None:
    groups = [make_group(0, [1.0, 0.0], [3, 3])]
    assert status_of(groups, applied=True, any_advantage=True) == "learning"
    assert status_of(groups, applied=False, any_advantage=True) == "skipped:not-finite"
    assert status_of(groups, applied=False, any_advantage=False) == "no-signal:equal-rewards"


def test_sameness_is_measured_in_groups_that_are_not_all_right() -> None:
    solved = make_group(0, [1.0, 1.0], [3, 3])
    same = replace(solved, rollouts=(solved.rollouts[0],) * 2)
    assert rollout_tallies([same], [(0.0, 0.0)])["completion/unique"].count == 0
    wrong = make_group(1, [0.0] * 4, [3, 4, 5, 6], correct=[False] * 4)
    two_kinds = replace(wrong, rollouts=(wrong.rollouts[0],) * 3 + (wrong.rollouts[1],))
    tally = rollout_tallies([same, wrong, two_kinds], [(0.0,) * 2, (0.0,) * 4, (0.0,) * 4])
    assert (tally["completion/unique"].max, tally["completion/unique"].min) == (1.0, 1 / 3)
    assert tally["completion/repetition"].count == 10


def test_entropy_and_log_probs_are_of_every_sampled_token() -> None:
    """T6: also of groups without a signal, from which nothing is trained."""
    lengths = ([2, 3], [5, 1])
    groups = [
        replace(
            group,
            rollouts=tuple(
                replace(r, completion=replace(r.completion, entropies=(float(g),) * length))
                for r, length in zip(group.rollouts, lengths[g], strict=True)
            ),
        )
        for g, group in enumerate(make_group(g, [g, 0.0], lengths[g]) for g in range(2))
    ]
    tallies = rollout_tallies(groups, [(0.0, 0.0), (1.0, -1.0)])
    assert tallies["policy/entropy"].count == 11
    assert tallies["policy/entropy"].mean == 6 / 11
    assert tallies["policy/logprob"].count == 11
