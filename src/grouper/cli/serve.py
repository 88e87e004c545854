"""`grouper serve-rollouts`: vLLM for runs that name it in `sampling.vllm.urls`."""

from __future__ import annotations

import os

import click

from grouper.cli.opening import chosen_model, open_recipe, run_of
from grouper.errors import ConfigError
from grouper.files import cache_folder

LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
    if opened.sampling.vllm.urls:
        raise ConfigError(
            "urls are for the run that uses the servers, not for a server",
            where="sampling.vllm.urls",
            fix="Leave it out here; --host and --port say where this one listens.",
        )

    from grouper.models.device import find_device, on_device
    from grouper.models.loading import shape_of
    from grouper.sampling.vllm import check_version, engine_arguments, write_shape
    from grouper.sampling.vllm_server import server_command, shared_secret
    from grouper.training.prepare import prepare
    from grouper.training.problem_sets import ProblemSets, load_problem_sets

    version = check_version()
    shared_secret()
    subject = chosen_model(model, opened, run_of(recipe, opened))
    sets = load_problem_sets(opened) if subject is None else ProblemSets()
    with prepare(opened, sets, model=subject, quiet=True) as prepared:
        config = shape_of(prepared.model_path)
        device = find_device(opened.device).type
        folder = cache_folder() / "rollouts" / str(port)
        folder.mkdir(parents=True, exist_ok=True)
        name = write_shape(folder, config, prepared.tokenizer)
        arguments = engine_arguments(
            opened.sampling,
            dtype=prepared.samplers.dtype(on_device(opened.model, device).compute_dtype),
            device=device,
            max_length=prepared.samplers.max_length(config),
        )
    command, environment = server_command(folder, name, arguments, host=host, port=port)
    click.echo(f"vLLM {version} serves {name} on http://{host}:{port}; Ctrl-C ends it.", err=True)
    if host not in LOOPBACK:
        click.echo(
            "It can be reached from other machines, and what is sent to it is not encrypted: only "
            "the shared secret stands before it.",
            err=True,
        )
    if dry_run:
        click.echo(" ".join(command))
        return
    os.execvpe(command[0], command, environment)  # noqa: S606 - it becomes the server
