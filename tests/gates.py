"""What some tests need that a user's machine may lack: shared data, and packages of the extras.

There they skip, with a reason that pytest counts and prints. Where GROUPER_GATES=1 is set (CI sets
it) nothing may be missing: a gate that cannot run is a failure.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def missing(reason: str) -> NoReturn:
    """Skip the test or module, or fail where gates must hold."""
    if os.environ.get("GROUPER_GATES") == "1":
        pytest.fail(f"GROUPER_GATES=1, and {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def shared(*parts: str) -> Path:
    """A file or folder of the problem sets that lie beside the checkout."""
    path = SHARED_DATA.joinpath(*parts)
    if not path.exists():
        missing(f"the shared problem sets are not beside this checkout ({path.name} is missing)")
    return path


def package(name: str, *, extra: str) -> Any:
    """The module of that name, which comes with an extra of Grouper."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        module = None
    # A folder of tests of that name (tests/kernels/triton) can be imported, and is no package.
    is_folder = hasattr(module, "__path__") and getattr(module, "__file__", None) is None
    if module is None or is_folder:
        missing(f"{name} is not installed (pip install -e '.[{extra}]')")
    return module
