"""Can the reference answers be graded against? Checked once per answer, and cached on disk.

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
from grouper.grading.equivalence import unreadable
from grouper.grading.normalise import tidy
from grouper.grading.numbers import is_number

log = logging.getLogger(__name__)

# Answers that are worth the start of one more worker (about a second).
PER_WORKER = 500

# Answer -> why it cannot be graded against, or None.
Verdicts = dict[str, str | None]


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
    hard = [a for a, why in found.items() if why is None and not is_number(tidy(a))]
    if not hard:
        return found
    try:
        require_symbolic(GradingConfig())
    except GradingError:
        return found
    path = cache_folder() / f"references-{_version()}.json"
    known = _read(path)
    if unknown := [answer for answer in hard if answer not in known]:
        workers = max(1, min(processors(), len(unknown) // PER_WORKER))
        with (
            Grader(BOXED, GradingConfig(), workers=workers) as grader,
            ThreadPoolExecutor(workers) as threads,
        ):
            try:
                known.update(zip(unknown, threads.map(grader.read_reference, unknown), strict=True))
            finally:  # after Ctrl-C, those that have been checked
                if known:
                    _store(path, known)
    return found | {answer: known[answer] for answer in hard}


@cache
def _version() -> str:
    """16 hex digits of the grading code and the versions of what it calls."""
    digest = hashlib.sha256()
    folder = importlib.resources.files("grouper.grading")
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    for package in ("math-verify", "latex2sympy2-extended", "sympy"):
        digest.update(f"{package} {installed(package)}".encode())
    return digest.hexdigest()[:16]


def _read(path: Path) -> Verdicts:
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _store(path: Path, checked: Mapping[str, str | None]) -> None:
    """Add to the cache file; no reader ever sees half of it.

    Of two processes that write at once, the entries of one are lost and checked again later.
    """
    text = json.dumps({**_read(path), **checked}, ensure_ascii=True)
    try:
        write_atomic(path, text.encode())
        for older in path.parent.glob("references-*.json"):
            if older != path:
                older.unlink(missing_ok=True)
    except (OSError, RunFolderError) as error:
        log.debug("The reference checks are not kept: %s", error)
