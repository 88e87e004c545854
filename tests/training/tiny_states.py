"""A train state over a tiny policy, and a session without data, grader or sampler."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny_models import tiny_model

from grouper.config.schema import LoraConfig, OptimizerConfig
from grouper.errors import Interrupted
from grouper.models.loading import _new_adapter
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.runs.folder import RunFolder
from grouper.training.curriculum import DifficultyBand, ProblemStream
from grouper.training.metrics import StepClock
from grouper.training.optimizers import make_optimizer
from grouper.training.parallel import ParallelPolicy
from grouper.training.rollouts import RolloutSource
from grouper.training.state import TrainState
from grouper.types import StepReport, Tally

HASH = "0123456789abcdef"


class SavedTokenizer:
    """Writes one file, as tokenizers do."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return " ".join(map(str, token_ids))


def tiny_state(
    phase: str = "grpo", *, lora: bool = False, band: DifficultyBand | None = None, **changes: Any
) -> TrainState:
    model = tiny_model()
    policy = Policy(model)
    if lora:
        adapter = _new_adapter(model, LoraConfig(rank=2, alpha=4), "base", seed=0)
        policy = Policy(adapter.get_base_model(), adapter=adapter)
    given = {"total": 6, "clock": StepClock(policy), **changes}
    stream = ProblemStream(size=10, seed=0, phase=phase)
    unused_run: Any = None
    return TrainState(
        phase=phase,
        step=0,
        stream=stream,
        rollouts=RolloutSource(unused_run, stream, band) if phase == "grpo" else None,
        replica=ParallelPolicy(policy),
        optimizer=make_optimizer(policy, OptimizerConfig(learning_rate=1e-2)),
        **given,
    )


def take_step(state: TrainState) -> None:
    """One optimizer step in a direction that depends on the step's number."""
    generator = torch.Generator().manual_seed(state.step)
    for parameter in state.replica.policy.trainable().values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    state.optimizer.step(1.0)
    state.replica.policy.zero_grad()
    state.step += 1
    state.replica.policy.version += 1


class QuietDisplay:
    """Shows nothing, and keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def track(self, *_: Any) -> Any:
        yield lambda *_: None

    def step(self, report: StepReport, total: int | None = None) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)


class TinyRun:
    """What the loop asks of a session.

    Args:
        path: the run folder.
        accuracies: step -> accuracy that an evaluation at that step finds.
        stop_at: the step after which the user asks to stop.
    """

    def __init__(
        self,
        path: Path,
        accuracies: dict[int, float] | None = None,
        *,
        stop_at: int | None = None,
        recipe: Any = None,
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.folder = RunFolder(path)
        self.display = QuietDisplay()
        self.processes = ProcessGroup()
        self.hash = HASH
        self.recipe = recipe or SimpleNamespace(evaluation=SimpleNamespace(servers=()))
        self.prepared = SimpleNamespace(tokenizer=SavedTokenizer(), validation=bool(accuracies))
        self.evaluated: list[int] = []
        self._accuracies = accuracies or {}
        self._stop_at = stop_at
        self._step = 0

    def recorded(self, name: str) -> None:
        del name

    def evaluate(self, policy: Policy, *, phase: str, step: int, split: str) -> Any:
        del policy, phase, split
        self.evaluated.append(step)
        return SimpleNamespace(accuracy=self._accuracies[step], interval=None)

    @property
    def stop(self) -> TinyRun:
        return self

    def raise_if_requested(self, what: str = "", *, together: bool = False) -> None:
        del what, together
        if self._step == self._stop_at:
            raise Interrupted("stopped on request")

    def saw(self, step: int) -> None:
        self._step = step


class TinyPhase:
    """Steps without data; each one moves every weight."""

    def __init__(self, run: TinyRun, state: TrainState, config: Any, total: int) -> None:
        state.total = total
        others = {} if run.recipe is None else vars(run.recipe)
        run.recipe = SimpleNamespace(**{**others, state.phase: config})
        self.state = state

    def step(self, run: TinyRun, state: TrainState) -> StepReport:
        number = state.step
        take_step(state)
        size, per_step = state.stream.size, 4
        state.epoch_ended = per_step * (number + 1) // size > per_step * number // size
        run.saw(state.step)
        return StepReport(
            phase=state.phase,
            step=state.step,
            tallies=self.tallies(state.step),
            status="learning",
        )

    def tallies(self, step: int) -> dict[str, Tally]:
        return {"loss": Tally.of([float(step)])}
