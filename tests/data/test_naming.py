"""What people call a set of problems leads to the source that reads it."""

from __future__ import annotations

import pytest

from grouper.data import SOURCES
from grouper.data.naming import source_named


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_source_goes_by_its_own_name_and_by_that_on_the_hub(name):
    assert source_named(name) == {"source": name}
    hub = SOURCES[name].hub
    if hub:
        assert source_named(hub) == {"source": name}


def test_a_path_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source_named("mine/rows")["source"] == "hub"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows").touch()
    assert source_named("mine/rows") == {"source": "file", "path": "mine/rows"}
    assert source_named("/no/such")["source"] == "file"
