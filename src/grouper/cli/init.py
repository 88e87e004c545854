"""`grouper init`: a recipe for the user's own model and problems."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Literal

import click

from grouper.advice.recipe_choice import ENOUGH, HELD_OUT, MOST_TESTED, TEST_SHARE
from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import flow, short, table, warn
from grouper.errors import ConfigError, DataError, GrouperError, ModelError, did_you_mean, plural
from grouper.files import write_atomic

if TYPE_CHECKING:
    from grouper.advice.first_answers import FirstAnswers
    from grouper.advice.recipe_choice import Choices
    from grouper.data import ProblemSet

EXAMPLES = """
grouper init FILE                              asks for what it needs
grouper init first.yaml --model ./my-model --data mine.jsonl --memory 24
grouper init second.yaml --model ./my-model --data arithmetic --full
"""

# Problems that are looked at.
LOOKED_AT = 100
# Problems whose lengths are measured for the plan.
PLANNED = 10_000
# (gradient checkpointing, tokens of a micro-batch), the fastest first.
UPDATES = ((False, 8192), (True, 8192), (True, 2048))
# GB of a common GPU.
CARD = 24.0
# The share of the memory that an update may take, by device. On a CPU the process holds up to half
# as much again, since glibc keeps freed memory.
SHARE = {"cuda": 0.9, "cpu": 0.6}


@dataclass(frozen=True, slots=True)
class Machine:
    """What a recipe is written for."""

    device: Literal["cpu", "cuda"]
    """`cpu`: of this machine."""
    memory: float
    """GB of a GPU, or GiB of this machine."""

    def __str__(self) -> str:
        if self.device == "cpu":
            return f"the {self.memory:.1f} GiB of this machine"
        return f"a GPU of {self.memory:g} GB"


@click.command("init", cls=Command, examples=EXAMPLES)
@click.argument("file", required=False, metavar="[FILE]")
@click.option("--model", metavar="PATH", help="Model folder, GGUF file or Hub name.")
@click.option(
    "--data", metavar="SOURCE", help="File, folder, Hub name, or a name of `grouper data list`."
)
@click.option("--question", metavar="COLUMN", help="Column that holds the questions.")
@click.option("--answer", metavar="COLUMN", help="Column that holds the answers.")
@click.option(
    "--memory", metavar="GB", type=options.Number(1), help="Memory in GB of the GPU to write for."
)
@click.option(
    "--samples/--no-samples",
    default=True,
    show_default=True,
    help="Let the model answer a few problems, or choose by what kind of model it is.",
)
@click.option(
    "--sample-seconds",
    metavar="N",
    type=options.Number(1),
    default=75,
    show_default=True,
    help="Approximate time for its answers, after it has been loaded.",
)
@click.option("--lora/--full", default=None, help="Train an adapter, or all weights.")
def init(
    file: str | None,
    *,
    model: str | None,
    data: str | None,
    lora: bool | None,
    memory: float | None,
    samples: bool,
    sample_seconds: float,
    **columns: str | None,
) -> None:
    """Write a recipe for your own model and problems.

    The recipe is written to FILE (mine.yaml by default).

    The first problems are read, and the model's config.json and tokenizer. A model that is on
    this machine and small (about 2B parameters) also answers a few problems, for about a minute:
    its answers determine prompt format, rewards and whether SFT comes first; otherwise the kind
    of model does. Nothing is downloaded. You are prompted for missing values; without a terminal,
    LoRA on this machine's GPU is assumed. Without a GPU, a model that is here is trained on the
    CPU, if its memory suffices; otherwise a GPU of 24 GB is assumed. If there are no test problems
    next to the file, a tenth is held out for the final test.
    """
    from grouper.cli.recipe_args import require_new
    from grouper.models.folders import local_model, on_this_machine, require_model_folder

    target = Path(file or "mine.yaml")
    require_new(target, "FILE")
    # Read by the libraries when they are imported.
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    asks = sys.stdin.isatty()
    if not asks and not (model and data):
        raise click.UsageError("There is no terminal for questions: give --model and --data.")
    model = model or str(click.prompt("Model (a folder or a Hub name)"))
    require_model_folder(model, where="--model")
    data = data or str(click.prompt("Problems (a file, a folder, a Hub name or a source)"))
    parts, problems = _look_at_data(data, {ours: name for ours, name in columns.items() if name})
    if lora is None:
        lora = not asks or click.confirm("Train an adapter (LoRA), not all weights?", default=True)
    place = local_model(model)
    here = on_this_machine(place)
    machines = _machines(memory, here=here, asks=asks)
    choices = _choose(
        model, place if here else None, problems, seconds=sample_seconds if samples else 0.0
    )
    fields = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", target.stem).strip("-._") or "mine",
        "path": flow(model),
        "data": _indented(parts),
        **_of_the_choices(choices, held_out="validation_share" in parts),
    }
    _write_what_fits(target, fields, machines, lora=lora, here=here)
    if not here:
        click.echo(f"Model: {model} is not on this machine, so it was not checked.")
    _say_what_is_next(target, sft=choices.sft)


def _machines(memory: float | None, *, here: bool, asks: bool) -> list[Machine]:
    """Return what the recipe may be for, the first choice first.

    Args:
        memory: of the GPU, as the user has given it.
        here: whether the model is on this machine, so that it can be trained here.
        asks: whether the user can be asked.
    """
    if memory is None:
        memory = _memory_here(here=here, asks=asks)
    if memory > 0:
        return [Machine("cuda", memory)]
    from grouper.models.device import machine_memory

    click.echo(
        "The recipe is for the CPU of this machine, which is slow for more than a small model; "
        f"--memory {CARD:g} writes one for a GPU of {CARD:g} GB."
    )
    return [Machine("cpu", machine_memory() / 2**30), Machine("cuda", CARD)]


def _memory_here(*, here: bool, asks: bool) -> float:
    """Return the GB of this machine's GPU, or what the user says; 0: there is only a CPU."""
    import torch

    if torch.cuda.is_available():
        # A card that is sold with 24 GB reports a little less than 24 GiB.
        memory = float(round(torch.cuda.get_device_properties(0).total_memory / 2**30))
        question, least = "Memory of the GPU in GB", 1
    else:
        memory = 0.0 if here else CARD
        question, least = "Memory of the GPU in GB (0: train on the CPU of this machine)", 0
    if asks:
        memory = click.prompt(question, memory, type=click.FloatRange(least))
    return memory


def _write_what_fits(
    target: Path, fields: Mapping[str, Any], machines: Sequence[Machine], *, lora: bool, here: bool
) -> None:
    """Write the recipe for the first machine that an update fits, with the fastest that does.

    Args:
        target: file of the recipe.
        fields: of the template, those that do not depend on the machine.
        machines: what the recipe may be for.
        lora: train an adapter.
        here: whether the model is here; otherwise nothing can be checked.
    """
    template = importlib.resources.files("grouper.config") / "new_recipe.yaml"
    text = Template(template.read_text(encoding="utf-8"))
    tried = UPDATES if here else UPDATES[1:2]
    for machine in machines:
        for checkpointing, tokens in tried:
            update = {"checkpointing": str(checkpointing).lower(), "tokens": tokens}
            of_the_machine = _of_the_machine(lora, machine)
            written = text.substitute({**fields, **of_the_machine, **update})
            write_atomic(target, written.encode())
            if not here or _fits(target, machine):
                return
        if machine is not machines[-1]:
            click.echo(f"That is too much for {machine}: the recipe is for {machines[-1]}.")
    warn(f"an update does not fit in {machines[-1].memory:g} GB: use a smaller model, or --lora.")


def _name(file: Path) -> str:
    """Return a recipe file as a user types it."""
    return shlex.quote(str(file) if "/" in str(file) else f"./{file}")


def _say_what_is_next(target: Path, *, sft: bool) -> None:
    """Print the commands that come next: first a look at what the recipe would train on."""
    name = _name(target)
    why = (
        "GRPO learns only where the answers to a problem are right at times and wrong at times, "
        "and preview says whether they are, or why not."
    )
    if sft:
        click.echo(f"Written to {target}. Next, SFT, and then a look at some samples: {why}")
        commands = [f"grouper sft {name}", f"grouper preview {name}"]
        training = f"grouper run {name} --resume"
    else:
        click.echo(f"Written to {target}. Next, a look at some samples: {why}")
        commands = [f"grouper preview {name}"]
        training = f"grouper run {name}"
    for command in commands:
        click.echo(f"  {command}")
    click.echo(f"Then train:\n  {training}")


def _indented(settings: Mapping[str, Any]) -> str:
    """Return settings as lines of YAML below a section."""
    return "\n  ".join(f"{key}: {flow(value)}" for key, value in settings.items())


def _of_the_choices(choices: Choices, *, held_out: bool) -> dict[str, Any]:
    """Return the fields of the template that depend on model and problems."""
    return {
        "format": choices.format,
        "why_format": choices.reasons["prompt.format"],
        "skip_sft": str(not choices.sft).lower(),
        "why_sft": choices.reasons["skip_sft"],
        "needs_correct": str(choices.needs_correct).lower(),
        "why_correct": choices.reasons["grpo.require_correct_in_group"],
        "rewards": "\n".join(f"  - {flow(reward)}" for reward in choices.rewards),
        "completion": choices.max_new_tokens,
        "every": 50 if held_out else 0,
    }


def _of_the_machine(lora: bool, machine: Machine) -> dict[str, Any]:
    """Return the fields of the template that depend on what is trained, and on what machine."""
    on_gpu = machine.device == "cuda"
    weights: dict[str, Any] = {"compute_dtype": "auto" if on_gpu else "fastest"}
    if lora:
        from grouper.models.device import fastest_dtype, has_bfloat16

        dtype = "bfloat16" if on_gpu and has_bfloat16() else fastest_dtype()
        weights = {"dtype": dtype, "lora": {"rank": 32, "alpha": 64.0}}
    return {
        "weights": _indented(weights),
        "trained": "Trains an adapter; without `lora`, all weights."
        if lora
        else "Trains all weights.",
        "prompts": 16 if on_gpu and machine.memory >= 16 else 8,
        "slots": 128 if on_gpu and machine.memory >= 40 else 64,
        "rate": flow(1e-5 if lora else 1e-6),
        "sft_rate": flow(2e-4 if lora else 2e-5),
    }


def _choose(
    model: str, place: str | None, problems: ProblemSet | None, *, seconds: float
) -> Choices:
    """Choose format, phases and rewards, and print why.

    Args:
        model: as the user named it.
        place: where it is on this machine; None: it is not.
        problems: the first ones; None where they are not on this machine.
        seconds: that the model's answers may take; 0: it answers nothing.
    """
    from grouper.advice.recipe_choice import CANDIDATES, DataKind, choose, kind_of

    kind = kind_of(model, None, here=False)
    if place is not None:
        from grouper.advice.first_answers import look_at_model

        try:
            kind = look_at_model(place)
        except ModelError as error:
            # Perhaps only its configuration is here; a run will say the same.
            warn(f"the model is judged by its name: {error.paragraph()}")
            place = None
    click.echo(f"Model: {model} is {kind}.")
    first = () if problems is None else problems.problems
    known = DataKind(
        problems=len(first),
        solutions=any(problem.solution for problem in first),
        r1_prompts=any(p.response and p.prompt is None for p in first),
    )
    formats = ("r1-zero",) if known.r1_prompts else CANDIDATES
    answers: list[FirstAnswers] = []
    if seconds and place is not None and problems is not None:
        answers = _ask(place, problems, formats, seconds)
    choices = choose(kind, known, [one.observation for one in answers])
    for setting, why in choices.reasons.items():
        click.echo(f"  {setting}: {why}")
    return choices


def _ask(
    place: str, problems: ProblemSet, formats: Sequence[str], seconds: float
) -> list[FirstAnswers]:
    """Let the model answer a few problems in each format, where it is small; print a table."""
    from grouper.advice.first_answers import MOST_BYTES, PROBLEMS, ask, stored_bytes
    from grouper.runs.progress import Progress

    size = stored_bytes(place)
    if size is None or size > MOST_BYTES:
        why = "its weights are not here" if size is None else "it is large"
        click.echo(f"It was not tried, because {why}: the settings follow from its kind.")
        return []
    click.echo(
        f"It answers {PROBLEMS} problems now, in about {seconds:g} s after loading "
        "(--no-samples leaves this out)."
    )
    display = Progress()
    with display.track("first answers", PROBLEMS) as task:
        try:
            answers = ask(
                place,
                problems,
                formats,
                seconds=seconds,
                progress=lambda _, done, total: task(done, total),
            )
        except GrouperError as error:
            # A recipe can be written without it, and the run will say the same.
            warn(f"the model could not be tried: {error.paragraph()}")
            return []
    rows = [
        (
            one.observation.format,
            str(one.observation.answers),
            str(one.observation.held),
            str(one.observation.right),
            str(one.observation.answers - one.observation.ended),
            str(one.observation.tokens),
        )
        for one in answers
    ]
    if rows:
        columns = ("format", "answers", "in the format", "right", "truncated", "tokens (median)")
        table(columns, rows, lines=True)
        click.echo(f"One of them: {short(answers[0].examples[0])}")
    else:
        click.echo(
            "This machine is too slow for that, so the settings follow from the kind of model; "
            "--sample-seconds gives it more time."
        )
    return answers


def _fits(file: Path, machine: Machine) -> bool:
    """Tell whether an update of the new recipe fits, as `grouper plan` counts it."""
    from grouper.config.loading import load_recipe
    from grouper.runs.progress import Progress

    # `grouper plan` measures the longest rows of all problems. So does this, but for sets whose
    # reading takes minutes: the two name the same figure.
    recipe = load_recipe(file, [f"data.train.limit={PLANNED}", "data.test_share=0"])
    with Progress().track("planning an update"):  # importing torch takes as long as the plan
        from grouper.advice.plan import GIB, plan_run

        plan = plan_run(recipe, device=machine.device, with_cards=False)
    peaks = [memory_row.peak for memory_row in plan.memory[: len(recipe.phases)]]
    update = max(peaks) / GIB
    click.echo(
        f"Model: {recipe.model.path}, {plan.parameters:,} parameters, {plan.trainable:,} of them "
        f"trained. An update takes {update:.2f} GiB of {machine}"
        f"{' with gradient checkpointing' if recipe.model.gradient_checkpointing else ''} "
        f"(`grouper plan {_name(file)} --device {machine.device}` shows of what)."
    )
    return update <= SHARE[machine.device] * machine.memory


def _look_at_data(data: str, columns: dict[str, str]) -> tuple[dict[str, Any], ProblemSet | None]:
    """Return the settings of `data`, and the first problems where they are here; print about them.

    Raises:
        ConfigError: there is nothing of this name.
        DataError: it holds no problems.
    """
    from grouper.config.checks import validate_json
    from grouper.config.schema import SourceConfig
    from grouper.data import SOURCES, load_problems
    from grouper.data.problems import is_numeric

    parts = _sources(data, columns)
    text = json.dumps({**parts["train"], "limit": LOOKED_AT})
    config = validate_json(SourceConfig, text, where="--data")
    source = SOURCES[config.source]
    if config.path is None and "test" in source.splits:
        parts["test"] = {**parts["train"], "split": "test"}
    try:
        problems = load_problems(config, seed=0)
    except DataError as error:
        if source.hub is None and config.source != "hub":
            hint = "Here, --question and --answer name them." if "column" in error.what else ""
            raise DataError(error.what, where=error.where, fix=f"{error.fix} {hint}") from error
        click.echo(f"Data: {data} was not checked: {error.what}.")
        return parts | ({} if "test" in parts else {"test_share": TEST_SHARE}), None
    first = problems.problems[0]
    numbers = sum(is_numeric(problem.answer) for problem in problems.problems)
    click.echo(
        f"Data: {data} ({', '.join(first.columns) or 'made here'}). Plain numbers among the "
        f"first {plural(len(problems), 'answer')}: {numbers}."
    )
    solved = sum(problem.solution is not None for problem in problems.problems)
    click.echo(f"  Worked solutions: {solved} of {len(problems)}.")
    shown = f"Question: {short(first.question)}", f"Answer: {short(first.answer)}"
    for line in (*shown, *problems.notes):
        click.echo(f"  {line}")
    if len(problems) < ENOUGH:
        del parts["validation_share"]
        if "test" not in parts:
            click.echo(f"  No test problems: of fewer than {ENOUGH}, none are held out.")
    elif "test" not in parts:
        parts["test_share"] = share = _test_share(Path(config.path or "").expanduser())
        click.echo(
            f"  No test problems beside it: {share:.1%} are held out as data.test_share, chosen by "
            "the words of their questions, and never trained on."
        )
    return parts, problems


def _test_share(file: Path) -> float:
    """Return the share of the problems to hold out for the test, less for a very long file."""
    if file.suffix != ".jsonl" or not file.is_file():
        return TEST_SHARE
    with file.open("rb") as opened:
        rows = sum(1 for _ in opened)
    return min(TEST_SHARE, round(MOST_TESTED / max(rows, 1), 4))


def _sources(data: str, columns: dict[str, str]) -> dict[str, Any]:
    """Return the settings of `data`: the training problems, and test problems next to them."""
    from grouper.data import SOURCES
    from grouper.data.reading import READERS, source_named

    train = source_named(data)
    path = Path(data).expanduser()
    if train["source"] == "hub" and (data.count("/") != 1 or path.suffix in READERS):
        file_names = [file.name for file in Path().iterdir() if file.suffix in READERS]
        fix = did_you_mean(data, [*SOURCES, *file_names])
        raise ConfigError(f"there is no file, folder or source {data!r}", where="--data", fix=fix)
    if columns:
        if train["source"] == "prompt-response":
            train |= {"columns": columns, "source": "file"}
        else:
            train |= {"columns": columns}
    parts: dict[str, Any] = {"train": train, "validation_share": HELD_OUT}
    beside = path.parent / f"test{path.suffix}"  # `.` has no name that could be replaced
    if any([*path.glob("test[.-]*"), *path.glob("data/test[.-]*"), *path.glob("test/")]):
        parts["test"] = {**train, "split": "test"}
    elif path.stem == "train" and beside.is_file():
        parts["test"] = {**train, "path": str(beside)}
    return parts
