"""Reads the source tree as text and syntax trees; imports nothing of it."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"

TOP = "grouper"

LAYER_1 = (
    "types",
    "errors",
    "files",
    "futures",
    "printable",
    "tables",
    "config",
    "compat",
    "models.allocator",
    "models.folders",
    "data",
    "prompts",
    "programs",
    "grading",
    "rewards",
    "evaluation.statistics",
    "evaluation.result",
)
"""Vocabulary and pure logic: neither torch nor transformers."""

LAYER_2 = ("algorithms",)
"""Tensor math: torch only."""


@dataclass(frozen=True)
class Import:
    """One imported name, as `package.module` or `package.module.attribute`."""

    target: str
    line: int
    at_import_time: bool
    """False inside a function: it happens when that is called."""
    for_types_only: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def inner(self) -> str:
        """The name without `grouper.`: `algorithms.losses`; empty for the package itself."""
        return self.name[len(TOP) + 1 :]

    @property
    def layer(self) -> int:
        return layer_of(self.inner)

    @property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, in_function=False, for_types=False))

    @property
    def ours(self) -> list[tuple[str, Import]]:
        """(module of this package, the import) of every import from this package."""
        return [(owner(i.target), i) for i in self.imports if i.target.split(".")[0] == TOP]


def belongs(inner: str, parts: tuple[str, ...]) -> bool:
    return any(inner == part or inner.startswith(part + ".") for part in parts)


def layer_of(inner: str) -> int:
    """1, 2 or 3. The package's own docstring file is in layer 1: importing it loads nothing."""
    if inner == "" or belongs(inner, LAYER_1):
        return 1
    # Empty package files around modules of layers 1 and 3.
    if inner in ("evaluation", "models"):
        return 1
    return 2 if belongs(inner, LAYER_2) else 3


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted((SOURCE / TOP).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, path, text, ast.parse(text)))
    return tuple(found)


@cache
def module_names() -> frozenset[str]:
    return frozenset(module.name for module in modules())


def owner(target: str) -> str:
    """The module that holds an imported name.

    `grouper.types.Problem` is in `grouper.types`; `grouper.runs.records` is a module itself.
    """
    while target not in module_names():
        target, _, rest = target.rpartition(".")
        assert rest, "an import of a module that does not exist"
    return target


def _imports(node: ast.AST, *, in_function: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, not in_function, for_types)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                yield Import(
                    f"{child.module}.{alias.name}", child.lineno, not in_function, for_types
                )
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(
                child,
                in_function=in_function or function,
                for_types=for_types or _is_type_checking(child),
            )


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@cache
def committed_files() -> tuple[Path, ...]:
    """What git tracks; a tree without git (an unpacked archive) cannot be checked for it."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this tree is not a git checkout")
    paths = [ROOT / name for name in listing.split("\0") if name]
    return tuple(path for path in paths if path.is_file())
