"""Preparation: a recipe's problems as token ids, with all objects that sampling and grading need.

Run, dry run, preview, bench, evaluation and notebooks use `Prepared`. No weights are loaded before
`load` is called, and nothing is written outside the folder of a new model.
"""

from __future__ import annotations

import gc
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from grouper.config.loading import recipe_hash
from grouper.config.schema import EvaluationConfig, Recipe, SamplingConfig
from grouper.data import ProblemSet
from grouper.data.problems import contradicting
from grouper.errors import ConfigError, DataError, ModelError, PromptError
from grouper.evaluation.evaluate import Measurement
from grouper.grading import Grader, require_symbolic
from grouper.models.device import find_device, use_cpu_threads
from grouper.models.loading import (
    context_length,
    load_policy,
    load_tokenizer,
    shape_of,
    stop_ids_of,
)
from grouper.models.new_model import make_new_model, save_new_model
from grouper.models.policy import Policy
from grouper.prompts import make_format
from grouper.prompts.formats import with_plain_stops
from grouper.prompts.preparing import (
    Item,
    PreparedItems,
    prepare_demonstrations,
    prepare_prompts,
)
from grouper.prompts.rendering import (
    demonstrate,
    find_stop_tokens,
    install_template,
    render,
    right_completion,
    uses_chat,
)
from grouper.rewards import Group, RewardStack, build_rewards
from grouper.runs.records import flat_settings
from grouper.sampling.factory import Samplers
from grouper.sampling.tools import Toolbox, toolbox_of
from grouper.training.problem_sets import MEASURED, ProblemSets, load_part
from grouper.training.saved_state import is_complete, read_state
from grouper.types import (
    Completion,
    Demonstration,
    Problem,
    Prompt,
    Reward,
    RolloutGroup,
    SamplingParams,
)

log = logging.getLogger(__name__)

# What a teacher reads with `grpo.teacher.prompt: solution`.
HINTED_QUESTION = (
    "{question}\n\nFor reference, a worked solution:\n{solution}\n\n"
    "Now solve the problem in your own words."
)

# Problems with their prompts.
Items = tuple[tuple[Problem, Prompt], ...]


class Prepared(AbstractContextManager["Prepared"]):
    """The prepared data of a recipe, and its model, sampler, grader and rewards, made on demand.

    Each problem is rendered once, with the renderer that all phases share. Problems that do not fit
    are listed and left out. Close it, or use it with `with`: grading has processes of its own.

    Args:
        recipe: how prompts are written, sampled and graded.
        sets: the parts to prepare, from `load_problem_sets`; may be empty.
        model: folder or Hub name of the model whose tokenizer is used; default: the recipe's, or
            a new one in a temporary folder that is deleted on `close`.
        quiet: log no warnings.

    Raises:
        GrouperError: device, tokenizer, format or grading is not available; or a prompt holds
            tokens that the model does not know, or leaves no room for a completion.
    """

    def __init__(
        self, recipe: Recipe, sets: ProblemSets, *, model: str | None = None, quiet: bool = False
    ) -> None:
        find_device(recipe.device)
        use_cpu_threads(recipe.threads)
        require_symbolic(recipe.grading)
        self.recipe = recipe
        self._quiet = quiet
        self.warnings: list[str] = []
        """Warnings of settings that work but rarely do what was meant."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        path = model or named_base(recipe)
        if path is None:
            self._folder = tempfile.TemporaryDirectory(prefix="grouper-base-")
            path = str(Path(self._folder.name) / "base")
            make_base(recipe, sets, Path(path))
        self.model_path = path
        """Folder or Hub name of the model whose tokenizer is used: in a run, the base model."""
        try:
            self._read_model(path)
            self._render(sets)
        except BaseException:  # Ctrl-C, too, must leave no folder and no process
            self.close()
            raise

    def _read_model(self, path: str) -> None:
        """Set the attributes that follow from the recipe and the model alone."""
        recipe = self.recipe
        self.format = make_format(recipe.prompt)
        revision = recipe.model.revision_of(path)
        self.tokenizer = load_tokenizer(path, revision=revision)
        install_template(self.format, self.tokenizer)
        if self.format.chat == "auto" and not self.tokenizer.chat_template and not self._quiet:
            log.warning(
                "The tokenizer of %s has no chat template: prompts are plain text. "
                "prompt.template=install gives it one, prompt.template=plain is plain without "
                "this warning.",
                path,
            )
        if not uses_chat(self.format, self.tokenizer):
            include_stop = recipe.sampling.include_stop
            self.format = with_plain_stops(self.format, include_stop=include_stop)
        shape = shape_of(path, revision)
        eos = stop_ids_of(path, revision)
        self.stop_tokens = find_stop_tokens(self.tokenizer, eos, self.format)
        """Ids that end a completion; the first is the one that SFT trains."""
        self.context = context_length(shape)
        """The longest sequence that the model takes, in tokens; None if its configuration does not
        say."""
        self.vocabulary = int(shape.get_text_config().vocab_size)
        """The number of tokens that the model knows."""

    def _render(self, sets: ProblemSets) -> None:
        """Render every part, within the lengths that the recipe allows."""
        recipe = self.recipe
        self.max_new_tokens = recipe.sampling.max_new_tokens
        """The completion budget: of the recipe, or the rest of `max_total_tokens`."""
        self.budget_note: str | None = None
        """A line about the completion budget that follows from `sampling.max_total_tokens`."""
        max_total_tokens = recipe.sampling.max_total_tokens
        train = None
        if max_total_tokens is not None:
            # As little as possible, until the prompts have been counted.
            self.max_new_tokens = 1
            # How much room prompts and demonstrations have follows from the training prompts. If
            # there are none and evaluation has a budget of its own, nothing needs it.
            if sets != ProblemSets() or recipe.evaluation.max_new_tokens is None:
                train = self._prompts(sets.train or load_part(recipe, "train"), "train")
                total = min(max_total_tokens, self.context or max_total_tokens)
                self._set_budget(total, train)
        # Before the demonstrations: if prompts have no room, this error names the setting.
        if train is None or sets.train is None:
            train = self._prompts(sets.train, "train")
        self.train = train
        """The training problems that fit, each with its prompt. The other parts are the same; a
        part is empty if the recipe does not have it."""
        self.demonstrations: tuple[Demonstration, ...] = ()
        """The demonstrations that SFT trains; empty if it is skipped."""
        self.validation_demonstrations: tuple[Demonstration, ...] = ()
        """Demonstrations of the validation problems with a worked solution, if SFT is run."""
        if sets.sft is not None and not recipe.skip_sft:
            self.demonstrations = self._demonstrations(sets.sft, "sft")
            if sets.validation is not None and any(
                p.solution or p.program for p in sets.validation.problems
            ):
                try:
                    self.validation_demonstrations = self._demonstrations(
                        sets.validation, "validation"
                    )
                except PromptError as error:
                    log.warning("There is no validation loss in SFT: %s.", error.what)
        self.validation = self._prompts(sets.validation, "validation")
        self.test = self._prompts(sets.test, "test")
        # By problem id: encoded when first needed.
        self._solutions: dict[str, Demonstration | None] = {}
        self._hinted: dict[str, tuple[int, ...]] = {}
        self._require_solutions()

    @property
    def sizes(self) -> dict[str, int]:
        """Number of problems of each part that fit; of `sft`, of demonstrations."""
        return {
            "sft": len(self.demonstrations),
            "train": len(self.train),
            "validation": len(self.validation),
            "test": len(self.test),
        }

    # --- for notebooks ---

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode token ids, special tokens included."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

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
        """Sampling parameters of GRPO's rollouts."""
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
        phases = " then ".join(self.recipe.phases) or "measuring only"
        sizes = (
            f"{len(self.train):,} to train on, {len(self.validation):,} for validation, "
            f"{len(self.test):,} to test; {len(self.demonstrations):,} demonstrations"
        )
        return "\n".join(
            [
                f"{self.recipe.name}: {phases} of {model}",
                f"problems:       {sizes}",
                f"first problem:  {first.question!r} -> {first.answer!r}",
                f"first prompt:   {self.prompt.text!r}",
                f"rewards:        {rewards}",
                f"sampling:       {self.sampling}",
            ]
        )

    # --- worked solutions, for GRPO ---

    def solution_of(self, group: RolloutGroup) -> Demonstration | None:
        """Return the worked solution of a group's problem as a completion, stop token included.

        None where there is none that fits the completion budget, or where SFT would leave it out.
        """
        problem = group.problem
        if problem.id not in self._solutions:
            self._solutions[problem.id] = self._encoded_solution(problem)
        return self._solutions[problem.id]

    def _encoded_solution(self, problem: Problem) -> Demonstration | None:
        try:
            demonstration = demonstrate(problem, self.format, self.tokenizer, self.stop_tokens[0])
        except PromptError:
            return None
        if len(demonstration.token_ids) > self.max_new_tokens:
            return None
        return demonstration

    def prompt_with_solution(self, group: RolloutGroup) -> tuple[int, ...]:
        """Return the prompt of a group with the worked solution in its question.

        It is the group's own where there is no solution, where the problem has a prompt word for
        word, or where the model's context is too short for both.
        """
        problem = group.problem
        own = group.prompt.token_ids
        if problem.id not in self._hinted:
            self._hinted[problem.id] = self._with_hint(problem, own)
        return self._hinted[problem.id]

    def _with_hint(self, problem: Problem, own: tuple[int, ...]) -> tuple[int, ...]:
        solution = problem.solution or problem.response
        if solution is None or problem.prompt is not None:
            return own
        question = HINTED_QUESTION.format(question=problem.question, solution=solution)
        prompt = render(replace(problem, question=question), self.format, self.tokenizer)
        room = math.inf if self.context is None else self.context - self.max_new_tokens
        return own if len(prompt.token_ids) > room else prompt.token_ids

    def _require_solutions(self) -> None:
        """Raise `DataError` where GRPO uses worked solutions and no training problem has one."""
        config = self.recipe.grpo
        hinted = config.teacher is not None and config.teacher.prompt == "solution"
        if self.recipe.skip_grpo or not self.train or not (hinted or config.solution_weight > 0):
            return
        if not any(problem.solution or problem.response for problem in self.problems):
            raise DataError(
                "no training problem has a worked solution",
                where="grpo.teacher.prompt" if hinted else "grpo.solution_weight",
                fix="Take data that has them as data.train, or leave the setting out.",
            )

    # --- sampling and grading ---

    def prompt_limit(self, part: str = "train") -> int:
        """Return the length of the longest prompt that leaves room for a completion, in tokens.

        Args:
            part: of the data; validation and test have the budget of evaluation.

        Raises:
            ConfigError: the model's context has no room for the new tokens.
        """
        max_prompt_tokens = self.recipe.prompt.max_prompt_tokens
        new_tokens, setting = self._new_tokens(part)
        if self.context is None:
            return max_prompt_tokens
        if new_tokens >= self.context:
            raise ConfigError(
                f"{new_tokens} new tokens leave no room for a prompt in the model's {self.context}",
                where=setting,
                fix=f"Lower it; {self.context // 2} would leave half of the context.",
            )
        return min(max_prompt_tokens, self.context - new_tokens)

    def _new_tokens(self, name: str) -> tuple[int, str]:
        """Return the completion budget of a part, and the setting that it comes from."""
        evaluation_budget = self.recipe.evaluation.max_new_tokens
        if name in MEASURED and evaluation_budget is not None:
            return evaluation_budget, "evaluation.max_new_tokens"
        return self.max_new_tokens, "sampling.max_new_tokens"

    def training_params(self, *, max_new_tokens: int | None = None) -> SamplingParams:
        """Return the sampling parameters of GRPO's rollouts.

        Args:
            max_new_tokens: replaces the completion budget.
        """
        sampling = self.recipe.sampling
        return self._params(
            sampling,
            min_new_tokens=sampling.min_new_tokens,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
        )

    def evaluation_params(self) -> SamplingParams:
        """Return the sampling parameters with which every model of the run is measured."""
        max_new_tokens, _ = self._new_tokens("test")
        return self._params(self.recipe.evaluation, max_new_tokens=max_new_tokens)

    def _params(self, config: SamplingConfig | EvaluationConfig, **lengths: int) -> SamplingParams:
        """Return sampling parameters with the distribution of `config`."""
        sampling = self.recipe.sampling
        return SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop=self.format.stop if sampling.stop is None else sampling.stop,
            include_stop=sampling.include_stop,
            **lengths,
        )

    def load(self, path: str) -> Policy:
        """Load a model folder as the policy; its version is the number of updates it has had.

        Raises:
            ModelError: it cannot be loaded.
        """
        recipe = self.recipe
        device = find_device(recipe.device)
        policy = load_policy(recipe.model, path, seed=recipe.seed, device=device)
        self.set_generation(policy)
        folder = Path(path).expanduser()
        if is_complete(folder):
            policy.version = int(read_state(folder)["policy_version"])
        return policy

    def set_generation(self, policy: Policy, **settings: Any) -> None:
        """Set the generation config that is saved with the weights.

        With it other programs, too, stop at the stop tokens of SFT. Other settings of the model are
        dropped: transformers refuses to save some, such as a `temperature` without `do_sample`.
        """
        original: Any = policy.model.generation_config
        policy.model.generation_config = GenerationConfig(
            bos_token_id=original.bos_token_id,
            pad_token_id=original.pad_token_id,
            eos_token_id=list(self.stop_tokens),
            **settings,
        )

    @cached_property
    def model(self) -> Policy:
        """The base model, loaded on first use; `release` frees it."""
        return self.load(self.model_path)

    @cached_property
    def samplers(self) -> Samplers:
        """Factory of the samplers that the recipe names."""
        return Samplers(
            recipe=self.recipe,
            tokenizer=self.tokenizer,
            stop_token_ids=self.stop_tokens,
            longest=max(self.max_new_tokens, self.recipe.evaluation.max_new_tokens or 1),
            toolbox=self.toolbox,
        )

    @cached_property
    def toolbox(self) -> Toolbox | None:
        """What completions may call; None for a format without turns.

        Raises:
            ConfigError: a function of the user cannot be loaded.
        """
        return toolbox_of(self.recipe, self.format)

    @cached_property
    def grader(self) -> Grader:
        """Grader of completions of this format; its processes start with the first hard one."""
        return Grader(self.format.contract, self.recipe.grading)

    def start_workers(self) -> None:
        """Start what grades and what runs programs, and see that they can work.

        Raises:
            ConfigError: programs cannot be isolated as asked for, or a tool cannot be loaded.
            GradingError: the symbolic stage cannot work.
        """
        self.grader.start()
        if self.toolbox is not None:
            self.toolbox.start()

    @cached_property
    def rewards(self) -> RewardStack:
        """The rewards of the recipe.

        Raises:
            RewardError: one of them cannot be loaded.
        """
        return build_rewards(self.recipe.rewards, self.format)

    def check_rewards(self) -> list[str]:
        """Try the rewards on the first training problem, and return warnings.

        Raises:
            RewardError: one of them fails.
        """
        if self.recipe.skip_grpo:
            return []
        problem, prompt = self.train[0]
        right = right_completion(problem, self.format)
        return self.rewards.check(problem=problem, prompt=prompt, right=right)

    def measurement(
        self,
        *,
        name: str,
        phase: str,
        step: int,
        split: str,
        items: Items | None = None,
        facts: Mapping[str, Any] | None = None,
        weights: str = "",
        seconds: float | None = None,
    ) -> Measurement:
        """Describe a measurement as the recipe samples, grades and rewards.

        Args:
            name: as in `Measurement`, like the other arguments.
            phase: `base`, `sft` or `grpo`.
            step: optimizer steps of the phase.
            split: `test`, `validation`, or the name of a suite.
            items: left out: the validation problems for that split, the test problems otherwise.
            facts: further entries of the card.
            weights: mark of the model's weights.
            seconds: limit of the time.

        Raises:
            DataError: there are no problems.
        """
        recipe = self.recipe
        if items is None:
            items = self.validation if split == "validation" else self.test
        recipe_facts = {"recipe_hash": recipe_hash(recipe), "prompt": self.format.name}
        return Measurement(
            name=name,
            phase=phase,
            step=step,
            split=split,
            items=items,
            params=self.evaluation_params(),
            samples=recipe.evaluation.samples,
            seed=recipe.seed,
            format=self.format,
            rewards=self.rewards if recipe.evaluation.rewards else None,
            facts={**recipe_facts, **(facts or {})},
            weights=weights,
            seconds=seconds,
        )

    def reward(self, text: str, number: int = 0) -> Reward:
        """Return the reward of a completion of a training problem.

        Args:
            text: the completion, without the beginning that the prompt already contains.
            number: index of the problem in `train`.
        """
        problem, prompt = self.train[number]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            ids = [self.stop_tokens[0]]
        grade = self.grader.submit(text, problem.answer).result()
        group = Group(problem, prompt, [Completion.bare(ids, text)], [grade])
        return self.rewards.score(group)[0]

    def release(self) -> None:
        """Free the memory of the model."""
        self.__dict__.pop("model", None)
        gc.collect()

    def close(self) -> None:
        """Free the model, stop the grader, and delete the folder of a new model."""
        self.release()
        if "grader" in self.__dict__:
            self.grader.close()
        if "samplers" in self.__dict__:
            self.samplers.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- rendering ---

    def _set_budget(self, total: int, items: Items) -> None:
        """Set the completion budget to the rest of `total` tokens after the longest prompt.

        Args:
            total: tokens of a prompt and its completion.
            items: the training problems with their prompts.

        Raises:
            ConfigError: the longest prompt leaves no room.
        """
        longest = max((len(prompt.token_ids) for _, prompt in items), default=0)
        budget = total - longest
        if budget < max(1, self.recipe.sampling.min_new_tokens):
            raise ConfigError(
                f"prompts of up to {longest} tokens leave {max(budget, 0)} of {total} for a "
                "completion",
                where="sampling.max_total_tokens",
                fix="Raise it, or lower prompt.max_percentile or prompt.max_prompt_tokens.",
            )
        self.max_new_tokens = budget
        self.budget_note = (
            f"Completions have up to {budget} tokens: {total} in all, less {longest} of the "
            f"longest of {len(items):,} prompts."
        )

    def _prompts(self, problem_set: ProblemSet | None, name: str) -> Items:
        """Return the problems of a part that fit, with their prompts."""
        if problem_set is None:
            return ()
        limit = self.prompt_limit(name)
        config = self.recipe.prompt
        fix = "Raise prompt.max_prompt_tokens."
        if limit < config.max_prompt_tokens:
            _, setting = self._new_tokens(name)
            fix = (
                f"Lower {setting}: of the model's {self.context} tokens it leaves prompts {limit}."
            )
        rendered = prepare_prompts(
            problem_set.problems,
            self.format,
            self.tokenizer,
            max_prompt_tokens=limit,
            max_percentile=config.max_percentile if name == "train" else None,
            fix=fix,
        )
        return self._checked(rendered, name)

    def _demonstrations(self, problem_set: ProblemSet, name: str) -> tuple[Demonstration, ...]:
        """Return the worked solutions of a part that fit after the longest prompt allowed."""
        limit = self.prompt_limit()
        max_completion_tokens = None
        if self.context is not None:
            max_completion_tokens = max(1, self.context - limit)
        rendered = prepare_demonstrations(
            problem_set.problems,
            self.format,
            self.tokenizer,
            self.stop_tokens[0],
            max_prompt_tokens=limit,
            max_completion_tokens=max_completion_tokens,
            max_tokens=self.recipe.sft.max_tokens if name == "sft" else None,
        )
        items = self._checked(rendered, name, "the solution of ")
        if name == "sft" and not self._quiet:
            self._warn_of_contradictions([problem for problem, _ in items])
        return tuple(demonstration for _, demonstration in items)

    def _warn_of_contradictions(self, problems: Sequence[Problem]) -> None:
        """Warn of worked solutions that will teach another answer than their reference."""
        wrong = contradicting(problems)
        if wrong:
            log.warning(
                "data.sft: %d worked solutions state another answer than their reference, the "
                "first: %s (reference %.40r). They are trained as they are; "
                "data.sft.only_correct=true leaves them out.",
                len(wrong),
                wrong[0].id,
                wrong[0].answer,
            )

    def _checked(
        self, rendered: PreparedItems[Item], name: str, prefix: str = ""
    ) -> tuple[tuple[Problem, Item], ...]:
        """Return the rendered items of a part, and log the problems that were dropped.

        The log names the first one; all of them are in training.log.

        Args:
            rendered: the items, and the problems that were dropped.
            name: of the part.
            prefix: put before the id of a problem in the error message.

        Raises:
            ModelError: the model's embedding has no row for a token. A tokenizer may know more
                tokens than the model, if no text contains them.
        """
        dropped = () if self._quiet else rendered.dropped
        if dropped:
            log.warning(
                "data.%s: %d rows are left out, the first: %s (%s).",
                name,
                len(dropped),
                dropped[0].problem_id,
                dropped[0].reason,
            )
        for row in dropped:
            log.debug("data.%s: %s is left out: %s", name, row.problem_id, row.reason)
        for problem, item in rendered.items:
            highest = max(item.token_ids)
            if highest >= self.vocabulary:
                raise ModelError(
                    f"the tokenizer writes {prefix}{problem.id} with token {highest} "
                    f"({self.tokenizer.convert_ids_to_tokens(highest)!r}), and the model knows "
                    f"{self.vocabulary} tokens",
                    where="the tokenizer",
                    fix="Use the tokenizer that was saved with the model, or resize the model's "
                    "embedding (`resize_token_embeddings`) and save both.",
                )
        return rendered.items


# --- the base model ------------------------------------------------------------------------------


def named_base(recipe: Recipe) -> str | None:
    """Return the folder or Hub name of the model whose tokenizer a run uses; None: a new model."""
    if recipe.model.path is None and recipe.skip_sft:
        # A new model would bring a new tokenizer, which the starting model cannot read.
        return recipe.grpo.start_from
    return recipe.model.path


def make_base(recipe: Recipe, sets: ProblemSets, target: Path) -> str:
    """Make the recipe's random model in a new folder; the same arguments give the same weights.

    Args:
        recipe: describes it.
        sets: the data that its tokenizer is fitted to.
        target: the folder to save it in.

    Returns:
        A line that describes the model.
    """
    new = recipe.model.new
    assert new is not None, "a recipe has a path or a new model"
    model, tokenizer = make_new_model(
        new, sets.for_fitting, make_format(recipe.prompt), seed=recipe.seed
    )
    save_new_model(target, model, tokenizer)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"New random qwen3 model: {count:,} parameters, {len(tokenizer)} tokens."


# `teacher.prompt` -> what makes the prompt of a group for a teacher; None: it is the group's own.
TEACHER_PROMPTS: dict[str, Callable[[Prepared, RolloutGroup], Sequence[int]] | None] = {
    "same": None,
    "solution": Prepared.prompt_with_solution,
}
