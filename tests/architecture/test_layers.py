"""Imports point downwards only, and what is light stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest
from codebase import TOP, belongs, layer_of, modules

HEAVY = ("torch", "transformers", "peft", "accelerate", "datasets", "pyarrow", "pandas")
"""What `grouper --help` and scoring a string cannot afford."""

NEVER = ("tensorflow", "tf_keras", "keras", "jax", "flax")

LAYER_2_MAY_IMPORT = {
    "__future__",
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "math",
    "numpy",
    "torch",
    "typing",
}

MACHINERY = (
    ("kernels",),
    ("models",),
    ("sampling",),
    ("evaluation",),
    ("runs",),
    ("training",),
    ("advice",),
    ("report",),
    ("publish",),
    ("api",),
    ("stages", "certificate"),
    ("cli", "__main__"),
)
"""The order within layer 3, lowest first: a room uses itself and the ones below."""


def level(inner: str) -> tuple[int, int]:
    layer = layer_of(inner)
    if layer < 3:
        return layer, 0
    levels = [number for number, rooms in enumerate(MACHINERY) if belongs(inner, rooms)]
    assert levels, f"{inner} has no place in MACHINERY: which room is it?"
    return layer, levels[0]


def test_imports_only_downwards() -> None:
    upwards = [
        f"{module.name}, line {i.line}: {target}"
        for module in modules()
        if module.inner  # the package file hands out public names lazily, from every layer
        for target, i in module.ours
        if level(target[len(TOP) + 1 :]) > level(module.inner)
    ]
    assert upwards == []


def test_layer_1_names_no_torch_anywhere() -> None:
    """Not even inside functions; a tokenizer is passed in by whoever has one."""
    heavy = [
        f"{module.name}, line {i.line}: {i.target}"
        for module in modules()
        if module.layer == 1
        for i in module.imports
        if i.target.split(".")[0] in ("torch", "transformers")
    ]
    assert heavy == []


def test_layer_2_is_tensor_math() -> None:
    """No I/O, configuration, logging or devices."""
    others = [
        f"{module.name}, line {i.line}: {i.target}"
        for module in modules()
        if module.layer == 2
        for i in module.imports
        if i.target.split(".")[0] not in LAYER_2_MAY_IMPORT and not _vocabulary(i.target)
    ]
    assert others == []


def _vocabulary(target: str) -> bool:
    inner = target.removeprefix(f"{TOP}.")
    return target != inner and (belongs(inner, ("types", "errors")) or layer_of(inner) == 2)


def test_importing_layer_1_loads_nothing_heavy() -> None:
    names = [m.name for m in modules() if m.layer == 1]
    # The symbolic rung imports sympy; it runs in worker processes only, and torch-free as well.
    assert "grouper.grading.symbolic" in names
    assert _loaded_by(names, HEAVY) == ""


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    names = [m.name for m in modules() if belongs(m.inner, ("cli",))]
    assert _loaded_by(names, (*HEAVY, "matplotlib", "sympy")) == ""


@pytest.mark.slow  # 5 s
def test_importing_everything_loads_no_other_framework() -> None:
    names = [m.name for m in modules()]
    assert _loaded_by(names, NEVER) == ""


def _loaded_by(names: list[str], unwanted: tuple[str, ...]) -> str:
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = sorted(set(sys.modules) & set({unwanted!r}))\n"
        "    if found:\n"
        "        print(f'{name} loads {found}')\n"
        "        break\n"
    )
    # Libraries warn on stderr, as a build of PyTorch for CUDA does where there is none.
    return subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
