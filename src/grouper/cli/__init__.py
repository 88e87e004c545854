"""The command line. Commands are loaded only when they are called: `--help` answers at once."""

import sys

if sys.platform == "win32":
    raise SystemExit("error: Grouper runs on Linux and macOS. On Windows, use it inside WSL.")

try:
    from grouper.cli.main import main
except KeyboardInterrupt:  # `main`, which says so, is not there yet
    raise SystemExit(130) from None

__all__ = ["main"]
