"""What the user names by file or module is found, or the reason is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from grouper.errors import ConfigError
from grouper.user_code import load_user_object

CASES = [
    ("no-colon-here/x.py:f", "there is no file no-colon-here/x.py"),
    ("{file}:tald", "Did you mean 'told'"),
    ("{file}:NUMBER", "has no function 'NUMBER'"),
    ("{broken}:f", "cannot be loaded: SystemExit: 3"),
    ("no_such_module_anywhere:f", "the module no_such_module_anywhere of a tracker cannot be"),
]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "mine.py").write_text("NUMBER = 3\ndef told(record):\n    return record\n")
    (tmp_path / "broken.py").write_text("raise SystemExit(3)\n")
    return {"file": f"{tmp_path}/mine.py", "broken": f"{tmp_path}/broken.py"}


@pytest.mark.parametrize(("name", "message"), CASES)
def test_what_is_wrong_is_told_in_one_sentence(places, name, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as caught:
        load_user_object(name.format(**places), kind="tracker", where="here", error=ConfigError)
    assert caught.value.where == "here"


def test_a_file_is_loaded_once_and_a_module_by_its_name(places):
    name = f"{places['file']}:told"
    first = load_user_object(name, kind="tracker", where="")
    assert first is load_user_object(name, kind="tracker", where="")
    assert load_user_object("json:dumps", kind="tracker", where="")({}) == "{}"


def test_a_file_that_was_edited_is_loaded_again(places):
    """In a notebook the same process goes on after an edit."""
    name = f"{places['file']}:told"
    assert load_user_object(name, kind="reward", where="")(1) == 1
    Path(places["file"]).write_text("def told(record):\n    return -10 * record\n")
    assert load_user_object(name, kind="reward", where="")(1) == -10
