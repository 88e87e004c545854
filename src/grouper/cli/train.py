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

from grouper.cli.measure import progress, show_results, stages
from grouper.cli.recipe_args import open_recipe, read_recipe, run_folder_of, show_plan
from grouper.cli.text import is_follower, show, warn
from grouper.compat.flags import CommandLine, spelled_out
from grouper.config.loading import recipe_hash, resolved_yaml, shipped_recipes
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, Interrupted, plural
from grouper.files import processors
from grouper.models.folders import RECIPE_FILE
from grouper.rewards.user_code import load_hook
from grouper.runs.folder import RunFolder
from grouper.runs.trackers import check_trackers
from grouper.tables import Line

if TYPE_CHECKING:
    from grouper.training.pipeline import RunResult

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
    """Train the phases of the command: `sft`, `grpo`, or both if they are not skipped.

    Flags are spellings of overrides, so that the resolved recipe shows them.
    """
    context = click.get_current_context()
    phases = tuple(phase for phase in ("sft", "grpo") if context.info_name in ("run", phase))
    seeds = flags.pop("seeds", 1)
    skips = _skips(flags, phases)
    intent = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    if resume and overwrite:
        raise click.UsageError("--resume continues the run, --overwrite deletes it: give one.")
    if allow_changes and not resume:
        raise click.UsageError("--allow-changes is about a run that is continued: add --resume.")
    name, overrides = _named(recipe, config, overrides)
    if resume:
        name = _run_of_that_name(name, overrides, flags["output_dir"])
    overrides = (*overrides, *skips)
    line = CommandLine(
        name=name,
        overrides=overrides,
        phases=phases,
        nproc=nproc,
        typed=flags,
        read_recipe=read_recipe,
    )
    all_overrides, notes = spelled_out(line)
    _print_notes(notes)
    # A dry run reports a missing library together with the problems of data and model.
    opened = open_recipe(name, all_overrides, packages=not dry_run)
    if not opened.phases:
        warn("nothing is trained: both phases are skipped, and the base model is measured alone.")
    if resume or overwrite:
        _require_same_folder(name, opened)
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
        folders = [recipe_of_seed.run_folder for recipe_of_seed in runs]
        show_results(stages(folders), parts=False)


def _skips(flags: dict[str, Any], phases: Sequence[str]) -> list[str]:
    """Take the flags that skip a phase, and return them as overrides.

    A command without these flags skips the phases that are not its own.
    """
    skips = []
    for phase in ("sft", "grpo"):
        is_skipped = flags.pop(f"skip_{phase}", phase not in phases)
        if is_skipped:
            skips.append(f"skip_{phase}=true")
    return skips


def _print_notes(notes: Sequence[str]) -> None:
    """Print notes on standard error, once for all processes of a run."""
    if is_follower():
        return
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _require_same_folder(name: str, opened: Recipe) -> None:
    """Raise `ConfigError` if NAME is a run folder and its recipe names another one."""
    folder = run_folder_of(name)
    if folder is not None and folder.resolve() != opened.run_folder.resolve():
        problem = f"the recipe of the run in this folder names another one, {opened.run_folder}"
        fix = f"If the run was moved, name its folder {opened.name} and add --output-dir PARENT."
        raise ConfigError(problem, where=name, fix=fix)


def _run_all(
    runs: Sequence[Recipe], intent: dict[str, bool], *, nproc: int, quiet: bool, verbose: bool
) -> None:
    """Run recipes one after another, each in `nproc` processes."""
    if not is_follower():
        # Mistakes are reported before torch is imported and data are read.
        for recipe in runs:
            folder = RunFolder(recipe.run_folder)
            folder.check(recipe_hash(recipe), resolved_yaml(recipe), **intent)
    if nproc > 1 and "WORLD_SIZE" not in os.environ:
        require_devices(nproc, runs[0].device)
        switches = {**intent, "quiet": quiet, "verbose": verbose}
        options = [f"--{name.replace('_', '-')}" for name, is_on in switches.items() if is_on]
        for recipe in runs:
            with tempfile.TemporaryDirectory(prefix="grouper-") as temporary_folder:
                file = Path(temporary_folder) / f"{recipe.name}.yaml"
                file.write_text(resolved_yaml(recipe), encoding="utf-8")
                code = launch(nproc, ["run", str(file), *options])
                if code:
                    sys.exit(code)
        return
    for recipe in runs:
        _train(recipe, intent, quiet=quiet, verbose=verbose)


def _seeds(recipe: Recipe, count: int) -> list[Recipe]:
    """Return the recipe with its own seed and the following ones, each a run of its own.

    Raises:
        ConfigError: under torchrun, whose processes cannot begin a second run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "several seeds are several runs, one after another",
            where="--seeds",
            fix="Call it without torchrun; --nproc starts the processes of each run.",
        )
    recipes = []
    for seed in range(recipe.seed, recipe.seed + count):
        changes = {"seed": seed, "name": f"{recipe.name}-seed{seed}"}
        recipes.append(recipe.model_copy(update=changes))
    return recipes


def _named(
    name: str | None, config: str | None, overrides: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Return the recipe and the overrides; with --config the first argument is an override."""
    if config is not None:
        if name is not None:
            overrides = (name, *overrides)
        for text in overrides:
            if "=" not in text:
                problem = f"--config names the recipe, and so does {text!r}"
                raise click.UsageError(f"{problem}: give one.")
        # Usually a file, but the name of a shipped recipe is accepted.
        is_name = not Path(config).suffix and not Path(config).exists()
        if is_name or "/" in config:
            return config, overrides
        return f"./{config}", overrides
    if name is None:
        raise click.UsageError("Missing argument 'RECIPE': a name from `grouper recipes`, or FILE.")
    return name, overrides


def _run_of_that_name(name: str, overrides: tuple[str, ...], output_dirs: tuple[str, ...]) -> str:
    """Return the folder of the run of that name; the name of a recipe is returned unchanged."""
    if "/" in name or Path(name).suffix or name in shipped_recipes():
        return name
    output_dir = str(Recipe.model_fields["output_dir"].default)
    for text in overrides:
        if text.startswith("output_dir="):
            output_dir = text.partition("=")[2]
    if output_dirs:
        output_dir = output_dirs[-1]
    folder = Path(output_dir).expanduser() / name
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
    show("")
    if result.comparison is not None:
        show_results(result.comparison, parts=False)
    if recipe.note and not (recipe.skip_sft or recipe.skip_grpo):
        # One line per paragraph, which the terminal wraps.
        for paragraph in recipe.note.strip().split("\n\n"):
            show(Line(" ".join(paragraph.split()), "plain"))
        show("")
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

    gpus = torch.cuda.device_count() if device in {"auto", "cuda"} else 0
    if 0 < gpus < processes:
        raise ConfigError(
            f"{processes} processes were asked for, one per GPU, and this machine has {gpus}",
            where="--nproc",
            fix=f"Use --nproc {gpus} or fewer, or device=cpu.",
        )
    most = max(2, processors())
    if gpus == 0 and processes > most:
        raise ConfigError(
            f"{processes} processes were asked for, and {plural(processors(), 'processor')} may "
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
        message += " If nobody sent it, the system did: memory ran out (see `dmesg`)."
    click.echo(f"{message} Continue with the same command and --resume.", err=True)
