"""Models and tokenizers on disk: local folders first, else a Hub name; adapters included."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from grouper.config.extras import require_extra
from grouper.config.schema import LoraConfig, ModelConfig
from grouper.errors import ModelError, did_you_mean
from grouper.models.adapters import check_adapter
from grouper.models.model_folders import (
    ADAPTER_FILE,
    base_of,
    load_from,
    looks_local,
    quiet,
    read_adapter,
    require_model_folder,
)
from grouper.models.policy import Policy

__all__ = [
    "ADAPTER_FILE",
    "check_lora_targets",
    "context_length",
    "context_length_of",
    "load_policy",
    "load_tokenizer",
    "quiet",
    "require_model_folder",
    "save_policy",
    "shape_of",
    "stop_ids_of",
    "vocabulary_of",
    "weightless_policy",
]

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(path: str, *, revision: str | None = None) -> Any:
    """The tokenizer of a model folder or Hub name.

    Raises:
        ModelError: it cannot be loaded.
    """
    require_model_folder(path)
    return load_from(AutoTokenizer, path, revision=revision)


def _load_model(path: str, config: ModelConfig, device: str | torch.device) -> PreTrainedModel:
    attention = "sdpa" if config.attention == "native" else config.attention
    model: PreTrainedModel = load_from(
        AutoModelForCausalLM,
        path,
        revision=config.revision if path == config.path else None,
        dtype=_DTYPES[config.dtype],
        attn_implementation=_supported(path, attention, config),
        trust_remote_code=False,
        **_quantised(config, device),
    )
    for module in model.modules():
        # On some CPUs bitsandbytes re-packs 4-bit weights at the first forward without a gradient,
        # for inference only: they round differently from then on, and no backward reads them.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _quantised(config: ModelConfig, device: str | torch.device) -> dict[str, Any]:
    """What loads the linear layers in 4 bits: NF4, scales quantised too (arXiv 2305.14314).

    Embeddings, norms and the LM head stay in `config.dtype`.
    """
    if config.quantization is None:
        return {}
    require_extra("bitsandbytes", "quantized", where="model.quantization")
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=_DTYPES[config.compute_dtype or config.dtype],
        ),
        # Quantised on the way to the device, so that the whole model never stands on it.
        "device_map": {"": str(device)},
    }


def _supported(path: str, attention: str, config: ModelConfig) -> str:
    """SDPA drops Gemma 2's soft-capping, so models that have it are loaded with eager."""
    loaded = load_from(AutoConfig, path, revision=config.revision if path == config.path else None)
    capped = getattr(loaded.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if attention == "sdpa" and capped else attention


def load_policy(
    config: ModelConfig,
    path: str,
    *,
    seed: int,
    device: str | torch.device = "cpu",
    where: str = "model.path",
) -> Policy:
    """Load a model folder, Hub name or adapter folder as the policy to train.

    One rule for adapters: a recipe with LoRA continues the adapter it starts from; a recipe
    without LoRA merges it and trains all weights.

    Args:
        config: dtype, attention, quantisation and LoRA settings.
        path: what to load; `config.path`, a phase's `final/`, or a checkpoint.
        seed: of a new adapter's random half.
        device: where to put it.
        where: the setting that names it, for what is told.

    Raises:
        ModelError: nothing loadable there, or the model cannot be run as asked.
        ConfigError: a library that a setting needs is not installed.
    """
    require_model_folder(path)
    adapter_config = read_adapter(path)
    base = path if adapter_config is None else base_of(path, adapter_config)
    check_adapter(config, path, where=where)
    model = _load_model(base, config, device)
    adapter: Any = None
    if adapter_config is not None:
        adapter = _attach(model, path, keep=config.lora is not None)
        if config.lora is None:
            log.info("The adapter %s is merged; all weights are trained.", path)
            # PEFT froze the base weights; merged, they are what is trained.
            model, adapter = adapter.merge_and_unload().requires_grad_(True), None
        else:
            log.info("The adapter %s is continued.", path)
            if adapter_config.get("r") != config.lora.rank:
                log.warning(
                    "The adapter %s has rank %s and keeps it; model.lora.rank=%d is not used.",
                    path,
                    adapter_config.get("r"),
                    config.lora.rank,
                )
    elif config.lora is not None:
        adapter = _new_adapter(model, config.lora, base, seed)
    policy = Policy(
        adapter.get_base_model() if adapter is not None else model,
        adapter=adapter,
        native=config.attention == "native",
        compute_dtype=_autocast_dtype(config),
        gradient_checkpointing=config.gradient_checkpointing,
        activation_offload=config.activation_offload,
    )
    policy.to(device)
    policy.check_native_attention()
    return policy


def weightless_policy(config: ModelConfig, shape: PretrainedConfig) -> Policy:
    """The policy `load_policy` would make of a model of this shape, on the meta device.

    Every tensor has its shape and dtype and no content; a 4-bit base stands in its compute dtype.

    Raises:
        ModelError: as in `load_policy`.
    """
    attention = "eager" if getattr(shape, "attn_logit_softcapping", None) else "sdpa"
    with torch.device("meta"), quiet():
        try:
            model = AutoModelForCausalLM.from_config(
                shape, dtype=_DTYPES[config.dtype], attn_implementation=attention
            )
        except ValueError as error:
            raise ModelError(
                f"{shape.model_type} is no architecture of a causal language model",
                where="the model",
                fix="Name a model that continues text.",
            ) from error
        if config.quantization is not None:
            for module in model.modules():
                if (
                    isinstance(module, torch.nn.Linear)
                    and module is not model.get_output_embeddings()
                ):
                    module.to(_DTYPES[config.compute_dtype or config.dtype])
        adapter = None if config.lora is None else _new_adapter(model, config.lora, "", seed=0)
        return Policy(
            model,
            adapter=adapter,
            native=config.attention == "native",
            compute_dtype=_autocast_dtype(config),
            gradient_checkpointing=config.gradient_checkpointing,
        )


def check_lora_targets(config: ModelConfig, shape: PretrainedConfig) -> None:
    """Refuse `model.lora.target_modules` that a model of this shape does not have.

    Raises:
        ModelError: a name that is no layer of the model.
    """
    if config.lora is not None and not isinstance(config.lora.target_modules, str):
        weightless_policy(config, shape)


def shape_of(path: str, revision: str | None = None) -> PretrainedConfig:
    """The configuration of a model or adapter folder or of a model in the Hub cache.

    Raises:
        ModelError: it is not on this machine.
    """
    adapter = read_adapter(path)
    base = path if adapter is None else base_of(path, adapter)
    loaded: PretrainedConfig = load_from(AutoConfig, base, revision=revision, local_files_only=True)
    return loaded


def _autocast_dtype(config: ModelConfig) -> torch.dtype | None:
    """What matrix products are cast to, or None where the weights have that dtype already."""
    if config.compute_dtype in (None, config.dtype):
        return None
    return _DTYPES[config.compute_dtype]


def _attach(model: PreTrainedModel, path: str, *, keep: bool) -> Any:
    from peft import PeftModel

    try:
        with quiet():
            folder = str(Path(path).expanduser())
            return PeftModel.from_pretrained(model, folder, is_trainable=keep)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the adapter {path!r} does not fit its base model: {str(error).splitlines()[0]}",
            where="model.path",
            fix="Check `base_model_name_or_path` in its adapter_config.json.",
        ) from error


def _new_adapter(model: PreTrainedModel, lora: LoraConfig, base: str, seed: int) -> Any:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    targets = (
        lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    )
    if isinstance(targets, list):
        _require_targets(model, targets)
    settings = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapter = get_peft_model(model, settings)
        except ValueError as error:
            raise ModelError(
                f"LoRA cannot be added: {str(error).splitlines()[0]}",
                where="model.lora.target_modules",
                fix="Use all-linear, or names of linear layers of this model.",
            ) from error
    # Absolute, so that the adapter loads from whatever folder a command is run in.
    local = Path(base).expanduser()
    adapter.peft_config["default"].base_model_name_or_path = (
        str(local.resolve()) if local.is_dir() else base
    )
    return adapter


def _require_targets(model: PreTrainedModel, targets: list[str]) -> None:
    """Each name has a layer: PEFT ignores a name without one as long as another has some."""
    layers = [
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]
    missing = [t for t in targets if not any(f".{layer}".endswith(f".{t}") for layer in layers)]
    if missing:
        hint = did_you_mean(missing[0], {layer.rpartition(".")[2] for layer in layers})
        raise ModelError(
            f"LoRA cannot be added: the model has no layer {' and no '.join(map(repr, missing))}",
            where="model.lora.target_modules",
            fix=f"{hint} all-linear takes every linear layer.",
        )


def save_policy(
    policy: Policy, tokenizer: Any, folder: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write weights (or the adapter alone), tokenizer, template and generation config.

    The folder loads with `from_pretrained`. Not atomic: `checkpoint.py` wraps it.

    Args:
        policy: what to save.
        tokenizer: saved beside it.
        folder: exists, and is empty.
        weights: the values by the names of `policy.model`, where the policy does not hold them in
            one piece; tied weights once.
    """
    target = policy.model if policy.adapter is None else policy.adapter
    if weights is not None and policy.adapter is not None:
        # The adapter's own names: it wraps the model in two layers.
        weights = {f"base_model.model.{name}": value for name, value in weights.items()}
    with quiet():
        target.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    if policy.adapter is not None and policy.model.generation_config is not None:
        policy.model.generation_config.save_pretrained(folder)
    # PEFT writes a model card whose base model is a path on this machine; it says nothing.
    (folder / "README.md").unlink(missing_ok=True)


def stop_ids_of(path: str, revision: str | None = None) -> list[int]:
    """The end ids of a model's generation config; nothing else of it is ever used."""
    source = str(Path(path).expanduser()) if looks_local(path) else path
    try:
        ids = GenerationConfig.from_pretrained(source, revision=revision).eos_token_id
    except OSError:  # a model without a generation config
        return []
    if ids is None:
        return []
    return [int(i) for i in ids] if isinstance(ids, list | tuple) else [int(ids)]


def context_length(policy: Policy) -> int | None:
    """The longest sequence the model was made for, or None where it does not say."""
    return _context(policy.model.config)


def context_length_of(path: str, revision: str | None = None) -> int | None:
    """The same of a model or adapter folder or Hub name, without loading its weights."""
    adapter = read_adapter(path)
    base = path if adapter is None else base_of(path, adapter)
    if adapter is not None:
        require_model_folder(base, where=f"the base model of the adapter {path}")
    return _context(load_from(AutoConfig, base, revision=revision))


def vocabulary_of(path: str, revision: str | None = None) -> int:
    """Rows of the embedding of a model or adapter folder or Hub name, by its configuration."""
    adapter = read_adapter(path)
    base = path if adapter is None else base_of(path, adapter)
    config = load_from(AutoConfig, base, revision=revision)
    return int(config.get_text_config().vocab_size)


def _context(config: Any) -> int | None:
    value = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if value is None else int(value)
