"""What `import grouper` promises; taking a name away needs a line in the CHANGELOG."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import grouper

PINNED = [
    "AnswerContract",
    "AnswerFormat",
    "Comparison",
    "Completed",
    "Completion",
    "EvaluationResult",
    "Generator",
    "Grade",
    "GrouperError",
    "LoadedRun",
    "Prepared",
    "Problem",
    "ProblemSet",
    "Prompt",
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
    "load_run",
    "make_format",
    "pass_rates",
    "prepare",
    "reward",
    "solve",
    "stream",
    "synthesize",
    "train",
]


def test_tensorflow_is_looked_for_only_where_the_user_wants_it():
    code = (
        "import os, sys, grouper\n"
        "print(*(os.environ[n] for n in ('TRANSFORMERS_NO_TF', 'TRANSFORMERS_NO_TENSORFLOW', "
        "'USE_TF')), 'torch' in sys.modules)"
    )
    names = ("TRANSFORMERS_NO_TF", "TRANSFORMERS_NO_TENSORFLOW", "USE_TF")
    unset = {name: value for name, value in os.environ.items() if name not in names}
    for given, wanted in (({}, "1 1 0 False"), ({"USE_TF": "1"}, "1 1 1 False")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=unset | given,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == wanted


def test_the_public_names_are_pinned():
    assert sorted(grouper.__all__) == sorted(PINNED)


@pytest.mark.parametrize("name", PINNED)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(grouper, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__doc__
    assert name in dir(grouper)


def test_importing_the_package_and_grading_an_answer_load_no_torch():
    program = (
        "import sys, grouper\n"
        "assert grouper.load_recipe('demo').name == 'demo'\n"
        "assert grouper.grade(r'\\boxed{4}', '4', grouper.make_format(\n"
        "    grouper.load_recipe('demo', ['prompt.format=boxed']).prompt).contract).correct\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = grouper.trian
