"""A full GRPO step of Grouper beside TRL's GRPOTrainer: the same work for both, in turns.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.step --trl-python PATH --tries   # settings first
    OMP_NUM_THREADS=2 python -m benchmarks.cpu.step --trl-python PATH

PATH is the interpreter of an environment with TRL and the same PyTorch and transformers. Both load
the same random weights and train them on the same prompts with the same lengths, dtypes, loss and
optimizer settings; their steps alternate. On the first rollouts that TRL draws, the norm of its
gradient is compared with that of Grouper's update on the very same tokens.

`--tries` measures one setting at a time from a common start, then the best of each together, and
writes `results/cpu_step_tries.json`; without it each side runs with the best row of that file, and
the seconds of every step go to `results/cpu_step.json`.

Pretrained models (`make real-models`) are cases, too: `--cases "SmolLM2"`, one in a call, since the
memory is the most that each process has held. `--dtype float32` on a CPU without bfloat16 products.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.cpu.grouper_step import GrouperSteps
from benchmarks.machine import where
from benchmarks.workers import Worker, peak_memory
from benchmarks.workload import ALL_CASES, CASES, Case, lengths_of, prompts_of, save_model, text_of

RESULT = RESULTS / "cpu_step.json"
TRIES = RESULTS / "cpu_step_tries.json"
Settings = dict[str, Any]
Step = dict[str, Any]

STARTS: dict[str, Settings] = {
    "trl": {
        "micro_batch": 16,
        "checkpointing": False,
        "attention": "sdpa",
        "threads": 2,
        "cache": None,
        "autocast": False,
    },
    "grouper": {"budget": 4096, "threads": 2},
}
CHANGES: dict[str, dict[str, list[Any]]] = {
    "trl": {
        "micro_batch": [8, 32, 128],
        "checkpointing": [True],
        "attention": ["eager"],
        "threads": [1],
        "cache": ["static"],
        "autocast": [True],
    },
    "grouper": {"budget": [1024, 2048, 8192, 32768], "threads": [1]},
}
ENOUGH_SECONDS = 6.0
"""A try is stepped until this long, at most `MOST_STEPS` times."""
MOST_STEPS = 5


class Sides:
    """Both trainers over one saved model.

    Args:
        case: what to run.
        trl: the process that has TRL.
        folder: for the model and the runs.
    """

    def __init__(self, case: Case, trl: Worker, folder: Path) -> None:
        self._case = case
        self._trl = trl
        self._folder = folder
        self._runs = 0
        save_model(case, folder / "model")

    @contextmanager
    def trl(self, settings: Settings) -> Iterator[Callable[[], Step]]:
        case = self._case
        self._trl.ask(
            "open",
            model=str(self._folder / "model"),
            dtype=case.dtype,
            prompts=[text_of(case, ids) for ids in prompts_of(case)],
            group=case.group,
            new_tokens=case.new_tokens,
            lengths=lengths_of(case) if case.ragged else None,
            **settings,
        )
        try:
            yield lambda: self._checked(self._trl.ask("step"))
        finally:
            self._trl.ask("close")

    @contextmanager
    def grouper_steps(self, settings: Settings) -> Iterator[GrouperSteps]:
        self._runs += 1
        run = self._folder / f"run-{self._runs}"
        with GrouperSteps(self._case, self._folder / "model", run, **settings) as steps:
            yield steps

    @contextmanager
    def grouper(self, settings: Settings) -> Iterator[Callable[[], Step]]:
        with self.grouper_steps(settings) as steps:
            yield lambda: self._checked(steps.step())

    def _checked(self, step: Step) -> Step:
        """Every engine makes exactly the tokens it was told to."""
        assert step["tokens"] == sum(lengths_of(self._case)), step["tokens"]
        return step


# --- which settings ------------------------------------------------------------------------------


def grid(side: str, case: Case) -> list[Settings]:
    """The start, and each change of one setting that makes sense for the case."""
    start = STARTS[side]
    rows = [start]
    for name, values in CHANGES[side].items():
        if name == "autocast" and case.dtype != "bfloat16":
            continue
        fitting = [v for v in values if name != "micro_batch" or case.rows % v == 0]
        rows += [{**start, name: value} for value in fitting]
    return rows


def together(tried: list[Step]) -> Settings:
    """For each setting the value of its fastest row."""
    start = tried[0]["settings"]
    best = dict(start)
    for name in start:
        others_equal = [
            row
            for row in tried
            if all(row["settings"][k] == v for k, v in start.items() if k != name)
        ]
        best[name] = min(others_equal, key=lambda row: row["median"])["settings"][name]
    return best


def one_try(opened: Any, settings: Settings, *, warm_up: bool) -> Step:
    with opened(settings) as step:
        if warm_up:
            step()
        seconds: list[float] = []
        while not seconds or (sum(seconds) < ENOUGH_SECONDS and len(seconds) < MOST_STEPS):
            seconds.append(round(step()["seconds"], 3))
    row = {
        "settings": settings,
        "seconds": seconds,
        "median": round(statistics.median(seconds), 3),
    }
    print(row, flush=True)
    return row


def tries(sides: Sides, case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, opened in (("trl", sides.trl), ("grouper", sides.grouper)):
        rows: list[Step] = []
        for settings in grid(name, case):
            rows.append(one_try(opened, settings, warm_up=not rows))
        combined = together(rows)
        if combined not in [row["settings"] for row in rows]:
            rows.append(one_try(opened, combined, warm_up=False))
        found[name] = rows
    return found


def best_settings(name: str) -> dict[str, Settings]:
    """The fastest row of each side for a case; the start where none was tried."""
    tried = json.loads(TRIES.read_text()) if TRIES.exists() else {}
    return {
        side: min(tried[name][side], key=lambda row: row["median"])["settings"]
        if name in tried
        else start
        for side, start in STARTS.items()
    }


# --- the comparison ------------------------------------------------------------------------------


def rounded(steps: list[Step], name: str) -> list[float]:
    return [round(step[name], 3) for step in steps]


def compare(sides: Sides, case: Case, count: int) -> dict[str, Any]:
    best = best_settings(case.name)
    # A case that was made smaller may have fewer rows than the fastest micro-batch of the whole.
    best["trl"] = {**best["trl"], "micro_batch": min(best["trl"]["micro_batch"], case.rows)}
    found: dict[str, list[Step]] = {"trl": [], "grouper": []}
    with sides.trl(best["trl"]) as theirs, sides.grouper_steps(best["grouper"]) as ours:
        first = theirs()
        gradient = {
            "trl": first["grad_norm"],
            "grouper": ours.gradient_norm(first["prompts"], first["completion_ids"]),
        }
        ours.step()
        for _ in range(count):
            found["trl"].append(theirs())
            found["grouper"].append(ours.step())
    tokens = sum(lengths_of(case))
    for step in (*found["trl"], *found["grouper"]):
        assert step["tokens"] == tokens, (step["tokens"], tokens)
        assert not step.get("groups_without_signal"), "every group has a signal"
    median = {side: statistics.median(s["seconds"] for s in steps) for side, steps in found.items()}
    return {
        "rows": case.rows,
        "completion_tokens": tokens,
        "settings": best,
        "seconds": {side: rounded(steps, "seconds") for side, steps in found.items()},
        "trl_generate_seconds": rounded(found["trl"], "sample_seconds"),
        "grouper_split": [step["split"] for step in found["grouper"]],
        "median": {side: round(value, 3) for side, value in median.items()},
        "ratio": round(median["trl"] / median["grouper"], 2),
        "peak_bytes": {"trl": found["trl"][-1]["peak_bytes"], "grouper": peak_memory()},
        "gradient_norm_on_the_same_rollouts": gradient,
        "gradient_norms": {
            side: [round(s["grad_norm"], 4) for s in steps] for side, steps in found.items()
        },
    }


def keep(file: Path, name: str, value: Any) -> None:
    """Put one case into a result file, the others as they are."""
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**held, name: value}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", required=True, help="interpreter of TRL's environment")
    parser.add_argument("--cases", nargs="+", choices=ALL_CASES, default=list(CASES)[:4])
    parser.add_argument("--steps", type=int, default=5, help="of each side, after one to warm up")
    parser.add_argument("--tries", action="store_true", help="look for the best settings")
    parser.add_argument("--prompts", type=int, help="fewer of them, where tries take too long")
    parser.add_argument("--dtype", help="of the weights and products, instead of the case's own")
    parser.add_argument("--small", action="store_true", help="little work, nothing written")
    options = parser.parse_args()
    with Worker(options.trl_python, "benchmarks.cpu.trl_worker") as trl:
        versions = {k: v for k, v in trl.ask("versions").items() if k != "torch"}
        for name in options.cases:
            case = ALL_CASES[name].smaller(4, 4, 16) if options.small else ALL_CASES[name]
            case = replace(case, dtype=options.dtype or case.dtype)
            if options.prompts:
                case = replace(case, prompts=options.prompts)
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                sides = Sides(case, trl, Path(folder))
                if options.tries:
                    result = tries(sides, case)
                else:
                    result = compare(sides, case, options.steps)
            seconds = round(time.perf_counter() - started)
            machine = where(**versions)
            if options.tries:
                del machine["threads"]  # they are one of the settings
            result |= {"prompts": case.prompts, "dtype": case.dtype, "machine": machine}
            result["pretrained"] = bool(case.model)
            if options.small:
                print(json.dumps(result, indent=1))
            else:
                keep(TRIES if options.tries else RESULT, name, result)
            print(name, result.get("ratio", ""), f"took {seconds} s", flush=True)


if __name__ == "__main__":
    main()
