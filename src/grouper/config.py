"""The recipe: one typed, strict description of a whole run.

Every field says its unit and default here and nowhere else; `grouper recipes fields` prints
them. Values that contradict each other within a section are refused here; checks that need the
tables of data sources, formats or rewards are in `recipe.py`, which also reads the YAML.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "DataConfig",
    "EvaluationConfig",
    "GRPOConfig",
    "GradingConfig",
    "LoraConfig",
    "ModelConfig",
    "NewModelConfig",
    "OptimizerConfig",
    "PromptConfig",
    "Recipe",
    "RewardConfig",
    "SFTConfig",
    "SamplingConfig",
    "SourceConfig",
    "TagsConfig",
    "TrackingConfig",
]

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]

AdvantageName = Literal["standardised", "centred", "leave_one_out"]
WeightingName = Literal["token_mean", "sequence_mean", "constant"]
SurrogateName = Literal["clipped"]
ScheduleName = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "muon"]


class Section(BaseModel):
    """Base of every section: unknown keys are errors and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


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
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _one_model(self) -> ModelConfig:
        if (self.path is None) == (self.new is None):
            raise ValueError("give exactly one of model.path and model.new")
        if self.dtype == "bfloat16" and self.compute_dtype == "float32":
            raise ValueError("bfloat16 weights cannot be multiplied in float32; use dtype: float32")
        return self


class SourceConfig(Section):
    """One set of problems."""

    source: str = Field(description="a name from `grouper recipes sources`, for example gsm8k")
    path: str | None = Field(None, description="a local file or folder; left out: the Hub")
    split: str | None = Field(None, description="train, test, ...; left out: the source's own")
    subset: str | None = Field(None, description="the Hub configuration name")
    columns: dict[str, str] = Field(
        default_factory=dict, description="our field -> the file's column (question, answer, ...)"
    )
    offset: NonNegative = Field(0, description="leave out this many problems at the start")
    limit: Positive | None = Field(None, description="use at most this many problems")
    options: dict[str, Any] = Field(default_factory=dict, description="the source's own settings")


class DataConfig(Section):
    """What each part of the run reads. `validation` chooses settings, `test` is used once."""

    sft: SourceConfig | None = Field(None, description="worked solutions; left out: data.train")
    train: SourceConfig
    validation: SourceConfig | None = None
    test: SourceConfig | None = None


class TagsConfig(Section):
    """The tags of the `tags` format."""

    reasoning_open: str = "<start_working_out>"
    reasoning_close: str = "<end_working_out>"
    answer_open: str = "<SOLUTION>"
    answer_close: str = "</SOLUTION>"


class PromptConfig(Section):
    """How a problem becomes tokens, and where the answer will stand."""

    format: str = Field("xml", description="a name from `grouper recipes formats`")
    system: str | None = Field(None, description="replaces the format's instruction; '' is none")
    system_file: str | None = Field(None, description="a text file holding the instruction")
    tags: TagsConfig | None = Field(None, description="only for format: tags")
    template: Literal["auto", "chat", "plain"] = Field(
        "auto", description="auto: the tokenizer's chat template where it has one"
    )
    max_prompt_tokens: Positive = Field(512, description="longer prompts are dropped and listed")

    @model_validator(mode="after")
    def _one_system(self) -> PromptConfig:
        if self.system is not None and self.system_file is not None:
            raise ValueError("give only one of prompt.system and prompt.system_file")
        return self


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule of one phase."""

    name: OptimizerName = "adamw"
    learning_rate: PositiveFloat = 1e-6
    muon_learning_rate: PositiveFloat = Field(
        0.02, description="only for muon: rate of the 2-D layer weights, AdamW takes the rest"
    )
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: PositiveFloat | None = 1.0
    schedule: ScheduleName = "constant"
    warmup_ratio: Fraction = Field(0.0, description="share of the steps")
    final_ratio: Fraction = Field(0.0, description="last learning rate / highest one")


class PhaseConfig(Section):
    """What SFT and GRPO have in common."""

    steps: Positive | None = Field(None, description="optimizer steps; left out: by epochs")
    epochs: PositiveFloat = Field(1.0, description="passes over the data, where steps is not set")
    tokens_per_micro_batch: Positive = Field(
        8192, description="tokens in one forward and backward; never changes the gradient"
    )
    weighting: WeightingName = "token_mean"
    weighting_constant: PositiveFloat | None = Field(
        None, description="only for weighting: constant; what each sequence's sum is divided by"
    )
    evaluate_every: NonNegative = Field(0, description="steps; 0: only at the end")
    checkpoint_every: NonNegative = Field(0, description="steps; 0: only at the end")
    keep_checkpoints: Positive = 2

    @model_validator(mode="after")
    def _constant_has_a_value(self) -> PhaseConfig:
        if (self.weighting == "constant") != (self.weighting_constant is not None):
            raise ValueError("weighting: constant and weighting_constant belong together")
        return self


class SFTConfig(PhaseConfig):
    """Supervised fine-tuning: teaches the answer format."""

    batch_size: Positive = Field(32, description="demonstrations per optimizer step")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)


class GRPOConfig(PhaseConfig):
    """Group relative policy optimisation: raises what checks out."""

    start_from: str | None = Field(None, description="a model folder or adapter to start from")
    prompts_per_step: Positive = 16
    group_size: Annotated[int, Field(ge=2)] = Field(
        8, description="samples per prompt; a group baseline needs two"
    )
    advantage: AdvantageName = "standardised"
    surrogate: SurrogateName = "clipped"
    clip_low: Fraction = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    beta: Annotated[float, Field(ge=0)] = Field(0.0, description="weight of the k3 KL term")
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


class SamplingConfig(Section):
    """How GRPO draws its rollouts; evaluation has its own settings."""

    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_new_tokens: NonNegative = 0
    max_new_tokens: Positive = 512
    stop: tuple[str, ...] | None = Field(None, description="left out: the format's own")
    include_stop: bool = True
    allow_truncated: bool = Field(
        False, description="train although top_p, top_k or min_p make the gradient biased"
    )
    max_slots: Positive = Field(256, description="sequences decoded at the same time")
    dtype: Literal["same", "float32", "bfloat16"] = Field(
        "same", description="dtype of the sampling weights; same: the training weights themselves"
    )

    @model_validator(mode="after")
    def _in_range(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError("min_new_tokens is larger than max_new_tokens")
        if (self.top_p < 1 or self.top_k or self.min_p) and not self.allow_truncated:
            raise ValueError(
                "top_p, top_k or min_p cut the distribution that GRPO's gradient assumes; set "
                "sampling.allow_truncated: true to train with that bias, or leave them off"
            )
        return self


class RewardConfig(Section):
    """One component of the reward."""

    name: str = Field(
        description="a built-in name, `path/to/file.py:function`, or `stack:name` for several"
    )
    weight: float = 1.0
    params: dict[str, Any] = Field(default_factory=dict)
    max_failure_rate: Fraction = Field(
        0.1, description="share of the recent groups it may fail on before the run stops"
    )
    timeout_seconds: PositiveFloat = Field(
        120.0, description="a group's time: an async function is stopped, another warned of"
    )


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

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("evaluation.samples > 1 needs a temperature above 0")
        return self


class TrackingConfig(Section):
    """What is written down beside the metrics."""

    token_ids: bool = Field(False, description="keep ids and log-probs of every rollout")
    show_every: Positive = Field(1, description="steps between lines in training.log")


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    reading: str = Field("", description="printed at the end: what the result is and is not")
    seed: NonNegative = 0
    output_dir: str = "outputs"
    threads: Positive | None = Field(None, description="CPU threads; left out: PyTorch's choice")
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
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

    @model_validator(mode="after")
    def _rewards_are_named_once(self) -> Recipe:
        names = [reward.name for reward in self.rewards]
        if not names:
            raise ValueError("rewards is empty: GRPO needs at least one")
        for name in set(names):
            if names.count(name) > 1:
                raise ValueError(f"reward {name!r} is listed twice; use its weight instead")
        return self
