"""The training sections of a recipe: optimizer, SFT, GRPO and the parts GRPO is made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from grouper.config.presets import PRESETS
from grouper.config.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)

AlgorithmName = Literal[
    "grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "reinforce++"
]
AdvantageName = Literal["standardised", "centred", "leave_one_out", "raw", "batch_standardised"]
WeightingName = Literal["token_mean", "sequence_mean", "constant"]
SurrogateName = Literal["clipped", "cispo", "policy_gradient"]
RatioName = Literal["token", "sequence"]
KLName = Literal["k1", "k2", "k3"]
ImportanceName = Literal["none", "truncate", "mask"]
ScheduleName = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]

_NO_GROUP_BASELINE = ("raw", "batch_standardised")


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule of one phase."""

    name: OptimizerName = "adamw"
    learning_rate: PositiveFloat = 1e-6
    muon_learning_rate: PositiveFloat = Field(
        0.02, description="only for muon: rate of the 2-D layer weights, AdamW takes the rest"
    )
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat | None = 1.0
    schedule: ScheduleName = "constant"
    warmup_ratio: Fraction = Field(0.0, description="share of the steps")
    warmup_steps: NonNegative | None = Field(None, description="steps, in place of warmup_ratio")
    final_ratio: Fraction = Field(
        0.0, description="learning rate that the decay ends at / highest one"
    )

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimizerConfig:
        if self.warmup_steps is not None and self.warmup_ratio:
            raise ValueError("give only one of warmup_steps and warmup_ratio")
        return self


class PhaseConfig(Section):
    """What SFT and GRPO have in common."""

    steps: Positive | None = Field(
        None, description="optimizer steps (GRPO: rollout batches); left out: by epochs"
    )
    epochs: PositiveFloat = Field(
        1.0,
        description="passes over the data, where steps is not set (GRPO: at prompts_per_step; "
        "resampling and a difficulty band meet problems faster)",
    )
    tokens_per_micro_batch: Positive = Field(
        8192, description="tokens in one forward and backward; never changes the gradient"
    )
    rehearse: Literal["auto"] | bool = Field(
        "auto", description="try the largest slice before the first step; auto: on a GPU only"
    )
    weighting: WeightingName = "token_mean"
    weighting_constant: PositiveFloat | None = Field(
        None,
        description="only for weighting: constant; what each sequence's sum is divided by "
        "(GRPO, left out: sampling.max_new_tokens)",
    )
    evaluate_every: NonNegative | Literal["epoch"] = Field(
        0, description="steps between looks at data.validation, or epoch; 0: never"
    )
    stop_at_accuracy: Fraction | None = Field(
        None, description="end the phase once validation accuracy has reached this"
    )
    checkpoint_every: NonNegative = Field(0, description="steps; 0: by time only")
    checkpoint_minutes: NonNegativeFloat = Field(
        10.0, description="also save this long after the last checkpoint; 0: by steps only"
    )
    keep_checkpoints: Positive = Field(2, description="the newest ones, to go on from")
    max_skipped_updates: Positive = Field(
        3, description="updates in a row that are not finite and skipped before the run stops"
    )
    keep_best: bool = Field(
        True, description="also keep the weights with the best accuracy in data.validation"
    )

    @model_validator(mode="after")
    def _constant_has_a_use(self) -> PhaseConfig:
        if self.weighting != "constant" and self.weighting_constant is not None:
            raise ValueError("weighting_constant is only for weighting: constant")
        return self

    @model_validator(mode="after")
    def _target_is_measured(self) -> PhaseConfig:
        if self.stop_at_accuracy is not None and self.evaluate_every == 0:
            raise ValueError("stop_at_accuracy is looked at every evaluate_every steps: set it")
        return self


class SFTConfig(PhaseConfig):
    """Supervised fine-tuning: teaches the answer format."""

    batch_size: Positive = Field(32, description="demonstrations per optimizer step")
    max_tokens: Positive | None = Field(
        None, description="longer demonstrations, prompt and stop token counted, are left out"
    )
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)

    @model_validator(mode="after")
    def _constant_has_a_value(self) -> SFTConfig:
        if self.weighting == "constant" and self.weighting_constant is None:
            raise ValueError("weighting: constant needs a weighting_constant")
        return self


class DifficultyConfig(Section):
    """Which problems are worth sampling, by how often they are solved."""

    low: Fraction = Field(0.05, description="problems solved less often are left out")
    high: Fraction = Field(0.95, description="problems solved more often are left out")
    file: str | None = Field(None, description="pass rates from `grouper data difficulty`")
    online: bool = Field(True, description="keep the pass rates up to date with the run's rollouts")
    recheck_epochs: NonNegative = Field(
        3, description="a problem left out is tried again after this many epochs; 0: never"
    )

    @model_validator(mode="after")
    def _is_a_band(self) -> DifficultyConfig:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        if self.file is None and not self.online:
            raise ValueError("without a file, pass rates are only known with online: true")
        return self


class GRPOConfig(PhaseConfig):
    """Group relative policy optimisation: raises what checks out."""

    algorithm: AlgorithmName | None = Field(
        None, description="a named choice of the parts below; what the recipe sets itself wins"
    )
    start_from: str | None = Field(None, description="a model folder or adapter to start from")
    prompts_per_step: Positive = 16
    group_size: Positive = Field(8, description="samples per prompt; a group baseline needs two")
    advantage: AdvantageName = "standardised"
    advantage_eps: PositiveFloat | None = Field(
        None, description="added to the standard deviation of the rewards; left out: 1e-4"
    )
    decouple_rewards: bool = Field(
        False, description="a baseline for each reward component, then their weighted sum (GDPO)"
    )
    ratio: RatioName = Field("token", description="sequence: one for all its tokens (GSPO)")
    surrogate: SurrogateName = "clipped"
    clip_low: Fraction = 0.2
    clip_high: NonNegativeFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="only clipped: bound on the ratio where the advantage is negative"
    )
    beta: NonNegativeFloat = Field(0.0, description="weight of the KL term")
    kl: KLName = Field("k3", description="estimator of the KL; k1 only in the reward")
    kl_in_reward: bool = Field(False, description="take the KL off the reward, not into the loss")
    entropy_bonus: NonNegativeFloat = Field(0.0, description="weight of the entropy in the loss")
    top_entropy: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="only this share of the tokens, the most uncertain ones, gets a gradient"
    )
    importance: ImportanceName = Field(
        "none", description="weights for sampler log-probs that differ from the trainer's"
    )
    importance_cap: Annotated[float, Field(ge=1)] = 2.0
    overlong: Literal["keep", "mask"] = Field(
        "keep", description="mask: cut-off completions give no gradient, but count in the baseline"
    )
    updates_per_batch: Positive = Field(
        1, description="optimizer steps that one pass over a rollout batch is cut into"
    )
    passes_per_batch: Positive = Field(1, description="passes over each rollout batch")
    max_resample_rounds: NonNegative = Field(
        0, description="times that groups all right or all wrong are replaced by other problems"
    )
    difficulty: DifficultyConfig | None = Field(
        None, description="leave out problems that are too easy or too hard"
    )
    shaping_needs_a_correct: bool = Field(
        True, description="a group without one correct answer gives no update"
    )
    shuffle_rewards: bool = Field(
        False, description="control experiment: rewards permuted over the step; must not learn"
    )
    preflight_prompts: NonNegative = Field(32, description="sampled before training; 0: none")
    allow_truncation: bool = Field(
        False, description="start although more than half of the preflight samples are cut off"
    )
    optimizer: OptimizerConfig = OptimizerConfig()

    @classmethod
    def of(cls, algorithm: str, **settings: Any) -> Self:
        """The parts of a named algorithm, with some of them changed.

        >>> GRPOConfig.of("dapo", clip_high=0.3).weighting
        'token_mean'
        """
        return cls(**{"algorithm": algorithm, **PRESETS[algorithm], **settings})

    @model_validator(mode="after")
    def _preset_is_filled_in(self) -> Self:
        # A recipe file is filled in by `loading.load_recipe`, before anything is validated.
        if self.algorithm and not PRESETS[self.algorithm].keys() <= self.model_fields_set:
            raise ValueError(f"use GRPOConfig.of({self.algorithm!r}, ...) to get its parts")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        problems = [text for broken, text in _misfits(self) if broken]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def several_updates(self) -> bool:
        """Whether a rollout batch is stepped on more than once."""
        return self.updates_per_batch * self.passes_per_batch > 1

    @property
    def flat_rows_matter(self) -> bool:
        """Whether a rollout with advantage 0 has a gradient anyway."""
        return (self.beta > 0 and not self.kl_in_reward) or self.entropy_bonus > 0


def _misfits(c: GRPOConfig) -> list[tuple[bool, str]]:
    """Combinations that cannot work, and the nearest ones that do."""
    return [
        (
            c.group_size == 1 and c.advantage not in _NO_GROUP_BASELINE,
            (
                f"group_size 1 leaves advantage: {c.advantage} nothing to compare with; use raw or "
                "batch_standardised, or a group_size of 2 or more"
            ),
        ),
        (
            c.prompts_per_step * c.group_size == 1 and c.advantage == "batch_standardised",
            "one completion a step leaves advantage: batch_standardised nothing to compare with",
        ),
        (
            c.beta > 0 and c.kl == "k1" and not c.kl_in_reward,
            "kl: k1 has a gradient of expectation 0 in a loss; use k2 or k3, or kl_in_reward: true",
        ),
        (
            c.advantage_eps is not None and not c.advantage.endswith("standardised"),
            f"advantage_eps goes with a standard deviation, and {c.advantage} divides by none",
        ),
        (c.kl_in_reward and c.beta == 0, "kl_in_reward needs a beta above 0"),
        (
            c.dual_clip is not None and c.surrogate != "clipped",
            f"dual_clip is a bound of surrogate: clipped, not of {c.surrogate}",
        ),
        (
            c.dual_clip is not None and c.dual_clip <= 1 + c.clip_high,
            "dual_clip must lie above 1 + clip_high",
        ),
        (
            c.ratio == "sequence" and c.surrogate == "policy_gradient",
            "surrogate: policy_gradient has no ratio; leave ratio at token",
        ),
        (
            c.updates_per_batch > c.prompts_per_step * c.group_size,
            (
                f"updates_per_batch ({c.updates_per_batch}) is more than the "
                f"{c.prompts_per_step * c.group_size} completions of a step"
            ),
        ),
        (
            c.max_resample_rounds > 0 and c.group_size == 1,
            "max_resample_rounds replaces groups without a difference, and a group of one has none",
        ),
        (
            c.kl_in_reward and c.decouple_rewards,
            "kl_in_reward changes the total and decouple_rewards its components; use one of them",
        ),
    ]
