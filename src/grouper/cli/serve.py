"""`grouper serve-rollouts`: vLLM for runs that name it in `sampling.vllm.urls`."""

from __future__ import annotations

import os

import click

from grouper.cli.opening import chosen_model, open_recipe, run_of
from grouper.errors import require_vllm
from grouper.files import cache_folder


def serve(
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
    from grouper.models.loading import shape_of
    from grouper.sampling.vllm_server import server_command, shared_secret
    from grouper.training.prepare import prepare
    from grouper.training.problem_sets import ProblemSets, load_problem_sets

    version = require_vllm()
    shared_secret()
    subject = chosen_model(model, opened, run_of(recipe, opened))
    sets = load_problem_sets(opened) if subject is None else ProblemSets()
    folder, device = cache_folder() / "rollouts" / str(port), find_device(opened.device).type
    folder.mkdir(parents=True, exist_ok=True)
    with prepare(opened, sets, model=subject, quiet=True) as prepared:
        computed = on_device(opened.model, device).compute_dtype
        name, arguments = prepared.samplers.served(
            shape_of(prepared.model_path), folder, computed=computed, device=device
        )
    command, environment = server_command(folder, name, arguments, host=host, port=port)
    click.echo(f"vLLM {version} serves {name} on http://{host}:{port}; Ctrl-C ends it.", err=True)
    if dry_run:
        click.echo(" ".join(command))
    else:
        os.execvpe(command[0], command, environment)  # noqa: S606 - it becomes the server
