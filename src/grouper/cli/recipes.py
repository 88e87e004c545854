"""`grouper recipes` and `init`: shipped recipes, settings by name, import, and a new recipe."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import click
from pydantic.fields import FieldInfo

from grouper.cli.opening import require_new
from grouper.cli.text import definitions, flow, short, warn
from grouper.config.checks import advice, meant, settings, validate_json
from grouper.config.loading import list_recipes, load_recipe, resolved_yaml
from grouper.config.schema import PromptConfig, Recipe, SourceConfig
from grouper.errors import ConfigError, DataError, counted, did_you_mean
from grouper.files import write_atomic
from grouper.models.folders import local_model, on_this_machine, require_model_folder


def listed() -> None:
    """Print the shipped recipes."""
    definitions(list_recipes())


def show(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print a whole recipe."""
    click.echo(resolved_yaml(load_recipe(recipe, overrides)), nl=False)


def formats() -> None:
    """Print the prompt formats."""
    from grouper.prompts import FORMATS, make_format

    definitions([(n, make_format(PromptConfig(format=n)).description) for n in FORMATS])


def fields(words: tuple[str, ...]) -> None:
    """Print the settings of a section, or those that the words find."""
    known = dict(settings(Recipe))
    keys = [key for key in known if _lies_in(key, ".".join(words))] or _search(words, known)
    definitions([(key.replace("[]", ""), _describe(known[key])) for key in keys])


def imported(file: Path | str, output: Path | None, nproc: int) -> None:
    """Print or write a recipe for another trainer's file."""
    from grouper.config.importing import import_recipe
    from grouper.data.reading import source_named
    from grouper.rewards import REWARDS

    require_new(output, "--output")
    found = import_recipe(file, source_named=source_named, rewards=REWARDS, nproc=nproc)
    if output is None:
        click.echo(found.text, nl=False)
        return
    write_atomic(output, found.text.encode())
    for name, why in found.left_out.items():
        click.echo(f"{name}: {why}", err=True)
    shown = shlex.quote(str(output) if "/" in str(output) else f"./{output}")
    click.echo(f"Written to {output}: grouper run {shown} --dry-run", err=True)


def _lies_in(key: str, section: str) -> bool:
    """Whether a key is `section` itself or below it; every key is below the empty one."""
    return not section or f"{key}.".replace("[]", "").startswith(f"{section.replace('[]', '')}.")


def _search(words: Sequence[str], fields: Mapping[str, FieldInfo]) -> list[str]:
    """The keys of settings that have every word in name or meaning, or that the words stand for.

    Raises:
        ConfigError: there is none.
    """
    _, counterparts = meant("_".join(words), fields)
    found = [
        key
        for key, field in fields.items()
        if any(_lies_in(key, counterpart) for counterpart in counterparts)
        or all(word.lower() in f"{key} {field.description}".lower() for word in words)
    ]
    if not found:
        raise ConfigError(
            f"no setting has {' '.join(words)!r} in its name or meaning",
            fix=advice((words[-1].rpartition(".")[2],), "...", fields),
        )
    return found


def _describe(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    shown = "none" if value is None else repr([*value] if isinstance(value, tuple) else value)
    default = "required" if field.is_required() else f"default {shown}"
    meaning = f": {' '.join(field.description.split())}" if field.description else ""
    return f"({_kind(field.annotation)}, {default}){meaning}"


def _kind(annotation: Any) -> str:
    """A type in the words of a recipe: `int | none`, `list of str`, `mapping`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(map(str, inner))
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(_kind, inner))
    if origin is tuple:
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return "mapping"
    return "none" if annotation is types.NoneType else str(annotation.__name__)


# --- grouper init --------------------------------------------------------------------------------

# Problems that are looked at; the share that is held out, and how many must be there for it.
LOOKED_AT = 100
HELD_OUT = 0.05
ENOUGH = 40
# Tokens of a completion at most.
COMPLETION = 512
# (gradient checkpointing, tokens of a micro-batch), the fastest first.
UPDATES = ((False, 8192), (True, 8192), (True, 2048))
# GB of a common card, and the share of a card that an update may take.
CARD = 24.0
SHARE = 0.9


def init(
    file: str | None,
    *,
    model: str | None,
    data: str | None,
    lora: bool | None,
    memory: float | None,
    **columns: str | None,
) -> None:
    """Look at model and problems, ask for what is missing, and write a recipe."""
    target = Path(file or "mine.yaml")
    require_new(target, "FILE")
    # Read by the libraries when they are imported.
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    asks = sys.stdin.isatty()
    if not asks and not (model and data):
        raise click.UsageError("There is no terminal to ask in: give --model and --data.")
    model = model or str(click.prompt("Model (a folder or a Hub name)"))
    require_model_folder(model, where="--model")
    data = data or str(click.prompt("Problems (a file, a folder, a Hub name or a source)"))
    found = _look_at_data(data, {ours: name for ours, name in columns.items() if name})
    if lora is None:
        lora = not asks or click.confirm("Train an adapter (LoRA), not all weights?", default=True)
    if memory is None:
        memory = click.prompt("Memory of the card in GB", CARD, type=float) if asks else CARD
    weights: dict[str, Any] = {"compute_dtype": "auto"}
    if lora:
        weights = {"dtype": "bfloat16", "lora": {"rank": 32, "alpha": 64.0}}
    place, completion = local_model(model), COMPLETION
    here = on_this_machine(place)
    if here:
        from grouper.models.loading import context_length, shape_of

        context = context_length(shape_of(place, cached=True)) or 2 * COMPLETION
        completion = min(COMPLETION, context // 2)
    found |= {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", target.stem).strip("-._") or "mine",
        "path": flow(model),
        "weights": "\n  ".join(f"{key}: {flow(value)}" for key, value in weights.items()),
        "trained": "Trains an adapter; without `lora`, all weights."
        if lora
        else "Trains all weights.",
        "prompts": 16 if memory >= 16 else 8,
        "slots": 128 if memory >= 40 else 64,
        "rate": flow(1e-5 if lora else 1e-6),
        "completion": completion,
    }
    template = importlib.resources.files("grouper.config") / "new_recipe.yaml"
    text = Template(template.read_text(encoding="utf-8"))
    for checkpointing, tokens in UPDATES if here else UPDATES[1:2]:
        settings = {"checkpointing": str(checkpointing).lower(), "tokens": tokens}
        write_atomic(target, text.substitute(found, **settings).encode())
        if not here or _fits(target, memory):
            break
    else:
        warn(f"an update does not fit in {memory:g} GB: use a smaller model, or --lora.")
    if not here:
        click.echo(f"Model: {model} is not on this machine, so it was not checked.")
    name = shlex.quote(str(target) if "/" in str(target) else f"./{target}")
    click.echo(f"Written to {target}. Next:\n  grouper run {name} --dry-run")
    click.echo(f"  grouper preview {name}\n  grouper run {name}")


def _fits(file: Path, memory: float) -> bool:
    """Whether an update of the new recipe fits on the card, by its first problems."""
    from grouper.advice.run_plan import GIB, plan_run

    recipe = load_recipe(file, [f"data.train.limit={LOOKED_AT}"])
    plan = plan_run(recipe, device="cuda", with_cards=False)
    update = plan.memory[0].peak / GIB
    click.echo(
        f"Model: {recipe.model.path}, {plan.parameters:,} parameters, {plan.trainable:,} of them "
        f"trained. An update takes {update:.1f} GB of {memory:g}"
        f"{' with gradient checkpointing' if recipe.model.gradient_checkpointing else ''}."
    )
    return update <= SHARE * memory


def _look_at_data(data: str, columns: dict[str, str]) -> dict[str, Any]:
    """What the recipe says of the problems; prints what they are like, where they are here.

    Raises:
        ConfigError: there is nothing of this name.
        DataError: it holds no problems.
    """
    from grouper.data import SOURCES, load_problems
    from grouper.data.problems import is_numeric

    parts = _sources(data, columns)
    text = json.dumps({**parts["train"], "limit": LOOKED_AT})
    config = validate_json(SourceConfig, text, where="--data")
    source = SOURCES[config.source]
    if config.path is None and "test" in source.splits:
        parts["test"] = {**parts["train"], "split": "test"}
    fmt, solved = "boxed", False
    try:
        problems = load_problems(config, seed=0)
    except DataError as error:
        if source.hub is None and config.source != "hub":
            hint = "Here, --question and --answer name them." if "column" in error.what else ""
            raise DataError(error.what, where=error.where, fix=f"{error.fix} {hint}") from error
        click.echo(f"Data: {data} was not checked: {error.what}.")
    else:
        first = problems.problems[0]
        numbers = sum(is_numeric(problem.answer) for problem in problems.problems)
        solved = any(problem.solution for problem in problems.problems)
        fmt = "xml" if numbers == len(problems) else "boxed"
        if config.source == "prompt-response":
            fmt = "r1-zero" if first.prompt is None else fmt
        click.echo(
            f"Data: {data} ({', '.join(first.columns) or 'made here'}). Plain numbers among the "
            f"first {counted(len(problems), 'answer')}: {numbers}."
        )
        shown = f"Question: {short(first.question)}", f"Answer: {short(first.answer)}"
        for line in (*shown, *problems.notes):
            click.echo(f"  {line}")
        if len(problems) < ENOUGH:
            del parts["validation_share"]
    return {
        "solutions": "some" if solved else "none",
        "data": "\n  ".join(f"{part}: {flow(value)}" for part, value in parts.items()),
        "format": fmt,
        "reward": "boxed_format" if fmt == "boxed" else "format",
        "every": 50 if "validation_share" in parts else 0,
    }


def _sources(data: str, columns: dict[str, str]) -> dict[str, Any]:
    """The settings of `data`: where to train, and the test problems that lie beside."""
    from grouper.data import SOURCES
    from grouper.data.reading import READERS, source_named

    train, path = source_named(data), Path(data).expanduser()
    if train["source"] == "hub" and (data.count("/") != 1 or path.suffix in READERS):
        here = (file.name for file in Path().iterdir() if file.suffix in READERS)
        fix = did_you_mean(data, [*SOURCES, *here])
        raise ConfigError(f"there is no file, folder or source {data!r}", where="--data", fix=fix)
    if columns:
        own = {"source": "file"} if train["source"] == "prompt-response" else {}
        train |= {"columns": columns, **own}
    parts: dict[str, Any] = {"train": train, "validation_share": HELD_OUT}
    beside = path.parent / f"test{path.suffix}"  # `.` has no name that could be replaced
    if any([*path.glob("test[.-]*"), *path.glob("data/test[.-]*"), *path.glob("test/")]):
        parts["test"] = {**train, "split": "test"}
    elif path.stem == "train" and beside.is_file():
        parts["test"] = {**train, "path": str(beside)}
    return parts
