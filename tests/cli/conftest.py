"""The command line called in this process, and one small finished run to measure and ask."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from grouper.cli import main

SMALL = (
    "sft.steps=2",
    "grpo.steps=2",
    "grpo.prompts_per_step=4",
    "grpo.allow_truncation=true",
    "data.sft.options.count=60",
    "data.train.options.count=60",
    "data.validation.options.count=4",
    "data.test.options.count=8",
    "model.new.hidden_size=64",
    "model.new.intermediate_size=128",
)
"""Makes the demonstration a matter of seconds; it learns nothing."""


@dataclass(frozen=True)
class Called:
    code: int
    out: str
    err: str

    def refused(self, *texts: str) -> None:
        """One paragraph a problem, exit code 2, no traceback, and all of `texts` in it."""
        assert self.code == 2, self
        assert "Traceback" not in self.err
        paragraphs = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(paragraphs) >= 1, self.err
        for text in texts:
            assert text in self.err, self.err


Grouper = Callable[..., Called]


def call(*arguments: str | Path, stdin: str = "") -> Called:
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO(stdin)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            main([str(argument) for argument in arguments])
    finally:
        sys.stdin = before
    return Called(int(end.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture
def grouper() -> Grouper:
    return call


@pytest.fixture
def extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes packages of the extras for installed: settings are read, nothing is run."""
    monkeypatch.setattr("grouper.errors.find_spec", lambda name: name)


@pytest.fixture
def small() -> tuple[str, ...]:
    return SMALL


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two SFT and two GRPO steps with its pictures. Tests write nothing into it."""
    from grouper.report.page import draw_pictures

    outputs = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grouper.api.draw_pictures", draw_pictures)
        called = call("run", "demo", *SMALL, f"output_dir={outputs}", "--quiet")
    assert called.code == 0, called.err
    return outputs / "demo"


@pytest.fixture(scope="session")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `grouper export` makes of it. Tests write nothing into it."""
    target = tmp_path_factory.mktemp("export") / "model"
    called = call("export", finished_run, target, "--license", "mit")
    assert called.code == 0, called.err
    assert "Checked: log-probs differ by at most" in called.out
    return target
