"""The pictures of README and docs/, from a run of the demonstration.

    python -m benchmarks.tools.screenshots           # trains in outputs/demo, unless it is there
    python -m benchmarks.tools.screenshots FOLDER    # a folder for every picture, to look at

Needs Chromium. Without FOLDER the pictures that are shown go to docs/images, in 256 colors; with
one, every section of the report in both themes, on a desktop and on a phone, and all of it printed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from benchmarks.checkout import ROOT
from tests.end_to_end.chromium import Page

RUN = Path("outputs/demo")
SECTIONS = ("", "results", "findings", "curves", "completions", "parts", "recipe")
# What is shown: where it lies -> screen, theme and section.
SHOWN = {
    "report-verdict": ("desktop", "light", ""),
    "report-tokens": ("desktop", "dark", "completions"),
    "report-phone": ("phone", "light", ""),
    "report-phone-dark": ("phone", "dark", "curves"),
}


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
        images = ROOT / "docs" / "images"
        made = [take(page, *what, images / f"{name}.png") for name, what in SHOWN.items()]
    curves = images / "demo-curves.png"
    curves.write_bytes((RUN / "curves.png").read_bytes())
    for file in (*made, curves):
        Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
