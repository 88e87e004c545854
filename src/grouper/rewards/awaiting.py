"""Waiting for an async reward function: from any thread, with a time limit.

All run in one event loop of their own, in a thread of its own, so that a client which belongs to
a loop (an HTTP session) can be kept from one group to the next, as it can in TRL.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from functools import cache
from typing import Any

GRACE_SECONDS = 1.0
"""What a function that is being stopped has for its `finally` blocks."""


class StoppedError(TimeoutError):
    """The function was stopped, where a `TimeoutError` may be one of its own."""


def awaited(awaitable: Awaitable[Any], seconds: float) -> Any:
    """The result of an async function, also where an event loop is already running.

    Raises:
        StoppedError: there was none within `seconds`. What blocks the loop, or cannot be
            cancelled, is left behind with it, and the next call starts another.
        BaseException: what the function itself raised.
    """

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await awaitable, None
        except TimeoutError as error:
            return None, StoppedError() if limit.expired() else error
        except BaseException as error:  # noqa: BLE001 - it would end the loop; raised by the caller
            return None, error

    loop = _loop_of(os.getpid())
    future = asyncio.run_coroutine_threadsafe(outcome(), loop)
    try:
        value, error = future.result(seconds + GRACE_SECONDS)
    except TimeoutError as late:
        _loop_of.cache_clear()
        loop.call_soon_threadsafe(loop.stop)
        raise StoppedError from late
    if error is not None:
        raise error
    return value


@cache
def _loop_of(pid: int) -> asyncio.AbstractEventLoop:
    """The loop of this process: a forked child does not inherit its parent's thread."""
    loop = asyncio.new_event_loop()
    name = f"async rewards of {pid}"
    threading.Thread(target=_serve, args=(loop,), name=name, daemon=True).start()
    return loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run until the loop is stopped, whatever a task of it raises."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # asyncio hands on these two
            continue
        return
