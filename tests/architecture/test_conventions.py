"""Nothing is hidden or put off, what is public is explained, and tests mirror the source."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from codebase import ROOT, SOURCE, TESTS, committed_files, modules
from packaging.requirements import Requirement

FOLDERS_OF_THEIR_OWN = (
    "architecture",
    "cli",
    "contracts",
    "end_to_end",
    "frozen",
    "golden",
    "invariants",
    "learning",
    "real",
    "recipes",
)
"""Tests of something larger than one source file."""

# Spelled in pieces, so that this file does not hold them itself.
INDEX_HOSTS = re.compile(
    "|".join(
        [
            r"py" + r"pi\.(org|python)",
            r"python" + r"hosted",
            r"download\.py" + r"torch",
            r"file:" + r"///",
            r"/opt/(py" + r"pi|wheels)",
            r"(index-url|find-links)[ =\"']+(https?|file)" + r":",
            r"anaconda\." + r"org",
        ]
    )
)

UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")

PYTHON_FILES = sorted([*SOURCE.rglob("*.py"), *TESTS.rglob("*.py")])


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_drawer_for_everything() -> None:
    drawers = {"utils", "util", "common", "helpers", "misc"}
    assert [short(p) for p in PYTHON_FILES if p.stem in drawers or p.parent.name in drawers] == []


def test_catching_everything_has_a_reason() -> None:
    """Expected failures are caught by name; a boundary that catches more says why beside it."""
    bare = [
        f"{module.name}, line {node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and _catches_everything(node)
        and len(_comment(module.text.splitlines()[node.lineno - 1]).split()) < 3
    ]
    assert bare == []


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(n, ast.Name) and n.id in ("Exception", "BaseException") for n in names)


def _comment(line: str) -> str:
    """What a line's comments say, without the codes of the tools."""
    _, _, comment = line.partition("#")
    return re.sub(r"noqa(: *[A-Z0-9, ]+)?|type: ignore(\[[^]]*\])?|[#-]", " ", comment)


def test_exceptions_from_the_rules_have_a_reason() -> None:
    silent = [
        f"{module.name}, line {number}"
        for module in modules()
        for number, line in enumerate(module.text.splitlines(), start=1)
        if re.search(r"#.*(noqa|type: ignore)", line) and len(_comment(line).split()) < 2
    ]
    assert silent == []


def test_a_reason_is_told_from_a_code() -> None:
    # Put together at run time, or ruff would read them as meant for this file.
    noqa, ignore = "# no" + "qa", "# type: ig" + "nore"
    assert _comment(f"x = 1  {noqa}: S506").split() == []
    assert _comment(f"x = 1  {ignore}[no-untyped-call]  # torch leaves it untyped").split() != []
    assert _comment(f"x = 1  {noqa}: S506 - a SafeLoader").split() == ["a", "SafeLoader"]


def test_nothing_is_put_off() -> None:
    texts = ((short(path), path.read_text(encoding="utf-8")) for path in PYTHON_FILES)
    assert [name for name, text in texts if UNFINISHED.search(text)] == []


def test_what_is_public_is_explained() -> None:
    """Modules, and what has a name without an underscore in front: a docstring each."""
    missing = [m.name for m in modules() if not ast.get_docstring(m.tree)]
    missing += [
        f"{module.name}.{node.name}"
        for module in modules()
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and "overload" not in map(ast.unparse, node.decorator_list)
    ]
    assert missing == []


def test_public_names_are_listed_once() -> None:
    """By having no underscore; `__all__` is for modules that pass on what others define."""
    needless = []
    for module in modules():
        defined = {
            name.id
            for node in module.tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        defined |= {
            n.name for n in module.tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)
        }
        listed = _listed(module.tree)
        if listed and listed <= defined:
            needless.append(module.name)
    assert needless == []


def _listed(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.dump(node.targets[0]) == ast.dump(
            ast.Name("__all__", ast.Store())
        ):
            return set(ast.literal_eval(node.value))
    return set()


def test_tests_mirror_the_source() -> None:
    strays = []
    for path in sorted(TESTS.rglob("test_*.py")):
        inner = path.relative_to(TESTS)
        if inner.parts[0] in FOLDERS_OF_THEIR_OWN:
            continue
        room = SOURCE / "grouper" / inner.parent
        subject = inner.stem.removeprefix("test_")
        # Pytest knows a file by its name alone: where two rooms have a module of one name, the test
        # has the name of its room before it. A long subject has several files, each with its part.
        subject = subject.removeprefix(f"{room.name}_")
        modules_of_room = [file.stem for file in room.iterdir() if file.stem != "__init__"]
        if not any(f"{subject}_".startswith(f"{module}_") for module in modules_of_room):
            strays.append(short(path))
    assert not strays, f"no source file is tested by {strays}"


def test_no_two_test_files_share_a_name() -> None:
    """Pytest imports them by name alone, and collects only the first one."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_package_index_is_named() -> None:
    """Where packages come from is the business of each machine's own settings."""
    named = {}
    for path in committed_files():
        try:
            found = INDEX_HOSTS.search(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # a picture
        if found:
            named[short(path)] = found[0]
    assert not named


def _pins(file: str) -> list[str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_constraints_pin_versions_and_nothing_else(file: str) -> None:
    pins = _pins(file)
    assert [p for p in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", p)] == []
    assert [p for p in pins if re.match(r"(?i)torch==|nvidia|triton", p)] == []


def test_the_oldest_versions_that_are_allowed_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    oldest = dict(pin.lower().split("==") for pin in _pins("constraints-oldest.txt"))
    for text in asked:
        match = re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", text)
        assert match is not None, text
        name, version = match[1].lower().replace("_", "-"), match[2]
        if name != "torch":  # which is chosen apart
            assert f"{oldest[name]}.".startswith(f"{version}."), text


# What PyTorch's builds for CUDA require.
TRITON_OF_TORCH = {"2.11": "3.6.0", "2.12": "3.7.0", "2.14": "3.8.0"}


def test_the_triton_of_every_supported_torch_is_allowed() -> None:
    """V6: an extra that contradicts torch cannot be installed beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["triton"]
    allowed = Requirement(wanted).specifier
    (torch,) = (Requirement(r) for r in project["dependencies"] if r.startswith("torch>"))
    assert min(TRITON_OF_TORCH) in torch.specifier
    assert [t for t in TRITON_OF_TORCH.values() if t not in allowed] == []


@pytest.mark.parametrize("name", ["loop", "sft", "grpo"])
def test_loops_call_verbs(name: str) -> None:
    """Which algorithm or device it is, is looked up in a table; never asked in a loop."""
    module = next(m for m in modules() if m.name == f"grouper.training.{name}")
    asked = [
        f"line {node.lineno}: {ast.unparse(node.test)}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If | ast.IfExp | ast.While) and _asks_for_a_name(node.test)
    ]
    assert not asked


def _asks_for_a_name(test: ast.expr) -> bool:
    """Whether a condition compares with a string, or asks about a device."""
    sides = [
        side
        for node in ast.walk(test)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
    ]
    words = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)}
    return any(map(_holds_a_string, sides)) or bool(words & {"device", "is_cuda", "is_available"})


def _holds_a_string(side: ast.expr) -> bool:
    parts = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
    return any(isinstance(p, ast.Constant) and isinstance(p.value, str) for p in parts)


@pytest.mark.parametrize(
    ("condition", "asks"),
    [
        ("config.advantage == 'mean'", True),
        ("name in ('a', 'b')", True),
        ("policy.device.type != kind", True),
        ("run.folder.read_evaluation('sft') is None", False),
        ("config.beta > 0", False),
    ],
)
def test_asking_for_a_name_is_seen(condition: str, asks: bool) -> None:
    assert _asks_for_a_name(ast.parse(condition, mode="eval").body) is asks
