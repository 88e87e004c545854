"""A checkpoint brings everything back, and a damaged one is found, named and skipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_states import HASH, SavedTokenizer, take_step, tiny_state

from grouper.config.schema import (
    DifficultyConfig,
    GRPOConfig,
    OptimizerConfig,
    SFTConfig,
)
from grouper.errors import CheckpointError, RunFolderError
from grouper.models.folders import BEST_FILE, STATE_FILE
from grouper.training import checkpoint, disk_room
from grouper.training.checkpoint import load_optimizer, save_checkpoint
from grouper.training.curriculum import DifficultyBand
from grouper.training.disk_room import check_room_for_run, weight_bytes
from grouper.training.optimizers import state_bytes
from grouper.training.saved_state import (
    OPTIMIZER_FOLDER,
    contents,
    find_damage,
    is_finished,
    latest_checkpoint,
    read_state,
    write_state,
)
from grouper.training.state import TrainState
from grouper.training.update import UpdateResult

TOKENIZER = SavedTokenizer()
OPTIMIZER_FILE = f"{OPTIMIZER_FOLDER}/0.safetensors"


def save(run: Path, state: TrainState, **options: bool) -> Path:
    return save_checkpoint(run, state, TOKENIZER, recipe_hash=HASH, **options)


def three_checkpoints(run: Path) -> None:
    state = tiny_state()
    for _ in range(3):
        take_step(state)
        save(run, state)


def newest(run: Path) -> str:
    found = latest_checkpoint(run, "grpo", recipe_hashes={HASH})
    assert found is not None
    return found[0].name


def test_every_counter_and_controller_comes_back(tmp_path: Path) -> None:
    def fresh() -> TrainState:
        return tiny_state(band=DifficultyBand(DifficultyConfig()))

    state = fresh()
    take_step(state)
    state.skipped, state.rollout_source.position, state.epoch_ended = 2, 17, True
    assert state.rollout_source.band is not None
    state.rollout_source.band.seen = {"p/1": [3, 8, 0]}
    state.best.offer(1, 0.25)
    state.asked = {"stop": "mine.py:f"}
    state.checks = {"first": {"completion/truncated": [0.5]}, "active": ["kl"]}
    saved = read_state(save(tmp_path, state))
    back = fresh()
    back.restore(saved)
    assert (back.step, back.skipped, back.epoch_ended) == (1, 2, True)
    assert back.rollout_source.position == 17
    assert back.rollout_source.band is not None
    assert back.rollout_source.band.seen == state.rollout_source.band.seen
    assert back.best == state.best
    assert (back.checks, back.asked) == (state.checks, state.asked)
    longer = fresh()
    longer.total += 1
    longer.restore(saved)
    assert longer.asked == {}, "a phase that is given more steps goes on"
    band = fresh()
    band.restore({**saved, "difficulty": None})
    assert band.rollout_source.band is not None
    assert band.rollout_source.band.seen == {}, (
        "a band that the recipe has gained since starts afresh"
    )
    without = tiny_state()
    without.restore(saved)
    assert without.rollout_source.band is None
    # Nothing that a state holds is forgotten here: a new field must be saved, or named.
    not_saved = {"phase", "replica", "optimizer", "started_from", "suspect"}
    not_saved |= {"stream", "clock", "reference", "teachers"}  # made anew from the recipe
    assert set(TrainState.__slots__) - not_saved == {
        "step",
        "skipped",
        "epoch_ended",
        "best",
        "checks",
        "asked",
        "total",
        "rollouts",
    }


def test_a_step_counts_updates_in_a_row_that_were_skipped_and_epochs() -> None:
    state = tiny_state()
    done, skipped = (UpdateResult(tallies={}, applied=applied) for applied in (True, False))
    # (updates, position before and after, skipped in a row, whether an epoch has ended)
    rows = [
        ([skipped, skipped], 0, 9, 2, False),
        ([skipped], 9, 10, 3, True),
        ([done, skipped], 10, 19, 1, False),
        ([skipped, done], 19, 31, 0, True),
    ]
    assert state.stream.size == 10
    for number, (updates, before, after, in_a_row, ended) in enumerate(rows, start=1):
        state.advance(updates, before, after)
        assert (state.step, state.skipped, state.epoch_ended) == (number, in_a_row, ended)


@pytest.mark.parametrize("lora", [False, True])
def test_the_optimizer_goes_on_as_if_nothing_had_happened(tmp_path: Path, lora: bool) -> None:
    straight = tiny_state(lora=lora)
    for _ in range(3):
        take_step(straight)
    state = tiny_state(lora=lora)
    take_step(state)
    folder = save(tmp_path, state)
    weights = load_file(folder / ("adapter_model.safetensors" if lora else "model.safetensors"))
    assert weights
    back = tiny_state(lora=lora)
    back.replica.policy.load_state_dict(state.replica.policy.state_dict())
    load_optimizer(back.optimizer, folder / OPTIMIZER_FOLDER)
    back.restore(read_state(folder))
    for _ in range(2):
        take_step(back)
    for name, value in straight.replica.policy.trainable().items():
        assert torch.equal(value, back.replica.policy.trainable()[name]), name


def test_a_checkpoint_of_an_earlier_format_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    """Otherwise the phase would begin anew, and the record of what it did would be cut off."""
    folder = save(tmp_path, tiny_state())
    shutil.rmtree(folder / OPTIMIZER_FOLDER)
    (folder / "optimizer.pt").write_bytes(b"as it was")
    write_state(folder, {**read_state(folder), "files": contents(folder)})
    found = latest_checkpoint(tmp_path, "grpo", recipe_hashes={HASH})
    assert found is not None
    with pytest.raises(CheckpointError, match="none in this version's format"):
        load_optimizer(tiny_state().optimizer, found[0] / OPTIMIZER_FOLDER)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("nothing left"), RunFolderError),
        (torch.OutOfMemoryError("nothing left"), RunFolderError),
        (RuntimeError("nothing left of a shape"), RuntimeError),
    ],
)
def test_only_memory_that_runs_out_in_a_save_lets_training_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: type[Exception],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(expected, match="nothing left"):
        save(tmp_path, tiny_state())
    assert list((tmp_path / "grpo").iterdir()) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def forget(path: Path) -> None:
    state = json.loads(path.read_text())
    del state["files"], state["step"]
    path.write_text(json.dumps(state))


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (STATE_FILE, delete, "incomplete"),
    (STATE_FILE, truncate, "trainer_state.json cannot be read"),
    (STATE_FILE, empty, "trainer_state.json cannot be read"),
    (STATE_FILE, forget, "trainer_state.json has no 'step'"),
    (OPTIMIZER_FILE, delete, "its optimizer/0.safetensors is missing"),
    (OPTIMIZER_FILE, truncate, "optimizer/0.safetensors is damaged"),
    (OPTIMIZER_FILE, flip, "optimizer/0.safetensors is damaged"),
    ("model.safetensors", delete, "model.safetensors is missing"),
    ("model.safetensors", truncate, "model.safetensors is damaged"),
    ("model.safetensors", flip, "model.safetensors is damaged"),
    ("model.safetensors", empty, "model.safetensors is damaged"),
    ("config.json", delete, "config.json is missing"),
    ("config.json", lambda path: path.write_text("{}"), "config.json is damaged or was edited"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None],
    words: str,
) -> None:
    three_checkpoints(tmp_path)
    assert newest(tmp_path) == "checkpoint-3"
    assert not caplog.records
    damage(tmp_path / "grpo" / "checkpoint-3" / name)
    assert newest(tmp_path) == "checkpoint-2"
    assert "checkpoint-3 is skipped: it" in caplog.text
    assert words in caplog.text


def test_where_none_is_left_it_is_an_error(tmp_path: Path) -> None:
    three_checkpoints(tmp_path)
    for number in (1, 2, 3):
        truncate(tmp_path / "grpo" / f"checkpoint-{number}" / OPTIMIZER_FILE)
    with pytest.raises(CheckpointError, match=r"checkpoint-3: its optimizer/0.* is damaged"):
        newest(tmp_path)
    assert latest_checkpoint(tmp_path, "sft", recipe_hashes={HASH}) is None


def test_a_final_folder_whose_small_files_were_edited_is_named_and_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, tiny_state("sft", total=4), final=True)
    (tmp_path / "sft" / "final" / "generation_config.json").write_text("{}")
    assert is_finished(tmp_path, "sft", 4)
    assert "its generation_config.json is damaged or was edited" in caplog.text


def test_one_of_another_recipe_is_refused(tmp_path: Path) -> None:
    three_checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="written by recipe"):
        latest_checkpoint(tmp_path, "grpo", recipe_hashes={"another"})


def test_the_best_one_without_its_optimizer_is_nothing_to_go_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    three_checkpoints(tmp_path)
    state = tiny_state()
    state.step = 4
    save(tmp_path, state, resumable=False)
    assert newest(tmp_path) == "checkpoint-3"
    assert not caplog.records


def test_a_damaged_final_is_made_again_unless_something_came_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    final = save(tmp_path, tiny_state("sft", total=4), final=True)
    assert is_finished(tmp_path, "sft", 4)
    assert not is_finished(tmp_path, "sft", 5), "it has been given another step"
    flip(final / "model.safetensors")
    assert not is_finished(tmp_path, "sft", 4)
    assert "model.safetensors is damaged" in caplog.text
    state = tiny_state("grpo")
    state.step = 2
    save(tmp_path, state)
    with pytest.raises(CheckpointError, match="GRPO has begun from it"):
        is_finished(tmp_path, "sft", 4)


def test_a_finished_grpo_needs_its_sft_no_longer(tmp_path: Path) -> None:
    """Nor is SFT prolonged, from which it began; its own final model is made again."""
    start = save(tmp_path, tiny_state("sft", total=4), final=True)
    state = tiny_state("grpo", total=2)
    state.step = 2
    save(tmp_path, state)
    assert is_finished(tmp_path, "sft", 6), "GRPO has begun from it"
    final = save(tmp_path, state, final=True)
    flip(start / "model.safetensors")
    assert is_finished(tmp_path, "sft", 4)
    assert is_finished(tmp_path, "grpo", 2)
    flip(final / "model.safetensors")
    assert not is_finished(tmp_path, "grpo", 2)


def test_a_final_model_alone_cannot_be_trained_on(tmp_path: Path) -> None:
    final = save(tmp_path, tiny_state("grpo"), final=True)
    with pytest.raises(CheckpointError, match=r"only final/ is left.* A run of its own can begin"):
        newest(tmp_path)
    (final / STATE_FILE).unlink()
    assert latest_checkpoint(tmp_path, "grpo", recipe_hashes={HASH}) is None


def test_an_optimizer_of_other_weights_is_one_paragraph(tmp_path: Path) -> None:
    state = tiny_state(lora=True)
    take_step(state)
    folder = save(tmp_path, state)
    other = tiny_state()
    with pytest.raises(CheckpointError, match="does not fit"):
        load_optimizer(other.optimizer, folder / OPTIMIZER_FOLDER)


def test_a_save_without_room_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_checkpoints(tmp_path)
    state = tiny_state()
    state.step = 3
    before = (tmp_path / "grpo" / "checkpoint-3" / "model.safetensors").read_bytes()
    weights = weight_bytes(state.replica.policy)
    take_step(state)
    state.step = 3
    # Room for the weights, and for one of the two moments of each, is not enough.
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: int(2 * weights * disk_room.MARGIN))
    with pytest.raises(RunFolderError, match="are free"):
        save(tmp_path, state)
    assert (tmp_path / "grpo" / "checkpoint-3" / "model.safetensors").read_bytes() == before
    assert newest(tmp_path) == "checkpoint-3"


@pytest.mark.parametrize("breaks", ["save_file", "save_policy", "write_state"])
def test_a_save_that_breaks_off_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    """Optimizer, weights or the mark at the end: a full disk may stop any of them."""
    state = tiny_state()
    take_step(state)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, breaks, full)
    with pytest.raises(RunFolderError, match="No space left") as caught:
        save(tmp_path, state)
    assert caught.value.where == str(tmp_path / "grpo" / "checkpoint-1")
    assert list((tmp_path / "grpo").iterdir()) == []


@pytest.mark.parametrize("lora", [False, True])
def test_the_estimate_is_what_a_checkpoint_takes(tmp_path: Path, lora: bool) -> None:
    state = tiny_state(lora=lora)
    estimate = weight_bytes(state.replica.policy) + state_bytes(
        OptimizerConfig(), state.replica.policy
    )
    take_step(state)
    folder = save(tmp_path, state)
    written = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    # Headers of some KB lie on top of the tensors.
    assert estimate <= written <= estimate + 60_000


def test_a_run_is_refused_where_not_even_its_models_fit_and_warned_of_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = tiny_state()
    weights = weight_bytes(state.replica.policy)
    moments = state_bytes(OptimizerConfig(), state.replica.policy)
    phases = {"sft": SFTConfig(), "grpo": GRPOConfig(checkpoint_every=5, keep_checkpoints=3)}

    def check(free: float) -> None:
        monkeypatch.setattr(disk_room, "free_bytes", lambda _: int(free))
        check_room_for_run(tmp_path, state.replica.policy, phases)

    with pytest.raises(RunFolderError, match="are free"):
        check(2 * weights * disk_room.MARGIN - 1)
    check(2 * weights * disk_room.MARGIN + 1)
    assert "lower keep_checkpoints" in caplog.text
    # Two finals; two checkpoints of SFT and three of GRPO, and one more of each being written.
    wanted = 2 * weights + 7 * (weights + moments)
    for validated in (0, 2):  # the best model of each phase is kept, too
        every = {"evaluate_every": int(validated > 0)}
        phases = {name: phase.model_copy(update=every) for name, phase in phases.items()}
        for more, warned in ((-1, True), (1, False)):
            caplog.clear()
            check((wanted + validated * weights) * disk_room.MARGIN + more)
            assert bool(caplog.records) == warned
    # What the run has already written is room, too.
    (tmp_path / "sft" / "final").mkdir(parents=True)
    (tmp_path / "sft" / "final" / "model.safetensors").write_bytes(b"." * weights)
    check((wanted + weights) * disk_room.MARGIN + 1)
    assert not caplog.records
    check(weights * disk_room.MARGIN + 1)
    with pytest.raises(RunFolderError, match="are free"):
        check(weights * disk_room.MARGIN - 1)


def test_a_checkpoint_is_whole_whether_it_still_is_the_best_one_or_not(tmp_path: Path) -> None:
    """The mark of the best one goes to the next best one; that is no damage."""
    state = tiny_state()
    assert not (save(tmp_path, state) / BEST_FILE).exists()
    take_step(state)
    state.best.offer(1, 0.25)
    folder = save(tmp_path, state)
    assert json.loads((folder / BEST_FILE).read_text())["validation_accuracy"] == 0.25
    (folder / BEST_FILE).write_text("{}")
    assert find_damage(folder) is None
    (folder / BEST_FILE).unlink()
    assert find_damage(folder) is None


@pytest.mark.parametrize("key", ["step", "position", "started_from", "best"])
def test_a_state_without_a_key_is_one_paragraph(tmp_path: Path, key: str) -> None:
    """R5: written by another version, or edited."""
    folder = save(tmp_path, tiny_state())
    content = json.loads((folder / STATE_FILE).read_text())
    del content[key]
    (folder / STATE_FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"its {STATE_FILE} has no '{key}'"):
        read_state(folder)
