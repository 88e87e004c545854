"""`grouper export`: a trained model as one folder for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from grouper.models.folders import model_in

EXAMPLES = """\b
Examples:
  grouper export outputs/demo ./demo-model              what the run has trained
  grouper export outputs/demo/sft/final ./sft-model
  grouper export outputs/mine ./mine-bf16 --dtype bfloat16
"""


@click.command("export", epilog=EXAMPLES)
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of the saved weights.",
)
def export_command(source: str, target: Path, *, dtype: str) -> None:
    """Write SOURCE to the folder TARGET as one whole model that transformers, vLLM and others
    load: weights, tokenizer, chat template. A LoRA adapter is merged into its base.

    SOURCE is a run folder, a model or adapter folder, or a Hub name. What was written is loaded
    again and its log-probs compared with those of base and adapter side by side; where they
    disagree nothing is left behind.
    """
    from grouper.models.export import export_model
    from grouper.tracking.live import Progress, setup_logging

    setup_logging(None, console=Progress().console)
    model = model_in(source)
    target = target.expanduser()
    done = export_model(model, target, dtype=dtype)
    click.echo(
        f"{model} -> {target} ({dtype}). Checked: log-probs differ by at most {done.gap:.2g}, "
        f"the same most likely token at {done.same_choice:.1%} of positions."
    )
