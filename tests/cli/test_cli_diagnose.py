"""`grouper diagnose`: a run that is damaged or has not begun."""

from __future__ import annotations

import json
import os
import platform

import pytest
from drawn_runs import make_run, new_run

from grouper.runs.lock import LOCK_FILE


def test_a_damaged_file_of_rollouts_leaves_the_rest_of_a_diagnosis(grouper, tmp_path):
    run = make_run(tmp_path / "demo")
    whole = grouper("diagnose", run.path)
    (run.path / "rollouts" / "grpo-000002.jsonl.gz").write_bytes(b"no gzip")
    called = grouper("diagnose", run.path)
    assert (called.code, called.out) == (whole.code, whole.out)
    assert "warning: left out: " in called.err
    assert "grpo-000002.jsonl.gz: the file cannot be read" in called.err


@pytest.mark.parametrize("running", [True, False])
def test_a_run_without_a_step_has_nothing_to_diagnose(grouper, tmp_path, running):
    new_run(tmp_path / "demo")
    (tmp_path / "demo" / LOCK_FILE).write_text(
        json.dumps({"pid": os.getppid() if running else 2**22 + 1, "host": platform.node()})
    )
    told = "try again after its first step" if running else "Continue it with --resume"
    grouper("diagnose", tmp_path / "demo").refused("nothing to diagnose", told)
