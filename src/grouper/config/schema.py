"""The recipe: one typed, strict description of a whole run.

Every field says its unit and default here and nowhere else; `grouper recipes fields` prints
them. Values that contradict each other within a section are refused here; checks that need the
tables of data sources, formats or rewards are in `advice/recipe_checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grouper.config.checks import validate_json
from grouper.config.data import DataConfig, PromptConfig, SourceConfig, TagsConfig
from grouper.config.phases import (
    DifficultyConfig,
    GRPOConfig,
    OptimizerConfig,
    PhaseConfig,
    SFTConfig,
)
from grouper.config.rewards import RewardConfig
from grouper.config.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)
from grouper.config.tracking import TrackerConfig, TrackingConfig

__all__ = [
    "AlarmsConfig",
    "DataConfig",
    "DifficultyConfig",
    "EvaluationConfig",
    "GRPOConfig",
    "GradingConfig",
    "LoraConfig",
    "ModelConfig",
    "NewModelConfig",
    "OptimizerConfig",
    "PhaseConfig",
    "PromptConfig",
    "Recipe",
    "RewardConfig",
    "SFTConfig",
    "SamplingConfig",
    "SourceConfig",
    "TagsConfig",
    "TrackerConfig",
    "TrackingConfig",
]


class LoraConfig(Section):
    """Low-rank adapters through PEFT; only they are trained and saved."""

    rank: Positive = 32
    alpha: PositiveFloat = 64.0
    dropout: Fraction = Field(0.0, description="used in SFT only; GRPO always scores without")
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class NewModelConfig(Section):
    """A small random model, and a tokenizer fitted to the recipe's own data."""

    architecture: Literal["qwen3", "llama"] = "qwen3"
    hidden_size: Positive = 128
    layers: Positive = 2
    heads: Positive = 4
    kv_heads: Positive = 2
    head_dim: Positive = 32
    intermediate_size: Positive = 384
    vocab_size: Positive = Field(512, description="upper limit of the fitted tokenizer")
    max_position_embeddings: Positive = 2048
    tie_embeddings: bool = True
    initializer_range: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _heads_divide(self) -> NewModelConfig:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary embeddings")
        return self


class ModelConfig(Section):
    """Which model is trained: a folder or Hub name, or a new random one."""

    path: str | None = Field(None, description="local folder first, else a Hub name")
    revision: str | None = Field(None, description="Hub revision; leave out for local folders")
    new: NewModelConfig | None = None
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the trainable weights and the optimizer state"
    )
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="dtype of matrix products (autocast); left out: as dtype"
    )
    attention: Literal["native", "sdpa", "eager", "flash_attention_2"] = Field(
        "native", description="native runs each prompt once; the others pad rows"
    )
    gradient_checkpointing: bool = Field(
        False, description="run each layer again in the backward: a third slower, far less memory"
    )
    activation_offload: bool = Field(
        False, description="keep what the backward needs in host memory; only on a GPU"
    )
    quantization: Literal["4bit"] | None = Field(
        None, description="4bit: frozen base weights in NF4 (QLoRA); needs lora and bitsandbytes"
    )
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _one_model(self) -> ModelConfig:
        if (self.path is None) == (self.new is None):
            raise ValueError("give exactly one of model.path and model.new")
        if self.dtype == "bfloat16" and self.compute_dtype == "float32":
            raise ValueError("bfloat16 weights cannot be multiplied in float32; use dtype: float32")
        if self.quantization is not None and self.lora is None:
            raise ValueError("quantised weights cannot be trained: give model.lora as well")
        return self


_MAX_NEW_TOKENS = 512


class SamplingConfig(Section):
    """How GRPO draws its rollouts; evaluation has its own settings."""

    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_new_tokens: NonNegative = 0
    max_new_tokens: Positive = _MAX_NEW_TOKENS
    max_total_tokens: Positive | None = Field(
        None,
        description="prompt and completion together; max_new_tokens then follows from the "
        "longest prompt of data.train that is kept",
    )
    stop: tuple[str, ...] | None = Field(None, description="left out: the format's own")
    include_stop: bool = True
    allow_truncated: bool = Field(
        False, description="train although top_p, top_k or min_p make the gradient biased"
    )
    max_slots: Positive = Field(256, description="sequences decoded at the same time")
    dtype: Literal["auto", "same", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of a copy of the weights to sample from, LoRA merged into it; same: "
        "no copy, LoRA beside the weights; auto: same, but a copy with LoRA on the CPU (faster)",
    )

    @model_validator(mode="after")
    def _in_range(self) -> SamplingConfig:
        if self.max_total_tokens is not None and self.max_new_tokens != _MAX_NEW_TOKENS:
            raise ValueError(
                "max_new_tokens follows from max_total_tokens: give only one of them "
                f"(max_new_tokens: {_MAX_NEW_TOKENS}, its default, counts as left out)"
            )
        if self.min_new_tokens > (self.max_total_tokens or self.max_new_tokens):
            raise ValueError("min_new_tokens is larger than max_new_tokens")
        if (self.top_p < 1 or self.top_k or self.min_p) and not self.allow_truncated:
            raise ValueError(
                "top_p, top_k or min_p cut the distribution that GRPO's gradient assumes; set "
                "sampling.allow_truncated: true to train with that bias, or leave them off"
            )
        return self


class GradingConfig(Section):
    """How answers are compared."""

    timeout_seconds: PositiveFloat = 2.0
    workers: Positive = 1
    memory_mb: Positive = 2048
    symbolic: bool = Field(True, description="the Math-Verify rung; false: numbers and text only")


class EvaluationConfig(Section):
    """How accuracy is measured; the same for base, SFT and GRPO."""

    samples: Positive = Field(1, description="completions per problem (k of pass@k)")
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_new_tokens: Positive | None = Field(None, description="left out: as in sampling")
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    base: bool = Field(True, description="also measure the model before training")
    rewards: bool = Field(
        True, description="also format, reasoning and `rewards` of each completion"
    )

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("evaluation.samples > 1 needs a temperature above 0")
        return self


class AlarmsConfig(Section):
    """When GRPO says that it goes wrong. Each looks at the mean over the last `window` steps."""

    on_alarm: Literal["warn", "stop"] = Field(
        "warn", description="stop: end the run; what was saved before stays"
    )
    window: Annotated[int, Field(ge=2)] = Field(10, description="steps")
    entropy_low: Fraction = Field(0.1, description="share of the entropy in the first window")
    entropy_high: Annotated[float, Field(gt=1)] = Field(
        3.0, description="times the entropy in the first window"
    )
    length_growth: Annotated[float, Field(gt=1)] = Field(
        2.0, description="times the median length before"
    )
    repetition: Fraction = Field(0.5, description="share of 4-grams that were there before")
    unique: Fraction = Field(
        0.05, description="lowest difference within groups: 0 all the same, 1 no two the same"
    )
    kl_rise: PositiveFloat = Field(0.1, description="nats per token within the window")
    truncated: Fraction = Field(0.5, description="share of the completions")
    saturated: Fraction = Field(0.9, description="share of the groups that are all right")


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    reading: str = Field("", description="printed at the end: what the result is and is not")
    seed: NonNegative = 0
    output_dir: str = "outputs"
    save_path: str | None = Field(
        None, description="a folder for what was trained, the adapter alone where there is one"
    )
    threads: Positive | None = Field(None, description="CPU threads; left out: PyTorch's choice")
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="several processes: fsdp splits the weights over them, ddp copies them"
    )
    watchdog_minutes: NonNegativeFloat = Field(
        30.0, description="nothing moved for so long: show where every thread stands; 0: never"
    )
    skip_sft: bool = False
    skip_grpo: bool = False
    model: ModelConfig
    data: DataConfig
    prompt: PromptConfig = PromptConfig()
    sft: SFTConfig = SFTConfig()
    grpo: GRPOConfig = GRPOConfig()
    sampling: SamplingConfig = SamplingConfig()
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="correctness"),)
    grading: GradingConfig = GradingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    hooks: tuple[str, ...] = Field(
        (), description="your own `path/to/file.py:function`, called after each step"
    )

    def override(self, *settings: str, **sections: Any) -> Recipe:
        """This recipe with other settings; everything is checked again, and `self` stays as it is.

        Args:
            *settings: `section.key=value`, as on the command line; later ones win.
            **sections: whole keys, sections merged with what they hold already.

        Raises:
            ConfigError: every wrong or unknown setting at once.

        Example: `recipe.override("grpo.steps=20", name="short", model={"lora": {"rank": 8}})`.
        """
        from grouper.config.overrides import changed

        data = self.model_dump(mode="json", exclude_unset=True)
        text = changed(data, settings, sections, where=f"recipe {self.name}")
        return validate_json(Recipe, text, where=f"recipe {self.name}")

    @model_validator(mode="after")
    def _rewards_are_named_once(self) -> Recipe:
        names = [reward.name for reward in self.rewards]
        if not names:
            raise ValueError("rewards is empty: GRPO needs at least one")
        for name in set(names):
            if names.count(name) > 1:
                raise ValueError(f"reward {name!r} is listed twice; use its weight instead")
        return self
