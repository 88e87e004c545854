"""Sets on the Hub: what can go wrong is one sentence with the nearest known name."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from local_hub import GATED, SET, local_hub

from grouper.data import hub
from grouper.data.hub import read_hub
from grouper.errors import DataError


@pytest.fixture
def fails(monkeypatch):
    """Reading a set whose download raises the exception."""
    import datasets

    def reading(name: str, error: Exception) -> str:
        def load_dataset(*args, **kwargs):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(DataError) as refused:
            read_hub(name, split="train", subset=None)
        text = str(refused.value)
        assert "\n" not in text
        return text

    return reading


@pytest.fixture
def online(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gsm8k", "openai/gsm8k"),
        ("openai/gsm-8k", "openai/gsm8k"),
        ("AI-MO/NuminaMath-TRI", "AI-MO/NuminaMath-TIR"),
        ("open-r1/DAPO-Math-17k", "open-r1/DAPO-Math-17k-Processed"),
        ("OpenMathReasoning-mini", "unsloth/OpenMathReasoning-mini"),
    ],
)
def test_a_missing_or_renamed_set_names_the_nearest(fails, online, name, meant):
    import datasets

    error = datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
    text = fails(name, error)
    assert "there is no such set on the Hub, or it was renamed" in text
    assert f"Did you mean '{meant}'?" in text


def test_a_name_like_no_other_suggests_nothing(fails, online):
    import datasets

    text = fails("somebody/poems", datasets.exceptions.DatasetNotFoundError("no"))
    assert "Did you mean" not in text


def test_offline_says_how_to_get_it(fails):
    text = fails("openai/gsm8k", ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub"))
    assert "not on this machine, and the Hub cannot be reached (HF_HUB_OFFLINE is set)" in text
    assert "grouper data prepare" in text
    assert "Did you mean" not in text


def test_no_network_is_told_without_the_setting(fails, online):
    text = fails("openai/gsm8k", ConnectionError("no route to host"))
    assert "the Hub cannot be reached. Read it once" in text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("403 Client Error: Forbidden"), "this set is gated.*hf auth login"),
        (Exception("Access to it is gated"), "this set is gated"),
        (KeyError("features"), "cannot be loaded: 'features'"),
        (ValueError("Unknown split \"tset\". Should be one of ['train']."), "no split 'train'"),
    ],
)
def test_other_failures(fails, online, error, message):
    import re

    assert re.search(message, fails("a/b", error))


def test_every_known_set_is_its_own_nearest():
    known = [source.hub for source in hub.SOURCES.values() if source.hub is not None]
    assert len(known) == 6
    assert [hub._nearest(name) for name in known] == [""] * 6


READ = """
import json, sys
from grouper.config.schema import SourceConfig
from grouper.data import load_problems
from grouper.errors import DataError
for settings in json.loads(sys.argv[1]):
    try:
        print(load_problems(SourceConfig(**settings), seed=0).fingerprint)
    except DataError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_set_read_once_needs_no_network(tmp_path):
    """Against a Hub on this machine, in processes of their own: the library reads its settings
    when it is imported."""

    def read(*settings: dict[str, object], address: str, **more: str) -> list[str]:
        offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
        environment = {name: text for name, text in os.environ.items() if name not in offline}
        environment |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": address, "NO_PROXY": "127.0.0.1"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **more}
        command = [sys.executable, "-c", READ, json.dumps(settings)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    known = {"source": "hub", "path": SET, "subset": "main"}
    with local_hub() as address:
        first, few, missing, gated, split, subset = read(
            known,
            {**known, "streaming": True, "limit": 2},
            {**known, "path": "school/sumz"},
            {**known, "path": GATED},
            {**known, "split": "tset"},
            {**known, "subset": "mian"},
            address=address,
        )
    assert len(first) == len(few) == 16
    assert first != few
    assert "there is no such set on the Hub" in missing
    assert "this set is gated" in gated
    assert "there is no split 'tset'" in split
    assert "the subset is missing or wrong" in subset
    # The Hub is gone. (Not told to be offline, the library tries for half a minute first.)
    again, other = read(
        known, {**known, "path": "school/sumz"}, address=address, HF_HUB_OFFLINE="1"
    )
    assert again == first
    assert "not on this machine" in other
