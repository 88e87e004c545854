"""Grouper trains small language models to solve math problems, and says honestly how well.

    import grouper

    run = grouper.load_recipe("demo").override("grpo.steps=20", name="short")
    setup = grouper.prepare(run)
    print(setup)
    result = grouper.train(setup)

Names are imported when they are first used: `import grouper` loads no torch. `__init__.pyi` lists
them.
"""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path
from typing import Any

# Libraries that are imported later look for TensorFlow unless these are set: seconds, and memory on
# the GPU. Whatever the user has set stays.
os.environ.setdefault("TRANSFORMERS_NO_TF", "1")
os.environ.setdefault("TRANSFORMERS_NO_TENSORFLOW", "1")
os.environ.setdefault("USE_TF", "0")

_NAMES = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOME_OF: dict[str, str | None] = {}
for _node in _NAMES.body:
    if isinstance(_node, ast.ImportFrom):
        _HOME_OF |= {_alias.name: _node.module for _alias in _node.names}

__all__ = ["__version__"]
__all__ += list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("grouper-rl")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'grouper' has no attribute {name!r}")
    value = getattr(importlib.import_module(str(_HOME_OF[name])), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
