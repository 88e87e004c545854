"""The templates of pages: the report's, and those of other packages that share its style."""

from __future__ import annotations

from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup

from grouper.printable import printable


def templates(*packages: str) -> Environment:
    """Return the environment of templates: those of the packages, then the report's.

    What is put into a template is text: HTML and control characters in it are escaped.
    """
    loaders = [PackageLoader(package) for package in (*packages, "grouper.report")]
    return Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _escaped(value: Any) -> Any:
    """Escape control characters of a text that is not HTML already."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value
