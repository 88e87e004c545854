"""Models that lie beside the work: a local folder is taken before the Hub is asked."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODEL_FOLDERS", "local_model"]

MODEL_FOLDERS = ("models", ".models")
"""Where people keep models, below the folder that the command runs in."""


def local_model(name: str, beside: Path | None = None) -> str:
    """The local folder of a model, or its name unchanged where there is none.

    Args:
        name: a path or Hub name (`Qwen/Qwen2.5-0.5B`). A path that exists is left as it is;
            otherwise a folder of the whole name or its last part is looked for, in any case.
        beside: the folder whose `MODEL_FOLDERS` are searched; the current one by default.
    """
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")):
        return name
    for places in MODEL_FOLDERS:
        for wanted in (name, name.rpartition("/")[2]):
            folder = _folder_of(Path(places), wanted, beside or Path.cwd())
            if folder is not None:
                return f"./{folder}"
    return name


def _folder_of(places: Path, wanted: str, beside: Path) -> Path | None:
    """`places/wanted` in any case of letters, if it holds a model or an adapter."""
    found = places
    for part in wanted.split("/"):
        here = beside / found
        names = [entry.name for entry in here.iterdir()] if here.is_dir() else []
        matching = [name for name in names if name.casefold() == part.casefold()]
        if not matching:
            return None
        found = found / (part if part in matching else min(matching))
    files = ("config.json", "adapter_config.json")
    return found if any((beside / found / file).is_file() for file in files) else None
