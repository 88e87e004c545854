"""A whole run: base -> SFT -> GRPO, measured at each stop on the same problems."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from grouper.errors import ModelError
from grouper.evaluation.compare import Comparison, compare
from grouper.evaluation.evaluate import EvaluationResult
from grouper.policy import Policy
from grouper.report.curves import draw_curves
from grouper.training.checkpoint import (
    STATE_FILE,
    TrainState,
    is_complete,
    latest_checkpoint,
    load_optimizer,
    save_final,
)
from grouper.training.grpo import GRPOPhase
from grouper.training.loop import Phase, run_phase
from grouper.training.optimizers import make_optimizer
from grouper.training.preflight import check_lengths, check_stopping
from grouper.training.session import Session
from grouper.training.sft import SFTPhase

__all__ = ["RunResult", "train"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves behind."""

    path: Path
    results: tuple[EvaluationResult, ...]
    """Test results in order: base, SFT, GRPO, as far as they were made."""
    comparison: Comparison | None
    """None with fewer than two of them."""


def train(session: Session) -> RunResult:
    """Run every phase of the recipe that is not finished yet, compare, and draw `curves.png`.

    Raises:
        GrouperError: see the phases. Everything finished before stays and `--resume` goes on.
    """
    recipe = session.recipe
    policy = _measure_base(session)
    if not recipe.skip_sft:
        policy = _sft(session, policy)
    if not recipe.skip_grpo:
        policy = _grpo(session, policy)
    names = ("base", "sft", "grpo")
    results = tuple(r for name in names if (r := session.recorded(name)) is not None)
    comparison = None
    if len(results) > 1:
        comparison = compare(results, confidence=recipe.evaluation.confidence)
    draw_curves(session.folder, session.path / "curves.png")
    return RunResult(path=session.path, results=results, comparison=comparison)


def _measure(session: Session, policy: Policy, name: str, step: int) -> None:
    if session.inputs.test and session.recorded(name) is None:
        session.evaluate(policy, phase=name, step=step, split="test")


def _measure_base(session: Session) -> Policy | None:
    """Measure the untrained model; returns it for the first phase to go on with."""
    wanted = session.recipe.evaluation.base and session.inputs.test
    if not wanted or session.recorded("base") is not None:
        return None
    policy = session.load(session.base_path)
    _measure(session, policy, "base", 0)
    return policy


def _sft(session: Session, policy: Policy | None) -> Policy | None:
    final = session.path / "sft" / "final"
    if is_complete(final):
        if session.recorded("sft") is not None or not session.inputs.test:
            return None
        policy = session.load(str(final))
    else:
        policy = policy or session.load(session.base_path)
        state = _state(session, "sft", policy)
        policy = state.policy
        if state.step == 0:
            session.folder.truncate_to("base", 0)
        phase = SFTPhase(session, state)
        run_phase(session, phase)
        check_stopping(session, policy)
        _finish(session, phase)
    _measure(session, policy, "sft", _final_step(final))
    return policy


def _grpo(session: Session, policy: Policy | None) -> Policy | None:
    final = session.path / "grpo" / "final"
    if is_complete(final):
        if session.recorded("grpo") is not None or not session.inputs.test:
            return None
        policy = session.load(str(final))
    else:
        policy = _starting_policy(session, policy)
        # Taken before a checkpoint is loaded: the reference is where GRPO started.
        reference: dict[str, Tensor] | None = None
        if session.recipe.grpo.beta > 0:
            reference = policy.snapshot()
        state = _state(session, "grpo", policy)
        policy = state.policy
        if state.step == 0:
            session.folder.truncate_to("grpo", 0)
            check_lengths(session, policy)
        phase = GRPOPhase(session, state, reference)
        run_phase(session, phase)
        _finish(session, phase)
    _measure(session, policy, "grpo", _final_step(final))
    return policy


def _starting_policy(session: Session, policy: Policy | None) -> Policy:
    """What GRPO starts from: as told, else what SFT left, else the base model, said aloud."""
    start = session.recipe.grpo.start_from
    sft = session.path / "sft" / "final"
    if start is not None:
        session.display.say(f"GRPO starts from {start}.")
        return session.load_start(start)
    if is_complete(sft):
        if policy is not None and not session.recipe.skip_sft:
            return policy
        session.display.say(f"GRPO starts from {sft}.")
        return session.load(str(sft))
    if not session.recipe.skip_sft:
        raise ModelError("SFT left no model", where=str(sft), fix="Run SFT again.")
    session.display.say(
        f"GRPO starts from the base model {session.base_path}: there is no {sft} and no "
        "grpo.start_from."
    )
    return policy or session.load(session.base_path)


def _state(session: Session, phase: str, policy: Policy) -> TrainState:
    """The state to go on from: the newest complete checkpoint, or the beginning."""
    found = latest_checkpoint(session.path, phase, recipe_hash=session.hash)
    config = session.recipe.sft if phase == "sft" else session.recipe.grpo
    if found is None:
        optimizer = make_optimizer(policy, config.optimizer)
        return TrainState(phase=phase, step=0, policy=policy, optimizer=optimizer)
    folder, saved = found
    policy = session.load(str(folder))
    optimizer = make_optimizer(policy, config.optimizer)
    load_optimizer(folder, optimizer)
    step = int(saved["step"])
    session.folder.truncate_to(phase, step)
    session.display.say(f"Resuming {phase} at step {step} from {folder}.")
    return TrainState(
        phase=phase,
        step=step,
        policy=policy,
        optimizer=optimizer,
        skipped=int(saved["skipped"]),
    )


def _final_step(final: Path) -> int:
    return int(json.loads((final / STATE_FILE).read_text())["step"])


def _finish(session: Session, phase: Phase) -> None:
    path = save_final(session.path, phase.state, session.tokenizer, recipe_hash=session.hash)
    session.display.say(f"{phase.name} is finished: {path}")
