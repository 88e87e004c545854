# The public names, each once: editors read this file, and `__init__.py` finds them by it.

from grouper.api import Generator as Generator
from grouper.api import Solution as Solution
from grouper.api import append_jsonl as append_jsonl
from grouper.api import evaluate as evaluate
from grouper.api import load_generator as load_generator
from grouper.api import pass_rates as pass_rates
from grouper.api import prepare as prepare
from grouper.api import solve as solve
from grouper.api import stream as stream
from grouper.api import synthesize as synthesize
from grouper.api import train as train
from grouper.config.loading import load_recipe as load_recipe
from grouper.config.schema import Recipe as Recipe
from grouper.data import ProblemSet as ProblemSet
from grouper.data import load_problems as load_problems
from grouper.errors import GrouperError as GrouperError
from grouper.evaluation.compare import Comparison as Comparison
from grouper.evaluation.compare import compare as compare
from grouper.evaluation.result import EvaluationResult as EvaluationResult
from grouper.grading import grade as grade
from grouper.prompts import make_format as make_format
from grouper.rewards import Completed as Completed
from grouper.rewards import RewardStack as RewardStack
from grouper.rewards import build_rewards as build_rewards
from grouper.rewards import reward as reward
from grouper.runs.folder import LoadedRun as LoadedRun
from grouper.runs.folder import RunFolder as RunFolder
from grouper.runs.folder import load_run as load_run
from grouper.training.pipeline import RunResult as RunResult
from grouper.training.prepare import Prepared as Prepared
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
