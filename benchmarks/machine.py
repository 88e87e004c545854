"""What a result was measured on: processor, versions and commit."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkout import ROOT

__all__ = ["machine", "where"]


def machine() -> dict[str, Any]:
    """Name the commit of this checkout, the processor, and the versions that figures depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "src"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "commit": commit + (" with changes" if dirty else ""),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def where(**more: str) -> dict[str, Any]:
    """Name the machine, and the versions of transformers and of what else took part."""
    return {**machine(), "transformers": version("transformers"), **more}
