"""`grouper`: the commands of `commands.yaml`, and the one place where errors become exit codes."""

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
from functools import partial
from pathlib import Path
from typing import Any

import click

from grouper.cli.text import is_follower
from grouper.compat.flags import flag_named, hint, normalised
from grouper.compat.flags import options as flag_options
from grouper.errors import (
    FULL,
    GrouperError,
    Interrupted,
    ModelError,
    did_you_mean,
    first_line,
    is_out_of_memory,
)
from grouper.files import load_table
from grouper.models.allocator import prefer_expandable_segments

Row = dict[str, Any]

TABLE: Row = load_table("grouper.cli", "commands.yaml")

# Number of options at the top of a command's help.
FIRST = 5
# Exit code of shells for a closed pipe: not 0, since a run may have ended early.
SIGPIPE_EXIT = 141
# Seconds that a follower waits before it reports an error: rank 0 with the same one ends them all,
# once its trackers are closed and its pictures drawn.
HEAD_START = 20.0

# Keys of an option's row that are ours, not click's.
_OUR_KEYS = {"name", "type", "least", "most", "choices", "short", "opposite"}
# Type in the table -> click's type, and the name of such a number in messages.
RANGES = {"int": (click.IntRange, "whole number"), "float": (click.FloatRange, "number")}


class _Path(click.Path):
    """A path in which shells may have left a `~`: that of `--output=~/x`."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return super().convert(Path(value).expanduser(), param, ctx)


def _option(flag: str, row: Row) -> click.Option:
    """Make the option of a row; keys that are not in `_OUR_KEYS` are click's own."""
    settings = {key: value for key, value in row.items() if key not in _OUR_KEYS}
    is_switch = not {"metavar", "choices"} & row.keys()
    if "choices" in row:
        settings["type"] = click.Choice(row["choices"])
    elif row.get("type") in ("path", "file"):
        is_file = row["type"] == "file"
        settings["type"] = _Path(exists=is_file, dir_okay=not is_file, path_type=Path)
    elif "type" in row:
        range_type, noun = RANGES[row["type"]]
        settings["type"] = range_type(min=row.get("least"))
        settings["type"].name = noun
        # There is no use for a count beyond a billion.
        settings["callback"] = partial(_bounded, row.get("most", 10**9))
    if is_switch and "opposite" not in row:
        settings["default"] = False
    spellings = []
    if "short" in row:
        spellings.append(row["short"])
    if "opposite" in row:
        spellings.append(f"--{flag}/--{row['opposite']}")
    else:
        spellings.append(f"--{flag}")
    parameter_name = row.get("name", flag.replace("-", "_"))
    return click.Option(
        [*spellings, parameter_name],
        is_flag=is_switch or None,
        show_default="default" in row,
        **settings,
    )


def _bounded(most: float, _context: click.Context, _option: click.Parameter, value: Any) -> Any:
    """Return the value, or values, of an option; a number may be at most `most`, and not NaN."""
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if number is not None and not number <= most:
            raise click.BadParameter(f"{number} is not a number up to {most:,}.")
    return value


def _argument(name: str, metavar: str) -> click.Argument:
    count = -1 if metavar.endswith("...") else 1
    is_required = not metavar.startswith("[")
    return click.Argument([name], nargs=count, required=is_required, metavar=metavar)


def _texts(row: Row) -> Row:
    """Return the settings that commands and groups of commands share."""
    examples = "".join(f"  {line}\n" for line in row.get("examples", "").splitlines())
    return {
        "help": row["about"],
        "epilog": f"\b\nExamples:\n{examples}" if examples else None,
        "callback": partial(_call, row["call"]) if "call" in row else None,
        "context_settings": {
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
            # Underscores, and the names that other trainers have.
            "token_normalize_func": flag_named,
        },
    }


def _call(path: str, /, **arguments: Any) -> Any:
    """Import a command's function and call it; a group's own one only without a subcommand."""
    if click.get_current_context().invoked_subcommand is not None:
        return None
    module_name, _, function_name = path.partition(".")
    module = importlib.import_module(f"grouper.cli.{module_name}")
    function = getattr(module, function_name)
    return function(**arguments)


class Command(click.Command):
    """A command of the table; its module is imported when it is called."""

    def __init__(self, name: str, row: Row) -> None:
        rows = row.get("options", {})
        self.trains = "from-aliases" in rows.values()
        if self.trains:
            rows = rows | flag_options()
        arguments = [_argument(*argument) for argument in row.get("arguments", {}).items()]
        params = [*arguments, *(_option(*option) for option in rows.items())]
        super().__init__(name, params=params, short_help=row["does"], **_texts(row))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not self.trains:
            return super().parse_args(ctx, args)
        try:
            return super().parse_args(ctx, [*normalised(args)])
        except click.NoSuchOption as error:
            if not error.option_name.startswith("--"):
                raise
            raise click.UsageError(hint(error.option_name, args), ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record:
                records.append(record)
        # A section of one more option would be no shorter.
        count = FIRST if len(records) > FIRST + 1 else len(records)
        for title, rows in (("Options", records[:count]), ("More options", records[count:])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(click.Group):
    """Commands of the table; a mistyped name gets the nearest one."""

    def __init__(self, name: str, row: Row) -> None:
        commands: dict[str, click.Command] = {}
        for command_name, command_row in row["commands"].items():
            command_class = Group if "commands" in command_row else Command
            commands[command_name] = command_class(command_name, command_row)
        super().__init__(
            name,
            commands=commands,
            invoke_without_command="call" in row,
            short_help=row.get("does"),
            **_texts(row),
        )

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        typed = args[0]
        if typed not in self.commands and not typed.startswith("-"):
            command = f"{ctx.command_path} {typed}".partition(" ")[2]
            suggestion = did_you_mean(typed, self.commands)
            message = f"{ctx.command_path} has no command {typed!r}. {suggestion}"
            from grouper.config.loading import shipped_recipes

            if typed.endswith((".yaml", ".yml")) or typed in shipped_recipes():
                message = f"{typed} is a recipe. Give the command, too: grouper run {typed}"
            ctx.fail(TABLE["elsewhere"].get(command, message))
        return super().resolve_command(ctx, args)


cli = Group("grouper", TABLE)
click.version_option(package_name="grouper-rl", message="grouper %(version)s")(cli)


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
    fix = "Free some space where its output goes, and where temporary files and caches are."
    return GrouperError(f"nothing more can be written ({reason})", fix=fix)


def _known_problem(error: BaseException, arguments: list[str]) -> GrouperError | None:
    """Turn an error of Python or of a library into ours; None if it is a bug."""
    if _comes_from(error, click.exceptions.Abort, KeyboardInterrupt, EOFError):
        command = arguments[0] if arguments else ""
        return Interrupted("Stopped", fix=TABLE["kept"].get(command, ""))
    if isinstance(error, RuntimeError) and "gloo" in str(error) and "by peer" in str(error):
        # The cause is reported by that process or the launcher; after Ctrl-C none is needed.
        return Interrupted("another process of this run has ended, or is out of reach")
    if is_out_of_memory(error):
        reason = first_line(error).rstrip(".")
        return ModelError(f"memory ran out ({reason})", fix=TABLE["memory"])
    return _no_path(error)


def _no_path(error: BaseException) -> GrouperError | None:
    """Describe a problem with a path, or with its file; None for every other error."""
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        # This is an error of `expanduser`.
        return GrouperError("the ~ in a path stands for no folder", fix="Write it out.")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        what = f"the name of a file or folder is too long: {str(error.filename)[:60]!r}..."
        return GrouperError(what, fix="Is it a text, where a path or a model is meant?")
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return GrouperError("a path holds a null character", fix="Take it out.")
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
