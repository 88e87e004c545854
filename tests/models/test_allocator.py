"""Expandable segments unless the user has set the allocator up, and never by an import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grouper.models.allocator import prefer_expandable_segments


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_set_stays(name: str) -> None:
    environment = {name: "max_split_size_mb:64"}
    prefer_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:64"}


def test_importing_sets_nothing_and_the_command_line_does() -> None:
    program = (
        "import os, grouper, grouper.models.allocator, grouper.cli\n"
        "assert 'PYTORCH_ALLOC_CONF' not in os.environ\n"
        "try:\n"
        "    grouper.cli.main(['--version'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert os.environ['PYTORCH_ALLOC_CONF'] == 'expandable_segments:True'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=_without_settings(),
    )
    assert done.returncode == 0, done.stderr


def _without_settings() -> dict[str, str]:
    import os

    return {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k}


def test_train_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything else: it fails here for want of a session, with the setting made."""
    import os

    from grouper.training.pipeline import train

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AttributeError):
        train(None)  # type: ignore[arg-type]  # it ends at its first look
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
