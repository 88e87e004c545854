"""GGUF files of an export: read back and compared, or not left behind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from gates import package

from grouper.errors import ModelError
from grouper.models.gguf import read_header
from grouper.publish.export import export_model
from grouper.publish.to_gguf import SCRIPT, find_converter, write_gguf

package("gguf", extra="gguf")

CONVERTER = [sys.executable, str(Path(__file__).with_name("fake_converter.py"))]


@pytest.fixture(scope="session")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with weights large enough that a fault in one of them shows."""
    target = tmp_path_factory.mktemp("export") / "demo-model"
    export_model(str(finished_run / "grpo" / "final"), target)
    return target


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "demo-model"))


@pytest.mark.parametrize("outtype", ["f32", pytest.param("f16", marks=pytest.mark.slow), "q8_0"])
def test_a_file_is_read_back_and_agrees(folder: Path, outtype: str) -> None:
    converted = write_gguf(folder, outtype, CONVERTER)
    assert converted.file == folder / f"demo-model-{outtype}.gguf"
    header = read_header(converted.file)
    assert converted.tensors == len(header.tensors)
    assert header.metadata["general.architecture"] == "qwen3"
    assert converted.gap is not None
    assert converted.gap < (1e-3 if outtype == "f32" else 0.2)
    assert converted.texts == 2
    if outtype == "f32":
        # Exact weights give the export's greedy answers token by token.
        assert converted.same_texts == 2
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("unknown", "BPE pre-tokenizer was not recognized"),
        ("missing", "lacks model.layers.0.mlp.up_proj.weight"),
        ("other", "blk.0.ffn_down.weight differs from"),
        ("swapped", "log-probs differ by"),
    ],
)
def test_a_file_that_disagrees_is_not_left_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    before = {file.name for file in folder.iterdir()}
    monkeypatch.setenv("GROUPER_FAKE_FAULT", fault)
    monkeypatch.setattr("grouper.publish.to_gguf.BOUNDS", {"f32": (1e-6, 1e-4)})
    with pytest.raises(ModelError, match=words):
        write_gguf(folder, "f32", CONVERTER)
    assert {file.name for file in folder.iterdir()} == before


def test_the_converter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "llama.cpp" / SCRIPT
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert find_converter(script) == find_converter(script.parent) == [sys.executable, str(script)]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"not on the PATH.*--converter.*git clone"):
        find_converter(None)
    with pytest.raises(ModelError, match="there is no"):
        find_converter(tmp_path)
    monkeypatch.setenv("PATH", str(script.parent))
    assert find_converter(None) == [str(script)]


def test_continuations_are_as_long_as_they_are_said_to_be(exported: Path) -> None:
    from grouper.publish import to_gguf

    policy = to_gguf.load_for_probe(str(exported))
    (ids,) = to_gguf._continuations(policy, [[5, 6, 7]])
    assert len(ids) == to_gguf._CONTINUATION
    with torch.no_grad():
        first = policy.model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax()
    assert ids[0] == first
