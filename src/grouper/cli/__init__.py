"""The command line. Commands are loaded only when they are called: `--help` answers at once."""

from grouper.cli.main import main

__all__ = ["main"]
