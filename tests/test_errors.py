"""A missing library is told by the setting that needs it and the extra that brings it."""

from __future__ import annotations

import pytest

from grouper.errors import ConfigError, require_extra


def test_what_is_installed_passes() -> None:
    require_extra("json", "anything", where="here")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        require_extra("no_such_package", "quantized", where="model.quantization")
    assert caught.value.where == "model.quantization"
    assert "no_such_package" in caught.value.what
    assert 'pip install "grouper-rl[quantized]"' in caught.value.fix


def test_what_does_without_is_named() -> None:
    with pytest.raises(ConfigError, match=r'quantized\]", or set sft.optimizer.name=adamw\.'):
        require_extra(
            "no_such_package",
            "quantized",
            where="sft.optimizer.name",
            instead="sft.optimizer.name=adamw",
        )
