"""A user's own code: found by its name, identified by its contents, its errors described."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from grouper.errors import ConfigError, GrouperError, did_you_mean

logger = logging.getLogger(__name__)

_GROUPER_FOLDER = f"{Path(__file__).parents[1]}/"
_INSTALL_FOLDERS = tuple(
    sysconfig.get_path(scheme) for scheme in ("stdlib", "platstdlib", "purelib", "platlib")
)


def load_user_object(
    full_name: str, *, kind: str, where: str, error: type[GrouperError], known: Iterable[str] = ()
) -> Any:
    """Load the callable that the user named.

    Args:
        full_name: `path/to/file.py:name` or `package.module:name`.
        kind: its role (`reward`, `tracker`), for messages.
        where: the recipe key, for messages.
        error: the class of error to raise.
        known: names of Grouper's own, one of which may be meant.

    Raises:
        GrouperError: of class `error`: no such file, module or name, or loading it failed.
    """
    place, _, name = full_name.rpartition(":")
    is_file = place.endswith(".py")
    if not place:
        suggestion = did_you_mean(full_name, known)
        advice = "Your own function is named `path/to/file.py:function`."
        raise error(
            f"there is no {kind} {full_name!r}",
            where=where,
            fix=f"{suggestion} {advice}".lstrip(),
        )
    if is_file and not Path(place).is_file():
        raise error(
            f"there is no file {place}",
            where=where,
            fix=f"The {kind} {full_name!r} is looked for from {Path.cwd()}.",
        )
    try:
        module = _module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # a user's module may raise anything; it is reported as theirs
        reason = describe_exception(raised)
        if is_file:
            message = f"{place} cannot be loaded: {reason}"
            fix = ""
        else:
            if isinstance(raised, ImportError):
                reason = str(raised)
            message = f"the module {place} of a {kind} cannot be imported: {reason}"
            fix = f"Install it, or name a file: `path/to/file.py:{name}`."
        raise error(message, where=where, fix=fix) from raised
    function = getattr(module, name, None)
    if not callable(function):
        public_names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        fix = did_you_mean(name, public_names)
        raise error(f"{place} has no function {name!r}", where=where, fix=fix)
    return function


def _module(place: str) -> ModuleType:
    """Load a file as a module, again once it is edited; or import a module by its name.

    Modules are looked for in the working directory as well, which a console script does not search.
    """
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        # At the end of the path, so that an installed module of the same name wins.
        sys.path.append(working_directory)
        importlib.invalidate_caches()
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    stat = Path(place).stat()
    label = re.sub(r"\W", "_", f"grouper {path.as_posix()} {stat.st_mtime_ns} {stat.st_size}")
    if label in sys.modules:
        return sys.modules[label]
    spec = importlib.util.spec_from_file_location(label, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[label] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # a half-loaded module is forgotten, whatever stopped it
        del sys.modules[label]
        raise
    return module


def load_hook(full_name: str) -> Callable[[Any], Any]:
    """Load the user's function that is called with the report of each step.

    Raises:
        ConfigError: there is none of that name, or it cannot be called with one argument.
    """
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
    """Hash the source files that the named objects run: file -> hash.

    The files are the module of each name and the modules it imports from its own folder or below;
    installed packages have versions instead.

    Args:
        full_names: as `load_user_object` takes them; one without a colon is built in, and one
            that cannot be loaded has none.
    """
    hashes: dict[Path, str] = {}
    for name in full_names:
        if ":" not in name:
            continue
        try:
            load_user_object(name, kind="", where="", error=GrouperError)
        except GrouperError:
            continue  # refused with its own message where it is built
        place, _, _ = name.rpartition(":")
        _add_sources(_module(place), hashes)

    working_directory = Path.cwd()
    fingerprints = {}
    for path, digest in sorted(hashes.items()):
        shown_path = path
        if path.is_relative_to(working_directory):
            shown_path = path.relative_to(working_directory)
        fingerprints[str(shown_path)] = digest
    return fingerprints


def _add_sources(module: ModuleType, hashes: dict[Path, str]) -> None:
    """Add a module's file and, in turn, those of the modules in its folder that it imported."""
    path = Path(getattr(module, "__file__", None) or "").resolve()
    if path in hashes or path.suffix != ".py" or "site-packages" in path.parts:
        return
    source = path.read_bytes()
    hashes[path] = hashlib.sha256(source).hexdigest()[:16]
    for name in _imported_names(source, module.__package__ or ""):
        imported = sys.modules.get(name)
        file = getattr(imported, "__file__", None)
        if imported is None or not file:
            continue
        if Path(file).resolve().is_relative_to(path.parent):
            _add_sources(imported, hashes)


def _imported_names(source: bytes, package: str) -> Iterator[str]:
    """Yield the names of the modules that a source file imports, and of what may be one.

    They are read from its text: a constant that was imported does not know where it came from.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield name
            # `from package import module`
            yield from (f"{name}.{alias.name}" for alias in node.names)


def describe_exception(raised: BaseException) -> str:
    """Describe an exception of a user's code and where it was raised.

    For example `ValueError: no unit (my_rewards.py, line 12, in brevity)`. The line is the
    innermost that is neither Grouper's nor of Python or an installed package, or else the
    innermost that is not Grouper's; it is left out if there is none.
    """
    description = f"{type(raised).__name__}: {_text(raised, str)}"
    foreign_lines = []  # outside Grouper
    user_lines = []  # outside installed packages as well
    for frame, line in traceback.walk_tb(raised.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith((_GROUPER_FOLDER, "<")):
            continue
        foreign_lines.append((code, line))
        if not code.co_filename.startswith(_INSTALL_FOLDERS):
            user_lines.append((code, line))
    if not foreign_lines:
        return description
    code, line = (user_lines or foreign_lines)[-1]
    return f"{description} ({Path(code.co_filename).name}, line {line}, in {code.co_name})"


def shown(value: Any) -> str:
    """Return a value as text of at most 120 characters."""
    text = _text(value, repr)
    return text if len(text) <= 120 else text[:117] + "..."


def _text(value: Any, to_text: Callable[[Any], str]) -> str:
    try:
        return to_text(value)
    except Exception:  # noqa: BLE001 - an integer of more than 4,300 digits, or a user's own class
        return f"<{type(value).__name__} that cannot be shown>"
