"""With the kernels switched off everything that samples and trains passes the same tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.long  # 90 s
@pytest.mark.timeout(900)
def test_both_rooms_pass_in_plain_operations() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"),
            *("-m", "not slow", "-W", "ignore", str(TESTS / "sampling"), str(TESTS / "training")),
        ],
        env={**os.environ, "GROUPER_KERNELS": "0"},
        cwd=TESTS.parent,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "[100%]" in done.stdout
