"""The Python interface: a run in two calls, measurements, and answers from a trained model.

    run = load_recipe("demo").override("grpo.steps=20", name="short")
    setup = prepare(run)
    print(setup)
    result = train(setup)

Nothing is written before `train`, so a notebook can call `prepare` as often as it likes. A trained
model is prompted exactly as in training: the same prompt, stop tokens and extraction.

    generator = load_generator("outputs/demo")
    solution = solve("What is 3 + 4?", generator)
    append_jsonl("answers.jsonl", solution)

`grouper run` and `grouper generate` are the same on the command line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypedDict, Unpack, overload

from grouper.advice.checks import Samples
from grouper.advice.live_checks import usual_hooks
from grouper.advice.recipe_checks import check_recipe
from grouper.config.loading import load_recipe, resolved_yaml
from grouper.config.schema import Recipe
from grouper.data import ProblemSet
from grouper.errors import DataError, RunFolderError
from grouper.evaluation.contamination import Probe, probe_questions
from grouper.evaluation.evaluate import Measurement, few_at_a_time, measure, settings_name
from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.suites import Suite
from grouper.files import append_line, dumps, write_atomic
from grouper.models.folders import (
    identity_of,
    recipe_for,
    require_model_folder,
    with_sampling,
)
from grouper.models.policy import Policy
from grouper.models.trained import model_in
from grouper.prompts.rendering import render
from grouper.publish.hub import PushCheckpoints
from grouper.report.page import draw_pictures
from grouper.rewards.user_code import code_fingerprints, load_hook
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress
from grouper.sampling.base import SampleRequest, StopStrings, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.turns import TurnSampler, innermost
from grouper.training import pipeline
from grouper.training.assemble import advantages_of
from grouper.training.collect import collect
from grouper.training.curriculum import first_met, read_pass_rates
from grouper.training.parallel import join_processes
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import (
    ProblemSets,
    load_part,
    load_problem_sets,
    require_part,
)
from grouper.training.run import Run
from grouper.training.saved_state import is_complete, read_state, require_intact
from grouper.types import Completion, FinishReason, Message, Problem, Prompt, SamplingParams

log = logging.getLogger(__name__)


def prepare(recipe: Recipe | str | Path) -> Prepared:
    """Prepare everything that a run needs, for inspection or for `train`.

    Args:
        recipe: a recipe, or the name or file of one.

    Raises:
        GrouperError: every problem of the recipe or its data.
    """
    recipe, warnings = _checked(recipe)
    prepared = Prepared(recipe, load_problem_sets(recipe))
    try:
        reward_warnings = prepared.check_rewards()
    except BaseException:  # workers and files must be released, whatever the error
        prepared.close()
        raise
    for text in reward_warnings:
        log.warning(text)
    prepared.warnings.extend([*warnings, *reward_warnings])
    return prepared


def _checked(recipe: Recipe | str | Path) -> tuple[Recipe, list[str]]:
    """Return a recipe, given by itself, its name or its file, and its warnings; log these."""
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    for hook in recipe.hooks:
        load_hook(hook)
    warnings = check_recipe(recipe)
    for text in warnings:
        log.warning(text)
    return recipe, warnings


def train(
    what: Prepared | Run | Recipe | str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    display: Progress | None = None,
) -> pipeline.RunResult:
    """Run every phase of the recipe that is not finished yet, and compare.

    Args:
        what: the result of `prepare`, an open `Run` (which takes these switches itself), or an
            argument of `prepare`.
        resume: continue the run in the folder.
        overwrite: delete the run in the folder first.
        allow_changes: with `resume`: continue although recipe, data or code changed.
        display: where to show progress; standard error by default.

    Raises:
        GrouperError: a phase failed. Finished work is kept, and `resume` continues from it.
        ValueError: switches were given together with an open run.
    """
    if isinstance(what, Run):
        if resume or overwrite or allow_changes or display is not None:
            raise ValueError("give resume, overwrite, allow_changes and display to the Run")
        what.folder.draw = draw_pictures
        hooks = [*usual_hooks(what.recipe)]
        repository = what.recipe.push_to
        if repository is not None:
            hooks.append(PushCheckpoints(repository))
        return pipeline.train(what, hooks)
    if isinstance(what, Prepared):
        what.release()
        recipe = what.recipe
    else:
        recipe, _ = _checked(what)
    intent = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    with Run(recipe, display, **intent) as run:
        return train(run)


# --- measuring a model ---------------------------------------------------------------------------


@contextmanager
def _loaded(
    recipe: Recipe, model: str, problem_sets: ProblemSets
) -> Iterator[tuple[Prepared, Policy]]:
    """Load a model, and prepare these parts of the data for it."""
    require_model_folder(model, where="--model")
    require_intact(model)
    with Prepared(recipe, problem_sets, model=model) as prepared:
        yield prepared, prepared.load(model)


# Settings of a model that decide the arithmetic of its weights.
_COMPUTED = {"dtype", "compute_dtype", "quantization", "attention"}


def evaluate(
    recipe: Recipe,
    model: str | Path,
    *,
    split: str = "test",
    problems: ProblemSet | None = None,
    suite: Suite | None = None,
    are_twins: bool = False,
    name: str | None = None,
    folder: Path | None = None,
    display: Progress | None = None,
) -> EvaluationResult:
    """Evaluate a model on the test or validation problems of a recipe, as a run does.

    Args:
        recipe: sets how prompts are rendered, sampled, graded and rewarded.
        model: a model or adapter folder, or a Hub name.
        split: `test` or `validation`.
        problems: the problems of the split, if they are loaded already.
        suite: the benchmark suite of the test problems, for the record (see `recipe_on`).
        are_twins: the problems are twins of those of the split or suite, which the record says.
        name: name of the result; by default its settings, such as `test-greedy-500x1`.
        folder: folder for the result, its items and the recipe; by default nothing is written. An
            evaluation with the same settings is not repeated, and an interrupted one is continued.
            A result of other settings is never replaced: the new one gets a number in its name.
        display: where to show progress; nowhere by default.

    Raises:
        GrouperError: the model or the problems cannot be loaded.
    """
    problems = problems or require_part(recipe, split)
    model = str(model)
    path = Path(model).expanduser()
    state: Mapping[str, Any] = {"phase": "base", "step": 0}
    if is_complete(path):
        state = read_state(path)
    display = display or Progress(quiet=True)
    processes = join_processes()
    record = None if folder is None else RunFolder(folder)
    problem_sets = ProblemSets(**{split: problems})
    measuring = nullcontext() if record is None else record.measuring
    with measuring, _loaded(recipe, model, problem_sets) as (prepared, policy):
        items = prepared.test if split == "test" else prepared.validation
        params = prepared.evaluation_params()
        samples = recipe.evaluation.samples
        facts = _facts(recipe, model, problems, left_out=len(problems) - len(items), suite=suite)
        label = split if suite is None else suite.name
        if are_twins:
            facts["twins_of"] = label
            label = f"{label}-twins"
        set_name = label if suite is None else f"{label}-{prepared.format.name}"
        result_name = name or settings_name(set_name, params, len(items), samples)
        measurement = prepared.measurement(
            name=result_name,
            phase=str(state["phase"]),
            step=int(state["step"]),
            split=label,
            items=items,
            facts=facts,
        )
        if record is None:
            return _measure(prepared, policy, measurement, folder=None, display=display)
        card = measurement.card(prepared.grader)
        free_name = processes.on_rank0(lambda: record.name_for(result_name, label, card))
        evaluations = record.path / "evaluations"
        result = processes.on_rank0(lambda: record.read_evaluation(free_name))
        if result is None:
            measurement = replace(measurement, name=free_name)
            result = _measure(prepared, policy, measurement, folder=evaluations, display=display)
        else:
            summary = evaluations / f"{free_name}.json"
            display.say(f"Measured before with the same settings: {summary}")
        text = resolved_yaml(recipe).encode()
        processes.on_rank0(lambda: write_atomic(record.path / "recipe.yaml", text))
        processes.on_rank0(lambda: record.write_evaluation(result))
    return result


def _measure(
    prepared: Prepared,
    policy: Policy,
    measurement: Measurement,
    *,
    folder: Path | None,
    display: Progress,
) -> EvaluationResult:
    """Measure a loaded model; what an interrupted call has left in the folder is used."""
    sampler = prepared.samplers.over(policy)
    with (
        display.track(f"evaluating {prepared.model_path}", measurement.completions) as task,
        few_at_a_time(sampler, policy),
    ):
        return measure(
            measurement,
            sampler,
            prepared.grader,
            processes=join_processes(),
            folder=folder,
            resume=True,
            progress=task,
        )


def _facts(
    recipe: Recipe, model: str, problems: ProblemSet, *, left_out: int, suite: Suite | None
) -> dict[str, Any]:
    """Return what decides the numbers of a measurement beside its problems and sampling."""
    facts: dict[str, Any] = {
        "model": model,
        "model_hash": identity_of(model, recipe.model.revision),
        "data": problems.fingerprint,
        "left_out": left_out,
        "grading": recipe.grading.model_dump(mode="json"),
        "computed": recipe.model.model_dump(include=_COMPUTED),
        "drawn": recipe.sampling.model_dump(include={"dtype", "engine"}),
    }
    if recipe.evaluation.rewards:
        facts["rewards"] = [reward.model_dump(mode="json") for reward in recipe.rewards]
        facts["code"] = code_fingerprints(reward.name for reward in recipe.rewards)
    if suite is not None:
        facts["suite"] = {**suite.card, "revision": problems.revision}
    return facts


def pass_rates(
    recipe: Recipe,
    model: str | Path,
    path: Path | str,
    *,
    samples: int = 8,
    display: Progress | None = None,
) -> dict[str, tuple[int, int]]:
    """Sample each training problem as GRPO would, and write how often it is solved.

    This is an evaluation of the training problems: it resumes like one, and rates that are in the
    file already are not measured again.

    Args:
        recipe: recipe with the problems and settings.
        model: a model or adapter folder, or a Hub name.
        path: JSON Lines file, written when all problems are sampled.
        samples: number of samples per problem.
        display: where to show progress; nowhere by default.

    Returns:
        Problem id -> (correct, samples).

    Raises:
        RunFolderError: the file holds other measurements, or cannot be written.
    """
    target = Path(path).expanduser()
    model = str(model)
    problems = require_part(recipe, "train")
    sampling_recipe = _as_trained(recipe, samples, rewards=False)
    sections = {"prompt", "evaluation", "grading", "seed"}
    recipe_facts = sampling_recipe.model_dump(mode="json", include=sections)
    model_identity = identity_of(model, recipe.model.revision)
    facts = [model, model_identity, problems.fingerprint, recipe_facts]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    settings = digest.hexdigest()[:12]
    if target.exists():
        stored_rates = read_pass_rates(target)
        lines = target.read_text(encoding="utf-8").splitlines()
        if {json.loads(line).get("settings") for line in lines} != {settings}:
            raise RunFolderError(
                "the file holds pass rates of another model or other data, or with other sampling "
                "settings",
                where=str(target),
                fix="Give another --output, or delete the file.",
            )
        return stored_rates

    def rows_of(result: EvaluationResult) -> list[dict[str, Any]]:
        correct = Counter[str]()
        for item in result.slim:
            correct[item.problem_id] += item.correct
        rows = []
        for problem_id, count in correct.items():
            row = {
                "problem_id": problem_id,
                "correct": count,
                "completions": samples,
                "settings": settings,
            }
            rows.append(row)
        return rows

    _draw_rows(sampling_recipe, model, target, rows_of, problems=problems, display=display)
    return read_pass_rates(target)


def _as_trained(recipe: Recipe, samples: int, *, rewards: bool) -> Recipe:
    """Return the recipe with an evaluation that samples as GRPO does."""
    settings = recipe.sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
    settings |= {"samples": samples, "max_new_tokens": None, "rewards": rewards}
    evaluation = recipe.evaluation.model_copy(update=settings)
    return recipe.model_copy(update={"evaluation": evaluation})


def _draw_rows(
    recipe: Recipe,
    model: str,
    target: Path,
    rows_of: Callable[[EvaluationResult], list[dict[str, Any]]],
    *,
    problems: ProblemSet,
    display: Progress | None,
) -> tuple[int, int]:
    """Add rows that are made of an evaluation to a file; returns their number, and completions.

    Rows that the file holds already are not added again. The evaluation is stored beside the file
    until then: after an interruption the same call continues.
    """
    folder = target.with_name(f"{target.name}.drawn")
    result = evaluate(
        recipe, model, problems=problems, name="drawn", folder=folder, display=display
    )

    def write() -> tuple[int, int]:
        stored_lines = target.read_bytes().splitlines() if target.exists() else []
        stored_set = set(stored_lines)
        lines = [dumps(row).encode() for row in rows_of(result)]
        new_lines = [line for line in lines if line not in stored_set]
        write_atomic(target, b"".join(line + b"\n" for line in [*stored_lines, *new_lines]))
        # Partial evaluations with other settings are kept.
        if not [*folder.glob("evaluations/.*.part")]:
            shutil.rmtree(folder, ignore_errors=True)
        return len(new_lines), len(result.items)

    return join_processes().on_rank0(write)


def preview(
    recipe: Recipe, model: str, *, samples: int, problems: int, display: Progress | None = None
) -> Samples:
    """Draw a few samples as GRPO would, of the problems that it meets first.

    Where there is no difference within a group there is no gradient: `advice.checks.find` says why.

    Args:
        recipe: whose problems and settings.
        model: a model or adapter folder, or a Hub name.
        samples: of each problem, two or more.
        problems: how many.
        display: where progress goes; nowhere by default.
    """
    display = display or Progress(quiet=True)
    problem_sets = ProblemSets(train=load_part(recipe, "train"))
    with _loaded(recipe, model, problem_sets) as (prepared, policy):
        first = first_met(len(prepared.train), problems, seed=recipe.seed)
        met = tuple(prepared.train[index] for index in first)
        with display.track("sampling", samples * len(met)) as task:
            groups = collect(
                met,
                sampler=prepared.samplers.over(policy),
                grader=prepared.grader,
                rewards=prepared.rewards,
                params=prepared.training_params(),
                group_size=samples,
                key=(recipe.seed, "preview"),
                progress=task,
            ).groups
    signal = tuple(any(values) for values in advantages_of(groups, recipe.grpo))
    return Samples(groups=groups, signal=signal, prepared=prepared)


def probe(
    recipe: Recipe, model: str, sets: Sequence[ProblemSet], *, display: Progress | None = None
) -> list[Probe]:
    """Have a model complete the questions of problems from their first 60 %, as plain text.

    Args:
        recipe: sets how the model is loaded and sampled.
        model: a model or adapter folder, or a Hub name.
        sets: the problems; a control set among them shows how much can be guessed.
        display: where to show progress; nowhere by default.

    Raises:
        GrouperError: the model cannot be loaded.
    """
    display = display or Progress(quiet=True)
    probes = []
    with Generator(recipe, model) as generator:
        tokenizer = generator.prepared.tokenizer
        for problems in sets:
            questions = [(problem.id, problem.question) for problem in problems.problems]
            with display.within(problems.name, len(questions)) as task:
                found = probe_questions(
                    problems.name,
                    questions,
                    # A question is continued as it is: nothing in it calls a tool.
                    sampler=innermost(generator.sampler),
                    encode=tokenizer.encode,
                    progress=task,
                )
            probes.append(found)
    return probes


# --- answers of a trained model ------------------------------------------------------------------


class AnswerChanges(TypedDict, total=False):
    """Settings of sampling for one call; None and what is left out are as the recipe evaluates."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    max_new_tokens: int | None
    seed: int | None
    earlier: Sequence[Message]
    """The turns before the question, as the chat template takes them."""


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
    """Where the answer was found, or why there is none."""
    finish_reason: str
    """`stop_token`, `stop_string`, or `length` (truncated)."""
    tokens: int
    """Sampled tokens, the stop token included."""

    def as_row(self) -> dict[str, Any]:
        """For JSONL: `answer` is `extracted` there, since data sets call their references so."""
        row = asdict(self)
        row["extracted"] = row.pop("answer")
        return row


class Generator(AbstractContextManager["Generator"]):
    """A loaded model that answers questions. Close it, or use it in a `with` statement.

    Several threads can share it; it processes one call after another.

    Args:
        recipe: sets how prompts are rendered and answers sampled (its evaluation section).
        model: a model folder, an adapter folder (its base is found), or a Hub name.

    Raises:
        GrouperError: the model, its tokenizer or the prompt format cannot be loaded.
    """

    def __init__(self, recipe: Recipe, model: str) -> None:
        require_intact(model)
        self.recipe = recipe
        self.prepared = Prepared(recipe, ProblemSets(), model=model)
        self.sampler = self.prepared.samplers.over(self.prepared.load(model))
        self.params = self.prepared.evaluation_params()
        self._one_at_a_time = threading.RLock()

    def prompt(self, question: str, earlier: Sequence[Message] = ()) -> Prompt:
        """Render the prompt of a question.

        Args:
            question: the user's question.
            earlier: earlier turns of the conversation, if any, as for the chat template.

        Raises:
            DataError: the question is empty, or not valid UTF-8.
            PromptError: turns come before it, and the model was trained without a chat template.
        """
        if not question.strip():
            raise DataError("the question is empty", where="solve", fix="Give it some text.")
        if question.encode(errors="ignore").decode() != question:  # no tokenizer takes it
            raise DataError("the question is not UTF-8", where="solve", fix="Convert it to UTF-8.")
        # The reference is not known here, and rendering does not look at it.
        problem = Problem(id="question", question=question, answer="?", source="generate")
        with self._one_at_a_time:  # a tokenizer is switched over for each part of a prompt
            return render(problem, self.prepared.format, self.prepared.tokenizer, earlier)

    def answers(
        self,
        questions: Iterable[str],
        *,
        samples: int | None = None,
        display: Progress | None = None,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        on_answers: Callable[[int, list[Solution]], None] | None = None,
        **changes: Unpack[AnswerChanges],
    ) -> list[list[Solution]]:
        """Answer each question; one that does not fit into the model's context gets no answer.

        Args:
            questions: the questions to answer.
            samples: answers per question; by default the recipe's `evaluation.samples`.
            display: where to show progress; nowhere by default.
            on_tokens: called with all ids so far of a single answer, every few tokens, if the
                engine is Grouper's own.
            on_answers: called with the number of each question, in order, and its answers, as soon
                as they are complete.
            changes: sampling settings for this call, as in `AnswerChanges`.

        Raises:
            DataError: a question is empty.
        """
        questions = list(questions)  # those of a pandas Series have labels, not places
        earlier = changes.get("earlier", ())
        prompts = [self.prompt(question, earlier) for question in questions]
        k = self.recipe.evaluation.samples if samples is None else samples
        display = display or Progress(quiet=True)
        params, room = self._params_and_room(changes)
        fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= room]
        left_out = len(questions) - len(fitting)
        if left_out:
            log.warning("%d questions are too long for the model; they get no answer.", left_out)
        # Addressed by the text: the answer to a question does not depend on its neighbors.
        chosen_seed = changes.get("seed")
        # NumPy's integers have another repr.
        seed = self.recipe.seed if chosen_seed is None else int(chosen_seed)
        requests = []
        for prompt in fitting:
            for sample in range(k):
                key = draw_seed(seed, "generate", prompt.text, sample)
                requests.append(SampleRequest(prompt=prompt, params=params, key=key))
        solutions: list[list[Solution]] = []
        # Completions that have arrived before their turn, by the position of their request.
        early: dict[int, Completion] = {}
        with self._one_at_a_time, display.track("answering", len(requests)) as task:
            if isinstance(self.sampler, TurnSampler):
                self.sampler.show(on_tokens)
            elif isinstance(self.sampler, NativeSampler):
                self.sampler.on_tokens = on_tokens
            completions = self.sampler.sample(requests)
            positions = iter(range(len(requests)))
            for number, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
                answers: list[Solution] = []
                count = k if len(prompt.token_ids) <= room else 0
                for position in islice(positions, count):
                    while position not in early:
                        index, completion = next(completions)
                        early[index] = completion
                        task.advance()
                    answers.append(self._solution(question, prompt, early.pop(position)))
                solutions.append(answers)
                if on_answers is not None:
                    on_answers(number, answers)
            # The sampler keeps its engine only if it is read to its end.
            deque(completions, maxlen=0)
        return solutions

    def answer(
        self,
        question: str,
        samples: int | None = None,
        *,
        on_text: Callable[[str], None] | None = None,
        **changes: Unpack[AnswerChanges],
    ) -> list[Solution]:
        """Answer one question, once or several times.

        Args:
            question: the user's question.
            samples: number of answers; by default the recipe's `evaluation.samples`.
            on_text: called with each new piece of the text of a single answer as it is sampled.
            changes: sampling settings for this call, as in `AnswerChanges`.

        Raises:
            DataError: the question is empty, or longer than the model's context leaves room for.
        """
        prompt = self.prompt(question, changes.get("earlier", ()))
        tokens = len(prompt.token_ids)
        _, room = self._params_and_room(changes)
        if tokens > room:
            raise DataError(
                f"the question has {tokens} tokens, and the model's context leaves room for {room}",
                where="the question",
                fix="Shorten it, or lower --max-new-tokens (max_new_tokens in Python).",
            )
        k = self.recipe.evaluation.samples if samples is None else samples
        show = on_text if k == 1 else None
        decode = StopStrings(self.prepared.tokenizer, ()).text
        sent = ""

        def up_to(token_ids: Sequence[int]) -> None:
            nonlocal sent
            text = decode(token_ids)
            # The first bytes of a character are not text yet.
            if show and text.startswith(sent) and not text.endswith("\ufffd"):
                show(text.removeprefix(sent))
                sent = text

        on_tokens = up_to if show else None
        (solutions,) = self.answers([question], samples=k, on_tokens=on_tokens, **changes)
        if show:
            # The text that was sent may end with a stop string, which the response lacks.
            show(solutions[0].response[len(sent) :])
        return solutions

    def _params_and_room(self, changes: AnswerChanges) -> tuple[SamplingParams, float]:
        """Return the sampling parameters of a call, and the tokens that they leave for a prompt."""
        of_no_params = ("seed", "earlier")
        settings: dict[str, Any] = {
            name: value
            for name, value in changes.items()
            if name not in of_no_params and value is not None
        }
        params = replace(self.params, **settings)
        context = self.prepared.context
        if context is None:
            return params, math.inf
        return params, max(0, context - params.max_new_tokens)

    def _solution(self, question: str, prompt: Prompt, completion: Completion) -> Solution:
        """Return the completion of a question's prompt, with the answer that it commits to."""
        extraction = self.prepared.grader.answer(completion.text)
        return Solution(
            question=question,
            prompt=prompt.text,
            response=completion.text,
            answer=extraction.answer,
            reason=extraction.reason,
            finish_reason=completion.finish_reason.value,
            tokens=len(completion.token_ids),
        )

    def close(self) -> None:
        """Release the sampler and end the grader."""
        self.sampler.release()
        self.prepared.close()

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
    checkpoint: int | str | None = None,
) -> Generator:
    """Load a trained model to answer questions.

    Args:
        path: a run folder (its trained model), a model or adapter folder, or a Hub name.
        recipe: a recipe, its name or its file; by default the recipe of the run that contains the
            model.
        format: a prompt format, for a model without a recipe.
        temperature: sampling temperature, 0 for greedy; by default as in the recipe's evaluation.
        max_new_tokens: longest answer; by default as in the recipe's evaluation.
        seed: random seed; by default the recipe's.
        checkpoint: of a run folder: `best` by the accuracy in validation, `last`, or a step; left
            out: its result, or of a run that is not finished the newest checkpoint, with a warning.

    Raises:
        GrouperError: it cannot be loaded, or its prompt format is not known.
    """
    model = model_in(str(path), checkpoint=None if checkpoint is None else str(checkpoint))
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe)
    model_recipe = recipe_for(model, recipe, format)
    model_recipe = with_sampling(
        model_recipe, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
    )
    return Generator(model_recipe, model)


@overload
def solve(
    question: str,
    model: Generator | str | Path,
    *,
    samples: None = None,
    **changes: Unpack[AnswerChanges],
) -> Solution: ...
@overload
def solve(
    question: str, model: Generator | str | Path, *, samples: int, **changes: Unpack[AnswerChanges]
) -> list[Solution]: ...
def solve(
    question: str,
    model: Generator | str | Path,
    *,
    samples: int | None = None,
    **changes: Unpack[AnswerChanges],
) -> Solution | list[Solution]:
    """Answer one question; the same question and seed always get the same answer.

    Args:
        question: the user's question.
        model: a generator, or an argument of `load_generator` to load one for this call.
        samples: number of answers, returned as a list; by default one, returned by itself.
        changes: sampling settings, as in `AnswerChanges`: `temperature`, `seed` and so on.

    Raises:
        DataError: see `Generator.answer`.
    """
    opened = nullcontext(model) if isinstance(model, Generator) else load_generator(model)
    with opened as generator:
        solutions = generator.answer(question, samples=samples or 1, **changes)
    return solutions[0] if samples is None else solutions


def stream(question: str, model: Generator, **changes: Unpack[AnswerChanges]) -> Iterator[str]:
    """Yield the text of an answer piece by piece while it is sampled.

    Args:
        question: the user's question.
        model: a generator. It stops sampling when the caller stops, as with `break`.
        changes: sampling settings, as in `AnswerChanges`.

    Raises:
        DataError: see `Generator.answer`.
    """
    pieces = SimpleQueue[str | None]()
    is_abandoned = threading.Event()

    def show(piece: str) -> None:
        if is_abandoned.is_set():
            raise CancelledError
        pieces.put(piece)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(model.answer, question, 1, on_text=show, **changes)
        done.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
        finally:
            is_abandoned.set()
        done.result()


def append_jsonl(path: str | Path, solution: Solution, **extra: Any) -> None:
    """Add one line to a JSONL file, which is created if it does not exist.

    Its fields are `question`, `prompt`, `response`, `extracted`, `reason`, `finish_reason` and
    `tokens`, as in the output of `grouper generate`, and those of `extra`. The line is written in
    one piece, so that the lines of several writers do not mix.

    Raises:
        RunFolderError: the file cannot be written.
    """
    append_line(Path(path).expanduser(), {**solution.as_row(), **extra})


# --- demonstrations out of a model's own answers -------------------------------------------------


def synthesize(
    recipe: Recipe,
    model: str | Path,
    path: Path | str,
    *,
    samples: int = 4,
    display: Progress | None = None,
) -> tuple[int, int]:
    """Sample the training problems, and write the correct answers as data for SFT.

    Each line has `question`, `answer` and `response`, and its origin: problem, model, sample, seed,
    temperature. `data.sft={source: file, path: FILE, columns: {response: response}}` trains on
    them. If prompts are used verbatim, `prompt` takes the place of `question`: `{source:
    prompt-response, path: FILE}`. The completions are sampled and graded as an evaluation of the
    training problems, at the temperature of training; after an interruption the same call
    continues.

    Args:
        recipe: recipe with the problems, prompts, sampling and grading.
        model: a model or adapter folder, or a Hub name.
        path: a JSON Lines file; when everything is sampled, rows that it lacks are appended.
        samples: number of samples per problem.
        display: where to show progress; nowhere by default.

    Returns:
        Number of rows written, and number of completions sampled.

    Raises:
        GrouperError: the model or the problems cannot be loaded, or the file not written.
    """
    target = Path(path).expanduser()
    model = str(model)
    problems = require_part(recipe, "train")
    questions = {problem.id: problem.question for problem in problems.problems}
    verbatim = {problem.id for problem in problems.problems if problem.prompt is not None}

    def rows_of(result: EvaluationResult) -> list[dict[str, Any]]:
        rows = []
        for item in result.items:
            if not item.correct or item.finish_reason is FinishReason.LENGTH:
                continue
            question_column = "prompt" if item.problem_id in verbatim else "question"
            row = {
                "id": f"{item.problem_id}#{item.sample}",
                question_column: questions[item.problem_id],
                "answer": item.answer,
                "response": item.completion,
                "problem_id": item.problem_id,
                "model": model,
                "sample": item.sample,
                "seed": recipe.seed,
                "temperature": recipe.sampling.temperature,
                "tokens": item.tokens,
                "reward": item.reward,
            }
            rows.append(row)
        return rows

    sampled = _as_trained(recipe, samples, rewards=True)
    return _draw_rows(sampled, model, target, rows_of, problems=problems, display=display)
