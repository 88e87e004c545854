"""`grouper serve-rollouts`: vLLM's server, from which runs get their rollouts."""

from __future__ import annotations

import os

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.errors import require_vllm
from grouper.files import cache_folder

EXAMPLES = r"""
export GROUPER_ROLLOUT_SECRET=$(openssl rand -hex 16)
grouper serve-rollouts ./mine.yaml --port 8765
grouper run ./mine.yaml sampling.engine=vllm \
    "sampling.vllm={mode: server, servers: ['http://127.0.0.1:8765']}"
"""


@click.command("serve-rollouts", cls=Command, examples=EXAMPLES)
@options.recipe
@click.option(
    "--port",
    metavar="N",
    type=options.PORT,
    default=8765,
    show_default=True,
    help="Port to listen on.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any other address is open to other machines.",
)
@options.model
@click.option("--dry-run", is_flag=True, help="Validate everything and print vLLM's command.")
def serve_rollouts(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    host: str,
    port: int,
    dry_run: bool,
) -> None:
    """Serve rollouts for a recipe with vLLM.

    Starts a vLLM rollout server for models of RECIPE's shape, for runs on another device or
    machine; the command is replaced by the server process. A run uses it with
    sampling.engine=vllm, sampling.vllm.mode=server and its address in sampling.vllm.servers;
    several servers share the work. Weights come from the run.

    Every request must carry the secret in the environment variable GROUPER_ROLLOUT_SECRET, which
    the run needs as well. The server listens on this machine alone unless --host is given;
    nothing that is sent to it is encrypted.
    """
    from grouper.cli.recipe_args import chosen_model, open_recipe, run_of

    opened = open_recipe(recipe, (*overrides, "sampling.engine=vllm", "sampling.vllm.mode=server"))

    from grouper.models.device import find_device
    from grouper.models.loading import computed_on, shape_of, weightless_policy
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
        # LoRA may part the tied ends of a model.
        path = prepared.model_path
        shape = shape_of(path)
        computed = computed_on(opened.model, shape, device).compute_dtype
        policy = weightless_policy(opened.model, shape, path=path)
        name, arguments = prepared.samplers.served(
            policy, folder, computed=computed, device=device, own_card=True
        )
    command, environment = server_command(folder, name, arguments, host=host, port=port)
    click.echo(f"vLLM {version} serves {name} on http://{host}:{port}; Ctrl-C ends it.", err=True)
    if dry_run:
        click.echo(" ".join(command))
    else:
        os.execvpe(command[0], command, environment)  # noqa: S606 - it becomes the server
