"""The checks at work in a run: before GRPO, after every step, and after SFT."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from grouper.advice.checks import Watch, find
from grouper.advice.findings import Drawn
from grouper.config.schema import Recipe
from grouper.errors import AlarmError, PreflightError
from grouper.models.loading import context_length
from grouper.sampling.base import SampleRequest, address
from grouper.training.checkpoint import TrainState, last_good
from grouper.training.curriculum import first_met
from grouper.training.loop import Asked, Hook
from grouper.training.rehearsal import Rehearsal
from grouper.training.session import Session
from grouper.training.user_hooks import UserHook
from grouper.types import StepReport

__all__ = ["LiveChecks", "Preflight", "usual_hooks"]

log = logging.getLogger(__name__)

# The pre-flight samples up to this many times the budget, to see how long answers want to be.
STRETCH = 4
# Completions that are looked at after SFT.
STOP_SAMPLES = 10


def usual_hooks(recipe: Recipe) -> tuple[Hook, ...]:
    """What looks after every run, and the hooks of the recipe.

    Raises:
        ConfigError: one of these is not there.
    """
    return (Preflight(), Rehearsal(), LiveChecks(), *map(UserHook, recipe.hooks))


class LiveChecks(Hook):
    """Says while a run goes on what goes wrong, and ends it where `alarms.on_alarm` is `stop`."""

    def after_step(self, session: Session, state: TrainState, report: StepReport) -> Asked:
        watch = Watch(session.recipe.alarms, state.alarms)
        rung = watch.observe(report)
        if not rung:
            return Asked()
        texts = tuple(f"alarm {name}: {finding}" for name, finding in rung)
        return Asked(events=texts, error=self._reason_to_stop(session, state, texts))

    def _reason_to_stop(
        self, session: Session, state: TrainState, texts: Sequence[str]
    ) -> AlarmError | None:
        """What to end the run with, or None where alarms are only reported."""
        step, config = state.step, session.recipe.alarms
        if config.on_alarm == "warn":
            return None
        before = step - config.window
        good = session.team.lead(lambda: last_good(session.path / state.phase, before))
        kept = "there is no checkpoint of this phase yet"
        if good is not None:
            when = "from before these steps" if good[0] <= before else "the oldest that is left"
            kept = f"{good[1]} is {when}"
        return AlarmError(
            "; ".join(text.rstrip(".") for text in texts),
            where=f"{state.phase} step {step}",
            fix=f"alarms.on_alarm is stop: nothing of the last step was saved; {kept}. Go on with "
            "--resume --allow-changes and another setting.",
        )


class Preflight(Hook):
    """Looks at a few samples: whether GRPO's budget is enough, and whether SFT taught to stop."""

    def phase_begins(self, session: Session, state: TrainState) -> None:
        """Sample `grpo.preflight_prompts` prompts before the first step of GRPO.

        Raises:
            PreflightError: most would be cut off, and the recipe does not allow it.
        """
        config, budget = session.recipe.grpo, session.prepared.max_new_tokens
        count = config.preflight_prompts
        if state.phase != "grpo" or state.step > 0 or count == 0:
            return
        train, most = session.prepared.train, STRETCH * budget
        limit = context_length(state.policy)
        if limit is not None:
            met = first_met(len(train), count, seed=session.recipe.seed)
            most = min(most, limit - max(len(train[i][1].token_ids) for i in met))
        drawn = Drawn(
            completions=_sample(session, state, count, max(budget, most), "pre-flight"),
            budget=budget,
            before=state.phase,
            begun=session.team.lead(session.has_begun),
        )
        session.display.say(f"Pre-flight: of {len(drawn.completions)} samples, {drawn}.")
        if not config.allow_truncation:
            for found in find(drawn):
                raise PreflightError(found.what, where="pre-flight", fix=found.fix)

    def phase_ends(self, session: Session, state: TrainState) -> None:
        """Warn where few samples end by themselves after SFT."""
        if state.phase != "sft":
            return
        budget = session.prepared.max_new_tokens
        completions = _sample(session, state, STOP_SAMPLES, budget, "stop check")
        drawn = Drawn(completions=completions, budget=budget)
        share, count = 1 - drawn.truncated, len(completions)
        session.display.say(f"Stop check: {share:.0%} of {count} samples end by themselves.")
        for found in find(drawn):
            log.warning("%s", found)


def _sample(
    session: Session, state: TrainState, count: int, limit: int, purpose: str
) -> list[tuple[int, bool]]:
    """Tokens of completions of the problems that GRPO meets first, and whether each one ended."""
    train, seed = session.prepared.train, session.recipe.seed
    params = session.prepared.training_params(max_new_tokens=limit)
    requests = [
        SampleRequest(prompt=prompt, params=params, key=address(seed, purpose, problem.id))
        for problem, prompt in (train[i] for i in first_met(len(train), count, seed=seed))
    ]
    drawn = []
    with session.display.track(f"{purpose}: sampling", len(requests)) as task:
        for _, completion in session.sampler(state.policy).sample(requests):
            drawn.append((len(completion.token_ids), not completion.truncated))
            task.advance()
            session.raise_if_stopped()
    return drawn
