"""Work that goes on beside the sampler, in a copy of this process on a processor of its own."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

# Seconds in which a copy that is not needed any more may still write down what it has.
_GRACE = 10.0


def has_a_processor() -> bool:
    """Whether a copy can be made here, and would not take the processor of this process.

    Not on a machine with CUDA: a copy of a process that has used it may not touch it, and none is
    needed, since the processor waits for the GPU.
    """
    here = getattr(os, "sched_getaffinity", lambda _: ())(0)
    daemon = multiprocessing.current_process().daemon
    return len(here) > 1 and not daemon and not torch.cuda.is_available()


class Parent:
    """The other side of a `Beside`; both methods raise `EOFError` once it has given up or ended."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self) -> Any:
        """What was sent, when it has been."""
        return self._connection.recv()

    def wait(self) -> None:
        """A moment, where nothing is to be received."""
        if self._connection.poll(0.05):
            self.receive()


class Beside(Generic[Result]):
    """A function in a forked copy of this process, which must not touch an accelerator there.

    Leaving the context ends it: what it waits for then raises `EOFError`.

    Args:
        do: called with a `Parent`, which hands on what `send` is given.
    """

    def __init__(self, do: Callable[[Parent], Result]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        arguments = (do, theirs, self._connection)
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        with warnings.catch_warnings():  # of threads: what runs in the copy needs none of them
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def send(self, thing: Any) -> None:
        """Hand something over; waits while the copy is busy. Raises what it has ended with."""
        try:
            self._connection.send(thing)
        except BrokenPipeError:
            self.result()
            raise

    def result(self) -> Result:
        """What the function returns; raises what it raised."""
        try:
            value, error = self._connection.recv()
        except (EOFError, ConnectionResetError) as ended:
            self._process.join(_GRACE)
            status = self._process.exitcode
            raise RuntimeError(f"a process of an evaluation has ended: {status}") from ended
        if error is not None:
            raise error
        found: Result = value
        return found

    def __enter__(self) -> Beside[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(_GRACE)
        self._process.kill()
        self._process.join()


def _run(do: Callable[[Parent], Any], connection: Connection, other: Connection) -> None:
    """In the copy: the parent decides when it ends, by closing its side or by ending itself."""
    other.close()
    gc.freeze()  # a collection would touch, and so copy, all that is shared
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    outcome: tuple[Any, Exception | None]
    try:
        outcome = (do(Parent(connection)), None)
    except Exception as error:  # noqa: BLE001 - raised in the parent
        outcome = (None, error)
    with contextlib.suppress(OSError):
        connection.send(outcome)
