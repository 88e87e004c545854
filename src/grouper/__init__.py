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
for _name, _value in (
    ("TRANSFORMERS_NO_TF", "1"),
    ("TRANSFORMERS_NO_TENSORFLOW", "1"),
    ("USE_TF", "0"),
):
    os.environ.setdefault(_name, _value)

if TYPE_CHECKING:
    from grouper.api import (
        Generator,
        Prepared,
        Solution,
        append_jsonl,
        load_generator,
        prepare,
        solve,
        train,
    )
    from grouper.config.loading import load_recipe
    from grouper.config.schema import Recipe
    from grouper.data import ProblemSet, load_problems
    from grouper.errors import GrouperError
    from grouper.evaluation.compare import Comparison, compare
    from grouper.evaluation.evaluate import evaluate
    from grouper.evaluation.result import EvaluationResult
    from grouper.grading import grade
    from grouper.prompts import PromptFormat, make_format
    from grouper.rewards import RewardStack, build_rewards
    from grouper.tracking.run_folder import RunFolder
    from grouper.training.pipeline import RunResult
    from grouper.training.run import Run
    from grouper.types import (
        AnswerContract,
        Completion,
        Grade,
        Problem,
        Prompt,
        Reward,
        Rollout,
        RolloutGroup,
        SamplingParams,
    )

    __version__: str

__all__ = [
    "AnswerContract",
    "Comparison",
    "Completion",
    "EvaluationResult",
    "Generator",
    "Grade",
    "GrouperError",
    "Prepared",
    "Problem",
    "ProblemSet",
    "Prompt",
    "PromptFormat",
    "Recipe",
    "Reward",
    "RewardStack",
    "Rollout",
    "RolloutGroup",
    "Run",
    "RunFolder",
    "RunResult",
    "SamplingParams",
    "Solution",
    "__version__",
    "append_jsonl",
    "build_rewards",
    "compare",
    "evaluate",
    "grade",
    "load_generator",
    "load_problems",
    "load_recipe",
    "make_format",
    "prepare",
    "solve",
    "train",
]

_HOMES = {
    "api": (
        "Generator",
        "Prepared",
        "Solution",
        "append_jsonl",
        "load_generator",
        "prepare",
        "solve",
        "train",
    ),
    "config.loading": ("load_recipe",),
    "config.schema": ("Recipe",),
    "data": ("ProblemSet", "load_problems"),
    "errors": ("GrouperError",),
    "evaluation.compare": ("Comparison", "compare"),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.result": ("EvaluationResult",),
    "grading": ("grade",),
    "prompts": ("PromptFormat", "make_format"),
    "rewards": ("RewardStack", "build_rewards"),
    "tracking.run_folder": ("RunFolder",),
    "training.pipeline": ("RunResult",),
    "training.run": ("Run",),
    "types": (
        "AnswerContract",
        "Completion",
        "Grade",
        "Problem",
        "Prompt",
        "Reward",
        "Rollout",
        "RolloutGroup",
        "SamplingParams",
    ),
}
"""Where each public name lives."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


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
