"""What bounds a step on the CPU: where the seconds of sampling and of the update go.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.step_profile

One step of each case under PyTorch's profiler, operations put into a few kinds; `between` is what
no operation accounts for (Python, dispatch). Profiling makes operations a little dearer, small ones
most: shares matter here, not seconds. Beside them the rate of the matrix products: the model FLOPs
of the part over the seconds inside products. Written to benchmarks/results/cpu_profile.json.
"""

# ruff: noqa: SLF001 - a profiler looks inside

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.checkout import RESULTS
from benchmarks.cpu.grouper_step import GrouperSteps
from benchmarks.cpu.scaling import work
from benchmarks.cpu.step import best_settings, keep
from benchmarks.machine import where
from benchmarks.workload import ALL_CASES, CASES, save_model
from grouper.kernels.cpu import graph, library, ops
from grouper.sampling.native import NativeSampler
from grouper.training import optimizer_steps

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::", "aten::dot"),
    "attention": ("scaled_dot_product", "ours::decode", "ours::attention", "Attention"),
    "softmax and drawing": (
        "ours::draw",
        *("softmax", "cumsum", "searchsorted", "exp", "gather", "logsumexp"),
    ),
    "our other kernels": ("ours::", "_RMSNorm", "_Gated", "_Rotate"),
    "copies": ("copy_", "fill_", "zero_", "cat", "index", "contiguous", "clone"),
    "optimizer": ("Optimizer", "_fused_adam", "_foreach", "sqrt", "addcdiv", "addcmul", "lerp"),
}
"""Kind -> parts of the names of its operations; the first that fits counts."""
OTHER = "other operations"
PLAIN_RUN = graph._Graph._run
PARTS = ("sample", "update")


def kind_of(operation: str) -> str:
    for kind, names in KINDS.items():
        if any(name in operation for name in names):
            return kind
    return OTHER


def named_calls(plain: Callable[..., None]) -> Callable[..., None]:
    """Calls of kernels that the profiler sees."""

    def call(name: str, tensors: Any, *numbers: float) -> None:
        with record_function(f"ours::{name}"):
            plain(name, tensors, *numbers)

    return call


def named_run(recorded: Any, entry: Any) -> Callable[[], object]:
    """The call that replays an entry of a graph; the profiler sees kernels, too."""
    run = PLAIN_RUN(recorded, entry)
    if not isinstance(entry, graph._Kernel):
        return run

    def shown() -> None:
        with record_function(f"ours::{entry.name}"):
            run()

    return shown


def watched(found: dict[str, Any], part: str, run: Callable[[], Any]) -> Any:
    """What `run` returns; `found[part]` gets its seconds, by kind of operation."""
    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as watch:
        made = run()
        seconds = time.perf_counter() - started
    inside = dict.fromkeys((*KINDS, OTHER), 0.0)
    for event in watch.key_averages():
        inside[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    inside["between"] = max(0.0, seconds - sum(inside.values()))
    found[part] = {"seconds": seconds, "kinds": inside}
    return made


def profiled_step(steps: GrouperSteps) -> dict[str, Any]:
    """One step, its parts under the profiler."""
    found: dict[str, Any] = {}
    plain_sample, plain_update = NativeSampler.sample, vars(optimizer_steps)["update"]

    def sample(sampler: NativeSampler, requests: Any) -> Any:
        return iter(watched(found, "sample", lambda: list(plain_sample(sampler, requests))))

    def update(*arguments: Any, **options: Any) -> Any:
        return watched(found, "update", lambda: plain_update(*arguments, **options))

    with (
        patch.object(NativeSampler, "sample", sample),
        patch.object(optimizer_steps, "update", update),
    ):
        steps.step()
    return found


def one_case(name: str, *, dtype: str | None, small: bool) -> dict[str, Any]:
    case = ALL_CASES[name].smaller(4, 4, 16) if small else ALL_CASES[name]
    case = replace(case, dtype=dtype or case.dtype)
    settings = best_settings(name)["grouper"]
    with tempfile.TemporaryDirectory() as folder:
        save_model(case, Path(folder) / "model")
        with GrouperSteps(case, Path(folder) / "model", Path(folder) / "run", **settings) as steps:
            steps.step()
            found = profiled_step(steps)
    flops = work(case)
    return {
        "threads": settings["threads"],
        "dtype": case.dtype,
        **{
            part: {
                "seconds": round(found[part]["seconds"], 3),
                "kinds": {k: round(v, 4) for k, v in found[part]["kinds"].items()},
                "products_tflops": round(flops[part] / found[part]["kinds"]["products"] / 1e12, 3),
            }
            for part in PARTS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=ALL_CASES, default=list(CASES)[:3])
    parser.add_argument("--dtype", help="of the weights and products, instead of the case's own")
    parser.add_argument("--small", action="store_true", help="little work, nothing written")
    options = parser.parse_args()
    with (
        patch.object(ops, "call", named_calls(library.call)),
        patch.object(graph._Graph, "_run", named_run),
    ):
        cases = {
            name: one_case(name, dtype=options.dtype, small=options.small) for name in options.cases
        }
    machine = where()
    print(json.dumps({"machine": machine, "cases": cases}, indent=1))
    if not options.small:
        for name, found in cases.items():
            keep(RESULTS / "cpu_profile.json", name, {"machine": machine, **found})


if __name__ == "__main__":
    main()
