"""Libraries that only some settings need: asked for by name before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from grouper.errors import ConfigError


def require_extra(package: str, extra: str, *, where: str, instead: str = "") -> None:
    """Make sure that `package` can be imported.

    Args:
        package: the name it is imported by.
        extra: the optional dependencies of Grouper that it comes with.
        where: the setting that needs it.
        instead: the nearest setting that does without.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec(package) is None:
        raise ConfigError(
            f"this needs the package {package}, which is not installed",
            where=where,
            fix=f'Install it with: pip install "grouper-rl[{extra}]"'
            + (f", or set {instead}." if instead else ""),
        )
