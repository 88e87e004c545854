"""`grouper new-model`: a small random model and a tokenizer, for trials without weights."""

from __future__ import annotations

import json
from pathlib import Path

import click

from grouper.cli.options import open_recipe
from grouper.config.checks import validate_json
from grouper.config.schema import NewModelConfig

EXAMPLES = """\b
Examples:
  grouper new-model demo ./tiny
  grouper new-model demo ./wider --hidden-size 256 --layers 4 --vocab-size 2048
  grouper run demo model.new=null model.path=./wider name=wider
"""


@click.command("new-model", epilog=EXAMPLES)
@click.argument("recipe", metavar="RECIPE")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
@click.option("--hidden-size", type=click.IntRange(min=8))
@click.option("--layers", type=click.IntRange(min=1))
@click.option("--heads", type=click.IntRange(min=1))
@click.option("--kv-heads", type=click.IntRange(min=1))
@click.option("--vocab-size", type=click.IntRange(min=1), help="Upper limit of the tokenizer.")
@click.option("--context", type=click.IntRange(min=1), help="Longest sequence, in tokens.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the weights.")
def new_model_command(
    recipe: str,
    folder: Path,
    overrides: tuple[str, ...],
    *,
    seed: int | None,
    context: int | None,
    **shape: int | None,
) -> None:
    """Make a small random model in FOLDER, its tokenizer fitted to RECIPE's training data.

    What is not given is as in RECIPE's model.new, or the default. The folder is an ordinary
    Hugging Face model, for any recipe of the same prompt format. It knows nothing until it is
    trained.
    """
    from grouper.models.new_model import make_new_model, save_new_model
    from grouper.prompts import make_format
    from grouper.training.problem_sets import load_problem_sets

    opened = open_recipe(recipe, overrides)
    config = _resize(
        opened.model.new or NewModelConfig(), {**shape, "max_position_embeddings": context}
    )
    sets = load_problem_sets(opened)
    model, tokenizer = make_new_model(
        config,
        sets.for_fitting,
        make_format(opened.prompt),
        seed=opened.seed if seed is None else seed,
    )
    save_new_model(folder, model, tokenizer)
    count = sum(p.numel() for p in model.parameters())
    click.echo(f"{folder}: random qwen3, {count:,} parameters, {len(tokenizer)} tokens.")


def _resize(config: NewModelConfig, shape: dict[str, int | None]) -> NewModelConfig:
    """`config` with what was given; what hangs on the width follows it.

    Raises:
        ConfigError: sizes that do not go together.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    values = {**config.model_dump(), **given}
    if "hidden_size" in given or "heads" in given:
        values["head_dim"] = max(2, values["hidden_size"] // values["heads"] // 2 * 2)
        values["intermediate_size"] = 3 * values["hidden_size"]
    if "heads" in given and "kv_heads" not in given:
        values["kv_heads"] = values["heads"]
    return validate_json(NewModelConfig, json.dumps(values), where="grouper new-model")
