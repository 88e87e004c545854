"""`grouper`: the table of commands, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import logging
import os
import signal
import sys
import time
from typing import NamedTuple

import click

from grouper.cli.commands import Group
from grouper.cli.text import is_follower
from grouper.errors import (
    FULL,
    GrouperError,
    Interrupted,
    ModelError,
    first_line,
    is_out_of_memory,
)
from grouper.models.allocator import prefer_expandable_segments

# Exit code of shells for a closed pipe: not 0, since a run may have ended early.
SIGPIPE_EXIT = 141
# Seconds that a follower waits before it reports an error: rank 0 with the same one ends them all,
# once its trackers are closed and its pictures drawn.
HEAD_START = 20.0


class Row(NamedTuple):
    """A command in the table: its section of `grouper --help`, its function and its line there."""

    section: str
    function: str
    """`module.function` in `grouper.cli`; the module is imported when the command is needed."""
    help: str
    """The first sentence of the function's docstring, on one line of 80 columns."""


# Name of a command -> its row. `grouper --help` shows this table and imports no command.
COMMANDS = {
    "run": Row("Train", "train.run", "Run a recipe: base evaluation, SFT, GRPO and a comparison."),
    "sft": Row("Train", "train.sft", "Run only the SFT phase of a recipe."),
    "grpo": Row("Train", "train.grpo", "Run only the GRPO phase of a recipe."),
    "stages": Row(
        "Train", "stages.stages", "Run a chain of recipes, such as distillation, then GRPO."
    ),
    "init": Row("Train", "init.init", "Write a recipe for your own model and problems."),
    "preview": Row(
        "Train", "preview.preview", "Check on a few samples whether GRPO can learn from them."
    ),
    "plan": Row("Train", "plan.plan", "Plan memory and steps without loading weights."),
    "bench": Row("Train", "bench.bench", "Measure the speed of GRPO steps on this machine."),
    "synthesize": Row(
        "Train", "synthesize.synthesize", "Sample problems and save correct answers as SFT data."
    ),
    "serve-rollouts": Row(
        "Train", "serve_rollouts.serve_rollouts", "Serve rollouts for a recipe with vLLM."
    ),
    "eval": Row(
        "Evaluate", "evaluate.evaluate", "Evaluate models on a recipe's problems or on benchmarks."
    ),
    "compare": Row(
        "Evaluate", "compare.compare", "Compare runs or models by their recorded evaluations."
    ),
    "probe": Row(
        "Evaluate", "probe.probe", "Check whether a model has seen the questions of benchmarks."
    ),
    "certify": Row("Evaluate", "certify.certify", "Certify what the record of runs proves."),
    "grade": Row("Evaluate", "grade.grade", "Grade a text or a file, or grade a run again."),
    "generate": Row(
        "Evaluate", "generate.generate", "Answer one question, a file, or a conversation."
    ),
    "chat": Row("Evaluate", "chat.chat", "Chat with a trained model in the terminal."),
    "runs": Row("Inspect", "runs.runs", "List runs with their state, step and accuracy."),
    "watch": Row("Inspect", "watch.watch", "Follow a run from another terminal."),
    "report": Row("Inspect", "report.report", "Write runs as one HTML file to read and share."),
    "show": Row("Inspect", "show.show", "Print completions that a model wrote in training."),
    "diagnose": Row("Inspect", "diagnose.diagnose", "Find problems of a run in its logs."),
    "export": Row("Publish", "export.export", "Write a trained model as one folder, LoRA merged."),
    "push": Row("Publish", "push.push", "Push a trained model and its card to the Hub."),
    "serve": Row("Publish", "serve.serve", "Serve a trained model with vLLM or transformers."),
    "recipes": Row("Look up", "recipes.recipes", "List recipes, settings and prompt formats."),
    "rewards": Row(
        "Look up", "rewards.rewards", "List rewards, try them on a text, or attack them."
    ),
    "data": Row("Look up", "data.data", "List data sources; show, audit and prepare problems."),
    "env": Row("Look up", "env.env", "Show versions, devices, extras and kernels."),
    "skill": Row("Look up", "skill.skill", "Print instructions for coding agents."),
}

# Command -> the note after Ctrl-C about its unfinished work.
KEPT = {
    "eval": "Finished samples are kept; run the same command to continue.",
    "generate": "With --output, finished answers are kept; run the same command to continue.",
    "synthesize": "Finished samples are kept; run the same command to continue.",
}

# Advice where memory ran out.
MEMORY = (
    "`grouper plan RECIPE` says what every part of a run takes, and what would fit: the model's "
    "size decides about weights and optimizer, sampling.max_slots and sampling.max_new_tokens "
    "about sampling, tokens_per_micro_batch about the update."
)

EXAMPLES = """
grouper run demo                 train a tiny model in a few minutes
grouper eval outputs/demo        evaluate it again
grouper generate outputs/demo/grpo/final
grouper recipes                  list the other recipes
grouper init FILE                write a recipe for your own model
grouper COMMAND --help           show details and examples
"""


class CommandTable(Group):
    """The commands of the table; the module of a command is imported when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            module_name, _, function_name = COMMANDS[cmd_name].function.partition(".")
            module = importlib.import_module(f"grouper.cli.{module_name}")
            self.commands[cmd_name] = getattr(module, function_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        width = max(map(len, COMMANDS))
        sections = dict.fromkeys(row.section for row in COMMANDS.values())
        for section in sections:
            rows = []
            for name, row in COMMANDS.items():
                if row.section == section:
                    rows.append((name.ljust(width), row.help))
            with formatter.section(section):
                formatter.write_dl(rows)


@click.group("grouper", cls=CommandTable, examples=EXAMPLES)
@click.version_option(package_name="grouper-rl", message="grouper %(version)s")
def cli() -> None:
    """Train small language models to solve math problems, and measure whether they improved.

    SFT teaches an output format, GRPO with verifiable rewards reinforces correct answers, and an
    evaluation reports, with statistical tests, whether the model improved. One YAML recipe
    describes the whole run; override any setting with section.key=value.
    """


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command; a user's mistake is one paragraph and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads warn after a fork
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        # Rank 0 alone speaks. Of what is closed (`>&-`) the next file would get the number.
        if stream is None or (name == "stdout" and is_follower()):
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115, PTH123 - until the end
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale may not know every letter
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    # Without a handler nothing would be tidied up; with several processes the launcher does that.
    if alone and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _ended):
        signal.signal(signal.SIGTERM, _terminated)
    prefer_expandable_segments()
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # another signal, while the first one was being reported
        code = Interrupted.exit_code
    if signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, _ended)
    if not alone:
        # One of several processes: tearing down what they share may wait for ever.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _terminated(number: int, _: object) -> None:
    """End as after Ctrl-C; the same signal again, as `timeout` sends it, must not end the tidying.

    Raises:
        KeyboardInterrupt: always.
    """
    signal.signal(number, _ended)
    raise KeyboardInterrupt


def _ended(*_: object) -> None:
    """Do nothing: the process ends already. Children inherit no function, but an ignored signal."""


def _run(arguments: list[str]) -> int:
    """Run a command, print its errors, and return its exit code.

    Click's own `main` is not used: it ends with code 1 where the reader of a pipe has left.
    """
    try:
        with cli.make_context("grouper", list(arguments)) as context:
            result = cli.invoke(context)
            sys.stdout.flush()
            code = result if isinstance(result, int) else 0
    except GrouperError as error:
        code = _tell(error)
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BaseException as error:  # libraries make other errors of a closed pipe and of Ctrl-C
        is_full = isinstance(error, OSError) and error.errno in FULL
        if is_full or _comes_from(error, BrokenPipeError):
            # The reader of our output (`head`) has left, and Python would flush it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = _tell(_disk_full(error)) if is_full else SIGPIPE_EXIT
        else:
            problem = _known_problem(error, arguments)
            if problem is None:
                raise
            code = _tell(problem)
    return code


def _disk_full(error: BaseException) -> GrouperError:
    reason = getattr(error, "strerror", None)
    fix = "Free some space on the disks of its output, its temporary files and its caches."
    return GrouperError(f"nothing more can be written ({reason})", fix=fix)


def _known_problem(error: BaseException, arguments: list[str]) -> GrouperError | None:
    """Turn an error of Python or of a library into ours; None if it is a bug."""
    if _comes_from(error, click.exceptions.Abort, KeyboardInterrupt, EOFError):
        command = arguments[0] if arguments else ""
        return Interrupted("Stopped", fix=KEPT.get(command, ""))
    if isinstance(error, RuntimeError) and "gloo" in str(error) and "by peer" in str(error):
        # The cause is reported by that process or the launcher; after Ctrl-C none is needed.
        return Interrupted("another process of this run has ended, or cannot be reached")
    if is_out_of_memory(error):
        reason = first_line(error).rstrip(".")
        return ModelError(f"memory ran out ({reason})", fix=MEMORY)
    return _no_path(error)


def _no_path(error: BaseException) -> GrouperError | None:
    """Describe a problem with a path, or with its file; None for every other error."""
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        # This is an error of `expanduser`.
        return GrouperError("the ~ in a path stands for no folder", fix="Give the full path.")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        what = f"the name of a file or folder is too long: {str(error.filename)[:60]!r}..."
        return GrouperError(what, fix="Is it a text where a path or a model is expected?")
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return GrouperError("a path holds a null character", fix="Remove it.")
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        fix = "Check what is there, and whether you may read and write it."
        what = f"this cannot be used ({error.strerror})"
        return GrouperError(what, where=str(error.filename), fix=fix)
    return None


def _comes_from(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    """Tell whether an exception, or one that it was raised from, is one of `kinds`.

    Libraries turn one into another: rich a closed pipe into an exit, transformers Ctrl-C during an
    import into a module that could not be found.
    """
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__ or error.__context__
    return error is not None


def _tell(error: GrouperError) -> int:
    """Print every problem and return the exit code.

    Every process finds a mistake in the recipe, and one paragraph is enough: followers wait.
    """
    is_stopped = isinstance(error, Interrupted)
    if is_stopped and is_follower():
        # All processes are stopped, and the first one says so.
        return error.exit_code
    prefix = "" if is_stopped else "error: "
    if is_follower():
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(HEAD_START)
        prefix = f"[rank {os.environ['RANK']}] {prefix}"
    for problem in (error, *error.others):
        click.echo(click.style(prefix, fg="red", bold=True) + problem.paragraph(), err=True)
    return error.exit_code
