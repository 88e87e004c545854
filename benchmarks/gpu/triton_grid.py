"""Compiles every Triton kernel for every card, without one: does it build, and does it fit?

    python -m benchmarks.gpu.triton_grid                    # all of it, to results/triton_grid.json
    python -m benchmarks.gpu.triton_grid --arch 89 --dim 128 256 --part decode     # and no file

Each kernel is built with the constants that its launch chooses for the card, which are recorded
from a launch on small tensors, and its shared memory is compared with what a program may have
there. Needs Triton (`pip install grouper-rl[triton]`), and neither a GPU nor a driver. Ends with 1
if a kernel does not build or does not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.checkout import RESULTS

# Kernels are compiled here; the interpreter would run them instead.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from grouper.kernels import layers
from grouper.kernels.triton import decode, draw
from grouper.kernels.triton import head as heads
from grouper.kernels.triton import layers as triton_layers

RESULT = RESULTS / "triton_grid.json"

# Compute capability -> bytes of shared memory that a program may have (CUDA C++ Programming Guide,
# technical specifications per compute capability).
CARDS = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
DIMS = (64, 96, 128, 256)
PARTS = ("decode", "draw", "layers", "head")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES |= {torch.int64: "i64", torch.int32: "i32", torch.bool: "i1"}
WIDTH, VOCABULARY = 896, 151_936


@dataclass(frozen=True)
class Launch:
    """How a kernel was started."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    def key(self) -> str:
        """What the compiler knows of it: two launches alike give the same program."""
        signature, constants, attributes = self.specialised()
        return str((self.kernel.__name__, signature, constants, attributes, self.options))

    def specialised(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
        """Types, constants and divisibility of the arguments, as Triton derives them."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for number, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if isinstance(value, Tensor):
                signature[parameter.name] = "*" + TYPES[value.dtype]
            elif parameter.is_constexpr or (value == 1 and isinstance(value, int)):
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            whole = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
            if whole and signature[parameter.name] != "constexpr":
                attributes[number,] = [["tt.divisibility", 16]]
        return signature, constants, attributes

    def compiled(self, capability: int) -> Any:
        signature, constants, attributes = self.specialised()
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options=self.options
        )


def recorded(run: Callable[[], object], room: int) -> list[Launch]:
    """What `run` would launch on a card with so much shared memory."""
    found: list[Launch] = []

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        del grid, warmup
        names = [name for name in ("num_warps", "num_stages") if name in named]
        options: dict[str, int] = {name: named.pop(name) for name in names}
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        found.append(Launch(kernel, given, options))

    card = mock.patch.object(decode, "limits", return_value=(100, room))
    with card, mock.patch.object(JITFunction, "run", record):
        run()
    return found


def decoding(dtype: torch.dtype, dim: int) -> Iterator[Callable[[], object]]:
    """16 rows of two prompts, 1, 7 or 8 query heads a key head."""
    rows, heads, width, columns = 16, 2, 256, 256
    whole: dict[str, Any] = {"dtype": torch.long}
    for share, window, softcap in ((7, None, None), (8, 64, 30.0), (1, None, None)):
        ring = (torch.empty(rows, heads, width, dim, dtype=dtype),) * 2
        prompts = (torch.empty(2, heads, columns, dim, dtype=dtype),) * 2
        new = (torch.empty(rows, heads, dim, dtype=dtype),) * 2
        query = torch.empty(rows, heads * share, dim, dtype=dtype)
        yield partial(
            decode.decode,
            *(query, new, ring, prompts),
            (torch.ones(rows, **whole), torch.ones(2, **whole)),
            column=torch.zeros(1, **whole),
            members=torch.zeros(2, 8, **whole),
            window=window,
            scaling=0.1,
            softcap=softcap,
        )


def drawing() -> Iterator[Callable[[], object]]:
    logits, uniform = torch.empty(4, VOCABULARY), torch.empty(4)
    stops = torch.empty(VOCABULARY, dtype=torch.bool)
    yield lambda: draw.kernel_draw(logits, uniform, uniform, None, stops)
    yield lambda: draw.kernel_draw(logits, uniform, uniform, stops[:4], stops)


def backward_of(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    kernel(triton_layers, *arguments, **options).sum().backward()


def layering(dtype: torch.dtype, dim: int) -> Iterator[Callable[[], object]]:
    """Norms over the model's width and over a head, rotations and gates, with their gradients."""
    for width in (WIDTH, 8192, dim):
        for ones in (False, True):
            x, weight = torch.zeros(1, 32, width, dtype=dtype), torch.zeros(width, dtype=dtype)
            leaves = x.requires_grad_(), weight.requires_grad_()
            yield partial(backward_of, layers.rms_norm, *leaves, 1e-6, ones=ones)
            plain = x.detach()
            yield partial(triton_layers.add_norm, plain, plain, weight.detach(), 1e-6, ones=ones)
    for count in (1, 14):
        x = torch.zeros(1, 32, count, dim, dtype=dtype).transpose(1, 2).requires_grad_()
        angles = torch.zeros(1, 32, dim, dtype=dtype)
        yield partial(backward_of, layers.rotate, x, angles, angles)
        heads_ = x.detach()
        yield partial(triton_layers.rotate_both, heads_, heads_, angles, angles, dtype)
    gate, up = (torch.zeros(1, 4, 4864, dtype=dtype, requires_grad=True) for _ in range(2))
    yield partial(backward_of, layers.gated, gate, up, "silu")


def heading(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Products of the compute type, and in float32 of halves."""
    targets, numbers = torch.zeros(4, dtype=torch.long), torch.zeros(4)
    for given in {dtype, torch.float32}:
        for outer in (0.0, 30.0):
            products = torch.empty(4, VOCABULARY, dtype=given)
            curve = (0.5, outer)
            yield partial(heads.scores, products, targets, curve)
            for entropies in (False, True):
                known = (targets, *[numbers] * 4)
                yield partial(heads.gradient, products, known, curve, dtype, entropies=entropies)


def cases(
    part: str, dtype: torch.dtype, dims: tuple[int, ...]
) -> Iterator[tuple[int, Callable[[], object]]]:
    """Dimension of a head, and what launches the part's kernels."""
    for dim in dims:
        made: dict[str, Callable[[], Iterator[Callable[[], object]]]] = {
            "decode": partial(decoding, dtype, dim),
            "draw": drawing,
            "layers": partial(layering, dtype, dim),
            "head": partial(heading, dtype),
        }
        yield from ((dim, run) for run in made[part]())


def grid(cards: list[int], dims: tuple[int, ...], parts: list[str]) -> Iterator[dict[str, Any]]:
    """A row for every program: card, part, type, kernel, constants, bytes, or the error."""
    for card in cards:
        built: set[str] = set()
        for dtype in (torch.float16 if card < 80 else torch.bfloat16, torch.float32):
            launches = (
                (part, dim, launch)
                for part in parts
                for dim, run in cases(part, dtype, dims)
                for launch in recorded(run, CARDS[card] * 1024)
            )
            for part, dim, launch in launches:
                if launch.key() in built:
                    continue
                built.add(launch.key())
                yield {
                    "card": f"sm_{card}",
                    "part": part,
                    "dtype": str(dtype).removeprefix("torch."),
                    "dim": dim,
                    "kernel": launch.kernel.__name__,
                    **launch.options,
                    **measured(launch, card),
                }


def measured(launch: Launch, card: int) -> dict[str, Any]:
    try:
        shared = launch.compiled(card).metadata.shared
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a result
        return {"shared": None, "fits": False, "error": f"{type(error).__name__}: {error}"[:300]}
    return {"shared": shared, "fits": shared <= CARDS[card] * 1024}


def summarized(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each card, kernel, type and dimension: programs, and the most that one needs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        names = ("card", "part", "kernel", "dtype", "dim")
        groups.setdefault(json.dumps({name: row[name] for name in names}), []).append(row)
    return [
        json.loads(name)
        | {
            "programs": len(group),
            "shared": max((row["shared"] or 0 for row in group), default=0),
            "limit": CARDS[int(group[0]["card"].removeprefix("sm_"))] * 1024,
            "bad": sum(not row["fits"] for row in group),
        }
        for name, group in groups.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--dim", type=int, nargs="+", default=list(DIMS))
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    asked = parser.parse_args()
    began, rows = time.monotonic(), []
    for row in grid(asked.arch, tuple(asked.dim), asked.part):
        rows.append(row)
        if not row["fits"]:
            print(json.dumps(row), flush=True)
    seconds = time.monotonic() - began
    bad = sum(not row["fits"] for row in rows)
    print(f"{len(rows)} programs in {seconds:.0f} s with Triton {triton.__version__}: {bad} bad")
    if (asked.arch, asked.dim, asked.part) == (list(CARDS), list(DIMS), list(PARTS)):
        table = ",\n ".join(json.dumps(row) for row in summarized(rows))
        head = json.dumps({"triton": triton.__version__, "torch": torch.__version__})[1:-1]
        RESULT.write_text(f'{{{head},\n"programs": [\n {table}\n]}}\n', encoding="utf-8")
    return int(bad > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
