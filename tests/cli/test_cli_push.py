"""`grouper push`: token, privacy and branch."""

from __future__ import annotations

import pytest


def test_a_push_without_a_token(grouper, exported, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    grouper("push", exported, "me/model").refused("there is no token for the Hub", "hf auth login")


@pytest.mark.parametrize(
    ("flags", "private"), [((), True), (("--private",), True), (("--public",), False)]
)
def test_what_is_pushed_is_private_unless_asked_otherwise(
    grouper, tmp_path, monkeypatch, flags, private
):
    pushed = []

    def push(model, repo, **how):
        pushed.append((model, repo, how))
        return "https://the.hub/me/model"

    monkeypatch.setattr("grouper.publish.hub.export_and_push", push)
    (tmp_path / "config.json").touch()
    called = grouper("push", tmp_path, "me/model", "--revision", "v1", *flags)
    assert called.code == 0, called.err
    assert called.out == f"{tmp_path} -> https://the.hub/me/model\n"
    how = {"private": private, "revision": "v1", "adapter": False, "license_id": None}
    assert pushed == [(str(tmp_path), "me/model", how)]
