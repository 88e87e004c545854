"""A user's own code: found by its name, and told apart by what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grouper.errors import ConfigError
from grouper.rewards.user_code import code_fingerprints, load_user_object

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
    first = load_user_object(name, kind="tracker", where="", error=ConfigError)
    assert first is load_user_object(name, kind="tracker", where="", error=ConfigError)
    assert load_user_object("json:dumps", kind="tracker", where="", error=ConfigError)({}) == "{}"


def test_a_file_that_was_edited_is_loaded_again(places):
    """In a notebook the same process goes on after an edit."""
    name = f"{places['file']}:told"
    assert load_user_object(name, kind="reward", where="", error=ConfigError)(1) == 1
    Path(places["file"]).write_text("def told(record):\n    return -10 * record\n")
    assert load_user_object(name, kind="reward", where="", error=ConfigError)(1) == -10


def test_a_fingerprint_follows_the_file_and_what_it_imports_from_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper_of_mine.py").write_text("HALF = 0.5\ndef half(x):\n    return x * HALF\n")
    (tmp_path / "mine.py").write_text(
        "import json\nfrom helper_of_mine import half\ndef f(**_):\n    return half(1)\n"
    )
    before = code_fingerprints(["correctness", "mine.py:f"])
    assert list(before) == ["helper_of_mine.py", "mine.py"]
    (tmp_path / "helper_of_mine.py").write_text("HALF = 0.4\ndef half(x):\n    return x * HALF\n")
    after = code_fingerprints(["mine.py:f"])
    assert after["mine.py"] == before["mine.py"]
    assert after["helper_of_mine.py"] != before["helper_of_mine.py"]
    # Of a module that only gives a number, nothing in the other one tells where it came from.
    (tmp_path / "numbers_of_mine.py").write_text("SCALE = 2\n")
    (tmp_path / "mine.py").write_text(
        "from numbers_of_mine import SCALE\ndef f(**_):\n    return SCALE\n"
    )
    assert list(code_fingerprints(["mine.py:f"])) == ["mine.py", "numbers_of_mine.py"]
    (tmp_path / "mine.py").write_text("def f(**_):\n    return 0\n")
    assert list(code_fingerprints(["mine.py:f"])) == ["mine.py"]
    assert code_fingerprints(["mine.py:f"])["mine.py"] != before["mine.py"]


def test_a_file_that_raises_names_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("import json\n\nnumber = json.loads('{')\n")
    with pytest.raises(ConfigError, match=r"JSONDecodeError: .* \(mine\.py, line 3, in <module>\)"):
        load_user_object(f"{tmp_path}/mine.py:f", kind="reward", where="", error=ConfigError)


def test_a_module_of_the_working_directory_is_found_by_a_console_script(tmp_path):
    """Python searches the folder of the script then, not that of the user."""
    (tmp_path / "my_rewards.py").write_text("def one(completions, **kwargs):\n    return [1.0]\n")
    (tmp_path / "json.py").write_text("raise AssertionError('it hides what is installed')\n")
    script = tmp_path / "bin" / "grouper"
    script.parent.mkdir()
    script.write_text(
        "from grouper.rewards.user_code import load_user_object\n"
        "print(load_user_object('my_rewards:one', kind='reward', where='', error=Exception)([]))\n"
        "print(load_user_object('json:dumps', kind='reward', where='', error=Exception)(['x']))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == '[1.0]\n["x"]\n', done.stderr
