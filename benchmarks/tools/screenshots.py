"""The pictures of README and docs/, from a run of the demonstration.

    python -m benchmarks.tools.screenshots           # trains in outputs/demo, unless it is there
    python -m benchmarks.tools.screenshots FOLDER    # a folder for every picture, to look at

Needs Chromium. Without FOLDER the pictures that are shown go to docs/images, in 256 colors; with
one, every section of the report in both themes, on a desktop and on a phone, and all of it printed.
Beside the pictures it writes what they are of (`source_mark`), so that a test can tell old ones.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from benchmarks.checkout import ROOT
from tests.end_to_end.chromium import Page

RUN = Path("outputs/demo")
IMAGES = ROOT / "docs" / "images"
MARK = IMAGES / "report-source.txt"
SECTIONS = ("", "results", "findings", "curves", "completions", "parts", "recipe")
# What is shown: where it lies -> screen, theme and section.
SHOWN = {
    "report-verdict": ("desktop", "light", ""),
    "report-tokens": ("desktop", "dark", "completions"),
    "report-phone": ("phone", "light", ""),
    "report-phone-dark": ("phone", "dark", "curves"),
}


def source_mark() -> str:
    """Return a digest of all that makes the report look as it does."""
    digest = hashlib.sha256()
    folder = ROOT / "src" / "grouper" / "report"
    for file in sorted(folder.rglob("*")):
        if file.suffix in {".css", ".html", ".js", ".yaml"}:
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def take(
    page: Page, size: str, theme: str, section: str, target: Path, *, whole: bool = False
) -> Path:
    """Take a picture of the report: of a section, or of the whole page."""
    page.open(RUN / "report.html", dark=theme == "dark", size=size)
    if section == "completions":
        page.run("document.querySelector('.trace summary')?.click()")
    page.run(f"document.getElementById('{section}')?.scrollIntoView()")
    time.sleep(0.3)
    return page.picture(target, whole=whole)


def main(folder: Path | None) -> None:
    command = [sys.executable, "-m", "grouper", "run", "demo", "--resume", "--quiet"]
    subprocess.run(command, check=True)
    with Page() as page:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            take(page, "print", "light", "", folder / "print.png", whole=True)
            for size in ("desktop", "phone"):
                for theme in ("light", "dark"):
                    for section in SECTIONS:
                        name = f"{size}-{theme}-{section or 'top'}.png"
                        take(page, size, theme, section, folder / name)
            return
        made = [take(page, *what, IMAGES / f"{name}.png") for name, what in SHOWN.items()]
    curves = IMAGES / "demo-curves.png"
    curves.write_bytes((RUN / "curves.png").read_bytes())
    for file in (*made, curves):
        Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)
    MARK.write_text(source_mark() + "\n", encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
