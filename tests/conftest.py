"""Settings every test shares: one thread, no network, no TensorFlow."""

from __future__ import annotations

import os

# Two OpenMP threads collapse when another process holds a core, so tests use one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import signal
import sys
from collections.abc import Generator
from pathlib import Path

# In the background a shell has its children ignore Ctrl-C, and their children, too: tests that
# send these signals would find nobody listening.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Without a GPU kernels run in Triton's interpreter, which is chosen when Triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from gates import package, shared
from hypothesis import settings

# The same examples in every run, so that a change is judged by itself; HYPOTHESIS_PROFILE=search
# looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session", autouse=True)
def _own_grouper_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the user has cached plays no part in tests, and tests leave nothing there.

    Processes that share the tests share the cache, too: the kernels are built once.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["GROUPER_CACHE"] = str(folder / "grouper-cache")


@pytest.fixture(scope="session", autouse=True)
def _fixtures_start_in_an_empty_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The fixtures of modules and sessions see nothing of the folder that pytest was started in."""
    os.chdir(tmp_path_factory.mktemp("started-here"))


@pytest.fixture(autouse=True)
def _tests_start_in_an_empty_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test depends on what lies where it was started: a user's runs, or another test's."""
    monkeypatch.chdir(tmp_path_factory.mktemp("started-here"))


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a test that is marked `pictures` draw what those of users draw."""
    if "pictures" in request.keywords:
        from grouper.report.page import draw_pictures

        monkeypatch.setattr("grouper.api.draw_pictures", draw_pictures)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real problem sets beside the checkout."""
    return shared()


def pytest_collection_finish() -> None:
    """Two things took most of the time of a run of a few steps: pictures, and `gc.collect`.

    So runs draw nothing, those of fixtures included. What is imported by now stays: a run collects
    garbage several times, and looks through less.
    """
    if api := sys.modules.get("grouper.api"):
        api.draw_pictures = lambda folder: None
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """What a file of tests leaves stays, too: in the end each look took half a second."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.needs_package(name, extra=...)`: see `gates.package`."""
    for mark in item.iter_markers("needs_package"):
        package(*mark.args, **mark.kwargs)


@pytest.fixture(scope="session")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of an adapter: SFT, GRPO, and what it handed over in `handed-over` beside it.

    Tests read it and write nothing into it.
    """
    from tiny_runs import TINY_RUN, data_from, write_problems

    from grouper import load_recipe, prepare, train

    folder = tmp_path_factory.mktemp("lora-run")
    write_problems(folder)
    recipe = load_recipe("demo", [*TINY_RUN, *data_from(str(folder))]).override(
        "model.lora={rank: 4}",
        "sft.steps=4",
        "grpo.steps=2",
        name="run",
        output_dir=str(folder),
        save_path=str(folder / "handed-over"),
    )
    with prepare(recipe) as setup:
        return train(setup).path
