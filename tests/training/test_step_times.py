"""The seconds of a step, its tokens and its share of the device's arithmetic."""

from __future__ import annotations

import time

import pytest
import torch
from tiny_models import make_batch, make_group, tiny_model

from grouper.config.schema import ModelConfig
from grouper.models.loading import weightless_policy
from grouper.models.policy import Policy
from grouper.training import step_times
from grouper.training.step_times import StepTimes, _weights_of, matrix_rate

RATE = 1e9
SPLIT = ("prefill", "decode", "grade", "update", "other")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> StepTimes:
    monkeypatch.setattr(step_times, "matrix_rate", lambda *_: RATE)
    return StepTimes(Policy(tiny_model()))


def means(times: StepTimes) -> dict[str, float]:
    return {name.removeprefix("time."): t.mean for name, t in times.tallies().items()}


def test_the_parts_add_up_to_the_step(times: StepTimes) -> None:
    times.begin()
    times.took(prefill=0.001, decode=0.002, grade=0.001)
    with times.updating():
        time.sleep(0.01)
    time.sleep(0.02)
    found = means(times)
    assert sum(found[name] for name in SPLIT) == pytest.approx(found["step"])
    assert found["update"] >= 0.01
    assert found["sample"] == pytest.approx(0.003)


def test_utilisation_is_flops_over_what_the_device_could_have_done(times: StepTimes) -> None:
    policy = Policy(tiny_model())
    layers = [m for m in policy.model.modules() if isinstance(m, torch.nn.Linear)]
    matrices = sum(layer.weight.numel() for layer in layers)
    group, batch = make_group(0, [1.0, 0.0], [3, 7], prompt_length=4), make_batch()
    times.begin()
    times.took(prefill=0.25, decode=0.5)
    times.sampled([group])
    times.took(update=0.5)
    times.trained(batch)
    found = means(times)
    drawn = 2 * matrices * (4 + 3 + 7)
    rows = [(4, [3, 7, 1, 5]), (7, [9, 2, 6]), (1, [4, 8, 3])]
    learned = 6 * matrices * sum(prompt + sum(lengths) for prompt, lengths in rows)
    assert found["mfu_sample"] == pytest.approx(drawn / (0.75 * RATE))
    assert found["mfu_update"] == pytest.approx(learned / (0.5 * RATE))
    assert found["mfu"] == pytest.approx((drawn + learned) / (found["step"] * RATE))
    assert found["sampled_tokens_per_second"] == pytest.approx(10 / 0.75)
    assert found["trained_tokens_per_second"] == pytest.approx(batch.target_tokens / 0.5)


def test_a_forward_without_a_gradient_counts_as_a_third(times: StepTimes) -> None:
    """Old and reference log-probs are part of the update's work."""
    found = []
    for passes in (1, 4):
        times.begin()
        times.took(update=1.0)
        times.trained(make_batch())
        for _ in range(passes):
            times.scored(make_batch())
        found.append(means(times)["mfu_update"])
    assert found[1] / found[0] == pytest.approx(7 / 4)


def test_a_step_without_an_update_has_no_speed_of_one(times: StepTimes) -> None:
    times.begin()
    times.took(prefill=0.1, decode=0.1)
    times.sampled([make_group(0, [1.0], [3])])
    with times.updating():
        pass
    found = means(times)
    assert "trained_tokens_per_second" not in found
    assert found["mfu"] > 0


def test_a_new_step_begins_at_nothing(times: StepTimes) -> None:
    times.begin()
    times.took(update=5.0)
    times.trained(make_batch())
    times.begin()
    found = means(times)
    assert "update" not in found
    assert "mfu" not in found
    assert found["other"] == found["step"]


def test_more_processes_could_have_done_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "matrix_rate", lambda *_: RATE)
    found = []
    for processes in (1, 4):
        times = StepTimes(Policy(tiny_model()), processes)
        times.took(update=1.0)
        times.trained(make_batch())
        found.append(means(times)["mfu_update"])
    assert found[0] == pytest.approx(4 * found[1])


def test_with_lora_only_its_own_matrices_are_trained() -> None:
    config = tiny_model().config
    whole = _weights_of(weightless_policy(ModelConfig(path="x"), config))
    lora = _weights_of(weightless_policy(ModelConfig(path="x", lora={"rank": 4}), config))
    assert whole is not None
    assert lora is not None
    assert whole.trained == whole.all
    assert 0 < lora.trained == lora.all - whole.all


def test_a_mixture_of_experts_has_no_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "matrix_rate", lambda *_: RATE)
    policy = Policy(tiny_model())
    policy.model.config.num_experts = 8
    times = StepTimes(policy)
    times.took(update=1.0)
    times.trained(make_batch())
    found = means(times)
    assert "trained_tokens_per_second" in found
    assert "mfu" not in found


def test_the_rate_is_measured_once_and_is_a_rate_of_products() -> None:
    cpu = torch.device("cpu")
    rate = matrix_rate(cpu, torch.float32, torch.get_num_threads())
    started = time.perf_counter()
    assert matrix_rate(cpu, torch.float32, torch.get_num_threads()) == rate
    assert time.perf_counter() - started < 0.01
    assert 1e8 < rate < 1e15
