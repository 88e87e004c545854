"""Starting one command as several processes, and being one of them."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence

from grouper.errors import ConfigError

PR_SET_PDEATHSIG = 1
"""Linux: the signal a process gets when its parent dies."""

HEAD_START = 3.0
"""Seconds a follower waits with its error: when rank 0 has the same one, it ends the others."""


def is_follower() -> bool:
    """Whether this process was started by torchrun and is not the one that talks."""
    return int(os.environ.get("RANK", "0")) > 0


def stop_with_the_launcher() -> None:
    """A process that torchrun or `--nproc` started stops, as on SIGTERM, when that is killed.

    Linux only; elsewhere the processes of a killed launcher train on to the end.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def let_the_first_speak() -> str:
    """Before a follower reports an error; returns what to put in front of it.

    A mistake in a recipe is found by every process at once, and one paragraph is enough. One
    that only this process has is told a little later.
    """
    if not is_follower():
        return ""
    time.sleep(HEAD_START)
    return f"[rank {os.environ['RANK']}] "


def require_devices(processes: int, device: str) -> None:
    """Raise `ConfigError` if the processes of a run would have to share CUDA devices.

    Args:
        processes: how many will be started on this machine.
        device: as in a recipe.
    """
    import torch

    found = torch.cuda.device_count() if device in {"auto", "cuda"} else 0
    if 0 < found < processes:
        raise ConfigError(
            f"{processes} processes were asked for, one per GPU, and this machine has {found}",
            where="--nproc",
            fix=f"Use --nproc {found} or fewer, or device=cpu.",
        )


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `grouper ARGUMENTS` as several processes on this machine; returns the exit code.

    The same as `torchrun --standalone --nproc-per-node N -m grouper ...`, without its summary:
    the processes' own messages say what went wrong.

    Args:
        processes: how many.
        arguments: of the command, without `--nproc`.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Shared out, or every process would start as many threads as the machine has cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        monitor_interval=0.2,
        # A command that failed fails again, and one with --overwrite would delete what it saved.
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "grouper", *arguments)
    except ChildFailedError as error:
        code: int = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # ended by a signal: as the shell says it
    return 0


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """The arguments of the same command for one process.

    >>> without_nproc(["run", "demo", "--nproc", "2", "seed=1", "--nproc=2"])
    ['run', 'demo', 'seed=1']
    """
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != "--nproc" and not argument.startswith("--nproc="):
            kept.append(argument)
        skip = argument == "--nproc" and not skip
    return kept
