"""Whether an adapter fits where it is to be used, said before anything is trained or measured."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from grouper.config.schema import ModelConfig
from grouper.errors import ModelError
from grouper.models.model_folders import (
    base_of,
    load_from,
    quiet,
    read_adapter,
    require_model_folder,
)

__all__ = ["check_adapter"]

log = logging.getLogger(__name__)

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
WEIGHTS_FILE = "adapter_model.safetensors"


def check_adapter(config: ModelConfig, path: str, *, where: str = "model.path") -> None:
    """Refuse an adapter of another base model; no weights are loaded.

    An adapter brings its own base model, which must be the recipe's or one of its shape, and its
    tensors must be those that PEFT would put into that model. Whole models pass, and so does what
    lies on the Hub.

    Args:
        config: the recipe's model.
        path: what is to be loaded.
        where: the setting that names it.

    Raises:
        ModelError: its base is not there, is another model, or has other layers.
    """
    adapter = read_adapter(path)
    if adapter is None:
        return
    base = base_of(path, adapter)
    require_model_folder(base, where=f"the base model of the adapter {path}")
    _check_base(path, base, config, where)
    shape = load_from(AutoConfig, base, revision=config.revision if base == config.path else None)
    misfit = _misfit(path, shape)
    if misfit is not None:
        raise ModelError(
            f"the adapter {path!r} does not fit its base model {base!r}: {misfit}",
            where=where,
            fix="Check `base_model_name_or_path` in its adapter_config.json.",
        )


def _check_base(path: str, base: str, config: ModelConfig, where: str) -> None:
    """An adapter brings its own base model: that must be the recipe's, or one of its shape.

    Raises:
        ModelError: it is a model of another shape.
    """
    if config.path is None:
        return
    own = read_adapter(config.path)
    wanted = config.path if own is None else base_of(config.path, own)
    if Path(wanted).expanduser().resolve() == Path(base).expanduser().resolve():
        return
    theirs, ours = (load_from(AutoConfig, name).get_text_config() for name in (base, wanted))
    differ = [name for name in SHAPE if getattr(theirs, name, None) != getattr(ours, name, None)]
    if differ:
        raise ModelError(
            f"the adapter {path!r} was trained on {base!r}, which is another model than "
            f"{wanted!r} ({', '.join(differ)} differ)",
            where=where,
            fix=f"Set model.path={base}, or start from an adapter of {wanted!r}.",
        )
    log.warning(
        "The adapter %s was trained on %s, which is used in place of %s.", path, base, wanted
    )


def _misfit(path: str, shape: PretrainedConfig) -> str | None:
    """The first tensor of an adapter that its base has no place for, or lacks, in words."""
    stored = _stored_shapes(path)
    if stored is None:
        return None
    try:
        wanted = _wanted_shapes(path, shape)
    except ValueError as error:  # none of its target modules is there
        return str(error).splitlines()[0]
    lora = {name for name in stored if "lora_" in name}
    for name in sorted(lora | wanted.keys()):
        here, there = stored.get(name), wanted.get(name)
        if here != there:
            return f"{name} {_told(here, 'in the adapter')}, {_told(there, 'for this base')}"
    return None


def _told(shape: list[int] | None, place: str) -> str:
    return f"is not there {place}" if shape is None else f"is {' x '.join(map(str, shape))} {place}"


def _stored_shapes(path: str) -> dict[str, list[int]] | None:
    """Name -> shape of what the adapter's file holds, by its header; None for another kind."""
    file = Path(path).expanduser() / WEIGHTS_FILE
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as weights:
            names = weights.keys()
            return {name: list(weights.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{str(file)!r} cannot be read: {error}",
            where="the adapter",
            fix="It was damaged after it was written, or is not all there: copy it again.",
        ) from error


def _wanted_shapes(path: str, shape: PretrainedConfig) -> dict[str, list[int]]:
    """Name -> shape of what PEFT would put into a model of this shape."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict

    with torch.device("meta"), quiet(), warnings.catch_warnings():
        # A model without weights has no name, which PEFT takes for another than the adapter's.
        warnings.simplefilter("ignore", UserWarning)
        model = AutoModelForCausalLM.from_config(shape)
        adapter = get_peft_model(model, PeftConfig.from_pretrained(str(Path(path).expanduser())))
        state = get_peft_model_state_dict(adapter, save_embedding_layers=False)
    return {name: list(tensor.shape) for name, tensor in state.items()}
