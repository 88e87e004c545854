"""Estimates against what is really written, and what happens when there is no room."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_states import HASH, SavedTokenizer, take_step, tiny_state

from grouper.config.schema import GRPOConfig, SFTConfig
from grouper.errors import RunFolderError
from grouper.training import disk_space
from grouper.training.checkpoint import save_checkpoint
from grouper.training.disk_space import check_room_for_run, optimizer_bytes, weight_bytes


@pytest.mark.parametrize("lora", [False, True])
def test_the_estimate_is_what_a_checkpoint_takes(tmp_path: Path, lora: bool) -> None:
    state = tiny_state(lora=lora)
    before = optimizer_bytes(state.policy, state.optimizer)
    take_step(state)
    estimate = weight_bytes(state.policy) + optimizer_bytes(state.policy, state.optimizer)
    folder = save_checkpoint(tmp_path, state, SavedTokenizer(), recipe_hash=HASH)
    written = sum(
        file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".pt")
    )
    # Headers of some KB lie on top of the tensors.
    assert estimate <= written <= estimate + 60_000
    assert before == pytest.approx(optimizer_bytes(state.policy, state.optimizer), rel=0.01)


def test_a_run_is_refused_where_not_even_its_models_fit_and_warned_of_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = tiny_state()
    weights, moments = weight_bytes(state.policy), optimizer_bytes(state.policy, state.optimizer)
    phases = {"sft": SFTConfig(), "grpo": GRPOConfig(checkpoint_every=5, keep_checkpoints=3)}

    def check(free: float) -> None:
        monkeypatch.setattr(disk_space, "free_bytes", lambda _: int(free))
        check_room_for_run(tmp_path, state.policy, state.optimizer, phases)

    with pytest.raises(RunFolderError, match="are free"):
        check(1.9 * weights)
    check(2.1 * weights)
    assert "lower keep_checkpoints" in caplog.text
    caplog.clear()
    # Two finals; two checkpoints of SFT and three of GRPO, and one more of each being written.
    check(1.1 * (2 * weights + 7 * (weights + moments)))
    assert not caplog.records
