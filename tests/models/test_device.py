"""The device that a recipe names."""

from __future__ import annotations

import pytest
import torch

from grouper.errors import ConfigError
from grouper.models.device import find_device


def test_the_cpu_is_always_there() -> None:
    assert find_device("cpu") == torch.device("cpu")


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert find_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_device("auto") == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("cuda", torch.cuda.is_available()),
        ("mps", torch.backends.mps.is_available()),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, there: bool) -> None:
    if there:
        assert find_device(name).type == name
        return
    with pytest.raises(ConfigError, match=rf"device: .* finds no {name} device .* auto or cpu"):
        find_device(name)
