"""`grouper env`: the facts about a machine."""

from __future__ import annotations

import json
import os
import platform
import re
from importlib.metadata import version
from types import SimpleNamespace

from grouper.files import processors
from grouper.programs.runner import available_isolation


def test_env_names_what_numbers_depend_on(grouper):
    facts = json.loads(grouper("env", "--json").out)
    assert list(facts) == ["versions", "devices", "extras", "kernels", "programs of a model"]
    assert facts["programs of a model"]["isolation"].startswith(available_isolation())
    assert facts["versions"]["torch"] == version("torch")
    assert facts["versions"]["grouper-rl"] == version("grouper-rl")
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["devices"]["system"] == platform.platform()
    assert {"wandb", "quantized"} <= facts["extras"].keys()
    assert re.fullmatch("accelerate .+, bitsandbytes .+", facts["extras"]["quantized"])
    assert "dev" not in facts["extras"]
    memory, unit = facts["devices"]["memory"].split()
    assert unit == "GiB"
    assert 0.5 < float(memory) < 50_000
    assert facts["devices"]["cpu"].startswith(f"{processors()} of {os.cpu_count()} processors, ")
    text = grouper("env").out
    assert text.startswith("Versions:\n")
    assert version("torch") in text


def test_env_names_every_device(grouper, monkeypatch):
    card = SimpleNamespace(name="Card", total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: card)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    devices = json.loads(grouper("env", "--json").out)["devices"]
    assert [devices["cuda:0"], devices["cuda:1"]] == ["Card, 80.0 GiB"] * 2
    assert "mps" in devices
