"""All of a run that "bit for bit" is about, as comparable values (DESIGN: Proof)."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

NOT_COMPARED = ("time", "elapsed_s", "memory.", "host.")

LEFT_OUT = ("report.html", "curves.png", "training.log")


def everything(path: Path) -> dict[str, Any]:
    """File name -> content, for every file of a run folder that two equal runs have in common."""
    return {
        str(file.relative_to(path)): _content(file)
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in LEFT_OUT
    }


def record(path: Path) -> dict[str, Any]:
    """As `everything`, of two runs in folders of different names, which the small files hold.

    Rows carry the hash of their recipe, in which the name is: it is left out.
    """
    kept = (".safetensors", ".gz", ".jsonl")
    files = everything(path).items()
    return {name: unsigned(content) for name, content in files if Path(name).suffix in kept}


def unsigned(content: Any) -> Any:
    """Rows without the recipe that they were made by; any other content as it is."""
    if isinstance(content, bytes):
        return re.sub(rb',"recipe_hash":"[0-9a-f]+"', b"", content)
    if isinstance(content, str):
        return re.sub(r',"recipe_hash":"[0-9a-f]+"', "", content)
    if isinstance(content, list):
        return [unsigned(row) for row in content]
    if isinstance(content, dict):
        return {key: value for key, value in content.items() if key != "recipe_hash"}
    return content


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names that only one of two runs has, or whose contents differ."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def _content(file: Path) -> Any:
    if file.parent.name == "optimizer":
        return file.read_bytes()  # numbers beside the tensors, too
    read = _BY_NAME.get(file.name) or _BY_SUFFIX.get(file.suffix) or Path.read_bytes
    return read(file)


def _metrics(file: Path) -> list[Any]:
    return [_without_time(json.loads(line)) for line in file.read_text().splitlines()]


def _without_time(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_time(v) for k, v in value.items() if not k.startswith(NOT_COMPARED)}
    return value


def _info(file: Path) -> dict[str, Any]:
    return {k: v for k, v in json.loads(file.read_text()).items() if k != "host"}


def _state(file: Path) -> dict[str, Any]:
    state = json.loads(file.read_text())
    # Checksums of archives; what is in them is compared value by value.
    return {**state, "files": sorted(state["files"])}


def _adapter(file: Path) -> dict[str, Any]:
    # The base model's folder, as a path from the root.
    return {**json.loads(file.read_text()), "base_model_name_or_path": None}


def _weights(file: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in load_file(file).items()}


_BY_NAME: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": _metrics,
    "run.json": _info,
    "trainer_state.json": _state,
    "adapter_config.json": _adapter,
}
_BY_SUFFIX: dict[str, Callable[[Path], Any]] = {
    ".safetensors": _weights,
    ".gz": lambda file: gzip.decompress(file.read_bytes()),
}
