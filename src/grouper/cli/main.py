"""`grouper`: the group of commands, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

import click

from grouper.cli.groups import NamingGroup
from grouper.cli.launch import let_the_first_speak
from grouper.errors import GrouperError, Interrupted, ModelError, first_line, is_out_of_memory
from grouper.models.allocator import prefer_expandable_segments

COMMANDS = {
    "run": ("grouper.cli.train", "Train and evaluate by a recipe: base, SFT, GRPO, comparison."),
    "sft": ("grouper.cli.train", "Only the SFT phase of a recipe."),
    "grpo": ("grouper.cli.train", "Only the GRPO phase of a recipe."),
    "init": ("grouper.cli.init", "Write a recipe for your own model and problems."),
    "eval": ("grouper.cli.evaluate", "Measure a model on a recipe's problems."),
    "preview": ("grouper.cli.preview", "A few samples as GRPO draws them; why rewards are alike."),
    "generate": ("grouper.cli.generate", "Answer one question, a JSONL file, or a conversation."),
    "export": ("grouper.cli.export", "A trained model as one folder, its adapter merged in."),
    "recipes": ("grouper.cli.recipes", "List the recipes; show one, its fields, formats, sources."),
    "diagnose": ("grouper.cli.diagnose", "Name what went wrong in a run, from its logs alone."),
    "rewards": ("grouper.cli.rewards", "List the rewards, try them on a text, or attack them."),
    "plan": ("grouper.cli.plan", "Memory, steps and time of a recipe; loads no weights."),
    "bench": ("grouper.cli.bench", "Measure a few GRPO steps here: seconds, tokens/s, hours."),
    "grade": ("grouper.cli.grade", "Grade one completion, every stage shown."),
    "grade-agreement": ("grouper.cli.grade", "Our grader beside Math-Verify, on a file."),
    "regrade": ("grouper.cli.regrade", "Grade and reward a run's stored completions again."),
    "data": ("grouper.cli.data", "List data sources, show, check and prepare problems."),
    "new-model": ("grouper.cli.new_model", "Make a small random model fitted to a recipe's data."),
}
"""Name -> (module that holds the command, one line for `grouper --help`)."""

EPILOG = """\b
Start here:
  grouper run demo                 a tiny model learns arithmetic in a few minutes
  grouper eval outputs/demo        measure what it learned again
  grouper generate outputs/demo/grpo/final
  grouper recipes                  what else there is
  grouper init FILE                a recipe for your own model and problems
  grouper COMMAND --help           more, with examples
"""


_SIGPIPE_EXIT = 141
"""As the shell tells it of any program: not 0, since a run may have been cut short."""


class _ReaderGoneError(Exception):
    """What reads our output (`head`) has left; click and rich would end with code 1."""


@contextlib.contextmanager
def _while_somebody_reads() -> Iterator[None]:
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise _ReaderGoneError from error
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich makes an exit of it
            raise _ReaderGoneError from error
        raise


class LazyGroup(NamingGroup):
    """A group that imports a command's module when the command is called."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            from grouper.config.loading import list_recipes

            if args[0] in dict(list_recipes()) or args[0].endswith((".yaml", ".yml")):
                ctx.fail(f"{args[0]} is a recipe. Give the command, too: grouper run {args[0]}")
            if args[0] == "train":
                ctx.fail("Training is `grouper run RECIPE`: SFT, GRPO, and both measured.")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _while_somebody_reads():  # --help is printed here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _while_somebody_reads():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        name: str,
    ) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[name][0])
        command: click.Command = getattr(module, f"{name.replace('-', '_')}_command")
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="grouper-rl", message="grouper %(version)s")
def cli() -> None:
    """Train small language models to solve maths problems, and measure honestly whether it worked.

    SFT teaches an output format, GRPO with verifiable rewards raises what is right, and an
    evaluation with statistics says whether the model got better. One YAML recipe describes the
    whole run; any setting is overridden as section.key=value.
    """


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command; a user's mistake is one paragraph and exit code 2."""
    # Never TensorFlow, whatever else is installed; tokenizer threads warn after a fork.
    for name, value in {
        "USE_TF": "0",
        "TRANSFORMERS_NO_TF": "1",
        "TRANSFORMERS_NO_TENSORFLOW": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    prefer_expandable_segments()
    code = _run(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # One of several processes: tearing down what they share may wait for ever.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


class _Interrupts:
    """Remembers Ctrl-C, since what it interrupts may make another error of it.

    Libraries that are being imported do: transformers says that a module could not be found.
    """

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> Self:
        # Handlers can only be set in the main thread; a caller's own handler stays.
        main = threading.current_thread() is threading.main_thread()
        self._ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came and kind is not None and issubclass(kind, Exception):
            raise click.exceptions.Abort

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.default_int_handler(number, frame)


def _run(arguments: list[str] | None) -> int:
    try:
        with _Interrupts(), _shortage_told():
            result: Any = cli.main(
                args=arguments,
                prog_name="grouper",
                standalone_mode=False,
                obj=sys.argv[1:] if arguments is None else arguments,
            )
    except GrouperError as error:
        return _tell(error)
    except click.exceptions.Abort:
        click.echo("Stopped.", err=True)
        return 130
    except KeyboardInterrupt:
        click.echo("Stopped at once; what was finished before is saved.", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except _ReaderGoneError:
        # Writing to it again at exit would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE_EXIT
    return result if isinstance(result, int) else 0


def _tell(error: GrouperError) -> int:
    """Print every problem; returns the exit code."""
    who = let_the_first_speak()
    prefix = who if isinstance(error, Interrupted) else f"{who}error: "
    for problem in (error, *error.others):
        click.echo(click.style(prefix, fg="red", bold=True) + problem.paragraph(), err=True)
    return error.exit_code


@contextlib.contextmanager
def _shortage_told() -> Iterator[None]:
    """Memory that ran out where no slice could be cut, as in loading or sampling: one paragraph."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"memory ran out ({first_line(error).rstrip('.')})",
            fix="`grouper plan RECIPE` says what every part of a run takes, and what would fit: "
            "the model's size decides about weights and optimizer, sampling.max_slots and "
            "sampling.max_new_tokens about sampling, tokens_per_micro_batch about the update.",
        ) from error
