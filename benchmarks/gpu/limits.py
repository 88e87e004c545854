"""What the device can do at best: bytes a second of a copy, FLOPs a second of a matrix product."""

from __future__ import annotations

import statistics

import torch

from benchmarks.gpu.workload import seconds_of

__all__ = ["copy_rate", "matrix_rate"]


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of copies much larger than any cache."""
    count = 2**31 if device.type == "cuda" else 2**22
    source = torch.randint(0, 100, (count,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    rounds = 10

    def copies() -> None:
        for _ in range(rounds):
            target.copy_(source)

    copies()
    return 2 * count * rounds / statistics.median(seconds_of(copies, device) for _ in range(3))


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of a large product of random matrices (zeros would run faster)."""
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    rounds = 10

    def products() -> None:
        for _ in range(rounds):
            left @ right

    products()
    return 2 * size**3 * rounds / statistics.median(seconds_of(products, device) for _ in range(3))
