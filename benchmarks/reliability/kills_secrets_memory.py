"""Kills, secrets and memory: what a run promises when it is interrupted, watched or very long.

    OMP_NUM_THREADS=1 python -m benchmarks.reliability.kills_secrets_memory

Kills: small runs of the recipe `demo` (base, SFT, GRPO; about a second each) are ended by SIGKILL,
resumed, and compared byte for byte with one that was never interrupted: weights, optimizer state,
controllers, rollouts, evaluations, and metrics outside `time.*`, `memory.*` and `host.*`. Some
kills happen at random times, some while a GRPO checkpoint is being written (the kill counts only
if the unfinished folder is still there afterwards), some in runs of two processes, of which one
or both are killed. One process imports everything and forks each run, with the environment that
`--nproc` gives its processes; pictures are not drawn.

Secrets: a run whose reward and tracker are given a token and a key by reference, and with one more
key in the environment; then every file of the run, what each tracker recorded and the environment
of each grading worker are searched for the values.

Memory: the resident memory of one process over GRPO steps; the slope of a straight line through
the part after the first tenth.

Written to benchmarks/results/reliability.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkout import RESULTS
from benchmarks.machine import machine
from grouper import api
from grouper.advice import checks
from grouper.api import train
from grouper.cli.main import main as grouper
from grouper.config.loading import load_recipe
from grouper.errors import ConfigError
from grouper.runs.progress import Progress
from grouper.training.run import Run
from grouper.types import StepReport
from tests.invariants.run_records import differences, everything
from tests.tiny_runs import TINY_RUN, data_from, write_problems

KILLABLE = [
    *TINY_RUN,
    *data_from(".."),
    "output_dir=.",
    "sampling.max_new_tokens=8",
    "sft.steps=12",
    "sft.checkpoint_every=4",
    "grpo.steps=6",
    "grpo.checkpoint_every=1",
    "grpo.keep_checkpoints=2",
    "grpo.evaluate_every=2",
    "grpo.updates_per_batch=2",
    "grpo.dynamic_sampling_rounds=1",
    "grpo.beta=0.05",
    "grpo.difficulty={band: [0.2, 0.8]}",
    "grpo.optimizer.learning_rate=5e-3",
    "evaluation.samples=2",
    "evaluation.temperature=1.0",
]
"""Every mechanism that keeps something between steps has work to do."""

GIVEN_UP = 60.0
"""Seconds after which the rest of a run that lost a process is ended."""


def start(folder: Path, arguments: Sequence[str], *, processes: int = 1) -> list[int]:
    """Fork `grouper ARGUMENTS` in `folder`, whose file `log` takes its output; the process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(processes):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            os.chdir(folder)
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if processes > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
                os.environ |= {name: str(value) for name, value in place.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            api.draw_pictures = lambda _: None  # type: ignore[attr-defined,assignment]  # a stub
            checks.WINDOW = 2  # six steps have findings to keep, too
            grouper(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:  # noqa: BLE001 - a child must not go on into the parent's code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return children


def wait(children: Sequence[int], seconds: float = GIVEN_UP) -> list[int]:
    """The exit codes, negative for a signal; what is still alive after this long is killed."""
    deadline, codes = time.monotonic() + seconds, dict.fromkeys(children, 0)
    left = set(children)
    while left:
        for child in list(left):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
                left.remove(child)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return list(codes.values())


def killed(children: Sequence[int], victims: Sequence[int]) -> bool:
    """Kill some of the processes and wait for all; whether any was still running."""
    for victim in victims:
        os.kill(victim, signal.SIGKILL)  # a process that has ended is a zombie until it is reaped
    return -signal.SIGKILL in wait(children)


def is_running(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


class Kills:
    """Runs that are killed once, resumed, and compared with one that was not.

    Args:
        folder: to work in.
        seed: of the times of the kills.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.times = random.Random(seed)
        self.count = 0
        self.rows: list[dict[str, Any]] = []
        self._whole: dict[int, tuple[dict[str, Any], float]] = {}
        write_problems(folder)

    def whole(self, processes: int) -> tuple[dict[str, Any], float]:
        """The uninterrupted run of so many processes: what it leaves, and its seconds."""
        if processes not in self._whole:
            place, began = self.folder / f"whole-{processes}", time.monotonic()
            self._finish(place, processes)
            seconds = time.monotonic() - began
            self._whole[processes] = everything(place / "demo"), seconds
        return self._whole[processes]

    def at_random(self, processes: int = 1) -> None:
        """One kill at any time of the run; of two processes one or both."""
        _, seconds = self.whole(processes)
        while True:
            place = self._place()
            children = start(place, self._arguments(), processes=processes)
            delay = self.times.uniform(0.05, seconds)
            time.sleep(delay)
            victims = self.times.choice([[child] for child in children] + [children])
            began = time.monotonic()
            if killed(children, victims):
                after = round(time.monotonic() - began, 1)
                what = {"victims": len(victims), "rest_ended_after": after} if processes > 1 else {}
                self._check(place, processes, at=f"{delay:.2f} s", **what)
                return

    def inside_a_checkpoint(self) -> None:
        """One kill while a folder of GRPO's checkpoints has its temporary name."""
        while True:
            place, number = self._place(), self.times.randint(1, 5)
            (child,) = start(place, self._arguments())
            wanted, phase = f".checkpoint-{number}.", place / "demo" / "grpo"
            while is_running(child) and not self._being_written(phase, wanted):
                pass
            time.sleep(self.times.uniform(0, 0.02))
            if killed([child], [child]) and (found := self._being_written(phase, wanted)):
                files = sorted(path.name for path in (phase / found).rglob("*"))
                self._check(place, 1, at=f"grpo/{found.split('.')[1]}", written=files)
                return

    @staticmethod
    def _being_written(phase: Path, wanted: str) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return next((name for name in os.listdir(phase) if name.startswith(wanted)), None)  # noqa: PTH208 - polled
        return None

    def _check(self, place: Path, processes: int, **what: Any) -> None:
        self._finish(place, processes)
        differ = differences(everything(place / "demo"), self.whole(processes)[0])
        self.rows.append({"processes": processes, **what, "differ": differ})
        print(self.rows[-1], flush=True)
        if not differ:
            shutil.rmtree(place)

    def _finish(self, place: Path, processes: int) -> None:
        codes = wait(start(place, self._arguments(), processes=processes), seconds=300)
        assert not any(codes), (codes, (place / "log").read_text()[-4000:])

    def _place(self) -> Path:
        self.count += 1
        return self.folder / f"run-{self.count}"

    @staticmethod
    def _arguments() -> list[str]:
        return ["run", "demo", "--resume", "--quiet", *KILLABLE]


def kills(total: int, inside: int, paired: int, *, seed: int) -> dict[str, Any]:
    """Some kills inside GRPO's checkpoints, some in runs of two processes, the rest at any time.

    Args:
        total: of all kinds.
        inside: of them inside checkpoints.
        paired: of them in runs of two processes.
        seed: of their times.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        runs = Kills(Path(name), seed)
        for _ in range(inside):
            runs.inside_a_checkpoint()
        for _ in range(paired):
            runs.at_random(processes=2)
        for _ in range(total - inside - paired):
            runs.at_random()
        files = {n: sorted(runs.whole(n)[0]) for n in (1, 2) if n == 1 or paired}
    return {
        "seed": seed,
        "kills": len(runs.rows),
        "inside_grpo_checkpoints": inside,
        "of_two_processes": paired,
        "identical_after_resuming": sum(not row["differ"] for row in runs.rows),
        "files_compared": {str(n): len(found) for n, found in files.items()},
        "seconds": round(time.monotonic() - began),
        "runs": runs.rows,
    }


SECRETS = {
    "PLANTED_TOKEN": "tok-4f9a1c77e2b84d0d",
    "PLANTED_KEY": "key-93be05d1aa6740c2",
    "OPENAI_API_KEY": "sk-live-7d41f0c9938b4e55",
}
"""The first two are given to a reward and to trackers; the last only lies in the environment."""

TOKEN = "params: {token: '${PLANTED_TOKEN}'}"
REWARD = "params: {token: '${PLANTED_TOKEN}', judge: {api_key: '${PLANTED_KEY}'}}"
TRACKERS = (
    "{name: tensorboard}",
    "{name: wandb}",
    f"{{name: 'users.py:Kept', {TOKEN}}}",
    f"{{name: 'users.py:failing', {TOKEN}}}",
)
GIVEN = [
    f"rewards=[{{name: 'users.py:judged', max_failure_rate: 1, {REWARD}}}]",
    f"tracking.trackers=[{', '.join(TRACKERS)}]",
    "grading.symbolic=true",
    "grpo.steps=3",
]
"""Parts of a recipe that need secrets; the reward and the last tracker say theirs as they fail."""


def secrets() -> dict[str, Any]:
    """Where the planted values are found after a run, and what happens to one in plain text."""

    def plant(folder: Path) -> dict[str, Any]:
        write_problems(folder)
        os.chdir(folder)
        os.environ |= {**SECRETS, "WANDB_MODE": "offline"}
        shutil.copyfile(Path(__file__).with_name("planted_code.py"), "users.py")
        overrides = [*TINY_RUN, *data_from("."), *GIVEN, "output_dir=."]
        with Run(load_recipe("demo", overrides), Progress(quiet=True)) as run:
            train(run)
            workers = run.prepared.grader.worker_pids
            environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in workers]
        plain = load_or_refusal(
            "rewards=[{name: 'users.py:judged', params: {token: tok-in-plain}}]"
        )
        return {
            "planted": len(SECRETS),
            "files_searched": sum(path.is_file() for path in Path("demo").rglob("*")),
            "trackers": sorted(path.name for path in Path("demo/trackers").iterdir()),
            "failures_recorded": Path("demo/metrics.jsonl").read_text().count("401 for ${PLANTED_"),
            "found_in_files": [str(path) for path in Path("demo").rglob("*") if holds_one(path)],
            "workers": len(environments),
            "found_in_workers": sum(any(map(env.__contains__, VALUES)) for env in environments),
            "found_in_an_ordinary_child": sum(map(environment_of_a_child().__contains__, VALUES)),
            "in_plain_text": plain,
        }

    found: dict[str, Any] = in_a_child(plant)
    return found


def environment_of_a_child() -> bytes:
    """What a process gets that nobody withheld anything from: the search must find it there."""
    return subprocess.run(["/usr/bin/env"], capture_output=True, check=True).stdout


VALUES = [value.encode() for value in SECRETS.values()]


def holds_one(path: Path) -> bool:
    """Whether a file, unpacked where it is packed, holds one of the planted values."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return any(value in content for value in VALUES)


def load_or_refusal(override: str) -> str:
    try:
        load_recipe("demo", [override])
    except ConfigError as error:
        return f"refused: {error}"
    return "accepted"


class Weighed(Progress):
    """Notes the resident memory after each step, in MB."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.megabytes: list[float] = []

    def step(self, report: StepReport, total: int | None = None) -> None:
        super().step(report, total)
        if report.phase == "grpo":
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)


def memory(steps: int) -> dict[str, Any]:
    """Resident memory over so many GRPO steps, in a process of its own."""
    began = time.monotonic()

    def measure(folder: Path) -> list[float]:
        write_problems(folder)
        overrides = [*TINY_RUN, *data_from(str(folder)), f"grpo.steps={steps}"]
        overrides += [f"output_dir={folder}", "grpo.evaluate_every=0", "grpo.checkpoint_every=500"]
        shown = Weighed()
        with Run(load_recipe("demo", overrides), shown) as run:
            train(run)
        return shown.megabytes

    found = in_a_child(measure)
    assert len(found) == steps
    settled = found[steps // 10 :]
    slope = statistics.linear_regression(range(len(settled)), settled).slope
    return {
        "steps": steps,
        "mb_per_1000_steps": round(1000 * slope, 3),
        "mb_after_a_tenth": round(settled[0], 1),
        "mb_at_the_end": round(settled[-1], 1),
        "every_100_steps": [round(value, 1) for value in found[::100]],
        "seconds": round(time.monotonic() - began),
    }


def in_a_child(work: Callable[[Path], Any]) -> Any:
    """What `work` returns for a temporary folder, done in a forked process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = os.fork()
        if not child:
            code = 1
            try:
                (folder / "answer").write_text(json.dumps(work(folder)))
                code = 0
            except BaseException:  # noqa: BLE001 - a child must not go on into the parent's code
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert status == 0, "the child failed; its traceback is above"
        return json.loads((folder / "answer").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--inside", type=int, default=25, help="inside GRPO's checkpoints")
    parser.add_argument("--paired", type=int, default=20, help="in runs of two processes")
    parser.add_argument("--steps", type=int, default=2000, help="of the memory measurement")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the kills")
    parser.add_argument("--output", type=Path, default=RESULTS / "reliability.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    record = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "secrets": secrets(),
        "kills": kills(chosen.kills, chosen.inside, chosen.paired, seed=chosen.seed),
        "memory": memory(chosen.steps),
    }
    chosen.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({part: _summary(record[part]) for part in record}, indent=1))


def _summary(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {name: v for name, v in part.items() if name not in ("runs", "every_100_steps")}


if __name__ == "__main__":
    main()
