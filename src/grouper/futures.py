"""Results that are not there yet: what is done with one once it is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def then(
    first: Future[Given], make: Callable[[Future[Given]], Made | Future[Made]]
) -> Future[Made]:
    """Return the future of what `make` returns once the first is done, or of what that brings.

    Args:
        first: done, failed or given up when `make` is called with it.
        make: may raise what the result is to raise.
    """
    last: Future[Made] = Future()

    def copy(made: Future[Made]) -> None:
        error = made.exception()
        if error is None:
            last.set_result(made.result())
        else:
            last.set_exception(error)

    def proceed(known: Future[Given]) -> None:
        try:
            made = make(known)
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits gets it
            last.set_exception(error)
            return
        if isinstance(made, Future):
            made.add_done_callback(copy)
        else:
            last.set_result(made)

    first.add_done_callback(proceed)
    return last
