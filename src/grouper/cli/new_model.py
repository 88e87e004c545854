"""`grouper new-model`: a small random model and a tokenizer, for trials without weights."""

from __future__ import annotations

import json
from pathlib import Path

import click

from grouper.cli.options import open_recipe

__all__ = ["new_model_command"]


@click.command("new-model")
@click.argument("recipe", metavar="RECIPE")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--architecture", type=click.Choice(["qwen3", "llama"]), default="qwen3")
@click.option("--hidden-size", type=click.IntRange(min=8), default=128, show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--heads", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--kv-heads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--vocab-size", type=click.IntRange(min=300), default=512, show_default=True)
@click.option("--context", type=click.IntRange(min=64), default=2048, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
def new_model_command(
    recipe: str,
    folder: Path,
    overrides: tuple[str, ...],
    *,
    architecture: str,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab_size: int,
    context: int,
    seed: int,
) -> None:
    """Make a random model in FOLDER, its tokenizer fitted to RECIPE's training data and format.

    The folder is an ordinary Hugging Face model: use it as `model.path=FOLDER` in any recipe of
    the same format. It knows nothing until it is trained.
    """
    from grouper.config import NewModelConfig
    from grouper.new_model import make_new_model, save_new_model
    from grouper.prompts import make_format
    from grouper.training.problem_sets import load_problem_sets
    from grouper.validation import validate_json

    opened = open_recipe(recipe, overrides)
    values = {
        "architecture": architecture,
        "hidden_size": hidden_size,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": max(2, hidden_size // heads // 2 * 2),
        "intermediate_size": 3 * hidden_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
    }
    config = validate_json(NewModelConfig, json.dumps(values), where="grouper new-model")
    sets = load_problem_sets(opened)
    model, tokenizer = make_new_model(
        config, sets.for_fitting, make_format(opened.prompt), seed=seed
    )
    save_new_model(folder, model, tokenizer)
    count = sum(p.numel() for p in model.parameters())
    click.echo(f"{folder}: random {architecture}, {count:,} parameters, {len(tokenizer)} tokens.")
