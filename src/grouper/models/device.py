"""The device that a recipe runs on, with its dtypes, threads and memory."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from grouper.errors import ConfigError
from grouper.files import processors

if TYPE_CHECKING:  # the benchmarks for GPUs run where pydantic is missing
    from grouper.config.schema import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes of weights that a recipe can name."""

PRODUCT_DTYPES = {**DTYPES, "float16": torch.float16}
"""The dtypes of matrix products that a recipe can name."""

MACHINE_DTYPES = ("auto", "fastest")
"""The settings of `compute_dtype` that leave the choice to the machine."""

# PyTorch's modules that know whether a device is available; the CPU always is.
_BACKENDS: dict[str, Any] = {"cuda": torch.cuda, "mps": torch.backends.mps}


def on_device(config: ModelConfig, device: str) -> ModelConfig:
    """Return the settings with `compute_dtype: auto` or `fastest` replaced by a dtype.

    Args:
        config: of the model.
        device: `cpu`, `cuda` or `mps`. A CUDA device that this machine does not have is assumed to
            compute in bfloat16.
    """
    if config.compute_dtype not in MACHINE_DTYPES:
        return config
    dtype: str = config.dtype
    if device == "cuda" and has_bfloat16():
        dtype = "bfloat16"
    elif device == "cuda" and dtype == "float32":
        dtype = "float16"
    if device == "cpu" and config.compute_dtype == "fastest" and bfloat16_slowdown() < 1:
        dtype = "bfloat16"
    return config.model_copy(update={"compute_dtype": dtype})


def has_bfloat16() -> bool:
    """Tell whether the CUDA device computes in bfloat16; assumed of one that is not available."""
    if not torch.cuda.is_available():
        return True
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


# Sides of the matrices that a CPU is timed with: one product takes some milliseconds.
_ROWS = 256
_SIDE = 1024


def bfloat16_slowdown() -> float:
    """Measure how many times as long this CPU takes for a product in bfloat16 as in float32.

    Processors with instructions for bfloat16 (AVX512-BF16, AMX) take half as long, others several
    times as long, because each number is converted.
    """
    seconds = _product_seconds()
    return seconds["bfloat16"] / seconds["float32"]


def cpu_product_rate(dtype: torch.dtype) -> float:
    """Measure how many multiplications and additions a second this CPU does in a product."""
    name = str(dtype).removeprefix("torch.")
    seconds = _product_seconds()
    return 2 * _ROWS * _SIDE**2 / seconds.get(name, seconds["float32"])


@functools.cache
def _product_seconds() -> dict[str, float]:
    """Measure how long this CPU takes for a product, by dtype.

    It takes the best of three runs, and about 0.2 s, once per process.
    """
    seconds = {}
    for name, dtype in DTYPES.items():
        rows = torch.ones(_ROWS, _SIDE, dtype=dtype)
        weight = torch.ones(_SIDE, _SIDE, dtype=dtype)
        times = []
        for _ in range(3):
            started = time.perf_counter()
            torch.mm(rows, weight)
            times.append(time.perf_counter() - started)
        seconds[name] = min(times)
    return seconds


# How many times as fast the other dtype has to be for a warning.
MUCH_FASTER = 1.5


def slow_products(config: ModelConfig) -> str | None:
    """Say that a CPU would compute in bfloat16 without instructions for it; None if it would not.

    Args:
        config: of a model on the CPU.
    """
    dtype = on_device(config, "cpu").compute_dtype
    if dtype != "bfloat16" or bfloat16_slowdown() <= MUCH_FASTER:
        return None
    setting = "model.dtype" if config.dtype == "bfloat16" else "model.compute_dtype"
    return (
        f"This CPU has no fast products in bfloat16: they take {bfloat16_slowdown():.1f} times as "
        f"long as in float32. {setting}=float32 is faster."
    )


def fastest_dtype() -> Literal["float32", "bfloat16"]:
    """Return the dtype of weights that the default device of this process multiplies fastest."""
    device = find_device("auto").type
    slow = device == "cpu" and bfloat16_slowdown() > 1
    missing = device == "cuda" and not has_bfloat16()
    return "float32" if slow or missing else "bfloat16"


# "set": the threads that a recipe has set last. "default": those before any recipe, chosen by
# PyTorch or the user.
_THREADS: dict[str, int] = {}


def use_cpu_threads(threads: int | None) -> int:
    """Set the threads of PyTorch, for the whole process.

    Args:
        threads: None: as many as before any recipe, but no more than the job's processors. PyTorch
            does not know of a container's limit, and would wait for threads that may not run.

    Returns:
        The number of threads that was set.
    """
    if torch.get_num_threads() != _THREADS.get("set"):
        _THREADS["default"] = torch.get_num_threads()
    count = threads or min(_THREADS["default"], processors())
    _THREADS["set"] = count
    torch.set_num_threads(count)
    return count


def find_device(name: str) -> torch.device:
    """Return the device of this process.

    Args:
        name: as in a recipe; `auto` is a CUDA device where there is one, else the CPU.

    Raises:
        ConfigError: PyTorch finds no such device here.
    """
    if name == "auto" and torch.cuda.is_available():
        # torchrun numbers the processes of a machine; each takes the device of its number. There
        # may be fewer: a scheduler can show each process only its own, and a run can use the CPU.
        number = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", number % torch.cuda.device_count())
    if name in _BACKENDS and not _BACKENDS[name].is_available():
        raise ConfigError(
            f"PyTorch {torch.__version__} finds no {name} device on this machine",
            where="device",
            fix="Set device: auto or cpu; or install a PyTorch that was built for the device, with "
            "its driver.",
        )
    return torch.device("cpu" if name == "auto" else name)


def describe_hardware(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor, and its memory."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has the file
        match = re.search(r"model name\s*: (.+)", CPU_INFO.read_text("utf-8", "replace"))
        if match is not None:
            name = match[1]
    memory = f"{machine_memory() / 2**30:.0f} GiB"
    return f"{name}, {processors()} processors, {memory}"


# The file with the names of the processors.
CPU_INFO = Path("/proc/cpuinfo")
# The file that holds the bytes of memory that a container may take.
MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")


def machine_memory() -> int:
    """Return the bytes of memory of the machine or of its container, free or not."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit in it
        limit = int(MEMORY_MAX.read_text(encoding="ascii"))
        memory = min(memory, limit)
    return memory


def free_memory(device: torch.device) -> int:
    """Return the bytes that new tensors can take on a CUDA device.

    They are the free memory of the GPU, and what PyTorch has reserved and not allocated. A process
    that has only a share of the GPU (`torch.cuda.set_per_process_memory_fraction`) can take no more
    than that, however much is free.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    allowed = int(share * total) - reserved
    new = max(0, min(free, allowed))
    unused = reserved - torch.cuda.memory_allocated(device)
    return new + unused
