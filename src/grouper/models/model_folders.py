"""Where models and adapters lie: folders first, else names on the Hub; nothing here has weights."""

from __future__ import annotations

import contextlib
import difflib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from grouper.errors import ModelError

__all__ = [
    "ADAPTER_FILE",
    "base_of",
    "load_from",
    "looks_local",
    "on_this_machine",
    "quiet",
    "read_adapter",
    "require_model_folder",
]

ADAPTER_FILE = "adapter_config.json"


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


def looks_local(path: str) -> bool:
    """Whether a path is meant as a folder and not as a Hub name (owner/model)."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()


def on_this_machine(path: str, revision: str | None = None) -> bool:
    """Whether a path is a folder, or a Hub name whose configuration is in the Hub cache."""
    if looks_local(path):
        return Path(path).expanduser().is_dir()
    try:
        cached = try_to_load_from_cache(path, "config.json", revision=revision)
    except HFValidationError:  # neither a folder nor a name that the Hub could have
        return False
    return isinstance(cached, str)


def require_model_folder(path: str, *, where: str = "model.path") -> None:
    """Check without loading anything that a local `path` is a model or adapter folder.

    Raises:
        ModelError: the folder is missing or holds no model. Hub names pass.
    """
    if not looks_local(path):
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


# What transformers raises on files that do not belong together; the last two where a tokenizer's
# file is of another kind than its configuration says.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    ImportError,
    SafetensorError,
    TypeError,
    AttributeError,
)


def load_from(loader: Any, path: str, **options: Any) -> Any:
    """Call `loader.from_pretrained`, telling what went wrong in one paragraph.

    Raises:
        ModelError: there is nothing to load, it is damaged, or it may not be had.
    """
    source = str(Path(path).expanduser()) if looks_local(path) else path
    try:
        with quiet():
            return loader.from_pretrained(source, **options)
    except RuntimeError as error:
        # torch tells running out of memory in the same class, which is somebody else's to tell.
        if "mismatched" not in str(error):
            raise
        raise ModelError(
            f"the weights in {path!r} do not have the shapes that its config.json says "
            "(vocab_size, hidden_size or the like)",
            where="the model",
            fix="Put the config.json back that was saved with these weights.",
        ) from error
    except UnpicklingError as error:
        raise ModelError(
            f"the weights in {path!r} are a pickle that holds more than tensors, which could run "
            "code when it is loaded",
            where="the model",
            fix="Save the model with `save_pretrained` (safetensors) where you trust it.",
        ) from error
    except _LOADING_ERRORS as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "gated repo" in str(error):
            raise ModelError(
                f"{path!r} is gated: its owner asks you to accept terms first",
                where="the model",
                fix="Accept them on the model's page on the Hub, then run `hf auth login`; or "
                "name another model.",
            ) from error
        here = "" if looks_local(path) else "there is no such folder here, and "
        raise ModelError(
            f"{here}{path!r} cannot be loaded: {lines[0]}",
            where="the model",
            fix="Check the name; a gated model needs `hf auth login`, and without a network the "
            "model must be a local folder or in the Hub cache already.",
        ) from error


def read_adapter(path: str) -> dict[str, Any] | None:
    """The adapter configuration of a local folder, or None for a whole model.

    Raises:
        ModelError: it cannot be read, or names no base model.
    """
    file = Path(path).expanduser() / ADAPTER_FILE
    if not file.is_file():
        return None
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(file)!r} cannot be read ({error})", where="the adapter") from error
    if not isinstance(config, dict) or not config.get("base_model_name_or_path"):
        raise ModelError(
            f"{str(file)!r} does not say which base model the adapter belongs to",
            where="the adapter",
            fix="Write its folder or Hub name there as `base_model_name_or_path`.",
        )
    return config


def base_of(path: str, adapter_config: dict[str, Any]) -> str:
    """The base model of an adapter: as it was recorded, else the `base` of a run that was moved."""
    recorded = str(adapter_config["base_model_name_or_path"])
    if not looks_local(recorded) or Path(recorded).is_dir():
        return recorded
    moved = (parent / "base" for parent in Path(path).expanduser().resolve().parents)
    return next((str(folder) for folder in moved if (folder / "config.json").is_file()), recorded)
