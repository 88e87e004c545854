"""The policy that a run has in memory: its replica, its sampler, and its validation servers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from grouper.config.schema import Recipe
from grouper.models.device import find_device
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.runs.progress import Progress
from grouper.sampling.base import ModelSampler
from grouper.sampling.factory import Samplers
from grouper.sampling.native import NativeSampler
from grouper.sampling.turns import TurnSampler, innermost
from grouper.sampling.vllm.sampler import VllmSampler
from grouper.training.parallel import ParallelPolicy, make_parallel
from grouper.training.prepare import Prepared
from grouper.training.teachers import Teachers, describe, load_teachers, teachers_of_phases


class ModelsInMemory:
    """Makes the replica and the sampler of a policy once, and lets them go with it.

    Args:
        recipe: of the run.
        prepared: loads policies and makes samplers.
        processes: of the run.
        display: shows the progress of loading.
        check_for_stop: called within long completions; may raise `Interrupted`.
    """

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        processes: ProcessGroup,
        display: Progress,
        check_for_stop: Callable[[], None],
    ) -> None:
        self._recipe = recipe
        self._prepared = prepared
        self._processes = processes
        self._display = display
        self._check_for_stop = check_for_stop
        self._sampled_policy: Policy | None = None
        self._sampler: ModelSampler | None = None
        self._replica: ParallelPolicy | None = None
        self._validators: Samplers | None = None

    def load(self, path: str) -> Policy:
        """Load a policy as `Prepared.load` does, with its progress displayed."""
        with self._display.track(f"loading {path}"):
            return self._prepared.load(path)

    def teachers(self, phase: str) -> Teachers | None:
        """Load the teachers of a phase; None where it has none. Whoever asks holds them.

        Raises:
            ModelError: one cannot be loaded.
        """
        config = teachers_of_phases(self._recipe).get(phase)
        if config is None:
            return None
        self._display.say(describe(self._recipe, config))
        with self._display.track(f"loading the teacher of {phase}"):
            return load_teachers(self._recipe, config, find_device(self._recipe.device))

    def sampler(self, policy: Policy) -> ModelSampler:
        """Return the sampler over a policy's weights: one, with at most one copy of them."""
        if self._sampler is None or self._sampled_policy is not policy:
            return self._replace_sampler(policy)
        return self._sampler

    def validation_sampler(self, policy: Policy) -> VllmSampler | TurnSampler:
        """Return a sampler over servers that do nothing but validate; they get the weights.

        Raises:
            GrouperError: they cannot be started, or do not take the weights.
        """
        if self._validators is None:
            self._validators = self._prepared.samplers.for_validation()
        sampler = self._validators.over(policy)
        assert isinstance(sampler, VllmSampler | TurnSampler)
        return sampler

    def replica(self, policy: Policy) -> ParallelPolicy:
        """Return the policy as this process trains it; the same one for the same policy."""
        if self._replica is None or self._replica.policy is not policy:
            if self._processes.size > 1 and self._recipe.parallel == "fsdp":
                # The sampler's copy is made while the weights are still unsharded.
                self._replace_sampler(policy, copy_now=True)
            self._replica = make_parallel(policy, self._processes, self._recipe.parallel)
        return self._replica

    def held_replica(self) -> ParallelPolicy | None:
        """Return the replica that was made last, if any."""
        return self._replica

    def forget(self) -> None:
        """Release the policy that was trained last, and the sampler's copy of it."""
        self._forget_sampler()
        self._replica = None
        torch.cuda.empty_cache()

    def _replace_sampler(self, policy: Policy, *, copy_now: bool = False) -> ModelSampler:
        self._forget_sampler()  # not two copies at a time
        sampler = self._prepared.samplers.over(policy, copy_now=copy_now)
        native = innermost(sampler)
        if isinstance(native, NativeSampler):
            # A completion may take minutes, so a request to stop is looked for within it, too.
            native.on_tokens = lambda _: self._check_for_stop()
        self._sampled_policy = policy
        self._sampler = sampler
        return sampler

    def _forget_sampler(self) -> None:
        """Release its copy of the weights, and what it holds between calls."""
        if self._sampler is not None:
            self._sampler.release()
        self._sampler = None
        self._sampled_policy = None
