"""Functions and classes of the user's, named by `path/to/file.py:name` or `module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from grouper.errors import GrouperError, did_you_mean

__all__ = ["load_user_object"]

_AS_READ: dict[str, tuple[int, int]] = {}
"""Module -> modification time and size of its file when it was loaded."""


def load_user_object(
    full_name: str, *, kind: str, where: str, error: type[GrouperError] = GrouperError
) -> Any:
    """What the user named, which can be called.

    Args:
        full_name: `path/to/file.py:name` or `package.module:name`.
        kind: what it is meant to be (`reward`, `tracker`), for messages.
        where: the recipe key, for messages.
        error: the class of what is raised.

    Raises:
        GrouperError: of class `error`: no such file, module or name, or loading it failed.
    """
    place, _, name = full_name.rpartition(":")
    is_file = place.endswith(".py")
    try:
        module = (
            _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except _NoFileError as missing:
        raise error(
            f"there is no file {place}",
            where=where,
            fix=f"The {kind} {full_name!r} is looked for from {Path.cwd()}.",
        ) from missing
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # a user's module may raise anything; it is told as theirs
        if is_file:
            what, fix = f"{place} cannot be loaded: {type(raised).__name__}: {raised}", ""
        else:
            what = f"the module {place} of a {kind} cannot be imported: {_told(raised)}"
            fix = f"Install it, or name a file: `path/to/file.py:{name}`."
        raise error(what, where=where, fix=fix) from raised
    found = getattr(module, name, None)
    if not callable(found):
        public = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        fix = did_you_mean(name, public)
        raise error(f"{place} has no function {name!r}", where=where, fix=fix)
    return found


class _NoFileError(Exception):
    pass


def _told(raised: BaseException) -> str:
    return str(raised) if isinstance(raised, ImportError) else f"{type(raised).__name__}: {raised}"


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise _NoFileError
    # A stable name, so that a file that is named twice is loaded once, until it is edited.
    label = f"grouper_user_code.{path.resolve().as_posix().replace('/', '_').replace('.', '_')}"
    stat = path.stat()
    as_read = (stat.st_mtime_ns, stat.st_size)
    if label in sys.modules and _AS_READ.get(label) == as_read:
        return sys.modules[label]
    spec = importlib.util.spec_from_file_location(label, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    _AS_READ[label] = as_read
    try:
        spec.loader.exec_module(module)
    except BaseException:  # a half-loaded module is forgotten, whatever stopped it
        del sys.modules[label]
        raise
    return module
