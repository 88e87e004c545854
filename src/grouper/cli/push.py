"""`grouper push`: a trained model on the Hub."""

from __future__ import annotations

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import progress, warn

EXAMPLES = """
grouper push outputs/demo OWNER/NAME
grouper push ./demo-model OWNER/NAME --public
"""


@click.command("push", cls=Command, examples=EXAMPLES)
@click.argument("source", metavar="SOURCE")
@click.argument("repo", metavar="OWNER/NAME")
@click.option(
    "--public/--private",
    default=False,
    show_default=True,
    help="Make the repository public when it is created.",
)
@click.option("--revision", metavar="NAME", help="Branch to push to.  [default: main]")
@options.adapter
@options.license_id
@options.checkpoint
def push(
    source: str,
    repo: str,
    *,
    checkpoint: str | None,
    public: bool,
    revision: str | None,
    adapter: bool,
    license_id: str | None,
) -> None:
    """Push a trained model and its card to the Hub.

    Pushes SOURCE to the repository OWNER/NAME on the Hub; a missing repository is created, and is
    private. The card is written from the model's run. SOURCE is a folder that `grouper export`
    wrote, or a run folder or a model in one, which is exported first.

    The token is read from HF_TOKEN or `hf auth login` and is never written to a file. After an
    interrupted push, run the same command again: what has arrived is not sent twice.
    """
    from grouper.models.trained import model_in

    model = model_in(source, where="SOURCE", checkpoint=checkpoint, say=warn)
    from grouper.publish.hub import export_and_push

    # This sets up the log messages.
    progress()
    address = export_and_push(
        model,
        repo,
        private=not public,
        revision=revision,
        adapter=adapter,
        license_id=license_id,
    )
    click.echo(f"{model} -> {address}")
