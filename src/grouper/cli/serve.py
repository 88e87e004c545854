"""`grouper serve`: a trained model behind an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import warn
from grouper.errors import ConfigError, ModelError, register_secret

EXAMPLES = """
grouper serve outputs/demo --dry-run
"""

# Program -> the package that it serves with, what installs it, and what `python -m` calls.
SERVERS = {
    "vllm": ("vllm", "vllm", "vllm.entrypoints.openai.api_server --model"),
    "transformers": ("uvicorn", "transformers[serving]", "transformers.cli.transformers serve"),
}

# The environment variable that holds the key which a server asks for.
API_KEY = "GROUPER_API_KEY"


class _Usage(NamedTuple):
    """How a model is asked."""

    request: dict[str, Any]
    """The part of a request that is the same for all questions."""
    calls_tools: bool = False
    """Whether its completions have turns with tools."""


@click.command("serve", cls=Command, examples=EXAMPLES)
@click.argument("model", metavar="MODEL")
@click.option(
    "--engine",
    type=click.Choice(["vllm", "transformers"]),
    help="Program that serves.  [default: the first one that is installed]",
)
@click.option(
    "--host",
    metavar="NAME",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any other address is open to other machines.",
)
@click.option("--unprotected", is_flag=True, help="Allow other machines without a key.")
@click.option(
    "--port",
    metavar="N",
    type=options.PORT,
    default=8000,
    show_default=True,
    help="Port to listen on.",
)
@options.checkpoint
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the commands and a request; load and start nothing.",
)
def serve(
    model: str,
    *,
    checkpoint: str | None,
    engine: str | None,
    host: str,
    port: int,
    unprotected: bool,
    dry_run: bool,
) -> int:
    """Serve a trained model with vLLM or transformers.

    MODEL is a run folder or a model folder. `vllm` serves it if it is installed, else
    `transformers serve`, through an OpenAI-compatible API, with the chat template and the stop
    tokens of training. First, a curl command to try it is printed.

    A --host that is open to other machines requires a key in the environment variable
    GROUPER_API_KEY, and `vllm`, which checks the key of requests.
    """
    from grouper.models.folders import EXPORT_FILE, require_on_this_machine
    from grouper.models.folders import run_of as run_of_model
    from grouper.models.trained import model_in

    source = model_in(model, checkpoint=checkpoint, say=warn)
    require_on_this_machine(source)
    chosen = engine or ("vllm" if find_spec("vllm") else "transformers")
    package, install, module = SERVERS[chosen]
    if find_spec(package) is None and not dry_run:
        raise ModelError(
            f"{chosen} cannot serve: {package} is not installed",
            where="--engine",
            fix=f'Install it with: pip install "{install}"',
        )
    key = os.environ.get(API_KEY)
    if not (_is_this_machine(host) or unprotected):
        _require_key(chosen, key, host)
    with tempfile.TemporaryDirectory(prefix="grouper-serve-") as place:
        folder = Path(source).expanduser()
        usage = None
        if not (folder / EXPORT_FILE).is_file():
            # Other servers know nothing of recipes: template and stops must be in the folder.
            if dry_run:  # no weights are loaded: the folder would not be there afterwards
                usage = _usage_of(source)
                name = folder.resolve()
                folder = Path(f"{(run_of_model(source) or name).name}-export")
                click.echo(shlex.join(["grouper", "export", source, str(folder)]))
            else:
                from grouper.publish.export import export_model

                folder = Path(place) / "model"
                export_model(source, folder)
        if usage is None:
            usage = _exported_usage(folder)
        if usage.calls_tools:
            warn(
                "The model calls Python in its completions, and this server runs none: the model "
                "invents the output. `grouper chat` and `grouper.solve` run it."
            )
        words = [sys.executable, "-m", *module.split(), str(folder)]
        words += ["--host", host, "--port", str(port)]
        click.echo(shlex.join(words))
        with_key = key is not None and chosen == "vllm"
        click.echo(_curl(folder, usage.request, host, port, with_key=with_key))
        # Not in its arguments, which every user of the machine can see.
        environment = {**os.environ, **({"VLLM_API_KEY": str(key)} if with_key else {})}
        if dry_run:
            return 0
        # The exit code is that of the other program.
        return subprocess.run(words, check=False, env=environment).returncode


def _is_this_machine(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _require_key(engine: str, key: str | None, host: str) -> None:
    """Raise `ConfigError` where other machines could use a server without a key."""
    fix = "Add --unprotected on a network that only trusted machines can reach, or omit --host."
    if engine != "vllm":
        what = f"{engine} supports no keys, and {host} accepts other machines: anyone could use it"
        raise ConfigError(what, where="--host", fix=f"Use --engine vllm. {fix}")
    if not key:
        what = f"{host} accepts other machines without a key: anyone could use it"
        raise ConfigError(what, where="--host", fix=f"Set {API_KEY} in the environment. {fix}")
    register_secret(key, f"${{{API_KEY}}}")


def _exported_usage(folder: Path) -> _Usage:
    """Return how an exported model is asked."""
    from grouper.models.folders import export_record

    record = export_record(str(folder)) or {}
    if "prompt" not in record:  # a checkpoint on the Hub has only its recipe
        return _Usage({})
    prompt = record["prompt"]
    return _Usage(_request(record["sampling"], prompt["stop"]), prompt.get("tools", False))


def _usage_of(source: str) -> _Usage:
    """Return the same for a model that has not been exported; nothing if its recipe is unknown."""
    from grouper.publish.export import recipe_of
    from grouper.training.prepare import Prepared
    from grouper.training.problem_sets import ProblemSets

    recipe = recipe_of(source)
    if recipe is None:
        return _Usage({})
    with Prepared(recipe, ProblemSets(), model=source, quiet=True) as prepared:
        params = dataclasses.asdict(prepared.evaluation_params())
        return _Usage(_request(params, prepared.format.stop), prepared.format.tools)


def _request(sampling: Mapping[str, Any], stop: Sequence[str]) -> dict[str, Any]:
    settings = {"max_tokens": sampling["max_new_tokens"], "temperature": sampling["temperature"]}
    return {**settings, **({"stop": list(stop)} if stop else {})}


def _curl(
    folder: Path, settings: Mapping[str, Any], host: str, port: int, *, with_key: bool
) -> str:
    """Return a curl command for the server, with the model's stops where they are known."""
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    body = {"model": str(folder), "messages": messages, **settings}
    header = "-H 'Content-Type: application/json'"
    if with_key:
        header += f' -H "Authorization: Bearer ${API_KEY}"'
    return (
        f"curl http://{host}:{port}/v1/chat/completions {header} -d {shlex.quote(json.dumps(body))}"
    )
