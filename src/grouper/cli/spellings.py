"""Flags that spell overrides, so that the resolved recipe shows what they did.

Each is a row of `FLAGS`: what it is called, and the `section.key=value` that it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from grouper.config.schema import Recipe

Command = Callable[..., Any]
Phases = Sequence[str]
Spelling = Callable[[Any, Callable[[], Recipe], Phases], list[str]]
"""(value, the recipe without flags, the phases that run) -> overrides."""

ATTENTIONS = ("native", "sdpa", "eager", "flash_attention_2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag: its names, what click needs to know, and what it spells."""

    names: tuple[str, ...]
    spell: Spelling
    help: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameter(self) -> str:
        """The name under which click hands over the value."""
        return self.names[0].partition("/")[0].removeprefix("--").replace("-", "_")


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _sets(*keys: str) -> Spelling:
    """The value itself, at each of these keys."""
    return lambda value, _recipe, _phases: [f"{key}={_value(value)}" for key in keys]


def _of_each_phase(key: str) -> Spelling:
    return lambda value, _recipe, phases: [f"{phase}.{key}={_value(value)}" for phase in phases]


def _running(recipe: Recipe, phases: Phases) -> Phases:
    """The phases of the command that the recipe does not skip."""
    return [phase for phase in phases if not getattr(recipe, f"skip_{phase}")] or phases


def _steps(value: int, recipe: Callable[[], Recipe], phases: Phases) -> list[str]:
    """Of GRPO where it runs: a step of SFT is something else."""
    return [f"{_running(recipe(), phases)[-1]}.steps={value}"]


def _learning_rate(value: float, recipe: Callable[[], Recipe], phases: Phases) -> list[str]:
    """Of GRPO where it runs: a rate that suits SFT is far too high for it.

    With muon there are two rates: the matrices' own keeps its proportion to the other.
    """
    phase = _running(recipe(), phases)[-1]
    optimizer = getattr(recipe(), phase).optimizer
    spelled = [f"{phase}.optimizer.learning_rate={value!r}"]
    if optimizer.name == "muon":
        rate = optimizer.muon_learning_rate * value / optimizer.learning_rate
        spelled.append(f"{phase}.optimizer.muon_learning_rate={rate!r}")
    return spelled


_ONE_PHASE = {
    "steps": ("--max-steps", "steps"),
    "learning_rate": ("--learning-rate", "optimizer.learning_rate"),
}
"""Parameter -> its flag, and the key that it sets in one phase."""


def phase_note(
    given: Mapping[str, Any], recipe: Callable[[], Recipe], phases: Phases
) -> str | None:
    """What a flag that sets one phase leaves to the other; None where only one phase runs.

    Args:
        given: value by parameter, as click hands it over.
        recipe: reads the recipe without flags.
        phases: that the command runs.
    """
    set_ = [keys for name, keys in _ONE_PHASE.items() if given[name] is not None]
    if not set_ or len(_running(recipe(), phases)) < 2:
        return None
    flags = " and ".join(flag for flag, _ in set_)
    mean = "means" if len(set_) == 1 else "mean"
    keys = " and ".join(f"sft.{key}=..." for _, key in set_)
    return f"{flags} {mean} GRPO. SFT stays as the recipe has it; {keys} would change it."


def _model(value: str, _recipe: Callable[[], Recipe], _phases: Phases) -> list[str]:
    return [f"model.path={_value(value)}", "model.new=null", "model.revision=null"]


def _bf16(value: bool, _recipe: Callable[[], Recipe], _phases: Phases) -> list[str]:
    if value:
        return ["model.compute_dtype=bfloat16"]
    return ["model.dtype=float32", "model.compute_dtype=float32"]


def _system_file(value: str, _recipe: Callable[[], Recipe], _phases: Phases) -> list[str]:
    return [f"prompt.system_file={_value(value)}", "prompt.system=null"]


def _unique(value: str, recipe: Callable[[], Recipe], phases: Phases) -> list[str]:
    """Of what SFT reads, where it runs; that is data.train where the recipe names nothing else."""
    part = "sft" if "sft" in phases and recipe().data.sft is not None else "train"
    return [f"data.{part}.unique={value}"]


def _dataset(value: str, recipe: Callable[[], Recipe], phases: Phases) -> list[str]:
    from grouper.data.naming import source_named

    part = "sft" if phases == ("sft",) and recipe().data.sft is not None else "train"
    return [f"data.{part}={_value(source_named(value))}"]


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def _rewards(value: str, recipe: Callable[[], Recipe], _phases: Phases) -> list[str]:
    """In this order; weight and parameters as in the recipe, where it has one of that name."""
    known = {r.name: r.model_dump(mode="json", exclude_defaults=True) for r in recipe().rewards}
    return [f"rewards={_value([known.get(name, {'name': name}) for name in _names(value)])}"]


def _number_or_all(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
    if value is None or value == "all" or (value.isdecimal() and int(value) > 0):
        return value
    raise click.BadParameter(f"{value!r} is neither a number of examples nor 'all'.")


def _steps_or_epoch(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
    if value is None or value == "epoch":
        return value
    if value in ("off", "no"):
        return 0
    if value.isdecimal():
        return int(value)
    raise click.BadParameter(f"{value!r} is neither a number of steps, 'epoch' nor 'off'.")


_COUNT = {"type": click.IntRange(min=1), "metavar": "N"}
_COUNT_OR_NONE = {"type": click.IntRange(min=0), "metavar": "N"}

FLAGS: tuple[Flag, ...] = (
    Flag(
        names=("--model", "--model-name-or-path"),
        spell=_model,
        help="Folder or Hub name; ./models and ./.models are looked into first.",
        options={"metavar": "PATH"},
    ),
    Flag(
        names=("--steps", "--max-steps"),
        spell=_steps,
        help="Steps of GRPO; of SFT where only SFT runs.",
        options=_COUNT,
    ),
    Flag(
        names=("--learning-rate",),
        spell=_learning_rate,
        help="Learning rate of GRPO; of SFT where only SFT runs. Muon's changes in proportion.",
        options={"type": click.FloatRange(min=0, min_open=True), "metavar": "X"},
    ),
    Flag(
        names=("--rewards", "--reward-funcs"),
        spell=_rewards,
        help="By name, in this order, with commas or blanks between them.",
        options={"metavar": "A,B,..."},
    ),
    Flag(
        names=("--dataset", "--dataset-name"),
        spell=_dataset,
        help="Source, Hub name or path that GRPO trains on (grouper sft: SFT).",
        options={"metavar": "NAME"},
    ),
    Flag(
        names=("--unique-examples",),
        spell=_unique,
        help="Of what SFT trains on (grouper grpo: GRPO).",
        options={"metavar": "N|all", "callback": _number_or_all},
    ),
    Flag(
        names=("--system-prompt-file",),
        spell=_system_file,
        help="A text file holding the instruction.",
        options={"metavar": "FILE"},
    ),
    Flag(
        names=("--start-from",),
        spell=_sets("grpo.start_from"),
        help="What GRPO starts from, instead of the run's own SFT.",
        options={"metavar": "PATH"},
    ),
    Flag(
        names=("--seed",),
        spell=_sets("seed"),
        help="Of every draw.",
        options=_COUNT_OR_NONE,
    ),
    Flag(
        names=("--run-name",),
        spell=_sets("name"),
        help="The run's folder below --output-dir.",
        options={"metavar": "NAME"},
    ),
    Flag(
        names=("--output-dir",),
        spell=_sets("output_dir"),
        help="Where runs lie.",
        options={"metavar": "DIR"},
    ),
    Flag(
        names=("--save-path",),
        spell=_sets("save_path"),
        help="A further folder for the result; with LoRA the adapter alone.",
        options={"metavar": "DIR"},
    ),
    Flag(
        names=("--logging-steps",),
        spell=_sets("tracking.log_every"),
        help="Steps between lines in training.log.",
        options=_COUNT,
    ),
    Flag(
        names=("--save-steps",),
        spell=_of_each_phase("checkpoint_every"),
        help="Steps between checkpoints; 0: only at the end.",
        options=_COUNT_OR_NONE,
    ),
    Flag(
        names=("--save-total-limit",),
        spell=_of_each_phase("keep_checkpoints"),
        help="Checkpoints to keep.",
        options=_COUNT,
    ),
    Flag(
        names=("--eval-steps",),
        spell=_of_each_phase("evaluate_every"),
        help="Steps between evaluations, or each epoch; 0 or off: none while training.",
        options={"metavar": "N|epoch|off", "callback": _steps_or_epoch},
    ),
    Flag(
        names=("--bf16/--no-bf16",),
        spell=_bf16,
        help="Matrix products in bfloat16; no: everything in float32.",
        options={"default": None},
    ),
    Flag(
        names=("--attention", "--attn-implementation"),
        spell=_sets("model.attention"),
        help="native is Grouper's own.",
        options={"type": click.Choice(ATTENTIONS), "metavar": "|".join(ATTENTIONS)},
    ),
    Flag(
        names=("--gradient-checkpointing/--no-gradient-checkpointing",),
        spell=_sets("model.gradient_checkpointing"),
        help="Less memory, a third slower.",
        options={"default": None},
    ),
)


def add_flags(command: Command) -> Command:
    """Give a command every flag, and those of the trackers."""
    for flag in reversed(FLAGS):
        command = click.option(*flag.names, flag.parameter, help=flag.help, **flag.options)(command)
    return _tracker_flags(command)


def _tracker_flags(command: Command) -> Command:
    options = [
        click.option(
            "--tracker",
            "--report-to",
            "tracker",
            multiple=True,
            metavar="NAME",
            help="tensorboard, wandb, trackio or file.py:function, several with commas; or none.",
        ),
        click.option("--no-trackers", is_flag=True, help="None, whatever the recipe says."),
        click.option("--project", metavar="NAME", help="Of all trackers."),
        click.option("--entity", metavar="NAME", help="Of wandb: a user or team."),
        click.option("--online", is_flag=True, help="Trackers send while the run goes on."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def spelled_out(
    given: Mapping[str, Any], recipe: Callable[[], Recipe], phases: Phases
) -> list[str]:
    """The overrides that the flags stand for.

    Args:
        given: value by parameter, as click hands it over; None for a flag that was not given.
        recipe: reads the recipe with its overrides, without flags.
        phases: that the command runs.

    Raises:
        click.UsageError: flags that contradict each other.
    """
    spelled = [
        text
        for flag in FLAGS
        if given[flag.parameter] is not None
        for text in flag.spell(given[flag.parameter], recipe, phases)
    ]
    return [*spelled, *_trackers(given, recipe)]


def _trackers(given: Mapping[str, Any], recipe: Callable[[], Recipe]) -> list[str]:
    """The trackers that are named, or the recipe's, with what the flags say about them all."""
    asked = [name for text in given["tracker"] for name in _names(text)]
    none = given["no_trackers"] or "none" in asked
    asked = [name for name in asked if name != "none"]
    if none:
        if asked:
            raise click.UsageError("--no-trackers and --tracker contradict each other: give one.")
        return ["tracking.trackers=[]"]
    about = {"project": given["project"], "entity": given["entity"]}
    about = {name: value for name, value in about.items() if value is not None}
    if given["online"]:
        about["mode"] = "online"
    if not asked and not about:
        return []
    rows = [t.model_dump(mode="json", exclude_defaults=True) for t in recipe().tracking.trackers]
    if asked:
        known = {row["name"]: row for row in rows}
        rows = [known.get(name, {"name": name}) for name in asked]
    if not rows:
        names = ", ".join(f"--{'online' if name == 'mode' else name}" for name in about)
        raise click.UsageError(f"{names}: the recipe has no trackers; add --tracker NAME.")
    return [f"tracking.trackers={_value([{**row, **about} for row in rows])}"]
