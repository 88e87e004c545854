"""When things happen: steps, evaluations, checkpoints. What a step does is the phase's business."""

from __future__ import annotations

import logging
from typing import Protocol

from grouper.config import PhaseConfig
from grouper.errors import Interrupted, ModelError
from grouper.training.checkpoint import TrainState, save_checkpoint
from grouper.training.session import Session
from grouper.types import StepReport

__all__ = ["Phase", "run_phase"]

log = logging.getLogger(__name__)

MAX_SKIPPED = 3
"""Steps in a row whose loss or gradient was not finite before the run stops."""


class Phase(Protocol):
    """SFT or GRPO: one optimizer step at a time."""

    name: str
    total: int
    """Steps of the whole phase."""
    state: TrainState

    @property
    def config(self) -> PhaseConfig: ...

    def step(self) -> StepReport:
        """Do step `state.step` and count it."""
        ...


def run_phase(session: Session, phase: Phase) -> None:
    """Run a phase from `state.step` to its end.

    What is due at a step is done when the loop arrives there and looks whether it has been done:
    a run that was killed in the middle of an evaluation makes it up when it resumes.

    Raises:
        Interrupted: on Ctrl-C or SIGTERM, after saving a checkpoint.
        ModelError: the loss was not finite several times in a row.
    """
    with session.display.track(f"training {phase.name}", phase.total) as task:
        saved = phase.state.step
        try:
            while True:
                task(phase.state.step)
                _evaluate_if_due(session, phase)
                saved = _save_if_due(session, phase, saved)
                session.raise_if_stopped(f"{phase.name} step {phase.state.step}", together=True)
                if phase.state.step >= phase.total:
                    return
                report = phase.step()
                session.folder.append_metrics(report)
                session.display.step(report, phase.total)
                _stop_if_broken(session, phase)
        except Interrupted:
            if phase.state.step != saved:
                _save(session, phase)
            raise


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate_if_due(session: Session, phase: Phase) -> None:
    step = phase.state.step
    if not session.inputs.validation or not phase.config.evaluate_every:
        return
    if not (_due(phase.config.evaluate_every, step) or step == phase.total):
        return
    if session.recorded(f"validation-{phase.name}-{step:06d}") is None:
        session.evaluate(phase.state.policy, phase=phase.name, step=step, split="validation")


def _save_if_due(session: Session, phase: Phase, saved: int) -> int:
    """Save a checkpoint where one is due and not there yet; returns the step last saved."""
    step = phase.state.step
    if step in (saved, phase.total) or not _due(phase.config.checkpoint_every, step):
        return saved
    return _save(session, phase)


def _save(session: Session, phase: Phase) -> int:
    save_checkpoint(
        session.path,
        phase.state,
        session.tokenizer,
        recipe_hash=session.hash,
        keep=phase.config.keep_checkpoints,
    )
    return phase.state.step


def _stop_if_broken(session: Session, phase: Phase) -> None:
    if phase.state.skipped < MAX_SKIPPED:
        return
    raise ModelError(
        f"the loss or its gradient was not finite {MAX_SKIPPED} steps in a row",
        where=f"{phase.name} step {phase.state.step}",
        fix=f"Lower {phase.name}.optimizer.learning_rate or use model.compute_dtype: float32; the "
        f"checkpoints in {session.path / phase.name} are from before.",
    )
