"""The recipe: one typed, strict description of a whole run.

Every field says its unit and default here and nowhere else: `grouper recipes fields` prints the
text below each. Contradictions within a section are refused here; checks that need the tables of
data sources, formats or rewards are in `advice/recipe_checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from grouper.config.checks import validate_json
from grouper.config.credentials import places_of_secrets, refuse_literal_secrets
from grouper.config.overrides import PRESETS, changed, named_stack

# Upper limit of counts: the product of two of them fits into 64 bits.
MOST = 10**9
# Upper limit of a reward's value, its weight and their product: a float64 still tells totals
# 0.1 apart, and the square of a gradient is finite in float32.
LARGEST = 1e15
# Upper limit of all other measures: float32 holds it.
HUGE = 1e30

Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
# The range of PyTorch's seeds.
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0, le=HUGE)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=HUGE)]
# At most a day: clocks overflow somewhere beyond.
Seconds = Annotated[float, Field(gt=0, le=86400)]
# YAML and JSON write a tuple as a list; its entries are as strict as everything else.
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
Pair = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
Params = Annotated[dict[str, Any], AfterValidator(refuse_literal_secrets)]
_Server = Annotated[str, Field(pattern=r"^(auto|cuda:\d+|https?://\S+)$")]
Servers = Annotated[tuple[_Server, ...], Field(strict=False)]

# Marks settings that may differ between two runs of one experiment: texts, machine, phases.
ASIDE = "no part of the experiment"
# Marks settings that are newer than some runs: at its default it is no part of a recipe's hash, so
# that those runs are the same experiment as before, and can be resumed.
SINCE = "no part of the experiment at its default"


class Section(BaseModel, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True):
    """Base of every section: unknown keys are errors and nothing changes after loading."""

    def contradictions(self) -> Iterator[str]:
        """Yield settings of this section that cannot work together, with a way out."""
        yield from ()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        problems = list(self.contradictions())
        if problems:
            raise ValueError("; ".join(problems))
        return self


class LoraConfig(Section):
    """Low-rank adapters through PEFT; only they are trained and saved."""

    rank: Positive = 32
    alpha: PositiveFloat = 64.0
    dropout: Fraction = 0.0
    """used in SFT only; GRPO always scores without dropout"""
    target_modules: Literal["all-linear"] | Names = "all-linear"


class NewModelConfig(Section):
    """A small random Qwen3, and a tokenizer fitted to the recipe's own data."""

    hidden_size: Annotated[Positive, Field(multiple_of=8)] = 128
    """shared out among four heads; two of them have the same keys and values"""
    layers: Positive = 2
    intermediate_size: Positive = 384
    vocab_size: Annotated[Positive, Field(le=10**6)] = 512
    """upper limit of the fitted tokenizer"""


class ModelConfig(Section):
    """Which model is trained: a folder, GGUF file or Hub name, or a new random one."""

    path: str | None = None
    """local folder or GGUF file first, else a Hub name"""
    revision: str | None = None
    """Hub revision; omit for local folders"""
    new: NewModelConfig | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the trainable weights and the optimizer state"""
    compute_dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16"] = "auto"
    """dtype of matrix products (autocast); auto: bfloat16 on a CUDA device that has it, float16 on
    one that has not, else as dtype; fastest: bfloat16 on a CPU, too, that multiplies faster in it;
    float16 scales the loss"""
    attention: Literal["native", "sdpa", "eager", "flash_attention_2"] = "native"
    """native computes each prompt once per group; the others pad rows"""
    gradient_checkpointing: bool = False
    """recompute each layer in the backward pass: a third slower, much less memory"""
    activation_offload: bool = False
    """keep activations in host memory; only on a GPU"""
    quantization: Literal["4bit"] | None = None
    """4bit: frozen base weights in NF4 (QLoRA); needs lora and bitsandbytes"""
    lora: LoraConfig | None = None

    def revision_of(self, path: str) -> str | None:
        """Return the revision in which a model is read: `revision` is that of `path` alone."""
        return self.revision if path == self.path else None

    def contradictions(self) -> Iterator[str]:
        if (self.path is None) == (self.new is None):
            yield "give exactly one of model.path and model.new"
        if self.dtype == "bfloat16" and self.compute_dtype in ("float32", "float16"):
            yield (
                f"bfloat16 weights cannot be multiplied in {self.compute_dtype}; use dtype: float32"
            )
        if self.quantization is not None and self.lora is None:
            yield "quantized weights cannot be trained: give model.lora as well"


class RowsConfig(Section):
    """Where one set of problems lies, and which of its rows are used.

    In this order: `shuffle`, `offset` and `limit` choose rows; `numeric_only`, `only_correct` and
    `unique` choose among the problems that the rows gave.
    """

    source: str
    """a name from `grouper data list`, for example gsm8k"""
    path: str | None = None
    """a local file or folder; default: the Hub"""
    split: str | None = None
    """train, test, ...; default: the source's own"""
    subset: str | None = None
    """the Hub configuration name"""
    columns: dict[str, str] = {}
    """Grouper's field -> the file's column (question, answer, ...)"""
    streaming: bool = False
    """read row by row and stop at limit, for sets larger than memory"""
    shuffle: Seed | None = None
    """seed of a shuffle before offset and limit; default: in order"""
    offset: NonNegative = 0
    """leave out this many rows at the start"""
    limit: Positive | None = None
    """use at most this many rows"""
    numeric_only: bool = False
    """only problems whose answer is a plain decimal number"""
    only_correct: bool = False
    """only worked solutions whose own answer grades as correct; whole responses must also be in
    the prompt's format"""
    unique: Positive | Literal["all"] = "all"
    """use this many distinct ones; all: duplicates, too"""
    unique_by: Literal["row", "problem"] = "row"
    """problem: count questions, and keep every row of those that count"""
    options: dict[str, Any] = {}
    """the source's own settings"""

    def contradictions(self) -> Iterator[str]:
        if self.streaming and self.limit is None:
            yield "streaming keeps `limit` rows in memory and reads no further: set it"


class MixedConfig(RowsConfig):
    """One source of a mixture."""

    weight: PositiveFloat = 1.0
    """its share, relative to the others'"""


_OF_ONE_SOURCE = ("path", "split", "subset", "columns", "streaming", "options")


class SourceConfig(RowsConfig):
    """One set of problems, or several in proportion (`mixture`)."""

    source: str = "mixture"
    """a name from `grouper data list`; default: see mixture"""
    mixture: Annotated[tuple[MixedConfig, ...], Field(strict=False)] = ()
    """several sources by weight instead of one; no problem is used twice"""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        own_settings = [name for name in _OF_ONE_SOURCE if getattr(self, name)]
        if (self.source == "mixture") != bool(self.mixture):
            yield "give either one `source` or the list `mixture` of several"
        elif any(member.source == "mixture" for member in self.mixture):
            yield "a mixture holds sources, not mixtures: list them all at one level"
        elif self.mixture and own_settings:
            yield f"{', '.join(own_settings)}: set it on the sources in `mixture`"


class DataConfig(Section):
    """What each part of the run reads. `validation` chooses settings, `test` is used once."""

    sft: SourceConfig | None = None
    """worked solutions; default: data.train"""
    train: SourceConfig
    validation: SourceConfig | None = None
    validation_share: BelowOne = 0.0
    """instead of validation: this share of train, held out by run seed"""
    test: SourceConfig | None = None
    test_share: Annotated[BelowOne, SINCE] = 0.0
    """instead of test: this share of train, held out by the words of the questions, the same for
    every seed"""

    def contradictions(self) -> Iterator[str]:
        if self.validation is not None and self.validation_share:
            yield "give only one of data.validation and data.validation_share"
        if self.test is not None and self.test_share:
            yield "give only one of data.test and data.test_share"


class TagsConfig(Section):
    """The tags of the `tags` format."""

    reasoning_open: str = "<start_working_out>"
    reasoning_close: str = "<end_working_out>"
    answer_open: str = "<SOLUTION>"
    answer_close: str = "</SOLUTION>"


class PromptConfig(Section):
    """How a problem becomes tokens, and where the answer will stand."""

    format: str = "xml"
    """a name from `grouper recipes formats`"""
    system: str | None = None
    """replaces the format's instruction; '' is none"""
    tags: TagsConfig | None = None
    """only for format: tags"""
    template: Literal["auto", "chat", "plain", "install"] = "auto"
    """auto: the tokenizer's chat template where it has one; install: give it another, which holds
    the instruction, opens the format's first tag, and is saved along"""
    chat_template_kwargs: Annotated[Params, SINCE] = {}
    """variables of the model's own chat template, such as enable_thinking: false; its thinking
    block then stands in the prompt as the template writes it"""
    max_prompt_tokens: Positive = 512
    """longer prompts are dropped and listed"""
    max_percentile: Annotated[float, Field(gt=0, le=100)] | None = None
    """of data.train: prompts above this percentile of length are dropped"""


Algorithm = Literal[
    "grpo",
    "dr-grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce",
    "reinforce++",
    "maxrl",
    "pass-at-k",
    "raft",
    "sapo",
    "dppo",
    "distillation",
]
Advantage = Literal[
    "standardised",
    "mean",
    "leave_one_out",
    "none",
    "batch_standardised",
    "relative",
    "pass_at_k",
    "only_best",
    "zero",
]
Surrogate = Literal["ppo_clip", "cispo", "policy_gradient", "sapo", "dppo_tv", "dppo_kl"]
EngineName = Literal["native", "vllm"]


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule of one phase."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    learning_rate: PositiveFloat = 1e-6
    muon_learning_rate: PositiveFloat = 0.02
    """only for muon: rate of the 2-D layer weights, AdamW takes the rest"""
    betas: Pair = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """norms and biases are left out"""
    master_weights: Annotated[bool, SINCE] = False
    """only for model.dtype: bfloat16 without LoRA: keep the weights in float32 as well, so that
    small steps add up"""
    max_grad_norm: PositiveFloat | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_ratio: Fraction = 0.0
    """share of the steps"""
    warmup_steps: NonNegative | None = None
    """steps, in place of warmup_ratio"""
    final_ratio: Fraction = 0.0
    """learning rate that the decay ends at / highest one"""

    def contradictions(self) -> Iterator[str]:
        if self.warmup_steps is not None and self.warmup_ratio:
            yield "give only one of warmup_steps and warmup_ratio"


class PhaseConfig(Section):
    """Settings that SFT and GRPO have in common."""

    steps: Positive | None = None
    """optimizer steps (GRPO: rollout batches); default: by epochs"""
    epochs: PositiveFloat = 1.0
    """epochs, where steps is not set (GRPO: at prompts_per_step; resampling and a
    difficulty band use problems faster)"""
    tokens_per_micro_batch: Positive = 8192
    """tokens in one forward and backward; never changes the gradient"""
    weighting: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    weighting_constant: PositiveFloat | None = None
    """only for weighting: constant; what each sequence's sum is divided by (GRPO, default:
    sampling.max_new_tokens)"""
    evaluate_every: NonNegative | Literal["epoch"] = 0
    """steps between validations (on data.validation), or epoch; 0: never"""
    checkpoint_every: NonNegative = 0
    """steps; a checkpoint is also saved ten minutes after the last one; 0: by time only"""
    keep_checkpoints: Positive = 2
    """number of recent checkpoints to keep for resuming"""

    def contradictions(self) -> Iterator[str]:
        if self.weighting != "constant" and self.weighting_constant is not None:
            yield "weighting_constant is only for weighting: constant"


class TeacherConfig(Section):
    """Another model, whose next-token distributions the policy is pulled toward."""

    path: str
    """a model folder, adapter or Hub name with the tokenizer of `model.path`"""
    revision: str | None = None
    """of a model from the Hub"""
    sources: dict[str, Annotated[str, Field(min_length=1)]] = {}
    """data source -> the path of another teacher for its problems"""
    weight: PositiveFloat = 1.0
    """of the divergence in the loss"""
    kl: Literal["reverse", "forward", "sampled"] = "reverse"
    """which divergence; sampled: an estimate of reverse from the sampled token alone, which needs
    less memory"""
    top_k: NonNegative = 0
    """tell apart only this many tokens, the teacher's most likely; 0: the whole vocabulary"""
    prompt: Literal["same", "solution"] = "same"
    """solution: the worked solution of a problem stands in the teacher's prompt"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of its weights; auto: that of the policy's products"""
    quantization: Literal["4bit"] | None = None
    """its weights in 4 bits; needs bitsandbytes"""
    device: Annotated[str, Field(pattern=r"^(same|cpu|cuda(:\d+)?)$")] = "same"
    """same: that of the policy"""

    def contradictions(self) -> Iterator[str]:
        if self.top_k and self.kl == "sampled":
            yield "kl: sampled compares the sampled token alone: leave top_k out"


class SFTConfig(PhaseConfig):
    """Supervised fine-tuning: teaches the answer format."""

    batch_size: Positive = 32
    """demonstrations per optimizer step"""
    max_tokens: Positive | None = None
    """longer demonstrations, prompt and stop token counted, are left out"""
    teacher: Annotated[TeacherConfig | None, SINCE] = None
    """add the divergence from a teacher on the demonstrated tokens to the loss"""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.teacher is not None and self.teacher.kl == "sampled":
            yield "teacher.kl: sampled needs the model's own samples: use forward in SFT"
        if self.teacher is not None and self.teacher.prompt == "solution":
            yield "teacher.prompt: solution is for GRPO: demonstrations are solutions already"
        if self.teacher is not None and self.teacher.sources:
            yield "teacher.sources: SFT has one teacher; give its path alone"
        if self.weighting == "constant" and self.weighting_constant is None:
            yield "weighting: constant needs a weighting_constant"


class DifficultyConfig(Section):
    """Which problems are worth sampling, by how often they are solved in the run's rollouts."""

    band: Pair = (0.05, 0.95)
    """problems with a pass rate outside this range are skipped, and tried again after three
    epochs"""
    path: str | None = None
    """pass rates to begin with, from `grouper data difficulty`"""

    def contradictions(self) -> Iterator[str]:
        low, high = self.band
        if low >= high:
            yield f"the band's lower end ({low:g}) must be below its upper ({high:g})"


# Advantages that compare a rollout with nothing in its group.
WITHOUT_GROUP = ("none", "batch_standardised", "only_best", "zero")


class GRPOConfig(PhaseConfig):
    """Group relative policy optimization: raises what checks out."""

    algorithm: Algorithm | None = None
    """a preset of the settings below; explicit settings win"""
    start_from: str | None = None
    """a model folder or adapter to start from"""
    prompts_per_step: Positive = 16
    group_size: Positive = 8
    """samples per prompt; a group baseline needs two"""
    advantage: Advantage = "standardised"
    advantage_eps: PositiveFloat | None = None
    """added to the standard deviation of the rewards; default: 1e-4"""
    advantage_k: Annotated[Positive, SINCE] = 4
    """only pass_at_k: draws of which any may be right"""
    decouple_rewards: bool = False
    """a baseline for each reward component, then their weighted sum, scaled over the step (GDPO)"""
    ratio: Literal["token", "sequence"] = "token"
    """sequence: one for all its tokens (GSPO)"""
    surrogate: Surrogate = "ppo_clip"
    clip_low: Fraction = 0.2
    clip_high: NonNegativeFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1, le=HUGE)] | None = None
    """only ppo_clip: bound on the ratio where the advantage is negative"""
    gate_positive: Annotated[PositiveFloat, SINCE] = 1.0
    """only sapo: how steeply its gate closes where the advantage is positive"""
    gate_negative: Annotated[PositiveFloat, SINCE] = 1.05
    """only sapo: the same where the advantage is negative"""
    beta: NonNegativeFloat = 0.0
    """weight of the KL term"""
    kl: Literal["k1", "k2", "k3", "k3_weighted"] = "k3"
    """estimator of the KL; k1 is subtracted from the reward, the others are terms of the loss;
    k3_weighted: times the ratio, which makes it unbiased"""
    entropy_bonus: NonNegativeFloat = 0.0
    """weight of the entropy in the loss"""
    top_entropy: Share = 1.0
    """train only on this share of the tokens, those with the highest entropy"""
    importance: Literal["none", "truncate", "mask"] = "none"
    """weights for sampler log-probs that differ from the trainer's, bounded by 2"""
    max_staleness: Literal[0, 1] = 0
    """1: a vLLM server samples the rollouts of the next step while this one is trained, with
    weights that are one step old; the native sampler begins them in slots that become free, and
    ends them with the next step's weights"""
    overlong: Literal["keep", "mask"] = "keep"
    """mask: truncated completions give no gradient, but count in the baseline"""
    updates_per_batch: Positive = 1
    """optimizer steps per pass over a rollout batch"""
    num_iterations: Positive = 1
    """passes over each rollout batch"""
    dynamic_sampling_rounds: NonNegative = 0
    """rounds that replace groups which are all correct or all wrong by other problems; nothing
    waits for a round to end"""
    difficulty: DifficultyConfig | None = None
    """skip problems that are too easy or too hard"""
    require_correct_in_group: bool = True
    """groups without a correct answer are not trained on"""
    solution_weight: Annotated[NonNegativeFloat, SINCE] = 0.0
    """weight of the likelihood of worked solutions to the problems that no rollout has solved"""
    teacher: Annotated[TeacherConfig | None, SINCE] = None
    """on-policy distillation: add the divergence from a teacher on the sampled tokens to the
    loss"""
    shuffle_rewards: bool = False
    """control experiment: rewards permuted over the step; must not learn"""
    allow_truncation: Annotated[bool, ASIDE] = False
    """start even if most samples would be truncated, and skip the check of 16 samples"""
    optimizer: OptimizerConfig = OptimizerConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, data: Any) -> Any:
        """Fill in the settings of the algorithm; those that the recipe sets itself win."""
        if not isinstance(data, dict):
            return data
        name = data.get("algorithm")
        if isinstance(name, str) and name in PRESETS:
            return {**PRESETS[name], **data}
        return data

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from self._of_the_groups()
        yield from self._of_the_loss()

    def _of_the_groups(self) -> Iterator[str]:
        completions = self.prompts_per_step * self.group_size
        if self.group_size == 1 and self.advantage not in WITHOUT_GROUP:
            *names, last = WITHOUT_GROUP
            choices = f"{', '.join(names)} or {last}"
            yield f"group_size 1 needs advantage: {choices}, not {self.advantage}"
        if completions == 1 and self.advantage == "batch_standardised":
            yield "one completion per step leaves batch_standardised nothing to compare with"
        if self.dynamic_sampling_rounds > 0 and self.group_size == 1:
            yield "dynamic_sampling_rounds needs a group_size of 2 or more"
        if self.updates_per_batch > completions:
            yield f"updates_per_batch must be at most {completions}, the completions of a step"
        if self.advantage_eps is not None and not self.advantage.endswith("standardised"):
            yield f"advantage: {self.advantage} divides by no deviation: leave advantage_eps out"
        if self.advantage == "zero" and self.teacher is None and not self.solution_weight:
            yield "advantage: zero learns nothing from rewards: name a teacher or another one"
        if self.advantage == "pass_at_k" and self.advantage_k > self.group_size:
            yield f"advantage_k must be at most {self.group_size}, the group_size"

    def _of_the_loss(self) -> Iterator[str]:
        if self.kl_in_reward and self.decouple_rewards:
            yield "kl: k1 changes the total, decouple_rewards its components: use k2 or k3"
        if self.dual_clip is not None and self.surrogate != "ppo_clip":
            yield f"dual_clip is a bound of surrogate: ppo_clip, not of {self.surrogate}"
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            yield "dual_clip must lie above 1 + clip_high"
        if self.max_staleness and self.importance == "none":
            yield "max_staleness trains on samples of older weights: set importance: truncate"
        if self.ratio == "sequence" and self.surrogate == "policy_gradient":
            yield "surrogate: policy_gradient has no ratio; leave ratio at token"

    @property
    def kl_in_reward(self) -> bool:
        """Tell whether the KL is subtracted from the reward.

        As a loss, the gradient of k1 is 0 in expectation.
        """
        return self.beta > 0 and self.kl == "k1"

    @property
    def flat_rows_matter(self) -> bool:
        """Tell whether a rollout with advantage 0 has a gradient beside its teacher's anyway."""
        kl_in_loss = self.beta > 0 and not self.kl_in_reward
        return kl_in_loss or self.entropy_bonus > 0


_MAX_NEW_TOKENS = 512


class VllmConfig(Section):
    """vLLM as the sampler of a run (`sampling.engine: vllm`); see docs/vllm.md."""

    mode: Literal["colocate", "server"] = "colocate"
    """colocate: in the training process; server: in separate processes, here or elsewhere"""
    gpu_memory_utilization: Share | None = None
    """share of a GPU's memory that vLLM may use, weights and cache included; default: 0.9 for a
    server with a GPU of its own (named in servers, or `grouper serve-rollouts`), else 0.3"""
    servers: Servers = ()
    """only for mode: server, one or several: a GPU, as cuda:1, on which the run starts and ends
    one; the address of one that `grouper serve-rollouts` has started, as http://127.0.0.1:8765;
    auto: the run starts one where vLLM puts it. Default: auto"""
    transfer: Literal["auto", "file", "ipc", "nccl"] = "auto"
    """how weights reach servers. file: through a folder that both sides see; ipc: a server on the
    trainer's GPU reads its memory; nccl: broadcast to servers on other GPUs; auto: ipc or nccl,
    whichever can work, else file"""
    tolerance: PositiveFloat | None = None
    """most that log-probs may differ from the trainer's after a push of weights, mean in nats;
    default: 1e-5 where both compute in float32, else 0.02"""
    timeout_seconds: Seconds = 600.0
    """time limit for a server to start, to answer, or to come back"""
    params: Params = {}
    """further arguments of vLLM's engine, by its own names"""

    def contradictions(self) -> Iterator[str]:
        if self.mode == "colocate" and self.servers:
            yield "servers are only for mode: server"


class ToolsConfig(Section):
    """Tools that a completion may call, in a format with turns (`prompt.format: python-tool`)."""

    calls: Positive = 4
    """at most, in one completion; later blocks are text"""
    output_tokens: Annotated[int, Field(ge=16, le=MOST)] = 128
    """of what a tool says; the rest is cut off. They count for max_new_tokens"""
    functions: Names = ()
    """tools of your own beside Python, as path/to/file.py:function"""
    function_seconds: Seconds = 30.0
    """of a function of your own, after which the model reads that there is no answer"""


class SamplingConfig(Section):
    """How GRPO draws its rollouts; evaluation has its own settings."""

    temperature: PositiveFloat = 1.0
    top_p: Share = 1.0
    top_k: NonNegative = 0
    min_p: BelowOne = 0.0
    min_new_tokens: NonNegative = 0
    max_new_tokens: Positive = _MAX_NEW_TOKENS
    max_total_tokens: Positive | None = None
    """prompt and completion together; max_new_tokens then follows from the longest prompt of
    data.train that is kept"""
    stop: Names | None = None
    """default: the format's own"""
    include_stop: bool = True
    allow_truncated: bool = False
    """train although top_p, top_k or min_p make the gradient biased"""
    max_slots: Positive = 256
    """sequences decoded at the same time"""
    dtype: Literal["auto", "same", "float32", "bfloat16"] = "auto"
    """dtype of a copy of the weights to sample from, LoRA merged into a float32 one and beside a
    bfloat16 one (vLLM: merged into both); same: no copy, LoRA beside the weights; auto: a copy in
    the dtype of products where that is faster (with LoRA; on CUDA also of float32 weights), else
    same; vLLM gets LoRA merged in float32, beside the weights in bfloat16"""
    engine: EngineName = "native"
    """native: Grouper's own, on the training device; vllm: needs vLLM, see docs/vllm.md"""
    vllm: Annotated[VllmConfig, ASIDE] = VllmConfig()
    """only for engine: vllm"""
    tools: Annotated[ToolsConfig, SINCE] = ToolsConfig()

    def contradictions(self) -> Iterator[str]:
        if self.max_total_tokens is not None and self.max_new_tokens != _MAX_NEW_TOKENS:
            yield "max_new_tokens follows from max_total_tokens: give only one of them"
        elif self.min_new_tokens > (self.max_total_tokens or self.max_new_tokens):
            yield "min_new_tokens is larger than max_new_tokens"
        if (self.top_p < 1 or self.top_k or self.min_p) and not self.allow_truncated:
            yield "top_p, top_k and min_p bias GRPO's gradient; allow_truncated: true accepts that"


class ProgramsConfig(Section):
    """How programs that a model writes are run (`prompt.format: program` and `python-tool`)."""

    isolation: Literal["seccomp", "limits"] = "seccomp"
    """seccomp: nothing but memory and clocks; limits: processor time, memory and output alone,
    where the model may do whatever you may"""
    seconds: Seconds = 2.0
    """processor time of a program; on the clock, five times as long"""
    memory_mb: Positive = 512
    """memory of a program; not limited on macOS"""
    packages: Names = ()
    """importable beside a part of the standard library, for example sympy"""


class GradingConfig(Section):
    """How answers are compared."""

    timeout_seconds: Seconds = 2.0
    """CPU time per answer in the symbolic stage"""
    symbolic: bool = True
    """the Math-Verify stage; false: numbers and text only"""
    programs: Annotated[ProgramsConfig, SINCE] = ProgramsConfig()


class EvaluationConfig(Section):
    """How accuracy is measured; the same for base, SFT and GRPO."""

    samples: Positive = 1
    """completions per problem (k of pass@k)"""
    temperature: NonNegativeFloat = 0.0
    top_p: Share = 1.0
    top_k: NonNegative = 0
    min_p: BelowOne = 0.0
    max_new_tokens: Positive | None = None
    """default: as in sampling"""
    validation_minutes: PositiveFloat | None = None
    """about as long as a validation may take: the first one finds how many problems of
    data.validation fit, in an order by seed, and every later one has the same problems"""
    servers: Annotated[Servers, ASIDE] = ()
    """vLLM servers for validation alone, named as in sampling.vllm.servers: it then runs while
    training goes on; default: training waits for it"""
    rewards: bool = True
    """also format, reasoning and `rewards` of each completion"""

    def contradictions(self) -> Iterator[str]:
        if self.samples > 1 and self.temperature == 0:
            yield "evaluation.samples > 1 needs a temperature above 0"


def _each_once(rows: tuple[Any, ...]) -> tuple[Any, ...]:
    names = [row.name for row in rows]
    repeated_name = next((name for name in names if names.count(name) > 1), None)
    if repeated_name is not None:
        raise ValueError(f"{repeated_name!r} is listed twice: give it once")
    return rows


_EACH_ONCE = AfterValidator(_each_once)


class RewardConfig(Section):
    """One component of the reward."""

    name: str
    """a built-in name, `path/to/file.py:function`, or `stack:name` for several"""
    weight: float = Field(1.0, ge=-LARGEST, le=LARGEST)
    params: Params = {}
    """its parameters; ${NAME} is read from the environment"""
    max_failure_rate: Fraction = 0.1
    """share of a step's groups it may fail on before the run stops"""
    deterministic: bool = True
    """false: it may answer the same input differently (a model as a judge); its answers are kept
    for --resume"""
    timeout_seconds: Seconds = 120.0
    """time limit per group: an async function is stopped, any other gets a warning"""


Rewards = Annotated[tuple[RewardConfig, ...], Field(strict=False), _EACH_ONCE]


def stack(name: str) -> tuple[RewardConfig, ...]:
    """Return the rewards of a named stack.

    Raises:
        RewardError: there is none of that name.

    >>> [(r.name, r.weight) for r in stack("default")]
    [('correctness', 1.0), ('format', 0.1), ('tag_count', 0.1)]
    """
    return tuple(RewardConfig(**row) for row in named_stack(name).rewards)


# Built-in trackers, by the names of their packages, which are those of Grouper's extras, too.
TRACKERS = ("tensorboard", "wandb", "trackio")


class TrackerConfig(Section):
    """Another place where every step is reported; it can neither stop a run nor slow it."""

    name: str
    """tensorboard, wandb, trackio, or your own: `path/to/file.py:function`"""
    project: str | None = None
    """default: grouper"""
    entity: str | None = None
    """only wandb: user or team; default: your own"""
    run_name: str | None = None
    """default: the recipe's name"""
    tags: Names = ()
    mode: Literal["offline", "online"] = "offline"
    """online: upload during the run"""
    params: Params = {}
    """further keywords: of wandb.init, trackio.init, or yours; ${NAME} is read from the
    environment"""


class TrackingConfig(Section):
    """What is recorded beside the metrics, and where else."""

    token_groups: Annotated[NonNegative | Literal["all"], ASIDE] = 2
    """groups per step whose tokens are recorded one by one: log-probs, entropy, clipping; the
    report shows them. all: of every group, with ids and exact log-probs"""
    log_every: Positive = 1
    """steps between lines on the console and in training.log; with 1, a console that is not a
    terminal gets about 40 lines a phase"""
    print_every_steps: Annotated[Positive | None, ASIDE] = None
    """GRPO steps between samples shown on the console; default: none"""
    trackers: Annotated[tuple[TrackerConfig, ...], Field(strict=False), _EACH_ONCE, ASIDE] = ()
    """where else each step is reported; the run folder is always written"""


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: Annotated[str, ASIDE] = ""
    note: Annotated[str, ASIDE] = ""
    """printed at the end: what the result is and is not"""
    seed: Seed = 0
    output_dir: Annotated[str, ASIDE] = "outputs"
    save_path: Annotated[str | None, ASIDE] = None
    """a folder for what was trained, the adapter alone where there is one"""
    push_to: Annotated[str | None, ASIDE] = None
    """owner/name on the Hub: each checkpoint is pushed as a revision, the result with its card"""
    threads: Annotated[Positive | None, Field(le=1024), ASIDE] = None
    """CPU threads; default: PyTorch's choice, at most the processors that the process may use"""
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], ASIDE] = "auto"
    """auto: CUDA if there is a device, else the CPU; mps is untested, and never chosen by itself"""
    parallel: Annotated[Literal["ddp", "fsdp"], ASIDE] = "ddp"
    """several processes: fsdp splits the weights over them, ddp copies them"""
    on_finding: Annotated[Literal["warn", "stop"], ASIDE] = "warn"
    """when a check finds that GRPO is going wrong: warn, or stop the run and keep what was saved
    before"""
    skip_sft: Annotated[bool, ASIDE] = False
    skip_grpo: Annotated[bool, ASIDE] = False
    model: ModelConfig
    data: DataConfig
    prompt: PromptConfig = PromptConfig()
    sft: SFTConfig = SFTConfig()
    grpo: GRPOConfig = GRPOConfig()
    sampling: SamplingConfig = SamplingConfig()
    rewards: Rewards = (RewardConfig(name="correctness"),)
    grading: GradingConfig = GradingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    hooks: Annotated[Names, ASIDE] = ()
    """your own `path/to/file.py:function`, called after each step"""

    @model_validator(mode="before")
    @classmethod
    def _correct_for_another_sampler(cls, data: Any) -> Any:
        """Set truncated importance weights by default where samples are not from the trainer.

        vLLM's numbers differ from the trainer's, and samples of a step ahead are of older weights.
        """
        match {"grpo": {}, **data} if isinstance(data, dict) else data:
            case {"sampling": {"engine": "vllm"}, "grpo": {**grpo}}:
                return {**data, "grpo": {"importance": "truncate", **grpo}}
            case {"grpo": {"max_staleness": 1, **others}}:
                ahead = {"importance": "truncate", "max_staleness": 1}
                return {**data, "grpo": {**ahead, **others}}
        return data

    def contradictions(self) -> Iterator[str]:
        for place in places_of_secrets(self.model_dump()):
            yield f"{place} holds what looks like a secret, and recipes are shared: take it out"
        if not self.rewards:
            yield "rewards is empty: GRPO needs at least one"
        samples_with_vllm = self.sampling.engine == "vllm"
        has_vllm = samples_with_vllm or self.evaluation.servers
        if has_vllm and self.model.quantization is not None:
            yield "4bit weights need sampling.engine: native and no evaluation.servers"
        vllm = self.sampling.vllm
        no_server = samples_with_vllm and vllm.mode == "colocate" and not self.evaluation.servers
        if no_server and vllm.transfer != "auto":
            yield "sampling.vllm.transfer is how weights reach servers, and mode: colocate has none"
        # vLLM raises the temperature of a request below 0.01 to it, silently; requests are relative
        # to sampling.temperature.
        lowest = 0.01 * self.sampling.temperature
        if has_vllm and 0 < self.evaluation.temperature < lowest:
            yield f"vLLM samples at no temperature below {lowest:g}: raise evaluation.temperature"
        has_server = samples_with_vllm and self.sampling.vllm.mode == "server"
        float32_already = self.model.dtype == "float32" or self.model.lora is not None
        for phase in self.phases:
            if float32_already and getattr(self, phase).optimizer.master_weights:
                yield (
                    f"{phase}.optimizer.master_weights is for model.dtype: bfloat16 without LoRA; "
                    "what is trained here is in float32"
                )
        if self.grpo.max_staleness and samples_with_vllm and not has_server:
            yield "grpo.max_staleness needs sampling.vllm.mode: server, or sampling.engine: native"

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases, of SFT and GRPO, that are not skipped, in order."""
        return tuple(phase for phase in ("sft", "grpo") if not getattr(self, f"skip_{phase}"))

    @property
    def run_folder(self) -> Path:
        """The folder of its run, which may not exist yet."""
        return Path(self.output_dir).expanduser() / self.name

    def override(self, *settings: str, **sections: Any) -> Recipe:
        """Return this recipe with other settings, checked again; `self` stays as it is.

        Args:
            *settings: `section.key=value`, as on the command line; later ones win.
            **sections: whole keys, sections merged with what they hold already.

        Raises:
            ConfigError: every wrong or unknown setting at once.
            RewardError: an unknown stack of rewards.

        Example: `recipe.override("grpo.steps=20", name="short", model={"lora": {"rank": 8}})`.
        """
        data = self.model_dump(mode="json", exclude_unset=True)
        text = changed(data, settings, sections, where=f"recipe {self.name}")
        return validate_json(Recipe, text, where=f"recipe {self.name}")
