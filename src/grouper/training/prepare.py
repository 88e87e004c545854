"""The one preparation: a recipe's problems as token ids, with all that sampling and grading need.

Run, dry run, preview, bench, evaluation and notebooks stand on `Prepared`. No weights are loaded
before `load` is called, and nothing is written outside the folder of a new model.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from grouper.config.loading import recipe_hash
from grouper.config.schema import EvaluationConfig, Recipe, SamplingConfig
from grouper.data import ProblemSet
from grouper.data.problems import contradicting
from grouper.errors import ConfigError, ModelError, PromptError
from grouper.evaluation.evaluate import evaluate
from grouper.evaluation.result import EvaluationResult
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
    find_stop_tokens,
    install_template,
    right_completion,
    uses_chat,
)
from grouper.rewards import Group, RewardStack, build_rewards
from grouper.runs.records import flat_settings
from grouper.sampling.base import Sampler
from grouper.sampling.engines import Samplers
from grouper.training.problem_sets import MEASURED, ProblemSets, load_part
from grouper.training.saved_state import is_complete, read_state
from grouper.types import (
    Completion,
    Demonstration,
    Problem,
    Prompt,
    Reward,
    SamplingParams,
)

log = logging.getLogger(__name__)

# Problems with their prompts.
Items = tuple[tuple[Problem, Prompt], ...]


class Prepared(AbstractContextManager["Prepared"]):
    """What a run works with, and what is made of it when asked: model, sampler, grader, rewards.

    Each problem is rendered once, with the renderer that all phases share. What does not fit is
    listed and left out. Close it, or use it with `with`: grading has processes of its own.

    Args:
        recipe: how prompts are written, sampled and graded.
        sets: the parts to prepare, from `load_problem_sets`; perhaps none.
        model: folder or Hub name of the model whose tokenizer is used; left out: the recipe's, or
            a new one in a folder that goes with this.
        quiet: warn of nothing.

    Raises:
        GrouperError: device, tokenizer, format or grading cannot be had; or a prompt holds tokens
            that the model does not know, or leaves no room for a completion.
    """

    def __init__(
        self, recipe: Recipe, sets: ProblemSets, *, model: str | None = None, quiet: bool = False
    ) -> None:
        find_device(recipe.device)
        use_cpu_threads(recipe.threads)
        require_symbolic(recipe.grading)
        self.recipe, self._quiet = recipe, quiet
        self.warnings: list[str] = []
        """Settings that work but rarely do what was meant."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        path = model or named_base(recipe)
        if path is None:
            self._folder = tempfile.TemporaryDirectory(prefix="grouper-base-")
            path = str(Path(self._folder.name) / "base")
            make_base(recipe, sets, Path(path))
        self.model_path = path
        """Folder or Hub name of the model whose tokenizer is used; in a run that before training.
        """
        try:
            self._read_model(path)
            self._render(sets)
        except BaseException:  # nothing may be left behind, whatever went wrong
            self.close()
            raise

    def _read_model(self, path: str) -> None:
        """What follows from the recipe and the model alone."""
        recipe = self.recipe
        self.format = make_format(recipe.prompt)
        revision = recipe.model.revision if path == recipe.model.path else None
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
        """The longest sequence that the model takes, in tokens; None where it does not say."""
        self.vocabulary = int(shape.get_text_config().vocab_size)
        """How many tokens the model knows."""

    def _render(self, sets: ProblemSets) -> None:
        """Every part, within the lengths that the recipe allows."""
        recipe = self.recipe
        self.max_new_tokens = recipe.sampling.max_new_tokens
        """The completion budget: of the recipe, or what `max_total_tokens` leaves of it."""
        self.budget_note: str | None = None
        """What `sampling.max_total_tokens` leaves for a completion, in words."""
        total, train = recipe.sampling.max_total_tokens, None
        if total is not None:
            # As little as possible, until the prompts have been counted.
            self.max_new_tokens = 1
            # How much room prompts and demonstrations have follows from the training prompts. Where
            # there are none and evaluation has a budget of its own, nothing needs it.
            if sets != ProblemSets() or recipe.evaluation.max_new_tokens is None:
                train = self._prompts(sets.train or load_part(recipe, "train"), "train")
                self._set_budget(min(total, self.context or total), train)
        # First: where prompts have no room, this says which setting leaves them none.
        if train is None or sets.train is None:
            train = self._prompts(sets.train, "train")
        self.train = train
        """The training problems that fit, each with its prompt; likewise the other parts, which are
        empty where the recipe has none."""
        self.demonstrations: tuple[Demonstration, ...] = ()
        """What SFT trains; empty where it is skipped."""
        self.validation_demonstrations: tuple[Demonstration, ...] = ()
        """Those of the validation problems that have a worked solution, where SFT is run."""
        if sets.sft is not None and not recipe.skip_sft:
            self.demonstrations = self._demonstrations(sets.sft, "sft")
            if sets.validation is not None and any(p.solution for p in sets.validation.problems):
                try:
                    found = self._demonstrations(sets.validation, "validation")
                    self.validation_demonstrations = found
                except PromptError as error:
                    log.warning("There is no validation loss in SFT: %s.", error.what)
        self.validation = self._prompts(sets.validation, "validation")
        self.test = self._prompts(sets.test, "test")

    @property
    def sizes(self) -> dict[str, int]:
        """Problems of each part that fit; demonstrations of `sft`."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {"sft": len(self.demonstrations), **{n: len(items) for n, items in parts.items()}}

    # --- for the eye ---

    def text(self, token_ids: Sequence[int]) -> str:
        """Ids as text, special tokens included."""
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

    # --- sampling and grading ---

    def prompt_limit(self, part: str = "train") -> int:
        """The longest prompt that leaves room for a completion, in tokens.

        Args:
            part: of the data; validation and test have the budget of evaluation.

        Raises:
            ConfigError: the model's context has no room for the new tokens.
        """
        wanted = self.recipe.prompt.max_prompt_tokens
        new, setting = self._new_tokens(part)
        if self.context is None:
            return wanted
        if new >= self.context:
            raise ConfigError(
                f"{new} new tokens leave no room for a prompt in the model's {self.context}",
                where=setting,
                fix=f"Lower it; {self.context // 2} would leave half of the context.",
            )
        return min(wanted, self.context - new)

    def _new_tokens(self, part: str) -> tuple[int, str]:
        """How many new tokens a completion for a part may have, and the setting that says so."""
        own = self.recipe.evaluation.max_new_tokens
        if part in MEASURED and own is not None:
            return own, "evaluation.max_new_tokens"
        return self.max_new_tokens, "sampling.max_new_tokens"

    def training_params(self, *, max_new_tokens: int | None = None) -> SamplingParams:
        """How GRPO draws its rollouts, or longer ones of up to `max_new_tokens`."""
        s, most = self.recipe.sampling, max_new_tokens or self.max_new_tokens
        return self._params(s, min_new_tokens=s.min_new_tokens, max_new_tokens=most)

    def evaluation_params(self) -> SamplingParams:
        """How every model of the run is measured."""
        new, _ = self._new_tokens("test")
        return self._params(self.recipe.evaluation, max_new_tokens=new)

    def _params(self, drawn: SamplingConfig | EvaluationConfig, **lengths: int) -> SamplingParams:
        s = self.recipe.sampling
        return SamplingParams(
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            top_k=drawn.top_k,
            min_p=drawn.min_p,
            stop=self.format.stop if s.stop is None else s.stop,
            include_stop=s.include_stop,
            **lengths,
        )

    def load(self, path: str) -> Policy:
        """Load a model folder as the policy; its version is the steps it has seen.

        Raises:
            ModelError: it cannot be had.
        """
        recipe, device = self.recipe, find_device(self.recipe.device)
        policy = load_policy(recipe.model, path, seed=recipe.seed, device=device)
        self.set_generation(policy)
        if is_complete(place := Path(path).expanduser()):
            policy.version = int(read_state(place)["policy_version"])
        return policy

    def set_generation(self, policy: Policy, **settings: Any) -> None:
        """What is saved beside the weights: other programs, too, stop where SFT ends completions.

        Nothing else is kept of what the model came with; transformers refuses to save some of it,
        such as a `temperature` without `do_sample`.
        """
        held: Any = policy.model.generation_config
        policy.model.generation_config = GenerationConfig(
            bos_token_id=held.bos_token_id,
            pad_token_id=held.pad_token_id,
            eos_token_id=list(self.stop_tokens),
            **settings,
        )

    @cached_property
    def model(self) -> Policy:
        """The model before training, loaded when it is first looked at; `release` lets it go."""
        return self.load(self.model_path)

    @cached_property
    def samplers(self) -> Samplers:
        """Makes the samplers that the recipe names."""
        return Samplers(
            recipe=self.recipe,
            tokenizer=self.tokenizer,
            stop_token_ids=self.stop_tokens,
            longest=max(self.max_new_tokens, self.recipe.evaluation.max_new_tokens or 1),
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
        items: Items,
        card: dict[str, Any] | None = None,
        **others: Any,
    ) -> EvaluationResult:
        """Measure the model of a sampler.

        Args:
            sampler: draws the completions.
            items: some of the problems, with their prompts.
            card: more to record.
            others: as in `evaluate`.
        """
        recipe = self.recipe
        known = {"recipe_hash": recipe_hash(recipe), "prompt": self.format.name}
        return evaluate(
            items=items,
            sampler=sampler,
            grader=self.grader,
            params=self.evaluation_params(),
            samples=recipe.evaluation.samples,
            seed=recipe.seed,
            card={**known, **(card or {})},
            fmt=self.format,
            rewards=self.rewards if recipe.evaluation.rewards else None,
            **others,
        )

    def reward(self, text: str, number: int = 0) -> Reward:
        """What a completion of a training problem is paid.

        Args:
            text: the completion, without what the prompt has already opened.
            number: of the problem in `train`.
        """
        problem, prompt = self.train[number]
        ids = self.tokenizer.encode(text, add_special_tokens=False) or [self.stop_tokens[0]]
        grade = self.grader.submit(text, problem.answer).result()
        group = Group(problem, prompt, [Completion.bare(ids, text)], [grade])
        return self.rewards.score(group)[0]

    def release(self) -> None:
        """Let the model go, so that its memory is there for the run."""
        self.__dict__.pop("model", None)
        gc.collect()

    def close(self) -> None:
        """End what was started: model, grader, and the folder of a new model."""
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
        """Let completions have what the longest training prompt leaves of `total` tokens.

        Raises:
            ConfigError: it leaves nothing.
        """
        longest = max((len(prompt.token_ids) for _, prompt in items), default=0)
        new = total - longest
        if new < max(1, self.recipe.sampling.min_new_tokens):
            raise ConfigError(
                f"prompts of up to {longest} tokens leave {max(new, 0)} of {total} for a "
                "completion",
                where="sampling.max_total_tokens",
                fix="Raise it, or lower prompt.max_percentile or prompt.max_prompt_tokens.",
            )
        self.max_new_tokens = new
        self.budget_note = (
            f"Completions have up to {new} tokens: {total} in all, less {longest} of the longest "
            f"of {len(items):,} prompts."
        )

    def _prompts(self, part: ProblemSet | None, name: str) -> Items:
        """The problems of a part that fit, with their prompts."""
        if part is None:
            return ()
        limit, settings = self.prompt_limit(name), self.recipe.prompt
        fix = "Raise prompt.max_prompt_tokens."
        if limit < settings.max_prompt_tokens:
            _, setting = self._new_tokens(name)
            fix = (
                f"Lower {setting}: of the model's {self.context} tokens it leaves prompts {limit}."
            )
        rendered = prepare_prompts(
            part.problems,
            self.format,
            self.tokenizer,
            max_prompt_tokens=limit,
            max_percentile=settings.max_percentile if name == "train" else None,
            fix=fix,
        )
        return self._checked(rendered, name)

    def _demonstrations(self, part: ProblemSet, name: str) -> tuple[Demonstration, ...]:
        """The worked solutions of a part that fit after every prompt that is kept."""
        context, limit = self.context, self.prompt_limit()
        rendered = prepare_demonstrations(
            part.problems,
            self.format,
            self.tokenizer,
            self.stop_tokens[0],
            max_prompt_tokens=limit,
            max_completion_tokens=None if context is None else max(1, context - limit),
            max_tokens=self.recipe.sft.max_tokens if name == "sft" else None,
        )
        kept = self._checked(rendered, name, "the solution of ")
        if name == "sft" and not self._quiet:
            self._warn_of_contradictions([problem for problem, _ in kept])
        return tuple(shown for _, shown in kept)

    def _warn_of_contradictions(self, problems: Sequence[Problem]) -> None:
        """Name the worked solutions that will teach another answer than their reference."""
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
        self, rendered: PreparedItems[Item], name: str, what: str = ""
    ) -> tuple[tuple[Problem, Item], ...]:
        """What is kept of a part; a few words on the rest, all of which is in training.log.

        Raises:
            ModelError: the model's embedding has no row for a token. A tokenizer may know more
                tokens than the model, as long as nobody writes them.
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
                    f"the tokenizer writes {what}{problem.id} with token {highest} "
                    f"({self.tokenizer.convert_ids_to_tokens(highest)!r}), and the model knows "
                    f"{self.vocabulary} tokens",
                    where="the tokenizer",
                    fix="Use the tokenizer that was saved with the model, or resize the model's "
                    "embedding (`resize_token_embeddings`) and save both.",
                )
        return rendered.items


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
