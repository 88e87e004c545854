"""`grouper run`, `sft` and `grpo`, in this process or in several that it starts."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.flags import CommandLine, spelled_out
from grouper.cli.measure import progress, show_results, stages
from grouper.cli.opening import open_recipe, run_folder_of, show_plan
from grouper.cli.text import is_follower, show, warn
from grouper.config.loading import recipe_hash, resolved_yaml, shipped_recipes
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, Interrupted, counted
from grouper.files import processors
from grouper.models.folders import RECIPE_FILE
from grouper.rewards.calling import load_hook
from grouper.runs.folder import RunFolder
from grouper.runs.trackers import check_trackers

if TYPE_CHECKING:
    from grouper.training.phases import RunResult

# Seconds that the other processes have to end where one has failed.
GRACE = 30
# Linux: a signal when the parent process dies.
PR_SET_PDEATHSIG = 1


def run(
    recipe: str | None,
    overrides: tuple[str, ...],
    *,
    config: str | None,
    resume: bool,
    allow_changes: bool,
    overwrite: bool,
    nproc: int,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
    **flags: Any,
) -> None:
    """Train what the command names: `sft`, `grpo`, or both phases that are not skipped.

    Flags are spellings of overrides, so that the resolved recipe shows them.
    """
    context = click.get_current_context()
    phases = tuple(p for p in ("sft", "grpo") if context.info_name in ("run", p))
    seeds = flags.pop("seeds", 1)
    skipped = [p for p in ("sft", "grpo") if flags.pop(f"skip_{p}", p not in phases)]
    intent = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    if resume and overwrite:
        raise click.UsageError("--resume continues the run, --overwrite deletes it: give one.")
    if allow_changes and not resume:
        raise click.UsageError("--allow-changes is about a run that is continued: add --resume.")
    name, overrides = _named(recipe, config, overrides)
    if resume:
        name = _run_of_that_name(name, overrides, flags["output_dir"])
    overrides = (*overrides, *(f"skip_{phase}=true" for phase in skipped))
    spelled, notes = spelled_out(
        CommandLine(name=name, overrides=overrides, phases=phases, nproc=nproc, typed=flags)
    )
    for note in () if is_follower() else notes:
        click.echo(f"note: {note}", err=True)
    # A dry run reports a missing library together with what is wrong with data and model.
    opened = open_recipe(name, spelled, packages=not dry_run)
    if not opened.phases:
        warn("nothing is trained: both phases are skipped, and the base model is measured alone.")
    folder = run_folder_of(name) if resume or overwrite else None
    if folder is not None and folder.resolve() != opened.run_folder.resolve():
        what = f"the recipe of the run in this folder names another one, {opened.run_folder}"
        fix = f"If the run was moved, name its folder {opened.name} and add --output-dir PARENT."
        raise ConfigError(what, where=name, fix=fix)
    check_trackers(opened.tracking)
    for hook in opened.hooks:
        load_hook(hook)
    if dry_run:
        _dry_run(opened, intent)
        return
    runs = [opened] if seeds == 1 else _seeds(opened, seeds)
    _run_all(runs, intent, nproc=nproc, quiet=quiet, verbose=verbose)
    if seeds > 1:
        click.echo(click.style(f"\n{seeds} seeds of {opened.name}", bold=True))
        show_results(stages([one.run_folder for one in runs]), parts=False)


def _run_all(
    runs: Sequence[Recipe], intent: dict[str, bool], *, nproc: int, quiet: bool, verbose: bool
) -> None:
    """One run after another, each in as many processes as were asked for."""
    for one in () if is_follower() else runs:  # before torch is imported and data are read
        RunFolder(one.run_folder).check(recipe_hash(one), resolved_yaml(one), **intent)
    if nproc > 1 and "WORLD_SIZE" not in os.environ:
        require_devices(nproc, runs[0].device)
        given = {**intent, "quiet": quiet, "verbose": verbose}
        switches = [f"--{name.replace('_', '-')}" for name, on in given.items() if on]
        for one in runs:
            with tempfile.TemporaryDirectory(prefix="grouper-") as folder:
                file = Path(folder) / f"{one.name}.yaml"
                file.write_text(resolved_yaml(one), encoding="utf-8")
                if code := launch(nproc, ["run", str(file), *switches]):
                    sys.exit(code)
        return
    for one in runs:
        _train(one, intent, quiet=quiet, verbose=verbose)


def _seeds(recipe: Recipe, count: int) -> list[Recipe]:
    """The recipe with its own seed and those after it, each a run of its own.

    Raises:
        ConfigError: under torchrun, whose processes cannot begin a second run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "several seeds are several runs, one after another",
            where="--seeds",
            fix="Call it without torchrun; --nproc starts the processes of each run.",
        )
    return [
        recipe.model_copy(update={"seed": seed, "name": f"{recipe.name}-seed{seed}"})
        for seed in range(recipe.seed, recipe.seed + count)
    ]


def _named(
    name: str | None, config: str | None, overrides: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """The recipe and the overrides; with --config the first argument is an override."""
    if config is not None:
        given = overrides if name is None else (name, *overrides)
        extra = next((text for text in given if "=" not in text), None)
        if extra is not None:
            raise click.UsageError(f"--config names the recipe, and so does {extra!r}: give one.")
        # Usually a file, but the name of a shipped recipe is accepted.
        is_name = not Path(config).suffix and not Path(config).exists()
        return config if is_name or "/" in config else f"./{config}", given
    if name is None:
        raise click.UsageError("Missing argument 'RECIPE': a name from `grouper recipes`, or FILE.")
    return name, overrides


def _run_of_that_name(name: str, overrides: tuple[str, ...], output_dirs: tuple[str, ...]) -> str:
    """The folder of the run of that name; the name of a recipe stays what it is."""
    if "/" in name or Path(name).suffix or name in shipped_recipes():
        return name
    usual = str(Recipe.model_fields["output_dir"].default)
    keys = [text.partition("=")[2] for text in overrides if text.startswith("output_dir=")]
    folder = Path([usual, *keys, *output_dirs][-1]).expanduser() / name
    return str(folder) if (folder / RECIPE_FILE).is_file() else name


def _dry_run(recipe: Recipe, intent: dict[str, bool]) -> None:
    from grouper.advice.dry_run import make_plan

    with progress().within("reading and preparing the data"):
        plan = make_plan(recipe, **intent)
    show_plan(recipe, plan.sizes, plan.warnings, leaks=plan.leaks, unchecked=plan.unchecked)


def _train(recipe: Recipe, intent: dict[str, bool], *, quiet: bool, verbose: bool) -> None:
    from grouper.api import train
    from grouper.training.run import Run

    # A process that torchrun or `--nproc` started ends with its launcher, as on SIGTERM; only on
    # Linux, elsewhere the processes of a killed launcher go on to the end.
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    display = progress(quiet=quiet, verbose=verbose, log_every=recipe.tracking.log_every)
    with Run(recipe, display, **intent) as opened:
        result = train(opened)
    _report(recipe, result)


def _report(recipe: Recipe, result: RunResult) -> None:
    from rich.text import Text

    show("")
    if result.comparison is not None:
        show_results(result.comparison, parts=False)
    if recipe.note and not (recipe.skip_sft or recipe.skip_grpo):
        # One line per paragraph, which the terminal wraps.
        paragraphs = recipe.note.strip().split("\n\n")
        show(*(Text(" ".join(text.split())) for text in paragraphs), "")
    show(f"Run folder: {result.path}", f"Report:     {result.path / 'report.html'}")
    show(f"By subject, level and length: grouper compare {result.path}")


# --- several processes ---------------------------------------------------------------------------


def require_devices(processes: int, device: str) -> None:
    """Raise `ConfigError` if the processes of a run would have to share devices or processors.

    On a CPU two may share a single processor, to try out what several do.

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
    most = max(2, processors())
    if found == 0 and processes > most:
        raise ConfigError(
            f"{processes} processes were asked for, and {counted(processors(), 'processor')} may "
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

    # Shared out, or every process would start as many threads as the machine has cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, processors() // processes)))
    # Where they meet, on a port that the system has given to this launch alone.
    store = create_c10d_store(True, "127.0.0.1", wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_RUN_ID": str(os.getpid()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    # -P: the working folder may hold a random.py.
    command = [sys.executable, "-P", "-m", "grouper", *arguments]
    started: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, _: object) -> None:
        third = number == signal.SIGINT and asked.count(number) > 1  # which does not wait
        asked.append(signal.SIGKILL if third else number)
        for one in started:
            one.send_signal(asked[-1])

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]  # as under `nohup`
    previous = {number: signal.signal(number, pass_on) for number in heeded}
    try:
        for rank in map(str, range(processes)):
            if asked:
                break
            env = {**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}
            started.append(subprocess.Popen(command, env=env, start_new_session=True))
        return _ended(started, asked)
    finally:
        for one in started:
            one.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ended(started: Sequence[subprocess.Popen[bytes]], asked: Sequence[int]) -> int:
    """Wait for all processes, `GRACE` seconds from when one has failed; returns the exit code.

    Args:
        started: the processes.
        asked: the signals that were passed on to them so far.
    """
    failed, deadline = 0, math.inf
    while True:
        codes = [one.poll() for one in started]
        fine = (None, 0, Interrupted.exit_code, *(-number for number in asked))
        if not failed and (bad := [code for code in codes if code and code not in fine]):
            failed, deadline = bad[0], time.monotonic() + GRACE
            if failed < 0:  # it has said nothing itself
                what = f"error: rank {codes.index(failed)} of {len(codes)} was ended by "
                what += f"{signal.Signals(-failed).name}, and the others with it."
                if failed == -signal.SIGKILL:
                    what += " If nobody sent it, the system did: memory ran out (see `dmesg`)."
                click.echo(f"{what} Continue with the same command and --resume.", err=True)
            for one in started:
                one.terminate()
        if None not in codes:
            break
        for one in started if time.monotonic() > deadline else ():
            one.kill()
        time.sleep(0.1)
    # Ended by a signal: as the shell says it.
    return 128 - failed if failed < 0 else failed or Interrupted.exit_code * any(codes)
