"""Where things are kept that can be worked out again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`GROUPER_CACHE`, else the user's; it need not be there yet."""
    if own := os.environ.get("GROUPER_CACHE"):
        return Path(own).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "grouper"
