"""The command line, as in tests/cli."""

from cli.conftest import extras, grouper, small

__all__ = ["extras", "grouper", "small"]
