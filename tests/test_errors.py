"""A missing library is told by the setting that needs it and the extra that brings it."""

from __future__ import annotations

import pytest
import torch

from grouper import errors
from grouper.errors import (
    ConfigError,
    first_line,
    is_out_of_memory,
    require_extra,
    require_vllm,
)


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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_what_a_library_says_over_several_lines_is_one_paragraph_and_paths_stay() -> None:
    error = errors.GrouperError("'./a  b' cannot be read:\n\n  its header\nis cut off")
    assert str(error) == "'./a  b' cannot be read: its header is cut off."


def test_an_exception_is_told_in_one_line() -> None:
    assert first_line(RuntimeError("one\ntwo")) == "one"
    assert first_line(MemoryError()) == "MemoryError"


def test_a_version_of_vllm_that_is_not_supported_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "version", lambda name: "0.19.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.19\.1 is installed, and Grouper works with 0"):
        require_vllm()
    for accepted in ("0.32.7", "0.33.0"):
        monkeypatch.setattr(errors, "version", lambda name, accepted=accepted: accepted)
        assert require_vllm() == accepted
    # 0.3 and 0.330 begin alike, and are other versions.
    for other in ("0.3.3", "0.330.0", "0.34.0"):
        monkeypatch.setattr(errors, "version", lambda name, other=other: other)
        with pytest.raises(ConfigError, match=r"works with 0\.32 and 0\.33"):
            require_vllm()

    def missing(name: str) -> str:
        raise errors.PackageNotFoundError(name)

    monkeypatch.setattr(errors, "version", missing)
    with pytest.raises(ConfigError, match="not installed"):
        require_vllm()
