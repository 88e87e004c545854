"""The compiled kernels: built once a machine from C++, loaded as a plain shared library.

Building takes a few seconds and needs a C++ compiler (`c++`, or what `CXX` names). Where
there is none, or it fails, everything runs on PyTorch's own operations: slower, the same numbers
but for rounding. The library depends on the processor it was built for, so it lies in the user's
cache (`GROUPER_CACHE`) under a name that holds source, compiler, options and processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grouper.user_cache import cache_folder

__all__ = ["OFF", "library"]

log = logging.getLogger(__name__)

OFF = "GROUPER_KERNELS"
"""Set to 0 in the environment, everything runs on PyTorch's own operations."""

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.cpp"))
HEADERS = sorted(FOLDER.glob("*.h"))

# Sums may be reordered, or they would not be vectorised; NaN and infinity stay what they are
# (-ffast-math would give them up, and switch denormal numbers off for the whole process).
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-ffp-contract=fast",
    "-fPIC",
)
# Tried in turn: Apple's compiler knows neither of the first two lines' options.
VARIANTS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-mcpu=native",),
    (),
)
SECONDS = 120


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they are switched off or cannot be built."""
    if os.environ.get(OFF) == "0":
        return None
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        log.info("No C++ compiler was found: fused kernels are off (slower, nothing else).")
        return None
    try:
        with _place() as folder:
            return ctypes.CDLL(str(_built(compiler, folder)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("The fused kernels could not be built and stay off: %s", error)
        return None


def _built(compiler: str, folder: Path) -> Path:
    """The library's file, made if it is not there."""
    target = folder / f"kernels-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=target.parent)
    os.close(handle)
    made = Path(name)
    try:
        _compile(compiler, made)
        made.replace(target)  # several processes may do this at the same time
    finally:
        made.unlink(missing_ok=True)
    return target


def _compile(compiler: str, target: Path) -> None:
    """All sources at the same time, then the library of them."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(SOURCES)) as pool:
        objects = {source: Path(name, source.stem).with_suffix(".o") for source in SOURCES}
        for variant in VARIANTS:
            command = [compiler, *OPTIONS, *variant]
            parts = [[*command, "-c", str(s), "-o", str(made)] for s, made in objects.items()]
            problem = next(filter(None, pool.map(_problem, parts)), "")
            whole = [*command, "-shared", *map(str, objects.values()), "-o", str(target)]
            problem = problem or _problem(whole)
            if not problem:
                return
    raise OSError(f"{compiler} failed: {problem[-500:]}")


def _problem(command: list[str]) -> str:
    """What a compiler has to say where it fails; else nothing."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or "without a word"


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """The user's cache; where that cannot be written, a folder that is gone once it was loaded."""
    cache = cache_folder()
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    if cache.is_dir() and os.access(cache, os.W_OK):
        yield cache
        return
    with tempfile.TemporaryDirectory(prefix="grouper-kernels-") as name:
        yield Path(name)


def _fingerprint(compiler: str) -> str:
    """What the compiled code depends on."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    code = "".join(path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS))
    parts = (code, version.stdout, str((OPTIONS, VARIANTS)))
    return hashlib.blake2b("\0".join((*parts, _processor())).encode(), digest_size=12).hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    kinds = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({ln for ln in lines if ln.startswith(kinds)}))
