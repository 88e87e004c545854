"""Waiting for async functions: one loop for all calls, and nothing that hangs holds it up."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from grouper.rewards import awaiting
from grouper.rewards.awaiting import StoppedError, awaited


async def _fine() -> int:
    await asyncio.sleep(0)
    return 4


async def _waits() -> None:
    await asyncio.sleep(60)


async def _blocks() -> None:
    time.sleep(5)


async def _clings() -> None:
    while True:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("function", [_waits, _blocks, _clings])
def test_what_hangs_is_left_and_the_next_call_works(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaiting, "GRACE_SECONDS", 0.1)
    started = time.monotonic()
    with pytest.raises(StoppedError):
        awaited(function(), 0.05)
    assert awaited(_fine(), 10) == 4
    assert time.monotonic() - started < 3


def test_what_is_stopped_can_tidy_up() -> None:
    tidied = []

    async def tidies() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            tidied.append(True)

    with pytest.raises(StoppedError):
        awaited(tidies(), 0.02)
    assert tidied == [True]


def test_a_timeout_of_its_own_is_none_of_ours() -> None:
    async def impatient() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError) as raised:
        awaited(impatient(), 10)
    assert not isinstance(raised.value, StoppedError)


def test_all_calls_share_a_loop_so_that_clients_can_be_kept() -> None:
    async def loop() -> object:
        return asyncio.get_running_loop()

    async def inside_another() -> object:
        return awaited(loop(), 10)

    first = awaited(loop(), 10)
    assert first is awaited(loop(), 10)
    assert first is asyncio.run(inside_another())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_loop_of_its_own() -> None:
    assert awaited(_fine(), 10) == 4
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if awaited(_fine(), 10) == 4 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
