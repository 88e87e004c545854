"""The compiled kernels: built from C++ once per machine, loaded as a plain shared library.

Building takes a few seconds and needs a C++ compiler (`c++`, or the one that `CXX` names). Without
one, or if it fails, everything runs on PyTorch's own operations: slower, and equal up to rounding.
The library depends on the processor it was built for, so it is kept in the user's cache
(`GROUPER_CACHE`) under a name derived from source, compiler, options and processor.

Loading a library runs its code. It is loaded only from a folder that nobody else can write to, and
only if the user owns the file and it matches the checksum in its name; otherwise it is rebuilt.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from grouper.files import cache_folder
from grouper.kernels.switch import Listeners, kernels_are_off

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.cpp"))
HEADERS = sorted(FOLDER.glob("*.h"))

# Sums may be reordered, or they would not be vectorised; NaN and infinity keep their meaning
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
# Tried in turn: Apple's compiler does not know the options of the first two lines.
VARIANTS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-mcpu=native",),
    (),
)
SECONDS = 120


def library() -> ctypes.CDLL | None:
    """The kernels, or None where they are switched off or cannot be built."""
    return None if kernels_are_off() else built()


@functools.cache
def built() -> ctypes.CDLL | None:
    """The kernels of this process, or None where they cannot be built."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        log.info("No C++ compiler was found: fused kernels are off (slower, nothing else).")
        return None
    try:
        with _place() as folder:
            return _loaded(compiler, folder)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("The fused kernels could not be built and stay off: %s", error)
        return None


def kernels_in_use() -> str:
    """Which kernels this process computes with; any two differ in rounding."""
    kernels = library()
    if kernels is None:
        return "none"
    return Path(kernels._name).name.split(".")[0].removeprefix("kernels-")  # noqa: SLF001 - its path has no other name


def _loaded(compiler: str, folder: Path) -> ctypes.CDLL:
    """The library in this folder, built if it is missing or cannot be trusted."""
    stem = f"kernels-{_fingerprint(compiler)}"
    for attempt in range(2):
        target = _whole(folder, stem)
        if target is None:
            with _alone(folder):  # another process may have built it meanwhile
                target = _whole(folder, stem) or _build(compiler, folder, stem)
        try:
            return ctypes.CDLL(str(target))
        except OSError as error:
            if attempt:
                raise
            log.warning("%s does not load (%s): it is built again.", target, error)
            target.unlink()
    raise AssertionError("the second attempt has returned or raised")


def _whole(folder: Path, stem: str) -> Path | None:
    """The user's own file whose content still matches the checksum in its name, or None."""
    for path in folder.glob(f"{stem}.*.so"):
        if _is_private(path) and path.suffixes[0] == f".{_checksum(path)}":
            return path
        log.warning("%s is damaged, or somebody else's: it is built again.", path)
        path.unlink(missing_ok=True)
    return None


def _is_private(path: Path) -> bool:
    """Whether the user owns the path and nobody else can write to it."""
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time build, while the others wait."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: each of them may build
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _build(compiler: str, folder: Path, stem: str) -> Path:
    """Build the library; it gets its name once it is complete on disk."""
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as name:
        made = Path(name, "made.so")
        _compile(compiler, made)
        made.chmod(0o700)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        return made.replace(folder / f"{stem}.{_checksum(made)}.so")


def _compile(compiler: str, target: Path) -> None:
    for variant in VARIANTS:
        command = [compiler, *OPTIONS, *variant, "-shared", *map(str, SOURCES), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode == 0:
            return
    raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:] or 'without a word'}")


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A private folder in the user's cache, or a temporary one that is deleted after loading."""
    cache = cache_folder() / "kernels"
    with contextlib.suppress(OSError):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache.is_dir():
        if not _is_private(cache):
            log.warning(
                "Others can write to %s: the kernels there are not used, and are built anew at "
                "every start. Delete it, or `chmod 700` it if it is yours.",
                cache,
            )
        elif os.access(cache, os.W_OK):
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


# --- how Python calls a kernel: an array of pointers and numbers, eight bytes each ----------------

_LETTERS = {torch.float32: "f", torch.bfloat16: "b"}
DTYPES = frozenset(_LETTERS)
_SMALL = 1 << 15
"""Below this many elements a second thread costs more than it gains."""


Tensors = tuple[Tensor | None, ...]

_LISTENERS = Listeners()
listened = _LISTENERS.adding
"""The listener is given the name of each kernel, its tensors and its numbers."""


@cache
def letters(*dtypes: torch.dtype) -> str:
    """The suffix of a kernel's name: one letter per dtype, `?` for one without kernels."""
    return "".join(_LETTERS.get(dtype, "?") for dtype in dtypes)


def threads_for(elements: int) -> int:
    """The number of threads that is worth using for this many elements."""
    return torch.get_num_threads() if elements >= _SMALL else 1


@cache
def function(name: str) -> Any:
    """The kernel of this name, with its suffix, as a function of one pointer."""
    kernels = library()
    assert kernels is not None, "callers have asked whether there are any"
    kernel = kernels[name]
    kernel.restype = None
    return kernel


@cache
def _layout(pointers: int, kinds: tuple[type, ...]) -> struct.Struct:
    return struct.Struct("q" * pointers + "".join("d" if kind is float else "q" for kind in kinds))


def packed(tensors: Tensors, numbers: tuple[float, ...]) -> bytes:
    """The array a kernel reads: floats as doubles, the rest as integers, None as a null pointer."""
    layout = _layout(len(tensors), tuple(map(type, numbers)))
    return layout.pack(*[0 if t is None else t.data_ptr() for t in tensors], *numbers)


def call(name: str, tensors: Tensors, *numbers: float) -> None:
    """Run a kernel; with a `FakeTensor`, as the memory plan uses, nothing runs."""
    if isinstance(tensors[0], FakeTensor):
        return
    function(name)(packed(tensors, numbers))
    _LISTENERS.notify(name, tensors, numbers)
