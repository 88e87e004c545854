"""Grouper trains small language models to solve maths problems, and says honestly how well.

    import grouper

    run = grouper.load_recipe("demo").override("grpo.steps=20", name="short")
    setup = grouper.prepare(run)
    print(setup)
    result = grouper.train(setup)

Names are imported when they are first used: `import grouper` loads no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Libraries that are imported later look for TensorFlow unless these are set: seconds, and memory on
# the GPU. Whatever the user has set stays.
os.environ.setdefault("TRANSFORMERS_NO_TF", "1")
os.environ.setdefault("TRANSFORMERS_NO_TENSORFLOW", "1")
os.environ.setdefault("USE_TF", "0")

# What editors and type checkers read; `_NAMES` says the same to the running program.
if TYPE_CHECKING:
    from grouper.api import Generator as Generator
    from grouper.api import Prepared as Prepared
    from grouper.api import Solution as Solution
    from grouper.api import append_jsonl as append_jsonl
    from grouper.api import load_generator as load_generator
    from grouper.api import prepare as prepare
    from grouper.api import solve as solve
    from grouper.api import train as train
    from grouper.config.loading import load_recipe as load_recipe
    from grouper.config.schema import Recipe as Recipe
    from grouper.data import ProblemSet as ProblemSet
    from grouper.data import load_problems as load_problems
    from grouper.errors import GrouperError as GrouperError
    from grouper.evaluation.compare import Comparison as Comparison
    from grouper.evaluation.compare import compare as compare
    from grouper.evaluation.evaluate import evaluate as evaluate
    from grouper.evaluation.result import EvaluationResult as EvaluationResult
    from grouper.grading import grade as grade
    from grouper.prompts import make_format as make_format
    from grouper.rewards import Completed as Completed
    from grouper.rewards import RewardStack as RewardStack
    from grouper.rewards import build_rewards as build_rewards
    from grouper.rewards import reward as reward
    from grouper.tracking.run_folder import RunFolder as RunFolder
    from grouper.training.pipeline import RunResult as RunResult
    from grouper.training.run import Run as Run
    from grouper.types import AnswerContract as AnswerContract
    from grouper.types import AnswerFormat as AnswerFormat
    from grouper.types import Completion as Completion
    from grouper.types import Grade as Grade
    from grouper.types import Problem as Problem
    from grouper.types import Prompt as Prompt
    from grouper.types import Reward as Reward
    from grouper.types import Rollout as Rollout
    from grouper.types import RolloutGroup as RolloutGroup
    from grouper.types import SamplingParams as SamplingParams

    __version__: str

# The public names of each module, which is imported when one of them is first used.
_NAMES = {
    "api": "Generator Prepared Solution append_jsonl load_generator prepare solve train",
    "config.loading": "load_recipe",
    "config.schema": "Recipe",
    "data": "ProblemSet load_problems",
    "errors": "GrouperError",
    "evaluation.compare": "Comparison compare",
    "evaluation.evaluate": "evaluate",
    "evaluation.result": "EvaluationResult",
    "grading": "grade",
    "prompts": "make_format",
    "rewards": "Completed RewardStack build_rewards reward",
    "tracking.run_folder": "RunFolder",
    "training.pipeline": "RunResult",
    "training.run": "Run",
    "types": "AnswerContract AnswerFormat Completion Grade Problem Prompt Reward Rollout "
    "RolloutGroup SamplingParams",
}
_HOME_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__"]
__all__ += list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("grouper-rl")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'grouper' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"grouper.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
