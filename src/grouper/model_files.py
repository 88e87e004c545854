"""Models and tokenizers on disk: local folders first, else a Hub name; adapters included."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
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
from transformers.utils import logging as transformers_logging

from grouper.config import LoraConfig, ModelConfig
from grouper.errors import ModelError
from grouper.extras import require_extra
from grouper.policy import Policy

__all__ = [
    "ADAPTER_FILE",
    "context_length",
    "context_length_of",
    "load_policy",
    "load_tokenizer",
    "quiet",
    "require_model_folder",
    "save_policy",
    "shape_of",
    "stop_ids_of",
    "weightless_policy",
]

log = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_config.json"
SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""What two models must share for an adapter of one to say anything about the other."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No bars for files that take no time, no warnings about calls between other libraries."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # PEFT asks transformers in a way that transformers will drop; neither is ours.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()


def require_model_folder(path: str, *, where: str = "model.path") -> None:
    """Check without loading anything that a local `path` is a model or adapter folder.

    Raises:
        ModelError: the folder is missing or holds no model. Hub names pass.
    """
    if not _looks_local(path):
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"there is no folder {path!r}",
            where=where,
            fix=f"{_nearest_folder(folder)}Give a local folder or a Hub name (owner/model).",
        )
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_FILE)):
        raise ModelError(
            f"{path!r} holds neither a model (config.json) nor an adapter ({ADAPTER_FILE})",
            where=where,
            fix="Give the folder that `save_pretrained` wrote, for example <run>/sft/final.",
        )


def _nearest_folder(folder: Path) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return ""
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    near = difflib.get_close_matches(folder.name, names, n=1)
    return f"Did you mean {str(parent / near[0])!r}? " if near else ""


def _load(loader: Any, path: str, **options: Any) -> Any:
    """Call `loader.from_pretrained`, telling what went wrong in one paragraph."""
    source = str(Path(path).expanduser()) if _looks_local(path) else path
    try:
        with quiet():
            return loader.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "gated repo" in str(error):
            raise ModelError(
                f"{path!r} is gated: its owner asks you to accept terms first",
                where="the model",
                fix="Accept them on the model's page on the Hub, then run `hf auth login`; or "
                "name another model.",
            ) from error
        here = "" if _looks_local(path) else "there is no such folder here, and "
        raise ModelError(
            f"{here}{path!r} cannot be loaded: {lines[0]}",
            where="the model",
            fix="Check the name; a gated model needs `hf auth login`, and without a network the "
            "model must be a local folder or in the Hub cache already.",
        ) from error


def load_tokenizer(path: str, *, revision: str | None = None) -> Any:
    """The tokenizer of a model folder or Hub name.

    Raises:
        ModelError: it cannot be loaded.
    """
    require_model_folder(path)
    return _load(AutoTokenizer, path, revision=revision)


def _read_adapter(path: str) -> dict[str, Any] | None:
    """The adapter configuration of a local folder, or None for a whole model."""
    file = Path(path).expanduser() / ADAPTER_FILE
    if not file.is_file():
        return None
    config: dict[str, Any] = json.loads(file.read_text())
    return config


def _base_of(path: str, adapter_config: dict[str, Any]) -> str:
    """The base model of an adapter: as it was recorded, else the `base` of a run that was moved."""
    recorded = str(adapter_config["base_model_name_or_path"])
    if not _looks_local(recorded) or Path(recorded).is_dir():
        return recorded
    moved = (parent / "base" for parent in Path(path).expanduser().resolve().parents)
    return next((str(folder) for folder in moved if (folder / "config.json").is_file()), recorded)


def _load_model(path: str, config: ModelConfig, device: str | torch.device) -> PreTrainedModel:
    attention = "sdpa" if config.attention == "native" else config.attention
    model: PreTrainedModel = _load(
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
    loaded = _load(AutoConfig, path, revision=config.revision if path == config.path else None)
    capped = getattr(loaded.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if attention == "sdpa" and capped else attention


def load_policy(
    config: ModelConfig, path: str, *, seed: int, device: str | torch.device = "cpu"
) -> Policy:
    """Load a model folder, Hub name or adapter folder as the policy to train.

    One rule for adapters: a recipe with LoRA continues the adapter it starts from; a recipe
    without LoRA merges it and trains all weights.

    Args:
        config: dtype, attention, quantisation and LoRA settings.
        path: what to load; `config.path`, a phase's `final/`, or a checkpoint.
        seed: of a new adapter's random half.
        device: where to put it.

    Raises:
        ModelError: nothing loadable there, or the model cannot be run as asked.
        ConfigError: a library that a setting needs is not installed.
    """
    require_model_folder(path)
    adapter_config = _read_adapter(path)
    base = path if adapter_config is None else _base_of(path, adapter_config)
    if adapter_config is not None:
        require_model_folder(base, where=f"the base model of the adapter {path}")
        _check_base(path, base, config)
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


def _check_base(path: str, base: str, config: ModelConfig) -> None:
    """An adapter brings its own base model: that must be the recipe's, or one of its shape.

    Raises:
        ModelError: it is a model of another shape.
    """
    if config.path is None:
        return
    own = _read_adapter(config.path)
    wanted = config.path if own is None else _base_of(config.path, own)
    if Path(wanted).expanduser().resolve() == Path(base).expanduser().resolve():
        return
    theirs, ours = (_load(AutoConfig, name).get_text_config() for name in (base, wanted))
    differ = [name for name in SHAPE if getattr(theirs, name, None) != getattr(ours, name, None)]
    if differ:
        raise ModelError(
            f"the adapter {path!r} was trained on {base!r}, which is another model than "
            f"{wanted!r} ({', '.join(differ)} differ)",
            where="model.path",
            fix=f"Set model.path={base}, or start from an adapter of {wanted!r}.",
        )
    log.warning(
        "The adapter %s was trained on %s, which is used in place of %s.", path, base, wanted
    )


def weightless_policy(config: ModelConfig, shape: PretrainedConfig) -> Policy:
    """The policy `load_policy` would make of a model of this shape, on the meta device.

    Every tensor has its shape and dtype and no content; a 4-bit base stands in its compute dtype.

    Raises:
        ModelError: as in `load_policy`.
    """
    attention = "eager" if getattr(shape, "attn_logit_softcapping", None) else "sdpa"
    with torch.device("meta"), quiet():
        model = AutoModelForCausalLM.from_config(
            shape, dtype=_DTYPES[config.dtype], attn_implementation=attention
        )
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


def shape_of(path: str, revision: str | None = None) -> PretrainedConfig:
    """The configuration of a model or adapter folder or of a model in the Hub cache.

    Raises:
        ModelError: it is not on this machine.
    """
    adapter = _read_adapter(path)
    base = path if adapter is None else _base_of(path, adapter)
    loaded: PretrainedConfig = _load(AutoConfig, base, revision=revision, local_files_only=True)
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
            return PeftModel.from_pretrained(model, path, is_trainable=keep)
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
    source = str(Path(path).expanduser()) if _looks_local(path) else path
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
    adapter = _read_adapter(path)
    base = path if adapter is None else _base_of(path, adapter)
    if adapter is not None:
        require_model_folder(base, where=f"the base model of the adapter {path}")
    return _context(_load(AutoConfig, base, revision=revision))


def _context(config: Any) -> int | None:
    value = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if value is None else int(value)
