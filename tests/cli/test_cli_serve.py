"""`grouper serve`: what would be started, and for whom."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from types import SimpleNamespace

import pytest

from grouper.models.folders import EXPORT_FILE


def test_what_would_be_served(grouper, exported, finished_run, monkeypatch):
    called = grouper("serve", exported, "--engine", "transformers", "--dry-run", "--port", "8123")
    assert called.code == 0, called.err
    command, request = called.out.splitlines()
    assert str(exported) in shlex.split(command)
    assert "http://127.0.0.1:8123/v1/chat/completions" in request
    body = json.loads(shlex.split(request)[-1])
    record = json.loads((exported / EXPORT_FILE).read_text())
    assert body["max_tokens"] == record["sampling"]["max_new_tokens"]
    # A run is exported first: the command for that is printed, and no weights are loaded.
    monkeypatch.setattr("grouper.publish.export.export_model", lambda *_: pytest.fail("loaded"))
    called = grouper("serve", finished_run, "--engine", "transformers", "--dry-run")
    assert called.code == 0, called.err
    export, command, asked = called.out.splitlines()
    model = str(finished_run / "grpo" / "final")
    assert shlex.split(export) == ["grouper", "export", model, "demo-export"]
    assert "demo-export" in shlex.split(command)
    own = {**body, "model": "demo-export"}
    assert json.loads(shlex.split(asked)[-1]) == own


def test_a_server_without_tools_is_said_to_have_none(grouper, exported, tmp_path):
    shutil.copytree(exported, tmp_path / "caller")
    file = tmp_path / "caller" / EXPORT_FILE
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "prompt": {**record["prompt"], "tools": True}}))
    for model, said in ((tmp_path / "caller", True), (exported, False)):
        called = grouper("serve", model, "--engine", "transformers", "--dry-run")
        assert called.code == 0, called.err
        assert ("this server runs none" in called.err) == said


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "gpu-7"])
def test_other_machines_are_admitted_with_a_key(grouper, exported, monkeypatch, host):
    """Anyone who reached the port could use the model."""
    started = []

    def run(words, *, check, env):
        started.append((words, env.get("VLLM_API_KEY")))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("grouper.cli.serve.find_spec", lambda name: name)
    monkeypatch.setattr("grouper.cli.serve.subprocess", SimpleNamespace(run=run))
    monkeypatch.delenv("GROUPER_API_KEY", raising=False)
    asked = ("serve", exported, "--host", host)
    grouper(*asked).refused("--host", host, "without a key", "GROUPER_API_KEY")
    grouper(*asked, "--engine", "transformers").refused("transformers supports no keys")
    assert grouper(*asked, "--unprotected").code == 0
    monkeypatch.setenv("GROUPER_API_KEY", "abcdef-0123456789")
    called = grouper(*asked)
    assert called.code == 0, called.err
    assert '-H "Authorization: Bearer $GROUPER_API_KEY"' in called.out
    grouper(*asked, "--engine", "transformers").refused("transformers supports no keys")
    assert [key for _, key in started] == [None, "abcdef-0123456789"]
    assert "abcdef" not in called.out + called.err + str(started[-1][0])
    for here in ("127.0.0.1", "localhost", "::1"):
        monkeypatch.delenv("GROUPER_API_KEY", raising=False)
        assert grouper("serve", exported, "--host", here, "--dry-run").code == 0


def test_a_model_of_unknown_origin_is_served(grouper, finished_run, tmp_path):
    shutil.copytree(finished_run / "base", tmp_path / "strange")
    called = grouper("serve", tmp_path / "strange", "--engine", "vllm", "--dry-run")
    assert called.code == 0, called.err
    assert '"messages"' in called.out
    assert '"max_tokens"' not in called.out


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_what_is_not_there_is_not_served(grouper, tmp_path, monkeypatch, command):
    """`serve nowhere` printed a command, and `chat` asked for a prompt format."""
    monkeypatch.chdir(tmp_path)
    more = ("--engine", "vllm", "--dry-run") if command == "serve" else ()
    grouper(command, "nowhere", *more).refused("there is no folder 'nowhere' here")


def test_a_program_that_is_not_installed(grouper, exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("grouper.cli.serve.find_spec", lambda name: None)
    grouper("serve", exported, "--engine", "vllm").refused("vllm is not installed", "pip install")
    called = grouper("serve", exported, "--engine", "transformers")
    called.refused("uvicorn is not installed", "transformers[serving]")
