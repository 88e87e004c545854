"""A model that lies beside the work is found under its Hub name."""

from __future__ import annotations

from pathlib import Path

import pytest

from grouper.models.model_place import local_model

FOLDERS = ("models/Qwen2.5-0.5B", ".models/qwen/qwen2.5-math-1.5b", "models/empty")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
        if name != "models/empty":
            (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen2.5-0.5B", "./models/Qwen2.5-0.5B"),
        ("Qwen2.5-0.5B", "./models/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-Math-1.5B", "./.models/qwen/qwen2.5-math-1.5b"),
        ("Qwen2.5-Math-1.5B", "Qwen2.5-Math-1.5B"),
        ("somebody/empty", "somebody/empty"),
        ("./models/Qwen2.5-0.5B", "./models/Qwen2.5-0.5B"),
    ],
)
def test_a_local_folder_comes_first(here: Path, name: str, found: str) -> None:
    assert local_model(name, beside=here) == found
