"""`make site`: a link or an anchor that leads nowhere fails the build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.needs_package("mkdocs", extra="docs")]

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGES = ("data.md", "publishing.md")
# Pages that the hooks write.
MADE = ("settings", "commands", "python")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pages of docs/ and the hooks, with the project's own settings and another navigation."""
    import yaml

    folder = tmp_path_factory.mktemp("site")
    (folder / "docs").mkdir()
    for name in ("hooks.py", *PAGES):
        shutil.copy(ROOT / "docs" / name, folder / "docs" / name)
    shutil.copytree(ROOT / "docs" / "overrides", folder / "docs" / "overrides")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "README.md").write_text("# Grouper\n\n[Data](docs/data.md#sources)\n")
    head, _, _ = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")
    made = [f"reference/{name}.md" for name in MADE]
    nav = ["index.md", *PAGES, *made]
    (folder / "mkdocs.yml").write_text(f"{head}\n{yaml.safe_dump({'nav': nav})}", encoding="utf-8")
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """What `make site` runs, word for word: with --quiet, for one, strict would mean nothing."""
    found = re.search(r"^site:.*\n\t@.*\$\(BIN\)/python (.*)$", MAKEFILE, re.MULTILINE)
    assert found is not None
    return subprocess.run(
        [sys.executable, *found[1].split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_site_without_faults_is_built(small: Path) -> None:
    done = build(small)
    assert done.returncode == 0, done.stderr
    made = small / "build" / "site"
    assert "grpo.group_size" in (made / "reference" / "settings" / "index.html").read_text("utf-8")
    assert 'href="data/#sources"' in (made / "index.html").read_text("utf-8")
    listed = (made / "llms.txt").read_text("utf-8")
    assert listed.startswith("# Grouper\n\n> Train small language models")
    addresses = re.findall(r"^- \[.+\]\(\./(.*)\): .+$", listed, re.MULTILINE)
    assert addresses == ["", "data/", "publishing/", *(f"reference/{name}/" for name in MADE)]
    assert all((made / address / "index.html").is_file() for address in addresses)


@pytest.mark.parametrize(
    ("file", "fault", "said"),
    [
        ("docs/data.md", "[gone](no-such-page.md)", "no-such-page.md"),
        ("docs/data.md", "[gone](publishing.md#no-such-heading)", "no-such-heading"),
        ("docs/data.md", "[gone](#no-such-heading)", "no-such-heading"),
        ("docs/data.md", "[gone](reference/settings.md#no-such-section)", "no-such-section"),
        ("docs/data.md", "![gone](images/none.png)", "images/none.png"),
        ("docs/data.md", "[gone](../tests/no-such-test.py)", "no-such-test.py"),
        ("README.md", "[gone](docs/data.md#no-such-heading)", "no-such-heading"),
    ],
)
def test_what_leads_nowhere_fails_the_build(small: Path, file: str, fault: str, said: str) -> None:
    page = small / file
    before = page.read_text(encoding="utf-8")
    page.write_text(f"{before}\n{fault}\n", encoding="utf-8")
    try:
        done = build(small)
    finally:
        page.write_text(before, encoding="utf-8")
    assert done.returncode != 0
    assert said in done.stderr
