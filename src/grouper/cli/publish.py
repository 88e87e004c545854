"""`grouper export`, `push`, `serve` and `serve-rollouts`: a model for others, and for runs."""

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
from typing import Any

import click

from grouper.cli.measure import progress
from grouper.cli.recipe_args import chosen_model, open_recipe, require_new, run_of
from grouper.cli.text import warn
from grouper.errors import ConfigError, ModelError, register_secret, require_vllm
from grouper.files import cache_folder
from grouper.models.folders import EXPORT_FILE, export_record, require_on_this_machine
from grouper.models.folders import run_of as run_of_model
from grouper.models.trained import model_in


def export(
    source: str, target: str, *, checkpoint: str | None, dtype: str, adapter: bool, **how: Any
) -> None:
    """Write a model folder, and print how closely it matches its source."""
    model = model_in(source, where="SOURCE", checkpoint=checkpoint, say=warn)
    place = Path(target).expanduser()
    require_new(place, "TARGET")
    from grouper.publish.export import export_model

    progress()
    done = export_model(model, place, dtype=dtype, adapter=adapter, **how)
    checked = f" Checked: log-probs differ by at most {done.gap:.2g}."
    click.echo(f"{model} -> {place} ({done.dtype}).{'' if adapter else checked}")
    if done.larger:
        click.echo(
            "The base is stored in bfloat16: this folder has twice its size, and --dtype bfloat16 "
            "halves it, which rounds small changes away."
        )
    if not done.prompts_alone:
        click.echo("Its chat template does not write the prompt of training: see its README.md.")


def push(source: str, repo: str, *, checkpoint: str | None, public: bool, **how: Any) -> None:
    """Push a model, and print where it is."""
    model = model_in(source, where="SOURCE", checkpoint=checkpoint, say=warn)
    from grouper.publish.hub import export_and_push

    progress()
    address = export_and_push(model, repo, private=not public, **how)
    click.echo(f"{model} -> {address}")


# --- grouper serve -------------------------------------------------------------------------------

# Program -> the package that it serves with, what installs it, and what `python -m` calls.
SERVERS = {
    "vllm": ("vllm", "vllm", "vllm.entrypoints.openai.api_server --model"),
    "transformers": ("uvicorn", "transformers[serving]", "transformers.cli.transformers serve"),
}


# The environment variable that holds the key which a server asks for.
API_KEY = "GROUPER_API_KEY"


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
    """Serve a model with another program until that ends; returns its exit code."""
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
        request = None
        if not (folder / EXPORT_FILE).is_file():
            # Other servers know nothing of recipes: template and stops must be in the folder.
            if dry_run:  # no weights are loaded: the folder would not be there afterwards
                request = _settings_of(source)
                name = folder.resolve()
                folder = Path(f"{(run_of_model(source) or name).name}-export")
                click.echo(shlex.join(["grouper", "export", source, str(folder)]))
            else:
                from grouper.publish.export import export_model

                folder = Path(place) / "model"
                export_model(source, folder)
        if request is None:
            request = _exported_settings(folder)
        words = [sys.executable, "-m", *module.split(), str(folder)]
        words += ["--host", host, "--port", str(port)]
        click.echo(shlex.join(words))
        with_key = key is not None and chosen == "vllm"
        click.echo(_curl(folder, request, host, port, with_key=with_key))
        # Not in its arguments, which every user of the machine can see.
        environment = {**os.environ, **({"VLLM_API_KEY": str(key)} if with_key else {})}
        return 0 if dry_run else subprocess.run(words, check=False, env=environment).returncode


def _is_this_machine(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _require_key(engine: str, key: str | None, host: str) -> None:
    """Raise `ConfigError` where other machines could use a server without a key."""
    fix = "Add --unprotected where only those can reach it who may, or leave --host out."
    if engine != "vllm":
        what = f"{engine} knows no keys, and {host} admits other machines: anyone could use it"
        raise ConfigError(what, where="--host", fix=f"Use --engine vllm. {fix}")
    if not key:
        what = f"{host} admits other machines, and there is no key: anyone could use it"
        raise ConfigError(what, where="--host", fix=f"Set {API_KEY} in the environment. {fix}")
    register_secret(key, f"${{{API_KEY}}}")


def _exported_settings(folder: Path) -> dict[str, Any]:
    """How an exported model is sampled: part of a request."""
    record = export_record(str(folder)) or {}
    if "prompt" not in record:  # a checkpoint on the Hub has only its recipe
        return {}
    return _request(record["sampling"], record["prompt"]["stop"])


def _settings_of(source: str) -> dict[str, Any]:
    """The same of a model that has not been exported; nothing of one whose recipe is not known."""
    from grouper.publish.export import recipe_of
    from grouper.training.prepare import Prepared
    from grouper.training.problem_sets import ProblemSets

    recipe = recipe_of(source)
    if recipe is None:
        return {}
    with Prepared(recipe, ProblemSets(), model=source, quiet=True) as prepared:
        return _request(dataclasses.asdict(prepared.evaluation_params()), prepared.format.stop)


def _request(sampling: Mapping[str, Any], stop: Sequence[str]) -> dict[str, Any]:
    settings = {"max_tokens": sampling["max_new_tokens"], "temperature": sampling["temperature"]}
    return {**settings, **({"stop": list(stop)} if stop else {})}


def _curl(
    folder: Path, settings: Mapping[str, Any], host: str, port: int, *, with_key: bool
) -> str:
    """A curl command that asks the server, with the model's stops where they are known."""
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    body = {"model": str(folder), "messages": messages, **settings}
    header = "-H 'Content-Type: application/json'"
    if with_key:
        header += f' -H "Authorization: Bearer ${API_KEY}"'
    return (
        f"curl http://{host}:{port}/v1/chat/completions {header} -d {shlex.quote(json.dumps(body))}"
    )


# --- grouper serve-rollouts ----------------------------------------------------------------------


def serve_rollouts(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    host: str,
    port: int,
    dry_run: bool,
) -> None:
    """Become vLLM's server for models of the recipe's shape; the run brings the weights."""
    opened = open_recipe(recipe, (*overrides, "sampling.engine=vllm", "sampling.vllm.mode=server"))

    from grouper.models.device import find_device, on_device
    from grouper.models.loading import shape_of, weightless_policy
    from grouper.sampling.vllm.server import server_command, shared_secret
    from grouper.training.prepare import Prepared
    from grouper.training.problem_sets import ProblemSets, load_problem_sets

    version = require_vllm()
    shared_secret()
    subject = chosen_model(model, opened, run_of(recipe, opened))
    sets = load_problem_sets(opened) if subject is None else ProblemSets()
    folder = cache_folder() / "rollouts" / str(port)
    device = find_device(opened.device).type
    folder.mkdir(parents=True, exist_ok=True)
    with Prepared(opened, sets, model=subject, quiet=True) as prepared:
        computed = on_device(opened.model, device).compute_dtype
        # LoRA may part the tied ends of a model.
        path = prepared.model_path
        policy = weightless_policy(opened.model, shape_of(path), path=path)
        name, arguments = prepared.samplers.served(policy, folder, computed=computed, device=device)
    command, environment = server_command(folder, name, arguments, host=host, port=port)
    click.echo(f"vLLM {version} serves {name} on http://{host}:{port}; Ctrl-C ends it.", err=True)
    if dry_run:
        click.echo(" ".join(command))
    else:
        os.execvpe(command[0], command, environment)  # noqa: S606 - it becomes the server
