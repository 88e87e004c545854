"""Check that reference answers can be graded against: once per answer, cached on disk.

Plain numbers are decided at once. The rest is parsed by worker processes of the grader, about 10
ms each, several at a time where there are many; their verdicts are kept in
`$GROUPER_CACHE/references-<version>.json` (`~/.cache/grouper` by default). The version is a hash
of the grading code and of the symbolic libraries: another version checks again.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from grouper.config.schema import GradingConfig
from grouper.data.sources import BOXED
from grouper.errors import GradingError, RunFolderError, installed
from grouper.files import cache_folder, processors, write_atomic
from grouper.grading import Grader, require_symbolic
from grouper.grading.answers import read_reference
from grouper.grading.normalize import tidy
from grouper.grading.numbers import is_number

log = logging.getLogger(__name__)

# Number of answers that is worth the start of one more worker (about a second).
PER_WORKER = 500

# Answer -> the reason why it cannot be graded against, or None.
Verdicts = dict[str, str | None]


def check_references(answers: Iterable[str]) -> Verdicts:
    r"""Return the reason why each answer cannot be graded against; None for readable ones.

    Only the spelling counts, never the time that reading takes, so a set of problems is the same on
    every machine. Where Math-Verify is not installed, the parser's grammar is not used.

    Raises:
        GradingError: see `Grader.read_reference`.

    >>> check_references(["1,234", r"\frac{1}{2"])
    {'1,234': None, '\\frac{1}{2': 'unbalanced braces'}
    """
    verdicts: Verdicts = {
        answer: read_reference(answer).defect for answer in dict.fromkeys(answers)
    }
    unparsed = [
        answer
        for answer, reason in verdicts.items()
        if reason is None and not is_number(tidy(answer))
    ]
    if not unparsed:
        return verdicts
    try:
        require_symbolic(GradingConfig())
    except GradingError:
        return verdicts
    path = cache_folder() / f"references-{_version()}.json"
    cached = _read(path)
    unchecked = [answer for answer in unparsed if answer not in cached]
    if unchecked:
        workers = max(1, min(processors(), len(unchecked) // PER_WORKER))
        with (
            Grader(BOXED, GradingConfig(), workers=workers) as grader,
            ThreadPoolExecutor(workers) as threads,
        ):
            try:
                reasons = threads.map(grader.read_reference, unchecked)
                cached.update(zip(unchecked, reasons, strict=True))
            finally:
                # Also after Ctrl-C: the answers checked so far need no second check.
                if cached:
                    _store(path, cached)
    verdicts.update({answer: cached[answer] for answer in unparsed})
    return verdicts


@cache
def _version() -> str:
    """Hash the grading code and the versions of the libraries it calls, as 16 hex digits."""
    digest = hashlib.sha256()
    folder = importlib.resources.files("grouper.grading")
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    for package in ("math-verify", "latex2sympy2-extended", "sympy"):
        digest.update(f"{package} {installed(package)}".encode())
    return digest.hexdigest()[:16]


def _read(path: Path) -> Verdicts:
    """Read the cache file; one that cannot be read counts as empty."""
    try:
        cached = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return cached if isinstance(cached, dict) else {}


def _store(path: Path, verdicts: Mapping[str, str | None]) -> None:
    """Add to the cache file; no reader ever sees half of it.

    If two processes write at once, the entries of one are lost and checked again later.
    """
    text = json.dumps({**_read(path), **verdicts}, ensure_ascii=True)
    try:
        write_atomic(path, text.encode())
        for file in path.parent.glob("references-*.json"):
            if file != path:  # of another version
                file.unlink(missing_ok=True)
    except (OSError, RunFolderError) as error:
        log.debug("The reference checks are not kept: %s", error)
