"""What a recipe's defaults become where this machine lacks a library that they need.

Only defaults: what the user asked for himself is refused where it cannot be had. The result is a
list of overrides, so that the resolved recipe shows what was run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

from grouper.config.loading import is_shipped
from grouper.config.schema import Recipe


def fallbacks(name: str, recipe: Recipe, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """(override, warning) for each default that cannot be had here.

    Args:
        name: of the recipe, as typed.
        recipe: what it and `overrides` give.
        overrides: `section.key=value`.
    """
    return [*_optimizers(name, recipe, overrides), *_symbolic(recipe)]


def _optimizers(name: str, recipe: Recipe, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """8-bit AdamW of a shipped recipe is plain AdamW without bitsandbytes."""
    if not is_shipped(name) or find_spec("bitsandbytes") is not None:
        return []
    keys = {override.partition("=")[0].strip() for override in overrides}
    found = []
    for phase in ("sft", "grpo"):
        theirs = {phase, f"{phase}.optimizer", f"{phase}.optimizer.name"} & keys
        skipped = getattr(recipe, f"skip_{phase}")
        if getattr(recipe, phase).optimizer.name != "adamw_8bit" or theirs or skipped:
            continue
        key = f"{phase}.optimizer.name"
        warning = (
            f"bitsandbytes is not installed: {key} is adamw instead of adamw_8bit, the same update "
            "with more memory."
        )
        found.append((f"{key}=adamw", warning))
    return found


def _symbolic(recipe: Recipe) -> list[tuple[str, str]]:
    """Without a working Math-Verify answers are compared as text and numbers."""
    if "symbolic" in recipe.grading.model_fields_set:
        return []
    problem = _symbolic_problem()
    if problem is None:
        return []
    warning = (
        f"Math-Verify does not work here ({problem}): grading.symbolic is off, and answers are "
        "compared by text and exact numbers only. 2\\sqrt{3} is then correct only as the reference "
        "writes it. Remedy: `pip install 'math-verify[antlr4_13_2]'`."
    )
    return [("grading.symbolic=false", warning)]


@cache
def _symbolic_problem() -> str | None:
    """Why the symbolic stage cannot be imported, tried in a process of its own; None: it can."""
    done = subprocess.run(
        [sys.executable, "-c", "import grouper.grading.symbolic"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
