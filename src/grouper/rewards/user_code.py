"""Functions and classes of the user's, named by `path/to/file.py:name` or `module:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from grouper.errors import ConfigError, GrouperError, did_you_mean

_OURS = f"{Path(__file__).parents[1]}/"
_INSTALLED = tuple(
    sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
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
        module = _load_file(Path(place)) if is_file else _import(place)
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
            line = (
                "" if isinstance(raised, SyntaxError) else line_of_users(raised)
            )  # it has its own
            what, fix = f"{place} cannot be loaded: {type(raised).__name__}: {raised}{line}", ""
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


def load_hook(full_name: str) -> Callable[[Any], Any]:
    """A function of the user's that is called with the report of each step.

    Raises:
        ConfigError: there is none of that name, or it cannot be called so.
    """
    if ":" not in full_name:
        raise ConfigError(
            f"there is no hook {full_name!r}",
            where="hooks",
            fix="Your own function is named `path/to/file.py:function`.",
        )
    function: Callable[[Any], Any] = load_user_object(
        full_name, kind="hook", where="hooks", error=ConfigError
    )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"the hook {full_name!r} cannot be called with a report: {error}",
            where="hooks",
            fix="It is given one argument, as in `def f(report)`.",
        ) from error
    except ValueError:
        pass  # some functions written in C have no signature
    return function


def code_fingerprints(full_names: Iterable[str]) -> dict[str, str]:
    """File of the user's -> hash of its source, for all that the named objects run.

    Counted are the file or module that a name leads to, and what that imports from its own folder
    or below; installed packages have versions instead.

    Args:
        full_names: as `load_user_object` takes them; one without a colon is built in, and one
            that cannot be loaded has none.
    """
    found: dict[Path, str] = {}
    for name in full_names:
        if ":" in name:
            try:
                load_user_object(name, kind="", where="")
            except GrouperError:
                continue  # refused with its own message where it is built
            place = name.rpartition(":")[0]
            label = _label(Path(place)) if place.endswith(".py") else place
            _add_sources(sys.modules[label], found)
    return {_seen_from_here(path): mark for path, mark in sorted(found.items())}


def _add_sources(module: ModuleType, found: dict[Path, str]) -> None:
    """Add a module's file and, in turn, those of what it imported from beside it."""
    path = Path(getattr(module, "__file__", None) or "").resolve()
    if path in found or path.suffix != ".py" or "site-packages" in path.parts:
        return
    found[path] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    for value in list(vars(module).values()):
        name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        other = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(other, "__file__", None)
        if other is not None and file and Path(file).resolve().is_relative_to(path.parent):
            _add_sources(other, found)


def _seen_from_here(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def line_of_users(raised: BaseException) -> str:
    """` (my_rewards.py, line 12, in brevity)`: where code of the user's raised an exception.

    The innermost line that is neither Grouper's nor of Python or an installed package, or else
    the innermost that is not Grouper's; empty where there is none.
    """
    frames = [(f.f_code, line) for f, line in traceback.walk_tb(raised.__traceback__)]
    others = [(c, line) for c, line in frames if not c.co_filename.startswith((_OURS, "<"))]
    theirs = [(c, line) for c, line in others if not c.co_filename.startswith(_INSTALLED)]
    if not others:
        return ""
    code, line = (theirs or others)[-1]
    return f" ({Path(code.co_filename).name}, line {line}, in {code.co_name})"


def _import(name: str) -> ModuleType:
    """A module, also of the working directory, which a console script does not search."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: what is installed wins
        importlib.invalidate_caches()
    return importlib.import_module(name)


class _NoFileError(Exception):
    pass


def _told(raised: BaseException) -> str:
    return str(raised) if isinstance(raised, ImportError) else f"{type(raised).__name__}: {raised}"


def _label(path: Path) -> str:
    """A stable name, so that a file that is named twice is loaded once, until it is edited."""
    return f"grouper_user_code.{path.resolve().as_posix().replace('/', '_').replace('.', '_')}"


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise _NoFileError
    label = _label(path)
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
