"""Check that a tag is ready to be released: `python .ci/check_release.py v1.2.3`.

The version must be that of pyproject.toml and CITATION.cff, and the newest heading of CHANGELOG.md
must have it with a date (`## 1.2.3 - 2026-01-31`) and at least one entry. Prints each problem and
exits with 1.
"""

from __future__ import annotations

import re
import sys
import tomllib
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def problems_of(tag: str, root: Path = ROOT) -> list[str]:
    """Return a sentence for each reason why `tag` must not be released from the files in `root`."""
    version = tag.removeprefix("v")
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        return [f"{tag} is not a tag like v1.2.3 or v1.2.3rc1"]
    problems = []
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if project["version"] != version:
        problems.append(f"pyproject.toml has version {project['version']}, the tag {version}")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    if f"\nversion: {version}\n" not in citation:
        problems.append(f"CITATION.cff does not have version {version}")
    problems += _problems_of_changelog(version, (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    return problems


def _problems_of_changelog(version: str, text: str) -> list[str]:
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    if not sections:
        return ["CHANGELOG.md has no version"]
    heading, _, entries = sections[0].partition("\n")
    name, _, day = heading.partition(" - ")
    if name != version:
        return [f"the newest heading of CHANGELOG.md is {heading!r}, not '{version} - <date>'"]
    problems = []
    try:
        date.fromisoformat(day)
    except ValueError:
        problems.append(f"the heading {heading!r} of CHANGELOG.md has no date like 2026-01-31")
    if not re.search(r"^- ", entries, re.MULTILINE):
        problems.append(f"CHANGELOG.md says nothing of {version}")
    return problems


def main() -> None:
    """Check the tag of the command line."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    problems = problems_of(sys.argv[1])
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
