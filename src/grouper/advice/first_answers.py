"""A few answers of an untrained model, in each format that a recipe might have.

For `grouper init`: the model is loaded once, in bfloat16, and nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from grouper.advice.recipe_choice import ModelKind, Observation, kind_of
from grouper.config.schema import (
    DataConfig,
    ModelConfig,
    PromptConfig,
    Recipe,
    SamplingConfig,
    SourceConfig,
)
from grouper.data import ProblemSet
from grouper.errors import PromptError
from grouper.grading import grade
from grouper.models.device import fastest_dtype
from grouper.models.folders import base_of, weight_files
from grouper.models.loading import context_length, load_tokenizer, shape_of, stop_ids_of
from grouper.models.policy import Policy
from grouper.prompts import FORMATS
from grouper.prompts.rendering import find_stop_tokens
from grouper.rewards.builtin import format_holds
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import ProblemSets
from grouper.types import Completion

# Largest weights of a model that is loaded to be asked: about 2B parameters in bfloat16.
MOST_BYTES = 4_500_000_000
# Problems that each format is tried on, and tokens of an answer at most: enough to see whether an
# answer is in the format.
PROBLEMS = 8
TOKENS = 256
# Tokens that a slow machine must have time for: with fewer, hardly an answer ends.
FEWEST_TOKENS = 96
# Tokens by which the speed is measured.
MEASURED_TOKENS = 12


def look_at_model(path: str) -> ModelKind:
    """Tell the type of a model on this machine by its configuration, tokenizer and name.

    Args:
        path: a folder, or a Hub name that is in the cache.

    Raises:
        ModelError: its configuration or tokenizer cannot be read.
    """
    shape = shape_of(path, cached=True)
    tokenizer = load_tokenizer(path)
    ends_turns = None
    if tokenizer.chat_template:
        ends = stop_ids_of(path) or [tokenizer.eos_token_id]
        try:
            ends_turns = find_stop_tokens(tokenizer, (), FORMATS["boxed"])[0] in ends
        except PromptError:  # no token at all ends its texts
            ends_turns = None
    size = stored_bytes(path)
    return kind_of(
        path,
        tokenizer.chat_template and str(tokenizer.chat_template),
        ends_turns=ends_turns,
        # Nearly every published model is stored in 16 bits.
        parameters=None if size is None else size // 2,
        context=context_length(shape),
    )


def stored_bytes(path: str) -> int | None:
    """Return the bytes of the weights of a model, or of an adapter's base.

    Returns:
        None if they are not on this machine.
    """
    files = weight_files(base_of(path))
    return sum(file.stat().st_size for file in files) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAnswers:
    """Answers of a model in one format."""

    observation: Observation
    examples: tuple[str, ...]
    """Some answers, as they were written."""


def ask(
    path: str,
    problems: ProblemSet,
    formats: Sequence[str],
    *,
    temperature: float = 1.0,
    seconds: float,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[FirstAnswers]:
    """Let a model answer a few problems in each format.

    Args:
        path: a model or adapter folder, or a Hub name that is in the cache.
        problems: the first ones are asked.
        formats: by name; tried in this order until the model knows one. Formats without enough time
            left are missing in the result, so it is empty on a slow machine.
        temperature: as rollouts are sampled.
        seconds: time for all answers; on a slow machine they are truncated earlier.
        progress: called with (format, answers so far, answers in all).

    Raises:
        GrouperError: the model cannot be loaded or run.
    """
    policy: Policy | None = None
    results: list[FirstAnswers] = []
    ends_at = 0.0
    for name in formats:
        recipe = Recipe(
            name="init",
            skip_sft=True,
            model=ModelConfig(path=path, dtype=fastest_dtype()),
            data=DataConfig(train=SourceConfig(source="arithmetic")),
            prompt=PromptConfig(format=name),
            sampling=SamplingConfig(
                temperature=temperature, max_new_tokens=TOKENS, max_slots=PROBLEMS
            ),
        )
        first_problems = replace(problems, problems=problems.problems[:PROBLEMS])
        with Prepared(recipe, ProblemSets(train=first_problems), quiet=True) as prepared:
            if policy is None:
                policy = prepared.load(path)
                ends_at = time.monotonic() + seconds
            sampler = prepared.samplers.over(policy)
            tokens = _tokens_in_time(prepared, sampler, ends_at)
            if tokens < FEWEST_TOKENS:
                break
            answers = _sampled(prepared, sampler, tokens, name, progress)
        results.append(_observed(prepared, name, answers))
        if results[-1].observation.is_known:
            break
    return results


def _tokens_in_time(prepared: Prepared, sampler: Sampler, ends_at: float) -> int:
    """Return the length of answers that there is time for, at most `TOKENS` tokens."""
    _sampled(prepared, sampler, 1)  # compiles kernels
    seconds = []
    for tokens in (1, 1 + MEASURED_TOKENS):
        started = time.monotonic()
        _sampled(prepared, sampler, tokens)
        seconds.append(time.monotonic() - started)
    prompts, with_tokens = seconds
    per_token = max(with_tokens - prompts, 1e-6) / MEASURED_TOKENS
    left = ends_at - time.monotonic() - prompts
    return min(TOKENS, int(left / per_token))


def _sampled(
    prepared: Prepared,
    sampler: Sampler,
    tokens: int,
    name: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[int, Completion]:
    """Sample completions of at most `tokens` tokens; return them by the index of their problem."""
    requests = [
        SampleRequest(
            prompt=prompt,
            params=prepared.training_params(max_new_tokens=tokens),
            key=draw_seed(prepared.recipe.seed, "init", problem.id),
        )
        for problem, prompt in prepared.train
    ]
    answers: dict[int, Completion] = {}
    for index, completion in sampler.sample(requests):
        answers[index] = completion
        if progress is not None:
            progress(name, len(answers), len(requests))
    return answers


def _observed(prepared: Prepared, name: str, answers: dict[int, Completion]) -> FirstAnswers:
    """Grade the answers in one format, and count those in the format."""
    contract = prepared.format.contract
    right = 0
    for index, completion in answers.items():
        problem, _ = prepared.train[index]
        right += grade(completion.text, problem.answer, contract).correct
    completions = list(answers.values())
    observation = Observation(
        format=name,
        answers=len(completions),
        held=sum(format_holds(answer.text, prepared.format) for answer in completions),
        right=right,
        ended=sum(not answer.truncated for answer in completions),
        tokens=median_low(len(answer.token_ids) for answer in completions),
    )
    examples = tuple(answer.text for answer in completions)
    return FirstAnswers(observation=observation, examples=examples)
