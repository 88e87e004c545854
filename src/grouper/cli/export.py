"""`grouper export`: a trained model as one folder for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import progress, warn

EXAMPLES = """
grouper export outputs/demo ./demo-model              the model that the run has trained
grouper export outputs/demo/sft/final ./sft-model
grouper export outputs/mine ./mine-bf16 --dtype bfloat16
"""


@click.command("export", cls=Command, examples=EXAMPLES)
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Data type of the saved weights; auto is the model's data type, or float32 if an adapter "
    "is merged.",
)
@options.adapter
@options.license_id
@options.checkpoint
def export(
    source: str,
    target: str,
    *,
    checkpoint: str | None,
    dtype: str,
    adapter: bool,
    license_id: str | None,
) -> None:
    """Write a trained model as one folder, LoRA merged.

    Writes SOURCE to the folder TARGET as a complete model that transformers, vLLM and others
    load: weights, tokenizer, a chat template that writes the prompt of training, stop tokens, a
    model card with the run's results, and grouper.json. A LoRA adapter is merged into its base
    model.

    SOURCE is a run folder, a model or adapter folder, a GGUF file or a Hub name. The exported
    model is loaded again and its log-probs are compared with those of the unmerged base model and
    adapter; if they disagree, the folder is deleted.
    """
    from grouper.cli.recipe_args import require_new
    from grouper.models.trained import model_in

    model = model_in(source, where="SOURCE", checkpoint=checkpoint, say=warn)
    place = Path(target).expanduser()
    require_new(place, "TARGET")
    from grouper.publish.export import export_model

    # This sets up the log messages.
    progress()
    done = export_model(model, place, dtype=dtype, adapter=adapter, license_id=license_id)
    checked = f" Checked: log-probs differ by at most {done.gap:.2g}."
    click.echo(f"{model} -> {place} ({done.dtype}).{'' if adapter else checked}")
    if done.larger:
        click.echo(
            "The base is stored in bfloat16: this folder has twice its size, and --dtype bfloat16 "
            "halves it, which rounds small changes away."
        )
    if not done.prompts_alone:
        click.echo("Its chat template does not write the prompt of training: see its README.md.")
