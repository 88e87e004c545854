"""Each piece against numbers worked out by hand, and against the parts that training uses."""

from __future__ import annotations

import doctest
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model

from grouper.algorithms.advantages import mean_baseline, standardised
from grouper.algorithms.losses import Bounds, ppo_clip
from grouper.algorithms.weighting import constant as constant_weights
from grouper.algorithms.weighting import sequence_mean

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import pieces

VALUES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, math.nan]])
MASK = torch.tensor([[1, 0, 1], [1, 1, 0]])
LOG_PROBS = torch.tensor([[-1.0, -2.0, -0.5], [-0.25, -4.0, -8.0]])
OLD = torch.tensor([[-1.5, -2.0, -0.5], [-0.25, -3.0, -8.0]])
ADVANTAGES = torch.tensor([[2.0], [-1.0]])


def test_masked_mean_by_hand():
    assert pieces.masked_mean(VALUES, MASK).item() == 29 / 4
    assert pieces.masked_mean(VALUES, MASK, dim=0).tolist() == [4.5, 16.0, 4.0]
    assert pieces.masked_mean(VALUES, MASK, dim=-1).tolist() == [2.5, 12.0]
    assert pieces.masked_mean(VALUES, MASK.bool(), dim=1).shape == (2,)
    assert pieces.masked_mean(VALUES[:1], torch.zeros(1, 3)).isnan()


def test_masked_normalize_by_hand():
    assert pieces.masked_normalize(VALUES, MASK, 10.0).item() == pytest.approx(2.9)
    assert pieces.masked_normalize(VALUES, MASK, 2.0, dim=0).tolist() == [4.5, 8.0, 2.0]
    assert pieces.masked_normalize(VALUES, MASK, 4.0, dim=1).tolist() == [1.25, 6.0]
    assert pieces.masked_normalize(VALUES, torch.zeros(2, 3), 4.0).item() == 0


def test_what_stands_off_the_mask_has_no_gradient():
    values = VALUES.clone().requires_grad_()
    pieces.masked_mean(values, MASK).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.25, 0, 0.25], [0.25, 0.25, 0]]


def test_entropy_by_hand():
    third = torch.tensor([0.5, 0.25, 0.25]).log()
    logits = torch.stack([torch.zeros(3), third + 100.0, torch.tensor([0.0, 0.0, -math.inf])])
    found = pieces.entropy_from_logits(logits.view(1, 3, 3))
    assert found.shape == (1, 3)
    assert found[0].tolist() == pytest.approx([math.log(3), 1.5 * math.log(2), math.log(2)])
    huge = torch.tensor([[[1e4, -1e4, 0.0]]], dtype=torch.bfloat16)
    assert pieces.entropy_from_logits(huge).tolist() == [[0.0]]


def test_response_log_probs_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(7.0), 0.0]]], requires_grad=True)
    model = lambda input_ids: SimpleNamespace(logits=logits)  # noqa: E731 - a model in one line
    ids = torch.zeros(1, 2, dtype=torch.int64)
    found = pieces.response_log_probs(model, ids, torch.tensor([[1, 1]]), with_entropy=True)
    assert found["log_probs"][0].tolist() == pytest.approx([math.log(3 / 4), math.log(1 / 8)])
    assert found["log_probs"].requires_grad
    assert not found["token_entropy"].requires_grad
    assert found["token_entropy"][0, 0].item() == pytest.approx(
        -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    )
    assert pieces.response_log_probs(model, ids, torch.tensor([[1, 1]])).keys() == {"log_probs"}


def test_response_log_probs_of_a_model_are_its_cross_entropy():
    model = tiny_model()
    ids = torch.arange(12).view(2, 6) * 7 % VOCABULARY
    found = pieces.response_log_probs(model, ids[:, :-1], ids[:, 1:])["log_probs"]
    logits = model(input_ids=ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(-found.flatten(), expected)


def _reward(response: str, truth: str) -> dict[str, float]:
    answer, format_ = float(truth in response), float(response.startswith("<"))
    return {"reward": answer * format_, "answer_reward": answer, "format_reward": format_}


RESPONSES = ["<4", "<5", "4", "<4", "<7", "<7", "<7", "<7"]
TRUTHS = ["4"] * 4 + ["7"] * 4


def test_group_normalized_rewards_by_hand():
    found, raw, metadata = pieces.group_normalized_rewards(_reward, RESPONSES, TRUTHS, 4, eps=0.0)
    assert raw.tolist() == [1, 0, 0, 1, 1, 1, 1, 1]
    # The deviations of (1, 0, 0, 1) are a half; their sample standard deviation is 1 / sqrt(3).
    half = math.sqrt(3) / 2
    assert found.tolist() == pytest.approx([half, -half, -half, half, 0, 0, 0, 0])
    assert metadata["answer_reward"] == 7 / 8
    assert metadata["format_reward"] == 7 / 8
    assert metadata["reward"] == metadata["reward_mean"] == 6 / 8
    assert (metadata["reward_min"], metadata["reward_max"]) == (0, 1)
    plain, _, _ = pieces.group_normalized_rewards(
        _reward, RESPONSES, TRUTHS, 4, divide_by_std=False
    )
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]


def test_group_normalized_rewards_are_the_advantages_of_training():
    ids = torch.arange(8) // 4
    found, raw, _ = pieces.group_normalized_rewards(_reward, RESPONSES, TRUTHS, 4, eps=1e-4)
    torch.testing.assert_close(found.double(), standardised(raw, ids), rtol=1e-6, atol=0)
    plain, raw, _ = pieces.group_normalized_rewards(
        _reward, RESPONSES, TRUTHS, 4, divide_by_std=False
    )
    torch.testing.assert_close(plain.double(), mean_baseline(raw, ids))


@pytest.mark.parametrize(
    ("responses", "truths", "size"),
    [(RESPONSES[:7], TRUTHS, 4), (RESPONSES, TRUTHS, 3), ([], [], 2)],
)
def test_groups_that_are_not_whole_are_refused(responses, truths, size):
    with pytest.raises(ValueError, match=r"ground truths|no whole groups"):
        pieces.group_normalized_rewards(_reward, responses, truths, size)


def test_naive_policy_gradient_loss_by_hand():
    found = pieces.naive_policy_gradient_loss(ADVANTAGES, LOG_PROBS)
    assert found.tolist() == [[2.0, 4.0, 1.0], [-0.25, -4.0, -8.0]]


def test_grpo_clip_loss_by_hand():
    loss, said = pieces.grpo_clip_loss(ADVANTAGES, LOG_PROBS, OLD, 0.2)
    # Row 1: the ratio e^0.5 = 1.65 is cut at 1.2 where A > 0. Row 2: e^-1 = 0.37 at 0.8 for A < 0.
    assert loss.flatten().tolist() == pytest.approx([-2.4, -2.0, -2.0, 1.0, 0.8, 1.0])
    assert said["clipped"].tolist() == [[True, False, False], [False, True, False]]
    other, said = pieces.grpo_clip_loss(-ADVANTAGES, LOG_PROBS, OLD, 0.2)
    # The bound never helps a token that moved the wrong way.
    assert other[0, 0].item() == pytest.approx(2 * math.exp(0.5))
    assert not said["clipped"].any()


def test_the_clipped_loss_is_that_of_training():
    bounds = Bounds(low=0.2, high=0.2)
    expected = ppo_clip(LOG_PROBS - OLD, LOG_PROBS, ADVANTAGES, bounds)
    assert pieces.grpo_clip_loss(ADVANTAGES, LOG_PROBS, OLD)[0].equal(expected)


def test_policy_gradient_loss_takes_what_its_kind_needs():
    raw = torch.tensor([[1.0], [0.0]])
    loss, said = pieces.policy_gradient_loss(LOG_PROBS, "no_baseline", raw_rewards=raw)
    assert (loss.tolist(), said) == ([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0]], {})
    loss, _ = pieces.policy_gradient_loss(
        LOG_PROBS, "reinforce_with_baseline", raw_rewards=raw, advantages=ADVANTAGES
    )
    assert loss.equal(pieces.naive_policy_gradient_loss(ADVANTAGES, LOG_PROBS))
    loss, said = pieces.policy_gradient_loss(
        LOG_PROBS, "grpo_clip", advantages=ADVANTAGES, old_log_probs=OLD
    )
    assert loss.equal(pieces.grpo_clip_loss(ADVANTAGES, LOG_PROBS, OLD)[0])
    assert said["clipped"].sum() == 2
    with pytest.raises(ValueError, match="grpo_clip needs advantages and old_log_probs"):
        pieces.policy_gradient_loss(LOG_PROBS, "grpo_clip", advantages=ADVANTAGES)
    with pytest.raises(ValueError, match="no loss 'ppo'"):
        pieces.policy_gradient_loss(LOG_PROBS, "ppo")  # type: ignore[arg-type]  # what is tested


def test_sft_microbatch_step_by_hand():
    log_probs = LOG_PROBS.clone().requires_grad_()
    loss, said = pieces.sft_microbatch_step(log_probs, MASK, 2, constant=5.0)
    # (1.5 / 5 + 4.25 / 5) / 2 rows / 2 micro-batches
    assert loss.item() == pytest.approx(5.75 / 20)
    assert not loss.requires_grad
    assert said["tokens"].item() == 4
    assert log_probs.grad is not None
    assert log_probs.grad.flatten().tolist() == pytest.approx([-0.05, 0, -0.05, -0.05, -0.05, 0])


def test_grpo_microbatch_step_by_hand():
    log_probs = LOG_PROBS.clone().requires_grad_()
    loss, said = pieces.grpo_microbatch_step(
        log_probs, MASK, 4, "grpo_clip", advantages=ADVANTAGES, old_log_probs=OLD
    )
    # Rows: (-2.4 - 2.0) / 2 and (1.0 + 0.8) / 2; their mean over 4 micro-batches.
    assert loss.item() == pytest.approx((-2.2 + 0.9) / 2 / 4)
    assert said["clip_fraction"].item() == 0.5
    assert log_probs.grad is not None
    # Clipped tokens get no gradient; the others A * rho / (tokens * rows * micro-batches).
    assert log_probs.grad.flatten().tolist() == pytest.approx([0, 0, -2 / 16, 1 / 16, 0, 0])


@pytest.mark.parametrize(("divisor", "weighting"), [(None, sequence_mean), (3.0, constant_weights)])
def test_micro_batches_add_up_to_the_step_of_training(divisor, weighting):
    """Two micro-batches of a row each have the gradient of the whole step under our weights."""
    whole, parts = LOG_PROBS.clone().requires_grad_(), LOG_PROBS.clone().requires_grad_()
    weights = weighting(MASK.bool(), divisor or 0.0).float()
    per_token = ppo_clip(whole - OLD, whole, ADVANTAGES, Bounds(low=0.2, high=0.2))
    (per_token * weights).sum().backward()
    for row in (slice(0, 1), slice(1, 2)):
        pieces.grpo_microbatch_step(
            parts[row],
            MASK[row],
            2,
            "grpo_clip",
            advantages=ADVANTAGES[row],
            old_log_probs=OLD[row],
            constant=divisor,
        )
    torch.testing.assert_close(parts.grad, whole.grad)


def test_a_row_of_advantages_is_refused():
    """With as many tokens as responses it would broadcast the wrong way round."""
    square = LOG_PROBS[:, :2]
    with pytest.raises(ValueError, match=r"are \[2\], and .* column: \[2, 1\]"):
        pieces.naive_policy_gradient_loss(ADVANTAGES.flatten(), square)
    with pytest.raises(ValueError, match="as a column"):
        pieces.grpo_clip_loss(ADVANTAGES.flatten(), square, OLD[:, :2])


def test_the_examples_in_the_docstrings():
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(pieces, optionflags=flags).failed == 0


def test_prompts_and_outputs_are_encoded_apart_and_shifted_by_one():
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [ord(letter) for letter in text],
        pad_token_id=None,
        eos_token_id=0,
    )
    found = pieces.tokenize_prompt_and_output(["ab", "c"], ["cde", "d"], tokenizer)
    assert found["input_ids"][0].tolist() == [*map(ord, "abcd")]
    assert found["labels"][0].tolist() == [*map(ord, "bcde")]
    assert found["response_mask"].tolist() == [
        [False, True, True, True],
        [True, False, False, False],
    ]
    assert found["input_ids"][1].tolist() == [ord("c"), ord("d"), 0, 0]
    assert found["labels"][1].tolist() == [ord("d"), 0, 0, 0]
    with pytest.raises(ValueError, match="2 prompts but 1 outputs"):
        pieces.tokenize_prompt_and_output(["a", "b"], ["c"], tokenizer)
    with pytest.raises(ValueError, match="a prompt without a token"):
        pieces.tokenize_prompt_and_output([""], ["c"], tokenizer)
