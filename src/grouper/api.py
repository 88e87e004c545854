"""What Python code calls: a run in two calls, and answers from a trained model.

    run = load_recipe("demo").override("grpo.steps=20", name="short")
    setup = prepare(run)
    print(setup)
    result = train(setup)

Nothing is written before `train`, so `prepare` can be called again as often as a notebook likes.
A trained model is asked exactly as in training: same prompt, stop tokens, and extraction.

    generator = load_generator("outputs/demo")
    solution = solve("What is 3 + 4?", generator)
    append_jsonl("answers.jsonl", solution)

`grouper run` and `grouper generate` are the same on the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from grouper.advice.live_checks import usual_hooks
from grouper.advice.recipe_checks import check_recipe
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import DataError
from grouper.files import dumps, refusing
from grouper.grading import extract
from grouper.models.folders import model_in, recipe_for, require_model_folder, with_sampling
from grouper.models.loading import context_length
from grouper.prompts.rendering import render
from grouper.rewards.calling import load_hook
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.tracking.live import Progress
from grouper.training import pipeline
from grouper.training import prepare as preparation
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import ProblemSets, load_problem_sets
from grouper.training.run import Run
from grouper.types import Completion, Problem, Prompt

__all__ = [
    "Generator",
    "Prepared",
    "Solution",
    "append_jsonl",
    "load_generator",
    "prepare",
    "solve",
    "train",
]

log = logging.getLogger(__name__)


def prepare(recipe: Recipe | str | Path) -> Prepared:
    """Prepare everything that a run needs, and hand it over to be looked at.

    Args:
        recipe: a recipe, or the name or file of one.

    Raises:
        GrouperError: everything that can be said against the recipe or its data.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    for hook in recipe.hooks:
        load_hook(hook)
    warnings = check_recipe(recipe)
    for text in warnings:
        log.warning(text)
    prepared = preparation.prepare(recipe, load_problem_sets(recipe))
    try:
        found = prepared.check_rewards()
    except BaseException:  # nothing may be left behind, whatever went wrong
        prepared.close()
        raise
    for text in found:
        log.warning(text)
    prepared.warnings.extend([*warnings, *found])
    return prepared


def train(
    what: Prepared | Run,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    display: Progress | None = None,
) -> pipeline.RunResult:
    """Run every phase of the recipe that is not finished yet, and compare.

    Args:
        what: what was prepared, or a run that the caller has opened (which has the switches
            itself).
        resume: continue the run in the folder.
        overwrite: delete the run in the folder first.
        allow_changes: with `resume`: go on although recipe, data or code changed.
        display: where progress goes; standard error by default.

    Raises:
        GrouperError: see the phases. Everything finished before stays, and `resume` goes on.
        ValueError: switches beside an open run.
    """
    if isinstance(what, Run):
        if resume or overwrite or allow_changes or display is not None:
            raise ValueError("give resume, overwrite, allow_changes and display to the Run")
        return pipeline.train(what, usual_hooks(what.recipe))
    what.release()
    intent = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    with Run(what.recipe, display, **intent) as run:
        return pipeline.train(run, usual_hooks(run.recipe))


# --- asking a trained model ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One question, answered.

    Example: `Solution(question="2+2?", prompt="Q: 2+2?", response="<answer>4</answer>",
    answer="4", reason="last <answer>", finish_reason="stop_token", tokens=5)`.
    """

    question: str
    prompt: str
    """The rendered prompt, generation prefix included."""
    response: str
    """What the model wrote after the prompt."""
    answer: str | None
    """The answer found in it, or None."""
    reason: str
    """Where the answer stood, or why there is none."""
    finish_reason: str
    """`stop_token`, `stop_string`, or `length`: cut off."""
    tokens: int
    """Sampled tokens, the stop token included."""


class Generator:
    """A loaded model that answers questions, each on its own. Close it, or use it with `with`.

    Args:
        recipe: how prompts are written and answers sampled (its evaluation section).
        model: a model folder, an adapter folder (its base is found), or a Hub name.

    Raises:
        GrouperError: the model, its tokenizer or the prompt format cannot be had.
    """

    def __init__(self, recipe: Recipe, model: str) -> None:
        require_model_folder(model, where="MODEL")
        self.recipe = recipe
        self.prepared = preparation.prepare(recipe, ProblemSets(), model=model)
        policy = self.prepared.load(model)
        self.sampler = self.prepared.sampler(policy)
        self.params = self.prepared.evaluation_params()
        limit = context_length(policy.model.config)
        self.room = None if limit is None else limit - self.params.max_new_tokens
        """Tokens that a prompt may have."""

    def prompt(self, question: str, number: int = 0) -> Prompt:
        """The prompt of a question; `number` tells questions of one call apart."""
        # The reference is not known here, and rendering does not look at it.
        problem = Problem(id=f"question/{number}", question=question, answer="?", source="generate")
        return render(problem, self.prepared.format, self.prepared.tokenizer)

    def fits(self, prompt: Prompt) -> bool:
        """Whether the model's context has room for the prompt and a completion."""
        return self.room is None or len(prompt.token_ids) <= self.room

    def require_fitting(self, prompt: Prompt) -> None:
        """Refuse a prompt that does not fit.

        Raises:
            DataError: it is too long.
        """
        if not self.fits(prompt):
            raise DataError(
                f"the question has {len(prompt.token_ids)} tokens, and the model's context leaves "
                f"room for {self.room}",
                where="the question",
                fix="Shorten it, or lower --max-new-tokens (max_new_tokens in Python).",
            )

    def draw(
        self, prompts: Sequence[Prompt], samples: int | None = None
    ) -> Iterator[tuple[int, Completion]]:
        """`samples` completions of each prompt as they finish, with their place in that list.

        Args:
            prompts: what to answer.
            samples: of each; left out: the recipe's `evaluation.samples`.
        """
        k = self.recipe.evaluation.samples if samples is None else samples
        # Addressed by the text: the answer to a question does not depend on its neighbours.
        requests = [
            SampleRequest(
                prompt=prompt,
                params=self.params,
                key=draw_seed(self.recipe.seed, "generate", prompt.text, sample),
            )
            for prompt in prompts
            for sample in range(k)
        ]
        return self.sampler.sample(requests)

    def solution(self, question: str, prompt: Prompt, completion: Completion) -> Solution:
        """A completion of a question's prompt, with the answer that it commits to."""
        found = extract(completion.text, self.prepared.format.contract)
        return Solution(
            question=question,
            prompt=prompt.text,
            response=completion.text,
            answer=found.answer,
            reason=found.reason,
            finish_reason=completion.finish_reason.value,
            tokens=len(completion.token_ids),
        )

    def close(self) -> None:
        """End what was started for it."""
        self.sampler.release()
        self.prepared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_generator(
    path: str | Path,
    *,
    recipe: Recipe | str | Path | None = None,
    format: str | None = None,  # noqa: A002 - the name that recipes and --format have for it
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
) -> Generator:
    """Load a trained model to ask it questions.

    Args:
        path: a run folder (what it has trained), a model or adapter folder, or a Hub name.
        recipe: a recipe, its name or its file; left out: that of the run the model lies in.
        format: a prompt format, for a model without a recipe.
        temperature: 0 is greedy; left out: as the recipe evaluates.
        max_new_tokens: longest answer; left out: as the recipe evaluates.
        seed: of the draws; left out: the recipe's.

    Raises:
        GrouperError: it cannot be loaded, or it is not known how it is asked.
    """
    model = model_in(str(path))
    given = load_recipe(recipe) if isinstance(recipe, str | Path) else recipe
    found = recipe_for(model, given, format)
    settings = with_sampling(
        found, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
    )
    return Generator(settings, model)


def solve(question: str, generator: Generator) -> Solution:
    """The model's answer to one question; the same question gets the same answer.

    Raises:
        DataError: the question is empty, or longer than the model's context leaves room for.
    """
    if not question.strip():
        raise DataError("the question is empty", where="solve", fix="Give it some text.")
    prompt = generator.prompt(question)
    generator.require_fitting(prompt)
    ((_, completion),) = generator.draw([prompt], samples=1)
    return generator.solution(question, prompt, completion)


def append_jsonl(path: str | Path, solution: Solution) -> None:
    """Add one line to a JSONL file, which is made if it is not there: prompt, response, and more.

    The line is written in one piece, so that several writers do not mix theirs.

    Raises:
        RunFolderError: the file cannot be written.
    """
    target = Path(path).expanduser()
    with refusing(target), target.open("ab", buffering=0) as file:
        file.write((dumps(asdict(solution)) + "\n").encode())
