"""`grouper certify`: a certificate of a run that was really trained, its page, and its check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grouper.errors import DataError
from grouper.runs.folder import RunFolder

pytestmark = pytest.mark.slow


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished_run, tmp_path / "demo")
    return tmp_path / "demo"


def statuses(file: Path) -> dict[str, str]:
    content = json.loads(file.read_text())
    return {item["name"]: item["status"] for item in content["items"]}


def test_a_run_is_certified_and_its_last_steps_are_trained_again(grouper, run):
    """Two steps teach nothing, so that there is no gain; everything else holds."""
    called = grouper("certify", run, "--replay", "--quiet")
    assert called.code == 1, called.err
    found = statuses(run / "certificate.json")
    assert {name for name, status in found.items() if status == "fail"} <= {
        "gain",
        "reasoning",
        "tokens",
    }
    assert found["replay"] == found["records"] == found["grades"] == found["leaks"] == "pass"
    page = (run / "certificate.html").read_text()
    assert "Certificate of demo" in page
    assert "Trained again, steps 1 to 2 of the last phase: the same weights, to the bit" in page
    assert "grouper certify --check certificate.json" in page
    assert [path.name for path in run.parent.iterdir()] == ["demo"], "nothing else is left"


def test_weights_that_the_recipe_does_not_give_are_found(grouper, run):
    """Another model lies where the run's should be, with a record that does not show it."""
    final = run / "grpo" / "final"
    file = final / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    called = grouper("certify", run, "--replay", "--quiet")
    assert called.code == 1
    assert statuses(run / "certificate.json")["replay"] == "fail"
    assert "grpo/final/model.safetensors" in called.out


def test_a_certificate_is_checked(grouper, run):
    file = run / "certificate.json"
    grouper("certify", run, "--quiet")
    checked = grouper("certify", "--check", file, "--quiet")
    assert checked.code == 0, checked.err
    assert "says what its runs show" in checked.out
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write("\n")
    changed = grouper("certify", "--check", file, "--quiet")
    assert changed.code == 1
    assert "metrics.jsonl has other content" in changed.out


def test_a_replay_that_fails_leaves_the_other_items(grouper, run, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise DataError("the data is gone", where="data.train", fix="Put it back.")

    monkeypatch.setattr("grouper.api.train", fail)
    grouper("certify", run, "--replay", "--quiet")
    content = json.loads((run / "certificate.json").read_text())
    (replay,) = [item for item in content["items"] if item["name"] == "replay"]
    assert replay["status"] == "missing"
    assert "cannot be trained: the data is gone" in replay["sentence"]
    assert [path.name for path in run.parent.iterdir()] == ["demo"]


def test_a_certificate_goes_with_its_run(grouper, run):
    """A new run in the folder has none, and its folder is nobody else's."""
    grouper("certify", run, "--quiet")
    grouper("probe", run, "--limit", 2, "--quiet")
    RunFolder(run).discard()
    assert not run.exists()


def test_mistakes_are_named(grouper, run, tmp_path):
    usage = {
        (): "name either the runs, or a certificate",
        (run, "--check", "x.json"): "name either the runs",
        ("--check", "x.json", "--replay"): "give it alone",
        (run, "--output", "x.html"): "is a .json file",
    }
    for words, problem in usage.items():
        called = grouper("certify", *words)
        assert called.code == 2
        assert problem in called.err
    grouper("certify", tmp_path / "nothing").refused("nothing")
    grouper("certify", run, "--control", run).refused("named twice")
