"""Can the references be graded against? Asked once for each answer, and remembered on disk.

Plain numbers are decided at once. The rest is read by worker processes of the grader, about 10 ms
each, several at a time where there are many; what they said is kept in
`$GROUPER_CACHE/references-<version>.json` (`~/.cache/grouper` by default). The version is a hash
of the grading code and of the symbolic libraries: another grader asks again.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grouper.config.schema import GradingConfig
from grouper.errors import GradingError
from grouper.files import cache_folder
from grouper.grading import Grader, require_symbolic
from grouper.grading.equivalence import unreadable
from grouper.grading.normalise import tidy
from grouper.grading.numbers import read_number
from grouper.types import AnswerContract, AnswerKind

log = logging.getLogger(__name__)

PER_WORKER = 500
"""Answers that are worth the start of one more worker (about a second)."""

Verdicts = dict[str, str | None]
"""Answer -> why it cannot be graded against, or None."""


def check_references(answers: Iterable[str]) -> Verdicts:
    r"""Why each answer cannot be graded against; None for those that are readable.

    Only the spelling counts, never the time that reading takes, so a set of problems is the same on
    every machine. Where Math-Verify is not installed, the parser's grammar is not asked.

    Raises:
        GradingError: see `Grader.read_reference`.

    >>> check_references(["1,234", r"\frac{1}{2"])
    {'1,234': None, '\\frac{1}{2': 'unbalanced braces'}
    """
    found: Verdicts = {answer: unreadable(answer) for answer in dict.fromkeys(answers)}
    hard = [a for a, why in found.items() if why is None and read_number(tidy(a)) is None]
    if not hard or not _has_symbolic():
        return found
    path = cache_folder() / f"references-{_version()}.json"
    known = _read(path)
    asked = [answer for answer in hard if answer not in known]
    if asked:
        said = _ask(asked)
        found |= said
        _remember(path, said)
    return found | {answer: known[answer] for answer in hard if answer in known}


def _has_symbolic() -> bool:
    try:
        require_symbolic(GradingConfig())
    except GradingError:
        return False
    return True


def _ask(answers: list[str]) -> Verdicts:
    workers = max(1, min(os.cpu_count() or 1, len(answers) // PER_WORKER))
    with (
        Grader(AnswerContract(kind=AnswerKind.BOXED), GradingConfig(), workers=workers) as grader,
        ThreadPoolExecutor(workers) as threads,
    ):
        return dict(zip(answers, threads.map(grader.read_reference, answers), strict=True))


@cache
def _version() -> str:
    """16 hex digits of the grading code and the versions of what it calls."""
    digest = hashlib.sha256()
    folder = importlib.resources.files("grouper.grading")
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    for package in ("math-verify", "latex2sympy2-extended", "sympy"):
        try:
            digest.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            digest.update(package.encode())
    return digest.hexdigest()[:16]


def _read(path: Path) -> Verdicts:
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(path: Path, said: Mapping[str, str | None]) -> None:
    """Add to the file: a whole new one under its name, so that no reader sees half of one.

    Two processes that write at once lose the entries of one, which are then asked again.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".references-", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({**_read(path), **said}, file, ensure_ascii=True)
        Path(name).replace(path)
        for older in path.parent.glob("references-*.json"):
            if older != path:
                older.unlink(missing_ok=True)
    except OSError as error:
        log.debug("The reference checks are not kept: %s", error)
