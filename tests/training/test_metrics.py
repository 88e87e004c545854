"""The seconds of a step, its tokens and its share of the device's arithmetic."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_batch, make_group, tiny_model

from grouper.advice.checks import FINDINGS
from grouper.config.schema import ModelConfig
from grouper.models.loading import weightless_policy
from grouper.models.policy import Policy
from grouper.training import metrics
from grouper.training.metrics import StepClock, matrices_of, matrix_rate, rollout_tallies, status_of
from grouper.types import FinishReason, Grade, RolloutGroup, Verdict

RATE = 1e9
SPLIT = ("prefill", "decode", "grade", "update", "other")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    monkeypatch.setattr(metrics, "matrix_rate", lambda *_: RATE)
    return StepClock(Policy(tiny_model()))


def means(times: StepClock, **work: Any) -> dict[str, float]:
    return {name.removeprefix("time."): t.mean for name, t in times.tallies(**work).items()}


def test_the_parts_add_up_to_the_step(times: StepClock) -> None:
    began = time.perf_counter()
    times.begin()
    times.seconds |= {"prefill": 0.001, "decode": 0.002, "grade": 0.001}
    with times.updating():
        time.sleep(0.01)
    time.sleep(0.02)
    found = means(times)
    whole = time.perf_counter() - began
    held = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert held is not None
    # At least what this process held: that of the process it was forked from may count, too.
    assert 0.99 * int(held[1]) * 2**10 <= 2**30 * found["memory.peak_gib"] < 2**40
    assert sum(found[name] for name in SPLIT) == pytest.approx(found["step"])
    assert 0.03 <= found["step"] <= whole
    assert 0.01 <= found["update"] <= whole - 0.02
    assert found["sample"] == pytest.approx(0.003)


def test_utilization_is_flops_over_what_the_device_could_have_done(times: StepClock) -> None:
    policy = Policy(tiny_model())
    layers = [m for m in policy.decoder.modules() if isinstance(m, torch.nn.Linear)]
    body = sum(layer.weight.numel() for layer in layers)
    head = policy.model.get_output_embeddings().weight.numel()
    group, batch = make_group(0, [1.0, 0.0], [3, 7], prompt_length=4), make_batch()
    times.begin()
    times.seconds |= {"prefill": 0.25, "decode": 0.5, "update": 0.5}
    found = means(times, drawn=[group], trained=[batch])
    drawn = 2 * body * (4 + 3 + 7) + 2 * head * (3 + 7)
    rows = [(4, [3, 7, 1, 5]), (7, [9, 2, 6]), (1, [4, 8, 3])]
    scored = sum(sum(lengths) for _, lengths in rows)
    learned = 6 * body * (scored + sum(prompt for prompt, _ in rows)) + 6 * head * scored
    assert found["mfu_sample"] == pytest.approx(drawn / (0.75 * RATE))
    assert found["mfu_update"] == pytest.approx(learned / (0.5 * RATE))
    assert found["mfu"] == pytest.approx((drawn + learned) / (found["step"] * RATE))
    assert found["sampled_tokens_per_second"] == pytest.approx(10 / 0.75)
    assert found["trained_tokens_per_second"] == pytest.approx(int(batch.mask.sum()) / 0.5)


def test_a_forward_without_a_gradient_counts_as_a_third(times: StepClock) -> None:
    """Old and reference log-probs are part of the update's work."""
    found = []
    for passes in (1, 4):
        times.begin()
        times.seconds["update"] = 1.0
        work = {"scored": [make_batch()] * passes, "trained": [make_batch()]}
        found.append(means(times, **work)["mfu_update"])
    assert found[1] / found[0] == pytest.approx(7 / 4)


def test_a_step_without_an_update_has_no_speed_of_one(times: StepClock) -> None:
    times.begin()
    times.seconds |= {"prefill": 0.1, "decode": 0.1}
    with times.updating():
        pass
    found = means(times, drawn=[make_group(0, [1.0], [3])])
    assert "trained_tokens_per_second" not in found
    assert found["mfu"] > 0


def test_a_new_step_begins_at_nothing(times: StepClock) -> None:
    times.begin()
    times.seconds["update"] = 5.0
    times.begin()
    found = means(times)
    assert "update" not in found
    assert "mfu" not in found
    assert found["other"] == found["step"]


def test_more_processes_could_have_done_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "matrix_rate", lambda *_: RATE)
    found = []
    for processes in (1, 4):
        times = StepClock(Policy(tiny_model()), processes)
        times.seconds["update"] = 1.0
        found.append(means(times, trained=[make_batch()])["mfu_update"])
    assert found[0] == pytest.approx(4 * found[1])


def test_with_lora_only_its_own_matrices_are_trained() -> None:
    config = tiny_model().config
    whole = matrices_of(weightless_policy(ModelConfig(path="x"), config))
    lora = matrices_of(weightless_policy(ModelConfig(path="x", lora={"rank": 4}), config))
    assert (whole.trained_body, whole.trained_head) == (whole.body, whole.head)
    assert 0 < lora.trained_body == lora.body - whole.body
    assert (lora.trained_head, lora.head) == (0, whole.head)


def test_a_mixture_of_experts_has_no_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "matrix_rate", lambda *_: RATE)
    policy = Policy(tiny_model())
    policy.model.config.num_experts = 8
    times = StepClock(policy)
    times.seconds["update"] = 1.0
    found = means(times, trained=[make_batch()])
    assert "trained_tokens_per_second" in found
    assert "mfu" not in found


def test_the_rate_is_measured_once_and_is_a_rate_of_products() -> None:
    cpu = torch.device("cpu")
    rate = matrix_rate(cpu, torch.float32, torch.get_num_threads())
    started = time.perf_counter()
    assert matrix_rate(cpu, torch.float32, torch.get_num_threads()) == rate
    assert time.perf_counter() - started < 0.01
    assert 1e8 < rate < 1e15


@pytest.mark.parametrize(("rate", "size"), [(50e9, 1024), (1e9, 256), (4e9, 512)])
def test_a_slow_device_is_measured_with_smaller_products(
    monkeypatch: pytest.MonkeyPatch, rate: float, size: int
) -> None:
    """Without products of bfloat16, those of a large size took a CPU five seconds."""
    measured: list[int] = []

    class TimerOf:
        """A device of a constant rate."""

        def __init__(self, statement: str, globals: dict[str, torch.Tensor], num_threads: int):  # noqa: A002 - as PyTorch calls it
            del statement, num_threads
            self._size = len(globals["matrix"])
            self.mean = 2 * self._size**3 / rate
            self.times = [self.mean]

        def timeit(self, number: int) -> TimerOf:
            assert number == 1
            return self

        def blocked_autorange(self, min_run_time: float) -> TimerOf:
            del min_run_time
            measured.append(self._size)
            return self

    monkeypatch.setattr(metrics, "Timer", TimerOf)
    found = matrix_rate.__wrapped__(torch.device("cpu"), torch.float32, 1)
    assert found == pytest.approx(rate)
    assert measured == [size]


# --- what the rollouts of a step were like


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
    grade = Grade(verdict=verdict, extracted=None, stage="extract", reason="")
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
    assert status_of(groups, signal=False, applied=False, tried=False) == word


def test_rollouts_without_a_reward_are_not_called_wrong() -> None:
    """R10: the reward had failed, and the step was told as all-wrong."""
    groups = [make_group(0, [None, None], [3, 3]), make_group(1, [None, None], [3, 3])]
    word = status_of(groups, signal=False, applied=False, tried=False)
    assert word == "no-signal:not-scored"
    assert word in FINDINGS


def test_the_other_status_words() -> None:
    groups = [make_group(0, [1.0, 0.0], [3, 3])]

    def word(*, signal: bool, applied: bool, tried: bool) -> str:
        return status_of(groups, signal=signal, applied=applied, tried=tried)

    assert word(signal=True, applied=True, tried=True) == "learning"
    assert word(signal=True, applied=False, tried=True) == "skipped:not-finite"
    assert word(signal=False, applied=False, tried=False) == "no-signal:equal-rewards"


def test_an_update_by_the_kl_alone_is_not_learning() -> None:
    """With `grpo.beta` a step without signal has a gradient, and was called learning."""
    groups = [_with(make_group(0, [0.0, 0.0], [3, 3]), Verdict.INCORRECT, STOP)]
    word = status_of(groups, signal=False, applied=True, tried=True)
    assert word == "no-signal:all-wrong"
    assert word in FINDINGS


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
