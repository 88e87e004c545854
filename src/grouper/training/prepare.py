"""The one preparation: a recipe's problems as token ids, with all that sampling and grading need.

Run, dry run, preview, bench, evaluation and notebooks stand on `prepare`. No weights are loaded
before `load` is called, and nothing is written outside the folder of a new model.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from grouper.config.loading import recipe_hash
from grouper.config.schema import Recipe
from grouper.data import ProblemSet
from grouper.errors import ConfigError, ModelError
from grouper.evaluation.evaluate import Behaviour, evaluate
from grouper.evaluation.result import EvaluationResult
from grouper.grading import Grader, require_symbolic
from grouper.models.device import find_device
from grouper.models.folders import require_model_folder
from grouper.models.loading import (
    context_length,
    load_policy,
    load_tokenizer,
    shape_of,
    stop_ids_of,
)
from grouper.models.new_model import make_new_model, save_new_model
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.prompts import make_format
from grouper.prompts.preparing import Dropped, prepare_demonstrations, prepare_prompts
from grouper.prompts.rendering import (
    StopTokens,
    find_stop_tokens,
    install_template,
    right_completion,
)
from grouper.rewards import RewardStack, build_rewards
from grouper.runs.identity import flat_settings
from grouper.sampling.base import Sampler
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights, copy_dtype
from grouper.training.checkpoint import is_complete, read_state
from grouper.training.problem_sets import ProblemSets, load_part
from grouper.types import (
    AnswerFormat,
    Completion,
    Demonstration,
    FinishReason,
    Problem,
    Prompt,
    Reward,
    SamplingParams,
)

log = logging.getLogger(__name__)

# Problems with their prompts.
Items = tuple[tuple[Problem, Prompt], ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Prepared:
    """What a run works with, and what is made of it when asked: model, sampler, grader, rewards.

    Close it, or use it with `with`: grading has processes of its own.
    """

    recipe: Recipe
    model_path: str
    """Folder or Hub name of the model whose tokenizer is used; in a run that before training."""
    format: AnswerFormat
    tokenizer: Any
    stop_tokens: StopTokens
    context: int | None
    """The longest sequence that the model takes, in tokens; None where it does not say."""
    vocabulary: int
    """How many tokens the model knows."""
    max_new_tokens: int
    """The completion budget: of the recipe, or what `max_total_tokens` leaves of it."""
    budget_note: str | None = None
    """What `sampling.max_total_tokens` leaves for a completion, in words."""
    train: Items = ()
    """The training problems that fit, each with its prompt; likewise the other parts, which are
    empty where the recipe has none."""
    validation: Items = ()
    test: Items = ()
    demonstrations: tuple[Demonstration, ...] = ()
    """What SFT trains; empty where it is skipped."""
    validation_demonstrations: tuple[Demonstration, ...] = ()
    """Those of the validation problems that have a worked solution, where SFT is run."""
    warnings: list[str] = field(default_factory=list)
    """Settings that work but rarely do what was meant."""
    folder: tempfile.TemporaryDirectory[str] | None = None
    """Of a new model that nobody asked for a place for."""
    quiet: bool = False
    """Whether rows that are left out go without a warning."""

    # --- for the eye ---

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
        """How GRPO draws its rollouts."""
        return self.training_params()

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted key, as it would be written on the command line."""
        return dict(flat_settings(self.recipe.model_dump(mode="json")))

    def __repr__(self) -> str:
        new = self.recipe.model.new
        model = self.model_path if new is None else "a new random qwen3 model"
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

    # --- sampling and grading ---

    @property
    def prompt_limit(self) -> int:
        """The longest prompt that leaves room for a completion, in tokens.

        Raises:
            ConfigError: the model's context has no room for `sampling.max_new_tokens`.
        """
        wanted, new = self.recipe.prompt.max_prompt_tokens, self.max_new_tokens
        if self.context is None:
            return wanted
        if new >= self.context:
            raise ConfigError(
                f"{new} new tokens leave no room for a prompt in the model's {self.context}",
                where="sampling.max_new_tokens",
                fix=f"Lower it; {self.context // 2} would leave half of the context.",
            )
        return min(wanted, self.context - new)

    def training_params(self, *, max_new_tokens: int | None = None) -> SamplingParams:
        """How GRPO draws its rollouts, or longer ones of up to `max_new_tokens`."""
        s = self.recipe.sampling
        return SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            min_new_tokens=s.min_new_tokens,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            stop=self.format.stop if s.stop is None else s.stop,
            include_stop=s.include_stop,
        )

    def evaluation_params(self) -> SamplingParams:
        """How every model of the run is measured."""
        s, e = self.recipe.sampling, self.recipe.evaluation
        return SamplingParams(
            temperature=e.temperature,
            max_new_tokens=e.max_new_tokens or self.max_new_tokens,
            stop=self.format.stop if s.stop is None else s.stop,
            include_stop=s.include_stop,
        )

    def load(self, path: str) -> Policy:
        """Load a model folder as the policy; its version is the steps it has seen.

        Raises:
            ModelError: it cannot be had.
        """
        require_model_folder(path)
        recipe = self.recipe
        policy = load_policy(
            recipe.model, path, seed=recipe.seed, device=find_device(recipe.device)
        )
        if is_complete(Path(path)):
            policy.version = int(read_state(Path(path))["policy_version"])
        return policy

    @cached_property
    def model(self) -> Policy:
        """The model before training, loaded when it is first looked at; `release` lets it go."""
        return self.load(self.model_path)

    def sampler(self, policy: Policy, *, copy_now: bool = False) -> NativeSampler:
        """A native sampler over a policy's weights, with a copy of them where the recipe wants one.

        Args:
            policy: whose weights.
            copy_now: copy the weights while they are still in one piece.
        """
        sampling = self.recipe.sampling
        dtype = copy_dtype(sampling, self.recipe.model, policy.device.type)
        return NativeSampler(
            SamplingWeights(policy, dtype, copy_now=copy_now),
            self.tokenizer,
            stop_token_ids=self.stop_tokens.all,
            max_slots=sampling.max_slots,
            max_length=context_length(policy.model.config),
        )

    @cached_property
    def grader(self) -> Grader:
        """Grades completions of this format; its processes start with the first hard one."""
        return Grader(self.format.contract, self.recipe.grading)

    @cached_property
    def rewards(self) -> RewardStack:
        """The rewards of the recipe.

        Raises:
            RewardError: one of them cannot be had.
        """
        return build_rewards(self.recipe.rewards, self.format)

    def check_rewards(self) -> list[str]:
        """Try the rewards on the first training problem; returns warnings.

        Raises:
            RewardError: one of them fails.
        """
        if self.recipe.skip_grpo:
            return []
        problem, prompt = self.train[0]
        right = right_completion(problem, self.format)
        return self.rewards.check(problem=problem, prompt=prompt, right=right)

    def evaluate(
        self,
        sampler: Sampler,
        *,
        name: str,
        phase: str,
        step: int,
        split: str,
        progress: Callable[[int, int], None] | None = None,
        card: Mapping[str, Any] | None = None,
        processes: ProcessGroup | None = None,
    ) -> EvaluationResult:
        """Measure the model of a sampler on the `test` or `validation` problems; see `evaluate`."""
        return evaluate(
            name=name,
            phase=phase,
            step=step,
            split=split,
            items=self.test if split == "test" else self.validation,
            sampler=sampler,
            grader=self.grader,
            params=self.evaluation_params(),
            samples=self.recipe.evaluation.samples,
            seed=self.recipe.seed,
            progress=progress,
            card={"recipe_hash": recipe_hash(self.recipe), **(card or {})},
            processes=processes,
            behaviour=Behaviour(self.format, self.rewards, name)
            if self.recipe.evaluation.rewards
            else None,
        )

    def reward(self, text: str, number: int = 0) -> Reward:
        """What a completion of a training problem is paid.

        Args:
            text: the completion, without what the prompt has already opened.
            number: of the problem in `train`.
        """
        problem, prompt = self.train[number]
        ids = self.tokenizer.encode(text, add_special_tokens=False) or [self.stop_tokens.trained]
        completion = Completion(
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            text=text,
            finish_reason=FinishReason.STOP_TOKEN,
            policy_version=0,
        )
        grade = self.grader.submit(text, problem.answer).result()
        (reward,) = self.rewards.score(
            problem=problem, prompt=prompt, completions=[completion], grades=[grade]
        )
        return reward

    def release(self) -> None:
        """Let the model go, so that its memory is there for the run."""
        self.__dict__.pop("model", None)
        gc.collect()

    def close(self) -> None:
        """End what was started: model, grader, and the folder of a new model."""
        self.release()
        if "grader" in self.__dict__:
            self.grader.close()
        if self.folder is not None:
            self.folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prepare(
    recipe: Recipe, sets: ProblemSets, *, model: str | None = None, quiet: bool = False
) -> Prepared:
    """Render the problems of `sets`, each once, with the renderer that all phases share.

    What does not fit is listed and left out.

    Args:
        recipe: how prompts are written, sampled and graded.
        sets: the parts to prepare, from `load_problem_sets`; perhaps none.
        model: folder or Hub name of the model whose tokenizer is used; left out: the recipe's, or
            a new one in a folder that goes with the result.
        quiet: warn of nothing.

    Raises:
        GrouperError: device, tokenizer, format or grading cannot be had; or a prompt holds tokens
            that the model does not know, or leaves no room for a completion.
    """
    find_device(recipe.device)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    require_symbolic(recipe.grading)
    path, folder = model or named_base(recipe), None
    if path is None:
        folder = tempfile.TemporaryDirectory(prefix="grouper-base-")
        path = str(Path(folder.name) / "base")
        make_base(recipe, sets, Path(path))
    elif model is None:
        require_model_folder(path)
    try:
        return _with_problems(_with_tokenizer(recipe, path, folder, quiet=quiet), sets)
    except BaseException:  # nothing may be left behind, whatever went wrong
        if folder is not None:
            folder.cleanup()
        raise


def _with_tokenizer(
    recipe: Recipe, path: str, folder: tempfile.TemporaryDirectory[str] | None, *, quiet: bool
) -> Prepared:
    """What follows from the recipe and the model alone; no problem has been rendered yet."""
    fmt, revision = make_format(recipe.prompt), None
    if path == recipe.model.path:
        revision = recipe.model.revision
    tokenizer = load_tokenizer(path, revision=revision)
    install_template(fmt, tokenizer)
    if fmt.chat == "auto" and not tokenizer.chat_template and not quiet:
        log.warning(
            "The tokenizer of %s has no chat template: prompts are plain text. "
            "prompt.template=install gives it one, prompt.template=plain is plain without "
            "this warning.",
            path,
        )
    shape = shape_of(path, revision)
    given = recipe.sampling.max_total_tokens is None
    return Prepared(
        recipe=recipe,
        model_path=path,
        format=fmt,
        tokenizer=tokenizer,
        stop_tokens=find_stop_tokens(tokenizer, stop_ids_of(path, revision), fmt),
        context=context_length(shape),
        vocabulary=int(shape.get_text_config().vocab_size),
        # With `max_total_tokens` as little as possible, until the prompts have been counted.
        max_new_tokens=recipe.sampling.max_new_tokens if given else 1,
        folder=folder,
        quiet=quiet,
    )


def _with_problems(prepared: Prepared, sets: ProblemSets) -> Prepared:
    """Every part rendered, within the lengths that the recipe allows."""
    recipe = prepared.recipe
    # How much room prompts and demonstrations have may follow from the training prompts. Where
    # there are none and evaluation has a budget of its own, nothing needs it.
    needed = sets != ProblemSets() or recipe.evaluation.max_new_tokens is None
    if needed and recipe.sampling.max_total_tokens is not None:
        prepared = _with_budget(prepared, recipe.sampling.max_total_tokens, sets)
    demonstrations: tuple[Demonstration, ...] = ()
    validation: tuple[Demonstration, ...] = ()
    if sets.sft is not None and not recipe.skip_sft:
        demonstrations = _demonstrations(prepared, sets.sft, "sft")
        if sets.validation is not None and any(p.solution for p in sets.validation.problems):
            validation = _demonstrations(prepared, sets.validation, "validation")
    return replace(
        prepared,
        demonstrations=demonstrations,
        validation_demonstrations=validation,
        train=prepared.train or _prompts(prepared, sets.train, "train"),
        validation=_prompts(prepared, sets.validation, "validation"),
        test=_prompts(prepared, sets.test, "test"),
    )


def _with_budget(prepared: Prepared, most: int, sets: ProblemSets) -> Prepared:
    """Let completions have what the longest training prompt leaves of `most` tokens.

    Raises:
        ConfigError: it leaves nothing.
    """
    recipe = prepared.recipe
    items = _prompts(prepared, sets.train or load_part(recipe, "train"), "train")
    total = min(most, prepared.context or most)
    longest = max((len(prompt.token_ids) for _, prompt in items), default=0)
    new = total - longest
    if new < max(1, recipe.sampling.min_new_tokens):
        raise ConfigError(
            f"prompts of up to {longest} tokens leave {max(new, 0)} of {total} for a completion",
            where="sampling.max_total_tokens",
            fix="Raise it, or lower prompt.max_percentile or prompt.max_prompt_tokens.",
        )
    note = (
        f"Completions have up to {new} tokens: {total} in all, less {longest} of the longest "
        f"of {len(items):,} prompts."
    )
    train = items if sets.train is not None else ()
    return replace(prepared, max_new_tokens=new, budget_note=note, train=train)


def _prompts(prepared: Prepared, part: ProblemSet | None, name: str) -> Items:
    """The problems of a part that fit, with their prompts."""
    if part is None:
        return ()
    limit, settings = prepared.prompt_limit, prepared.recipe.prompt
    fix = "Raise prompt.max_prompt_tokens."
    if limit < settings.max_prompt_tokens:
        fix = (
            f"Lower sampling.max_new_tokens: of the model's {prepared.context} tokens it leaves "
            f"prompts {limit}."
        )
    rendered = prepare_prompts(
        part.problems,
        prepared.format,
        prepared.tokenizer,
        max_prompt_tokens=limit,
        max_percentile=settings.max_percentile if name == "train" else None,
        fix=fix,
    )
    _report_dropped(prepared, name, rendered.dropped)
    for problem, prompt in rendered.items:
        _require_known(prepared, prompt.token_ids, problem.id)
    return rendered.items


def _demonstrations(prepared: Prepared, part: ProblemSet, name: str) -> tuple[Demonstration, ...]:
    """The worked solutions of a part that fit after every prompt that is kept."""
    context, limit = prepared.context, prepared.prompt_limit
    rendered = prepare_demonstrations(
        part.problems,
        prepared.format,
        prepared.tokenizer,
        prepared.stop_tokens.trained,
        max_prompt_tokens=limit,
        max_completion_tokens=None if context is None else max(1, context - limit),
        max_tokens=prepared.recipe.sft.max_tokens if name == "sft" else None,
    )
    _report_dropped(prepared, name, rendered.dropped)
    for problem, demonstration in rendered.items:
        _require_known(prepared, demonstration.token_ids, f"the solution of {problem.id}")
    return tuple(demonstration for _, demonstration in rendered.items)


def _require_known(prepared: Prepared, token_ids: Sequence[int], what: str) -> None:
    """Refuse tokens that the model's embedding has no row for.

    A tokenizer may know more tokens than the model, as long as nobody writes them.
    """
    highest = max(token_ids)
    if highest >= prepared.vocabulary:
        raise ModelError(
            f"the tokenizer writes {what} with token {highest} "
            f"({prepared.tokenizer.convert_ids_to_tokens(highest)!r}), and the model knows "
            f"{prepared.vocabulary} tokens",
            where="the tokenizer",
            fix="Use the tokenizer that was saved with the model, or resize the model's "
            "embedding (`resize_token_embeddings`) and save both.",
        )


def _report_dropped(prepared: Prepared, part: str, dropped: Sequence[Dropped]) -> None:
    """List what is left out: a few on the console, all of them in training.log."""
    if not dropped or prepared.quiet:
        return
    log.warning(
        "data.%s: %d rows are left out, the first: %s (%s).",
        part,
        len(dropped),
        dropped[0].problem_id,
        dropped[0].reason,
    )
    for row in dropped:
        log.debug("data.%s: %s is left out: %s", part, row.problem_id, row.reason)


# --- the model before training -------------------------------------------------------------------


def named_base(recipe: Recipe) -> str | None:
    """The folder or Hub name of the model whose tokenizer a run uses; None: it is to be made."""
    if recipe.model.path is None and recipe.skip_sft:
        # A new model would bring a new tokenizer, which the starting model cannot read.
        return recipe.grpo.start_from
    return recipe.model.path


def make_base(recipe: Recipe, sets: ProblemSets, target: Path) -> str:
    """Make the recipe's random model in a new folder; the same arguments give the same weights.

    Args:
        recipe: describes it.
        sets: the data that its tokenizer is fitted to.
        target: where it is saved.

    Returns:
        A line that says what was made.
    """
    new = recipe.model.new
    assert new is not None, "a recipe has a path or a new model"
    model, tokenizer = make_new_model(
        new, sets.for_fitting, make_format(recipe.prompt), seed=recipe.seed
    )
    save_new_model(target, model, tokenizer)
    count = sum(p.numel() for p in model.parameters())
    return f"New random qwen3 model: {count:,} parameters, {len(tokenizer)} tokens."
