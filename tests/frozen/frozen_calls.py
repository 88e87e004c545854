"""One call of `grouper` in this process, in a folder of its own, and what it told."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from frozen import HERE, normalize

sys.path.append(str(HERE.parent))  # as pytest has it, for those who run a recorder by hand

import torch
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper.cli.main import main
from grouper.errors import GrouperError

Prepare = Callable[[Path], object]

FIXED = {
    "COLUMNS": "80",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables that may change what is told."""

TINY = (*TINY_RUN, *data_from("."), "device=cpu")
"""What the finished run is made with, but for its steps."""
TINY_FOLDER = "tiny"
"""The finished run that a row may ask for, as it is called in the row's folder."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Something that a user can do, and what has to lie in the folder where it is done."""

    name: str
    command: str = ""
    """The arguments behind `grouper`, as they are typed."""
    python: Callable[[], object] | None = None
    """A call of the public interface instead."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    run: bool = False
    """Whether the finished run is to lie there, as the folder `tiny`."""
    prepare: Prepare | None = None
    """Whatever else has to be done to the folder, with it as the working directory."""
    hide: tuple[str, ...] = ()
    """Patterns of what a model writes or a machine measures; `<...>` stands for each."""
    computed: bool = False
    """Whether numbers are a model's: `<n>` stands for each, and columns lose their widths."""


@dataclass(frozen=True)
class Told:
    code: int
    out: str
    err: str


@contextlib.contextmanager
def working_in(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """The folder as working directory, the usual variables, and everything put back at the end."""
    variables, path, here = dict(os.environ), list(sys.path), Path.cwd()
    os.environ.update({**FIXED, "GROUPER_CACHE": str(folder.parent / "cache"), **environment})
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(variables)


def called(arguments: list[str], stdin: str = "") -> Told:
    """What `grouper` prints, and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO(stdin)
    code: object = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdin = before
    return Told(int(code or 0), out.getvalue(), err.getvalue())


def _refusal_of(call: Callable[[], object]) -> Told:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            call()
    except GrouperError as error:
        return Told(error.exit_code, "", f"{type(error).__name__}: {error}\n")
    return Told(0, out.getvalue(), err.getvalue())


def done(row: Row, folder: Path, tiny: Path | None) -> Told:
    """The row done in the new folder; texts are normalized.

    Args:
        row: what is done.
        folder: made here; what lies beside it is named by its path alone.
        tiny: where the finished run lies, for rows that ask for it.
    """
    for name in (".", *row.folders):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, content in row.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    if row.run:
        assert tiny is not None
        shutil.copytree(tiny, folder, dirs_exist_ok=True)
    with working_in(folder, row.environment):
        if row.prepare is not None:
            row.prepare(folder)
        # Whatever else has drawn numbers in this process plays no part.
        torch.manual_seed(0)
        if row.python is not None:
            told = _refusal_of(row.python)
        else:
            told = called(shlex.split(row.command), row.stdin)
    out, err = (_told(row, normalize(text, folder)) for text in (told.out, told.err))
    return Told(told.code, out, err)


NUMBER = r"(?<![\w.<])[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?(?![\d.]*[A-Za-z_<])"


def _told(row: Row, text: str) -> str:
    for pattern in row.hide:
        text = re.sub(pattern, "<...>", text, flags=re.MULTILINE)
    if row.computed:
        for pattern, sign in (
            (NUMBER, "<n>"),
            (r"\d+\.\d+s\b", "<n>s"),
            (r"[ \t]+", " "),
            (r"([─━])+", r"\1"),
        ):
            text = re.sub(pattern, sign, text)
    return text


def make_tiny_run(folder: Path) -> Path:
    """A finished run of a small adapterless model in `folder/tiny`, its problems beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_problems(folder)
    with working_in(folder, {}):
        arguments = ["run", "demo", *TINY]
        told = called([*arguments, "sft.steps=4", "grpo.steps=2", f"name={TINY_FOLDER}",
                       "output_dir=.", "--quiet"])  # fmt: skip
    assert told.code == 0, told.err
    return folder
