"""A run from Python in two calls: one prepares everything to look at, another runs it.

    run = load_recipe("demo").override("grpo.steps=20", name="short")
    setup = prepare(run)
    print(setup)
    result = train(setup)

Nothing is written before `train`, so `prepare` can be called again as often as a notebook likes.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from grouper.config import Recipe
from grouper.model_files import require_model_folder
from grouper.policy import Policy
from grouper.recipe import load_recipe
from grouper.recipe_checks import check_recipe
from grouper.rewards import RewardStack, build_rewards
from grouper.tracking.identity import flat_settings
from grouper.tracking.live import Progress
from grouper.training import run
from grouper.training.base_model import make_base, named_base
from grouper.training.inputs import prepare_inputs
from grouper.training.problem_sets import ProblemSets, load_problem_sets
from grouper.training.session import Session
from grouper.training.workbench import Items, Workbench
from grouper.types import (
    Completion,
    Demonstration,
    FinishReason,
    Problem,
    Prompt,
    Reward,
    SamplingParams,
)

__all__ = ["Setup", "prepare", "train"]

log = logging.getLogger(__name__)


class Setup:
    """What a run would work with: problems, prompts, rewards, sampling, and the model when asked.

    Args:
        recipe: what would be run.

    Raises:
        GrouperError: everything that can be said against the recipe or its data.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.given = recipe
        """As it was passed in; what `train` runs."""
        self.warnings = tuple(check_recipe(recipe))
        """Settings that work but rarely do what was meant."""
        for text in self.warnings:
            log.warning(text)
        self._sets = load_problem_sets(recipe)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.model_path = self._base(recipe, self._sets)
        """Folder or Hub name of the model before training."""
        self.bench = Workbench(recipe, self.model_path)
        """Tokenizer, prompt format, grader and sampler."""
        self._inputs = prepare_inputs(recipe, self._sets, self.bench)
        self.recipe = self.bench.recipe
        """With the completion budget that the data leave, where `max_total_tokens` asks for it."""
        self.rewards: RewardStack = build_rewards(recipe.rewards, self.bench.format.layout)
        if not recipe.skip_grpo:
            problem, prompt = self.train[0]
            self.rewards.check(problem=problem, prompt=prompt)

    def _base(self, recipe: Recipe, sets: ProblemSets) -> str:
        named = named_base(recipe)
        if named is not None:
            require_model_folder(named)
            return named
        # The run makes the same one again, in its own folder.
        self._folder = tempfile.TemporaryDirectory(prefix="grouper-setup-")
        target = Path(self._folder.name) / "base"
        make_base(recipe, sets, target)
        return str(target)

    @property
    def train(self) -> Items:
        """The training problems that fit, each with its prompt."""
        return self._inputs.train

    @property
    def validation(self) -> Items:
        """As `train`; empty where the recipe has none."""
        return self._inputs.validation

    @property
    def test(self) -> Items:
        """As `train`; empty where the recipe has none."""
        return self._inputs.test

    @property
    def demonstrations(self) -> tuple[Demonstration, ...]:
        """What SFT would train; empty where it is skipped."""
        return self._inputs.demonstrations

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The training problems."""
        return tuple(problem for problem, _ in self.train)

    @property
    def prompt(self) -> Prompt:
        """The prompt of the first training problem."""
        return self.train[0][1]

    @property
    def sampling(self) -> SamplingParams:
        """How GRPO would draw its rollouts."""
        return self.bench.training_params()

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted key, as it would be written on the command line."""
        return dict(flat_settings(self.recipe.model_dump(mode="json")))

    @cached_property
    def model(self) -> Policy:
        """The model before training, loaded when it is first looked at; `release` lets it go."""
        return self.bench.load(self.model_path)

    def reward(self, text: str, number: int = 0) -> Reward:
        """What a completion of a training problem would be paid.

        Args:
            text: the completion, without what the prompt has already opened.
            number: of the problem in `train`.
        """
        problem, prompt = self.train[number]
        ids = self.bench.tokenizer.encode(text, add_special_tokens=False) or [
            self.bench.stop_tokens.trained
        ]
        completion = Completion(
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            text=text,
            finish_reason=FinishReason.STOP_TOKEN,
            policy_version=0,
        )
        grade = self.bench.grader.submit(text, problem.answer).result()
        (reward,) = self.rewards.for_measuring().score(
            problem=problem, prompt=prompt, completions=[completion], grades=[grade]
        )
        return reward

    def release(self) -> None:
        """Let the model go, so that its memory is there for the run."""
        self.__dict__.pop("model", None)
        self.bench.forget_sampler()
        gc.collect()

    def close(self) -> None:
        """End what was started for it: model, grader, and the folder of a new model."""
        self.release()
        self.bench.__exit__()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        new = self.recipe.model.new
        model = self.model_path if new is None else f"a new random {new.architecture} model"
        first = self.problems[0]
        rewards = ", ".join(f"{weight:g} {name}" for name, weight in self.rewards.weights.items())
        phases = [name for name in ("sft", "grpo") if not getattr(self.recipe, f"skip_{name}")]
        sizes = (
            f"{len(self.train):,} to train on, {len(self.validation):,} for validation, "
            f"{len(self.test):,} to test; {len(self.demonstrations):,} demonstrations"
        )
        return "\n".join(
            [
                f"{self.recipe.name}: {' then '.join(phases) or 'measuring only'} of {model}",
                f"problems:       {sizes}",
                f"first problem:  {first.question!r} -> {first.answer!r}",
                f"first prompt:   {self.prompt.text!r}",
                f"rewards:        {rewards}",
                f"sampling:       {self.sampling}",
            ]
        )


def prepare(recipe: Recipe | str | Path) -> Setup:
    """Prepare everything that a run needs, and hand it over to be looked at.

    Args:
        recipe: a recipe, or the name or file of one.

    Raises:
        GrouperError: everything that can be said against the recipe or its data.
    """
    return Setup(recipe if isinstance(recipe, Recipe) else load_recipe(recipe))


def train(
    what: Setup | Session,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    display: Progress | None = None,
) -> run.RunResult:
    """Run every phase of the recipe that is not finished yet, and compare.

    Args:
        what: a setup, or a session that the caller has opened (which has the switches itself).
        resume: continue the run in the folder.
        overwrite: delete the run in the folder first.
        allow_changes: with `resume`: go on although the recipe or the data changed.
        display: where progress goes; standard error by default.

    Raises:
        GrouperError: see the phases. Everything finished before stays, and `resume` goes on.
        ValueError: switches beside a session.
    """
    if isinstance(what, Session):
        if resume or overwrite or allow_changes or display is not None:
            raise ValueError("give resume, overwrite, allow_changes and display to the Session")
        return run.train(what)
    what.release()
    intent = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    with Session(what.given, display, **intent) as session:
        return run.train(session)
