"""`grouper export`, `push`, `serve` and `serve-rollouts`: a model for others, and for runs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from grouper.cli.measure import progress
from grouper.cli.opening import chosen_model, open_recipe, require_new, run_of
from grouper.cli.text import warn
from grouper.errors import ModelError, require_vllm
from grouper.files import cache_folder
from grouper.models.folders import EXPORT_FILE, export_record
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
    click.echo(f"{model} -> {place} ({dtype}).{'' if adapter else checked}")
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


def serve(
    model: str,
    *,
    checkpoint: str | None,
    engine: str | None,
    host: str,
    port: int,
    dry_run: bool,
) -> int:
    """Serve a model with another program until that ends; returns its exit code."""
    source = model_in(model, checkpoint=checkpoint, say=warn)
    chosen = engine or ("vllm" if find_spec("vllm") else "transformers")
    package, install, module = SERVERS[chosen]
    if find_spec(package) is None and not dry_run:
        raise ModelError(
            f"{chosen} cannot serve: {package} is not installed",
            where="--engine",
            fix=f'Install it with: pip install "{install}"',
        )
    from grouper.publish.export import export_model

    with tempfile.TemporaryDirectory(prefix="grouper-serve-") as place:
        folder = Path(source).expanduser()
        if not (folder / EXPORT_FILE).is_file():
            # Other servers know nothing of recipes: template and stops must be in the folder.
            folder = Path(place) / "model"
            export_model(source, folder)
        words = [sys.executable, "-m", *module.split(), str(folder)]
        words += ["--host", host, "--port", str(port)]
        click.echo(shlex.join(words))
        click.echo(_curl(folder, host, port))
        return 0 if dry_run else subprocess.run(words, check=False).returncode


def _curl(folder: Path, host: str, port: int) -> str:
    """A curl command that asks the server, with the model's stops where they are known."""
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    body: dict[str, Any] = {"model": str(folder), "messages": messages}
    record = export_record(str(folder)) or {}
    if "prompt" in record:  # a checkpoint on the Hub has only its recipe
        body["max_tokens"] = record["sampling"]["max_new_tokens"]
        body["temperature"] = record["sampling"]["temperature"]
        body |= {"stop": record["prompt"]["stop"]} if record["prompt"]["stop"] else {}
    header = "-H 'Content-Type: application/json'"
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
    from grouper.sampling.vllm_server import server_command, shared_secret
    from grouper.training.prepare import Prepared
    from grouper.training.problem_sets import ProblemSets, load_problem_sets

    version = require_vllm()
    shared_secret()
    subject = chosen_model(model, opened, run_of(recipe, opened))
    sets = load_problem_sets(opened) if subject is None else ProblemSets()
    folder, device = cache_folder() / "rollouts" / str(port), find_device(opened.device).type
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
