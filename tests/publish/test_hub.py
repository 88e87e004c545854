"""Pushing: the real client against a server on this machine that speaks the Hub's protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_hub import OWNER, PART, TOKEN, FakeHub, fake_hub
from huggingface_hub import constants
from safetensors.torch import save_file
from small_run import SMALL

import grouper
from grouper.errors import ModelError
from grouper.models.folders import EXPORT_FILE
from grouper.publish.hub import PushCheckpoints, _forget_folders, export_and_push, push
from grouper.runs.progress import Progress

REPO = f"{OWNER}/small"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As an export is: one file small enough for one upload, one that takes several parts."""
    place = tmp_path / "model"
    place.mkdir()
    (place / EXPORT_FILE).write_text('{"format": 1}')
    (place / "README.md").write_text("# small")
    save_file({"w": torch.arange(64.0)}, place / "model-00001-of-00002.safetensors")
    save_file({"v": torch.arange(PART * 1.0)}, place / "model-00002-of-00002.safetensors")
    return place


def test_a_pushed_folder_arrives_as_it_is(hub: FakeHub, folder: Path) -> None:
    address = push(folder, REPO)
    assert address.startswith(f"{hub.url}/{REPO}/commit/")
    files = hub.files(REPO)
    files.pop(".gitattributes")
    assert files == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert hub.repos[REPO].private
    assert any("/part/" in upload for upload in hub.uploads)
    assert any("/upload/" in upload for upload in hub.uploads)


def test_options_of_an_export_are_refused_for_one_that_is_there(folder: Path) -> None:
    for options in ({"adapter": True}, {"license_id": "mit"}):
        with pytest.raises(ModelError, match="has been exported already"):
            export_and_push(str(folder), REPO, **options)


def test_public_only_where_it_is_asked_for(hub: FakeHub, folder: Path) -> None:
    push(folder, REPO, private=False)
    assert not hub.repos[REPO].private


def test_a_name_alone_is_in_the_owners_namespace(hub: FakeHub, folder: Path) -> None:
    push(folder, "small")
    assert [*hub.repos] == [REPO]


def test_a_push_that_was_cut_off_sends_only_what_is_missing(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client waits longer before each of its attempts, 23 seconds in all.
    patient = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", patient)
    hub.cut_after = 2
    with pytest.raises(ModelError, match=r"cannot be reached.*push again"):
        push(folder, REPO)
    assert "README.md" not in hub.files(REPO)
    hub.cut_after = None
    arrived = set(hub.objects)
    hub.uploads.clear()
    push(folder, REPO)
    assert not [u for u in hub.uploads if u.removeprefix("/upload/") in arrived]
    assert len(hub.files(REPO)) == 5


@pytest.mark.slow
def test_shards_of_an_earlier_push_are_gone(hub: FakeHub, folder: Path) -> None:
    push(folder, REPO)
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").rename(folder / "model.safetensors")
    push(folder, REPO)
    assert {*hub.files(REPO)} == {".gitattributes", EXPORT_FILE, "README.md", "model.safetensors"}


def test_a_revision_is_a_branch_and_a_tag_a_commit(hub: FakeHub, folder: Path) -> None:
    push(folder, REPO, revision="try", tag="grpo-000020")
    assert "README.md" in hub.files(REPO, "try")
    assert "README.md" not in hub.files(REPO)
    assert [*hub.repos[REPO].tags] == ["grpo-000020"]
    assert hub.repos[REPO].commits == [("try", "Checkpoint grpo-000020")]


@pytest.mark.slow
def test_a_tag_names_what_was_pushed_last(hub: FakeHub, folder: Path) -> None:
    """Another run that is pushed to the same repository has checkpoints of the same steps."""
    for text in (b"one", b"two"):
        (folder / "README.md").write_bytes(text)
        push(folder, REPO, tag="grpo-000020")
        assert hub.repos[REPO].tags["grpo-000020"]["README.md"] == text


@pytest.mark.slow
def test_a_merged_model_replaces_the_adapter_of_its_checkpoints(hub: FakeHub, folder: Path) -> None:
    """Transformers takes a repository with both for an adapter."""
    for name in ("adapter_config.json", "model.safetensors.index.json"):
        (folder / name).write_text("{}")
    push(folder, REPO, tag="grpo-000020")
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors.index.json").rename(folder / "config.json")
    push(folder, REPO)
    named = {name for name in hub.files(REPO) if name.endswith(".json")}
    assert named == {EXPORT_FILE, "config.json"}


def test_what_only_training_needs_stays_here(hub: FakeHub, folder: Path) -> None:
    (folder / "optimizer").mkdir()
    save_file({"m": torch.zeros(2)}, folder / "optimizer" / "0.safetensors")
    (folder / "trainer_state.json").write_text("{}")
    push(folder, REPO)
    assert not [name for name in hub.files(REPO) if "optimizer" in name or "state" in name]


def test_a_repository_of_something_else_is_left_alone(hub: FakeHub, folder: Path) -> None:
    push(folder, REPO)
    hub.files(REPO).clear()
    hub.files(REPO)["thesis.pdf"] = b"%PDF"
    with pytest.raises(ModelError, match=r"holds something that Grouper did not push \(thesis"):
        push(folder, REPO)
    assert hub.files(REPO) == {"thesis.pdf": b"%PDF"}


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        ("somebody/small", TOKEN, r"status 403.*no right to write there"),
        (REPO, "hf_anotherToken", r"status 401.*not valid"),
        (REPO, "", r"no token for the Hub.*hf auth login"),
        ("me/a/b", TOKEN, r"not a name that the Hub has"),
    ],
)
def test_refusals_say_what_to_do(
    hub: FakeHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    repo: str,
    token: str,
    message: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelError, match=message) as refused:
        push(folder, repo)
    assert not token or token not in str(refused.value)
    assert not hub.repos


def test_without_a_hub_nothing_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub() as gone:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", gone.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ModelError, match=r"cannot be reached"):
        push(folder, REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"offline mode is enabled"):
        push(folder, REPO)


def test_the_token_is_in_no_file(hub: FakeHub, folder: Path) -> None:
    push(folder, REPO)
    for content in hub.files(REPO).values():
        assert TOKEN.encode() not in content
    assert json.loads((folder / EXPORT_FILE).read_text()) == {"format": 1}


# --- while a run goes on -------------------------------------------------------------------------


def train(outputs: Path, **changes: object) -> Path:
    """A run of two steps each, with a checkpoint after every step."""
    settings = [
        *SMALL,
        f"output_dir={outputs}",
        "grpo.checkpoint_every=1",
        "sft.checkpoint_every=1",
    ]
    recipe = grouper.load_recipe("demo", settings).override(push_to=REPO, **changes)
    with grouper.prepare(recipe) as prepared:
        return grouper.train(prepared, display=Progress(quiet=True)).path


@pytest.mark.slow
def test_a_run_pushes_its_checkpoints_and_its_result(hub: FakeHub, tmp_path: Path) -> None:
    run = train(tmp_path)
    tags = hub.repos[REPO].tags
    # One that is still on its way lets the next one wait for the result.
    assert tags.keys() <= {"sft-000001", "sft-000002", "grpo-000001", "grpo-000002"}
    assert "sft-000001" in tags
    assert "model.safetensors" in tags["sft-000001"]
    # A run that ends here has left a model that says how it is prompted.
    assert json.loads(tags["sft-000001"][EXPORT_FILE])["recipe"]["name"] == "demo"
    assert not any("optimizer" in name for files in tags.values() for name in files)
    files = hub.files(REPO)
    assert b"## Results" in files["README.md"]
    assert json.loads(files[EXPORT_FILE])["recipe"]["name"] == "demo"
    weights = run / "grpo" / "final" / "model.safetensors"
    assert len(files["model.safetensors"]) == weights.stat().st_size
    assert not list(run.glob(".push-*"))


@pytest.mark.slow
def test_a_push_that_fails_stops_no_run(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_anotherToken")
    with caplog.at_level("WARNING"):
        run = train(tmp_path, skip_sft=True)
    assert (run / "grpo" / "final" / "config.json").exists()
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "grpo-000001 was not pushed" in told
    assert f"Try again: grouper push {run} {REPO}" in told
    assert not hub.repos


def test_a_disk_without_links_stops_no_run(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "links are not possible here")

    monkeypatch.setattr("os.link", refuse)
    run = SimpleNamespace(processes=SimpleNamespace(rank=0), path=tmp_path)
    state = SimpleNamespace(phase="grpo", step=3)
    PushCheckpoints(REPO).checkpoint_saved(run, state, folder)
    assert "grpo-000003 was not pushed" in caplog.text


def test_a_pushed_adapter_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    """Its configuration is a link to that of the checkpoint, which stays as it is."""
    ours = tmp_path / "adapter_config.json"
    ours.write_text(json.dumps({"base_model_name_or_path": f"{tmp_path}/models/base", "r": 4}))
    before = ours.read_text()
    link = tmp_path / "pushed.json"
    link.hardlink_to(ours)
    _forget_folders(link)
    assert json.loads(link.read_text()) == {"base_model_name_or_path": "base", "r": 4}
    assert ours.read_text() == before
