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
grouper export outputs/mine ./mine-ollama --modelfile
"""

# Types of the matrices in a GGUF file, as llama.cpp's converter names them.
GGUF_TYPES = ["f32", "f16", "bf16", "q8_0"]


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
@click.option(
    "--gguf",
    "gguf_type",
    type=click.Choice(GGUF_TYPES),
    help="Also write a GGUF file for llama.cpp and Ollama, with matrices of this type. Needs "
    "llama.cpp's convert_hf_to_gguf.py.",
)
@click.option(
    "--converter",
    metavar="PATH",
    type=options.PATH,
    help="convert_hf_to_gguf.py or a checkout of llama.cpp, for --gguf.  [default: that on the "
    "PATH]",
)
@click.option(
    "--modelfile",
    is_flag=True,
    help="Also write an Ollama Modelfile, with the prompt of training, stops and sampling.",
)
def export(
    source: str,
    target: str,
    *,
    checkpoint: str | None,
    gguf_type: str | None,
    converter: Path | None,
    modelfile: bool,
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

    A GGUF file is read back: names and shapes of all weights, the numbers of some, log-probs and
    greedy answers are compared with those of the export.
    """
    from grouper.cli.recipe_args import require_new
    from grouper.models.trained import model_in

    if adapter and (gguf_type or modelfile):
        raise click.UsageError("--gguf and --modelfile need whole weights: leave --adapter out.")
    if converter is not None and gguf_type is None:
        raise click.UsageError("--converter is for --gguf TYPE.")
    command: list[str] = []
    if gguf_type is not None:
        from grouper.errors import require_extra
        from grouper.publish.to_gguf import find_converter

        require_extra("gguf", "gguf", where="--gguf")
        command = find_converter(converter)
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
    if done.calls_tools:
        click.echo(
            "It calls Python in its completions, which most servers do not run: see its README.md."
        )
    weights = "."
    if gguf_type is not None:
        weights = _add_gguf(place, gguf_type, command)
    if modelfile:
        from grouper.publish.modelfile import write_modelfile

        click.echo(f"{write_modelfile(place, weights)}: ollama create NAME -f Modelfile")


def _add_gguf(place: Path, gguf_type: str, command: list[str]) -> str:
    """Write a GGUF file into an export, and return its name."""
    from grouper.publish.to_gguf import write_gguf

    converted = write_gguf(place, gguf_type, command)
    checked = f"{converted.tensors} weights in place"
    if converted.gap is None:
        checked += "; the model was not read back, because transformers cannot rebuild it"
    else:
        checked += (
            f", read back log-probs differ by at most {converted.gap:.2g}, "
            f"{converted.same_texts} of {converted.texts} greedy answers are the same"
        )
    click.echo(f"{converted.file} Checked: {checked}.")
    return converted.file.name
