"""Grading, rewards and writing in processes of their own: the same items, errors and leftovers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
from evaluation.test_evaluate import FakeGrader, make_items
from evaluation.test_items import PART, Counting, measure

from grouper.config.schema import RewardConfig
from grouper.errors import RunFolderError
from grouper.evaluation import evaluate as module
from grouper.evaluation.evaluate import BackgroundProcess
from grouper.prompts import FORMATS
from grouper.rewards import build_rewards

ITEMS = make_items(["1", "2", "1"] * 40)


@pytest.fixture(params=[True, False], ids=["beside", "here"])
def beside(request, monkeypatch):
    monkeypatch.setattr(module, "_MANY", 0 if request.param else 10**9)
    monkeypatch.setattr(module, "has_a_processor", lambda: True)
    yield request.param
    assert not multiprocessing.active_children()


def rewards():
    names = ("correctness", "boxed_format")
    return build_rewards([RewardConfig(name=name) for name in names], FORMATS["boxed"])


def test_items_do_not_depend_on_where_they_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "has_a_processor", lambda: True)
    found = {}
    for name, many in (("beside", 0), ("here", 10**9)):
        monkeypatch.setattr(module, "_MANY", many)
        folder = tmp_path / name
        result = measure(folder, items=ITEMS, fmt=FORMATS["boxed"], rewards=rewards())
        assert {path.name for path in folder.iterdir()} == {"test-greedy.jsonl.gz", PART}
        found[name] = (folder / "test-greedy.jsonl.gz").read_bytes(), result.slim
    assert found["beside"] == found["here"]
    assert not multiprocessing.active_children()


def test_one_copy_is_made_and_what_both_have_is_not_touched(tmp_path, monkeypatch):
    """A look for garbage in it would copy all of it, at a cost of several percent."""
    monkeypatch.setattr(module, "has_a_processor", lambda: True)
    monkeypatch.setattr(module, "_MANY", 0)
    seen = []

    class Looking(Counting):
        def sample(self, requests):
            seen.append((len(multiprocessing.active_children()), gc.get_freeze_count() > 0))
            yield from super().sample(requests)

    measure(tmp_path, Looking(), items=ITEMS, fmt=FORMATS["boxed"], rewards=rewards())
    assert seen == [(1, True)]
    assert gc.get_freeze_count() == 0


def test_an_interrupted_one_goes_on(tmp_path, monkeypatch, beside):
    monkeypatch.setattr(module, "_BATCH", 64)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, Counting(limit=150), items=ITEMS)
    sampler = Counting()
    assert measure(tmp_path, sampler, items=ITEMS) == measure(None, items=ITEMS)
    kept = 240 - sampler.drawn
    # What was not handed over yet is drawn again, at most a batch.
    assert kept == (128 if beside else 150)


def test_what_goes_wrong_there_is_raised_here(tmp_path, beside):
    class Full(FakeGrader):
        def submit(self, text, reference):
            raise RunFolderError("no space", where="here", fix="Make some.")

    with pytest.raises(RunFolderError, match=r"here: no space\. Make some\."):
        measure(tmp_path, items=ITEMS, grader=Full())


def test_a_process_that_is_killed_is_named():
    def die(parent) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with BackgroundProcess(die) as helper, pytest.raises(RuntimeError, match="has ended: -9"):
        helper.result()


def test_leaving_ends_what_waits_for_more():
    for do in (Connection.recv, lambda parent: parent.poll(99) and parent.recv()):
        with BackgroundProcess(do) as helper:
            assert multiprocessing.active_children()
        assert not multiprocessing.active_children()
        with pytest.raises(OSError, match="closed"):
            helper.send(1)


def test_rewards_of_the_user_s_are_called_here(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MANY", 0)
    monkeypatch.setattr(module, "has_a_processor", lambda: True)
    stack, seen = rewards(), set()
    name = next(iter(stack._functions))
    config, function = stack._functions[name]

    def theirs(**columns) -> Callable[..., list[float]]:
        seen.add(os.getpid())
        return function(**columns)

    stack._functions[name] = config, theirs
    measure(tmp_path, items=ITEMS, fmt=FORMATS["boxed"], rewards=stack)
    assert seen == {os.getpid()}
