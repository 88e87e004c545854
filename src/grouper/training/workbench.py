"""A workbench: model files, prompts, sampler and grader of one recipe, without a run folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from grouper.config.schema import Recipe
from grouper.errors import ConfigError, ModelError
from grouper.grading import Grader, require_symbolic
from grouper.models.device import find_device
from grouper.models.folders import require_model_folder
from grouper.models.loading import (
    context_length,
    context_length_of,
    load_policy,
    load_tokenizer,
    stop_ids_of,
    vocabulary_of,
)
from grouper.models.policy import Policy
from grouper.prompts import Dropped, find_stop_tokens, make_format, prepare_prompts
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights, copy_dtype
from grouper.training.checkpoint import is_complete, read_state
from grouper.training.problem_sets import load_part
from grouper.types import Problem, Prompt, SamplingParams

__all__ = ["Items", "Workbench", "tell_dropped"]

log = logging.getLogger(__name__)

Items = tuple[tuple[Problem, Prompt], ...]
"""Problems with their prompts."""


class Workbench:
    """Everything that sampling and measuring a model of a recipe needs.

    Args:
        recipe: how prompts are written, sampled and graded.
        model_path: whose tokenizer is used.

    Raises:
        GrouperError: the device, tokenizer, format or grader cannot be had.
    """

    def __init__(self, recipe: Recipe, model_path: str) -> None:
        self.recipe = recipe
        self.device = find_device(recipe.device)
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        require_symbolic(recipe.grading)
        self.format = make_format(recipe.prompt)
        revision = recipe.model.revision if model_path == recipe.model.path else None
        self.tokenizer = load_tokenizer(model_path, revision=revision)
        self.format.install(self.tokenizer)
        if self.format.falls_back(self.tokenizer):
            log.warning(
                "The tokenizer of %s has no chat template: prompts are plain text. "
                "prompt.template=install gives it one, prompt.template=plain is plain without "
                "this warning.",
                model_path,
            )
        self.stop_tokens = find_stop_tokens(
            self.tokenizer, stop_ids_of(model_path, revision), self.format
        )
        self.context = context_length_of(model_path, revision)
        self._vocabulary = vocabulary_of(model_path, revision)
        self.grader = Grader(self.format.contract, recipe.grading)
        self._sampler: tuple[Policy, NativeSampler] | None = None
        sampling = recipe.sampling
        self._budget = sampling.max_new_tokens if sampling.max_total_tokens is None else None
        """Tokens of a completion; None until the training prompts have been counted."""
        self._split = False
        """Whether the policy's weights will be split over processes."""

    def load(self, path: str) -> Policy:
        """Load a model folder as the policy; its version is the steps it has seen."""
        require_model_folder(path)
        policy = load_policy(self.recipe.model, path, seed=self.recipe.seed, device=self.device)
        if is_complete(Path(path)):
            policy.version = int(read_state(Path(path))["policy_version"])
        return policy

    def sampler(self, policy: Policy) -> NativeSampler:
        """The native sampler over a policy's weights: one for each policy, and one copy at most."""
        if self._sampler is None or self._sampler[0] is not policy:
            self._sampler = (policy, self._make_sampler(policy))
        return self._sampler[1]

    def forget_sampler(self) -> None:
        """Let the sampler go, and with it its policy and its copy of the weights."""
        self._sampler = None

    def _make_sampler(self, policy: Policy) -> NativeSampler:
        dtype = copy_dtype(
            self.recipe.sampling,
            self.recipe.model,
            policy.device.type,
            lora=policy.adapter is not None,
        )
        return NativeSampler(
            SamplingWeights(policy, dtype, copy_now=self._split),
            self.tokenizer,
            stop_token_ids=self.stop_tokens.all,
            max_slots=self.recipe.sampling.max_slots,
            max_length=context_length(policy),
        )

    @property
    def max_new_tokens(self) -> int:
        """The completion budget: of the recipe, or what `max_total_tokens` leaves of it."""
        if self._budget is None:
            train = load_part(self.recipe, "train")
            assert train is not None, "every recipe has training problems"
            self.settle_budget(self.render(train.problems, "train"))
        assert self._budget is not None
        return self._budget

    def settle_budget(self, train: Items) -> str | None:
        """With `sampling.max_total_tokens`, let completions have what the longest training prompt
        leaves of it, once; returns a line that says so.

        Raises:
            ConfigError: it leaves nothing.
        """
        if self._budget is not None or not train:
            return None
        sampling = self.recipe.sampling
        assert sampling.max_total_tokens is not None
        total = min(sampling.max_total_tokens, self.context or sampling.max_total_tokens)
        longest = max(len(prompt.token_ids) for _, prompt in train)
        new = total - longest
        if new < max(1, sampling.min_new_tokens):
            raise ConfigError(
                f"prompts of up to {longest} tokens leave {max(new, 0)} of {total} for a "
                "completion",
                where="sampling.max_total_tokens",
                fix="Raise it, or lower prompt.max_percentile or prompt.max_prompt_tokens.",
            )
        self._budget = new
        return (
            f"Completions have up to {new} tokens: {total} in all, less {longest} of the longest "
            f"of {len(train):,} prompts."
        )

    @property
    def prompt_limit(self) -> int:
        """The longest prompt that leaves room for a completion, in tokens.

        Raises:
            ConfigError: the model's context has no room for `sampling.max_new_tokens`.
        """
        wanted = self.recipe.prompt.max_prompt_tokens
        # How many new tokens there will be may follow from the prompts.
        new = 1 if self._budget is None else self._budget
        if self.context is None:
            return wanted
        if new >= self.context:
            raise ConfigError(
                f"{new} new tokens leave no room for a prompt in the model's {self.context}",
                where="sampling.max_new_tokens",
                fix=f"Lower it; {self.context // 2} would leave half of the context.",
            )
        return min(wanted, self.context - new)

    def render(self, problems: Sequence[Problem], name: str) -> Items:
        """Problems with their prompts; what does not fit is listed and left out."""
        if name != "train" and self._budget is None:
            # What fits depends on the completion budget, and that on the training prompts.
            log.debug("Completions have up to %d tokens.", self.max_new_tokens)
        prepared = prepare_prompts(
            problems,
            self.format,
            self.tokenizer,
            max_prompt_tokens=self.prompt_limit,
            max_percentile=self.recipe.prompt.max_percentile if name == "train" else None,
        )
        tell_dropped(name, prepared.dropped)
        for problem, prompt in prepared.items:
            self.require_known(prompt.token_ids, problem.id)
        return prepared.items

    def require_known(self, token_ids: Sequence[int], what: str) -> None:
        """Refuse tokens that the model's embedding has no row for.

        A tokenizer may know more tokens than the model, as long as nobody writes them.

        Raises:
            ModelError: there are some.
        """
        highest = max(token_ids)
        if highest >= self._vocabulary:
            raise ModelError(
                f"the tokenizer writes {what} with token {highest} "
                f"({self.tokenizer.convert_ids_to_tokens(highest)!r}), and the model knows "
                f"{self._vocabulary} tokens",
                where="the tokenizer",
                fix="Use the tokenizer that was saved with the model, or resize the model's "
                "embedding (`resize_token_embeddings`) and save both.",
            )

    def training_params(self, *, max_new_tokens: int | None = None) -> SamplingParams:
        """How GRPO draws its rollouts."""
        budget, s = max_new_tokens or self.max_new_tokens, self.recipe.sampling
        return SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            min_new_tokens=s.min_new_tokens,
            max_new_tokens=budget,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.grader.close()


def tell_dropped(part: str, dropped: Sequence[Dropped]) -> None:
    """List what is left out: a few on the console, all of them in training.log."""
    if not dropped:
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
