"""Exporting: the merged model is the model, or it is not written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from grouper.errors import ModelError
from grouper.models import export
from grouper.models.export import export_model
from grouper.models.policy import Policy


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tied-head model with a tokenizer."""
    from tokenizers import Tokenizer, models

    folder = tmp_path / "base"
    tiny_model("qwen3", scale=1.0).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[5, 6, 7, 8]])).logits
    return found


def test_a_merged_export_gives_the_adapters_logits(
    base: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = export_model(str(adapter), tmp_path / "out")
    loud = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not loud, "nobody has set a rank here (U17)"
    assert done.gap < 1e-4
    assert done.same_choice == 1.0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(base)
    side_by_side = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(logits(exported), logits(side_by_side), rtol=0, atol=1e-4)
    assert not torch.allclose(logits(exported), logits(plain), atol=1e-2)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 97


def test_a_whole_model_can_be_exported_in_bfloat16(base: Path, tmp_path: Path) -> None:
    done = export_model(str(base), tmp_path / "out", dtype="bfloat16")
    assert 0 < done.gap < 0.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16


def test_an_export_that_disagrees_is_not_left_behind(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = export.save_policy

    def forgetful(policy: Policy, *others: Any) -> None:
        with torch.no_grad():
            next(policy.model.parameters()).mul_(1.5)
        honest(policy, *others)

    monkeypatch.setattr(export, "save_policy", forgetful)
    with pytest.raises(ModelError, match="disagrees"):
        export_model(str(adapter), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exists already"):
        export_model(str(base), base)
    with pytest.raises(ModelError, match="no folder"):
        export_model(str(tmp_path / "nothing"), tmp_path / "out")
