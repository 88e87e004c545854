"""The table of sources that generate their problems instead of reading them.

A new one is a row here and a row in `sources.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from grouper.data.arithmetic import arithmetic_options
from grouper.data.arithmetic import generate as generate_arithmetic
from grouper.data.calculation import calculation_options
from grouper.data.calculation import generate as generate_calculation
from grouper.data.stories import generate as generate_stories
from grouper.data.stories import stories_options
from grouper.types import Problem


class GeneratedSource(NamedTuple):
    """The functions of a source that read its options and generate problems from them."""

    read_options: Callable[..., Any]
    """`(options, *, where)` -> checked options. Raises `ConfigError`."""
    generate: Callable[..., tuple[Problem, ...]]
    """`(checked options, *, split, seed)` -> problems, a function of its arguments alone."""


GENERATED = {
    "arithmetic": GeneratedSource(arithmetic_options, generate_arithmetic),
    "calculation": GeneratedSource(calculation_options, generate_calculation),
    "stories": GeneratedSource(stories_options, generate_stories),
}
