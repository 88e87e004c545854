"""Several processes of a run on this machine, which `--nproc` starts."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import click

from grouper.errors import ConfigError, Interrupted, plural
from grouper.files import processors

# Seconds that the other processes have to end where one has failed.
GRACE = 30


def require_devices(processes: int, device: str) -> None:
    """Raise `ConfigError` if the processes of a run would have to share devices or processors.

    On a CPU two may share a single processor, to try out what several do.

    Args:
        processes: how many will be started on this machine.
        device: as in a recipe.
    """
    import torch

    gpus = torch.cuda.device_count() if device in {"auto", "cuda"} else 0
    if 0 < gpus < processes:
        raise ConfigError(
            f"{processes} processes were requested, one per GPU, and this machine has {gpus}",
            where="--nproc",
            fix=f"Use --nproc {gpus} or fewer, or device=cpu.",
        )
    most = max(2, processors())
    if gpus == 0 and processes > most:
        raise ConfigError(
            f"{processes} processes were requested, and {plural(processors(), 'processor')} may "
            "be used here: they would only wait for each other",
            where="--nproc",
            fix=f"Use --nproc {most} or fewer.",
        )


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `grouper ARGUMENTS` as several processes on this machine; returns the exit code.

    Like `torchrun --standalone --nproc-per-node N -m grouper ...`, with three differences. A signal
    is passed on, and the processes may finish their step however long it takes; torchrun kills them
    after 30 seconds. A process that was killed is named. No other summary is printed.

    Args:
        processes: how many.
        arguments: of the command; each process finds that it is one of several.
    """
    from torch.distributed.elastic.utils.distributed import create_c10d_store

    # The processes share the processors, or each would start as many threads as there are cores.
    threads = max(1, processors() // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # The processes meet on a port that the system has given to this launch alone.
    store = create_c10d_store(True, "127.0.0.1", wait_for_workers=False)
    shared_environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    # -P: the working folder may hold a random.py.
    command = [sys.executable, "-P", "-m", "grouper", *arguments]
    children: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def pass_on(number: int, _: object) -> None:
        # The third Ctrl-C does not wait.
        is_third_interrupt = number == signal.SIGINT and signals.count(number) > 1
        signals.append(signal.SIGKILL if is_third_interrupt else number)
        for child in children:
            child.send_signal(signals[-1])

    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal that is ignored, as under `nohup`, stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, pass_on)
    try:
        for rank in range(processes):
            if signals:
                break
            environment = {**os.environ, **shared_environment}
            environment["RANK"] = str(rank)
            environment["LOCAL_RANK"] = str(rank)
            child = subprocess.Popen(command, env=environment, start_new_session=True)
            children.append(child)
        return _ended(children, signals)
    finally:
        for child in children:
            child.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ended(children: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> int:
    """Wait for all processes, `GRACE` seconds after one has failed; returns the exit code.

    Args:
        children: the processes.
        signals: the signals that were passed on to them so far.
    """
    failure = 0
    deadline = math.inf
    while True:
        codes = [child.poll() for child in children]
        if not failure:
            failure = _failure(codes, signals)
            if failure:
                deadline = time.monotonic() + GRACE
                _report_signal(failure, codes)
                for child in children:
                    child.terminate()
        if None not in codes:
            break
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        time.sleep(0.1)
    if not failure and any(codes):
        return Interrupted.exit_code
    # Shells add 128 to the number of a signal.
    return 128 - failure if failure < 0 else failure


def _failure(codes: Sequence[int | None], signals: Sequence[int]) -> int:
    """Return the first exit code that is a failure, or 0."""
    expected = {Interrupted.exit_code}
    expected.update(-number for number in signals)
    for code in codes:
        if code and code not in expected:
            return code
    return 0


def _report_signal(code: int, codes: Sequence[int | None]) -> None:
    """Print which process a signal has ended: it could not say so itself."""
    if code > 0:
        return
    number = -code
    name = signal.Signals(number).name
    rank = f"rank {codes.index(code)} of {len(codes)}"
    message = f"error: {rank} was ended by {name}, and the others with it."
    if number == signal.SIGKILL:
        message += " If nobody sent it, the system probably ran out of memory (see `dmesg`)."
    click.echo(f"{message} Continue with the same command and --resume.", err=True)
