"""The last word when nothing fits: the parts add up, and options that are taken are not told."""

from __future__ import annotations

from tiny_models import tiny_model

from grouper.config import LoraConfig
from grouper.model_files import _new_adapter
from grouper.planning.advice import memory_advice
from grouper.planning.rows import Rows
from grouper.policy import Policy

ROWS = Rows(prompt=64, completion=60, count=1)


def wide(**changes: int) -> Policy:
    return Policy(tiny_model(hidden_size=512, intermediate_size=2048, vocab_size=20_000, **changes))


def test_the_parts_are_counted() -> None:
    policy = wide()
    takes, helps = memory_advice(policy, ROWS)
    size = sum(p.numel() * 4 for p in policy.parameters()) / 2**30
    assert f"weights {size:.2f} GiB" in takes
    assert f"gradients {size:.2f} GiB" in takes
    assert f"optimizer states {2 * size:.2f} GiB" in takes
    assert "model.lora" in helps
    assert "adamw_8bit" in helps


def test_options_that_are_taken_are_not_told() -> None:
    model = tiny_model(hidden_size=512, intermediate_size=2048)
    adapter = _new_adapter(model, LoraConfig(rank=4), "base", seed=0)
    policy = Policy(adapter.get_base_model(), adapter=adapter, gradient_checkpointing=True)
    _, helps = memory_advice(policy, ROWS)
    assert "model.lora" not in helps
    assert "gradient_checkpointing" not in helps
    assert "model.quantization: 4bit" in helps
    assert helps.count("about") == 3


def test_shorter_rows_are_an_option_where_activations_are_most_of_it() -> None:
    policy = Policy(tiny_model(hidden_size=64, intermediate_size=256, head_dim=16))
    _, helps = memory_advice(policy, Rows(prompt=60, completion=66, count=8))
    assert "rows of half the length" in helps
