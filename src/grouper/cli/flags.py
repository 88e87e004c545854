"""Flags of the training commands: settings by the names that people type for other trainers.

The flags are rows of `config/aliases.json`. Most set one key of the recipe and are checked by its
own validation; what depends on the recipe, or on several flags at once, is worked out here.

`also` has the other names of a flag. It is shown in `--help` where it has a `help`. A row has

- `to`: the key that it sets, in which `{phases}` is each phase that runs; `values` maps what is
  typed to the setting;
- or `spells`: what it sets, for each value that it takes;
- or `of_trackers`: what it sets in every tracker;
- or none of these: `WORKED_OUT` has a function for it;
- `first`: settings that everything else on the command line overrides;
- `text`: its value is never a number, `switch`: it needs no value, `list`: it takes several,
  `repeats`: it may be given more than once.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.config.aliases import Row, alias, aliases, tables
from grouper.errors import ConfigError, nearest

if TYPE_CHECKING:
    from grouper.config.schema import Recipe

Settings = dict[str, Any]

TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

DEVICE_BATCH, ACCUMULATION = "per-device-train-batch-size", "gradient-accumulation-steps"

# Similarity from which a mistyped name is a flag, not a setting.
_NEARLY = 0.85

# Flags about trackers change the recipe's and the overrides', so they contradict neither.
TRACKERS = "tracking.trackers"


@cache
def flags() -> dict[str, Row]:
    """Flag, with dashes -> its row; an alias with `to` is a flag that help does not show."""
    table = dict(tables()["flags"])
    for name, row in aliases().items():
        flag = flag_named(name)
        if "to" in row and flag not in table:
            default = next(iter(row.get("default", {}).values()), None)
            kind = {"switch": isinstance(default, bool), "text": isinstance(default, str)}
            table[flag] = {"to": row["to"], "values": row.get("values", {}), **kind}
    return table


def flag_named(name: str) -> str:
    """The flag of a name in any spelling, with dashes: `max-steps` of `steps` and `max_steps`.

    A name that no flag has comes back with dashes.
    """
    name = name.replace("_", "-")
    return _flag_of().get(name, name)


@cache
def _flag_of() -> dict[str, str]:
    """Other name -> flag."""
    older = {name: row["now"] for name, row in aliases().items() if "now" in row}
    found = {name.replace("_", "-"): now.replace("_", "-") for name, now in older.items()}
    for flag, row in tables()["flags"].items():
        found |= dict.fromkeys(row.get("also", ()), flag)
    return found


# --- how they are written ------------------------------------------------------------------------


def options() -> dict[str, Settings]:
    """Every flag as a row of options, with all its values; those without help are not shown."""
    return {
        flag: {
            "multiple": True,
            "metavar": "" if row.get("switch") else row.get("metavar"),
            "help": row.get("help", ""),
            "hidden": "help" not in row,
        }
        for flag, row in flags().items()
    }


def normalised(args: Sequence[str]) -> Iterator[str]:
    """`--rewards a b` as `--rewards=a,b`, `--bf16` and `--bf16 True` as `--bf16=true`."""
    rest = deque(args)
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        flag = flag_named(name.removeprefix("--")) if name.startswith("--") else ""
        # The switch that a flag turns on, or off where it has `no-` in front.
        either = (flag, flag_named(flag.removeprefix("no-")))
        switch = next((f for f in either if flags().get(f, {}).get("switch")), None)
        values = [value] if equals else []
        if word == "--":
            yield from (word, *rest)
            return
        if switch:
            if not values and rest and rest[0].lower() in TRUTHS:
                values = [rest.popleft()]
            truth = TRUTHS.get((values or ["true"])[0].lower())
            if truth is None:
                raise click.UsageError(f"{name} is true or false, not {value!r}.")
            yield f"--{switch}={json.dumps(truth == (switch == flag))}"
        elif flag in flags() and not values and rest and rest[0].startswith("--"):
            raise click.UsageError(f"{name} needs a value, and {rest[0]} is a flag.")
        elif flags().get(flag, {}).get("list") and (values or rest):
            values = values or [rest.popleft()]
            while rest and not _ends_a_list(rest[0]):
                values.append(rest.popleft())
            yield f"--{flag}={','.join(values)}"
        else:
            yield word


def _ends_a_list(word: str) -> bool:
    """Whether a word after a list is the next flag, an override or RECIPE."""
    from grouper.config.loading import shipped_recipes

    is_file = word.endswith((".yaml", ".yml")) or ("/" in word and ":" not in word)
    return word.startswith("-") or "=" in word or is_file or word in shipped_recipes()


def hint(option: str, args: Sequence[str]) -> str:
    """That there is no such option, and what to write instead of it."""
    from grouper.config.loading import load_recipe

    flag = flag_named(option.removeprefix("--"))
    names = [flag_named(word.partition("=")[0].removeprefix("--")) for word in args]
    typed, _, value = args[names.index(flag)].partition("=")
    others = [name for name, of in _flag_of().items() if of in flags()]
    near = nearest(flag, [*flags(), *others], _NEARLY)
    if near and not alias(option):
        return f"There is no option {typed}. Did you mean --{near}?"
    after = "".join(word for word in args[names.index(flag) + 1 :][:1] if word[:2] != "--")
    setting = f"{typed.removeprefix('--').replace('-', '_')}={value or after or 'VALUE'}"
    instead = f"Write {setting}."
    try:
        load_recipe("demo", [setting])  # the error of any recipe says what to write
    except ConfigError as error:
        instead = error.fix or (instead if "." in typed else "")
    return f"There is no option {typed}. {instead}"


# --- what they stand for -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line, its flags still as typed.

    Args:
        name: the recipe, as typed.
        overrides: `section.key=value`, as typed.
        phases: that the command runs.
        nproc: processes that `--nproc` asks for.
        typed: the values of each flag; none where it was not typed.
    """

    name: str
    overrides: Sequence[str]
    phases: Sequence[str]
    nproc: int
    typed: Mapping[str, Sequence[str]]

    @cached_property
    def values(self) -> dict[str, str]:
        """Flag -> its one value; of those that may be repeated, all of them with commas.

        Raises:
            click.UsageError: one is given several times with different values.
        """
        found = {}
        for flag, row in flags().items():
            typed = self.typed[flag.replace("-", "_")]
            if len(set(typed)) > 1 and not row.get("repeats"):
                others = "".join(f", also --{name}" for name in row.get("also", ()))
                times = f"given {len(typed)} times, with {' and '.join(typed)}"
                raise click.UsageError(f"--{flag}{others}: {times}. Give it once.")
            if typed:
                found[flag] = ",".join(dict.fromkeys(typed))
        return found

    @cached_property
    def recipe(self) -> Recipe:
        """Read only where a flag depends on it, since other flags may complete it."""
        from grouper.cli.opening import read_recipe

        return read_recipe(self.name, self.overrides)

    @cached_property
    def running(self) -> Sequence[str]:
        """The phases of the command that the recipe does not skip."""
        return [phase for phase in self.phases if phase in self.recipe.phases] or self.phases

    def keys(self, template: str) -> list[str]:
        """The keys that a row of the table means: `{phase}` is GRPO where it runs."""
        if "{phases}" in template:
            return [template.format(phases=phase) for phase in self.phases]
        return [template.format(phase=self.running[-1]) if "{" in template else template]


def spelled_out(line: CommandLine) -> tuple[list[str], list[str]]:
    """The overrides that a command line stands for, those it has itself among them.

    Returns:
        The overrides, and notes of what the command line itself does not show.

    Raises:
        click.UsageError: flags that contradict each other or an override, or have wrong values.
        ConfigError: a value that is not YAML, or a recipe that cannot be read.
    """
    gives_way: Settings = {}
    spelled: list[tuple[str, Settings]] = []
    for flag, value in line.values.items():
        for template, setting in flags()[flag].get("first", {}).items():
            gives_way |= dict.fromkeys(line.keys(template), setting)
        spelled.append((flag, WORKED_OUT.get(flag, _by_the_table)(flag, value, line)))
    batch, batch_note = _batch(line)
    size = DEVICE_BATCH if DEVICE_BATCH in line.values else ACCUMULATION
    spelled += [("tracker", _trackers(line)), (size, batch)]
    _refuse_contradictions(spelled, line.overrides)
    settings = {key: setting for _, several in spelled for key, setting in several.items()}
    notes = [note for note in (_phase_note(line), batch_note) if note]
    # A section is replaced before overrides set something inside it.
    sections = {key: setting for key, setting in settings.items() if isinstance(setting, dict)}
    rest = {key: setting for key, setting in settings.items() if key not in sections}
    return [*_as_overrides(gives_way | sections), *line.overrides, *_as_overrides(rest)], notes


def _as_overrides(settings: Settings) -> list[str]:
    return [
        f"{key}={json.dumps(value, ensure_ascii=False, default=str)}"
        for key, value in settings.items()
    ]


def _refuse_contradictions(
    spelled: Sequence[tuple[str, Settings]], overrides: Sequence[str]
) -> None:
    """Refuse two flags, or a flag and an override, that set one key to different values."""
    pairs = [(text.partition("=")[0], text) for text in overrides]
    known = {key: (text, _parsed(text.partition("=")[2], text)) for key, text in pairs}
    known.pop(TRACKERS, None)
    for flag, settings in spelled:
        sections = [(key, part) for key, part in settings.items() if isinstance(part, dict)]
        inside = {f"{key}.{name}": part for key, parts in sections for name, part in parts.items()}
        for key, setting in (settings | inside).items():
            before, other = known.setdefault(key, (f"--{flag}", setting))
            if other != setting:
                both = f"{before} and --{flag} contradict each other"
                raise click.UsageError(f"{both}: {key} would be {setting}. Give one of them.")


def _parsed(text: str, where: str) -> Any:
    from grouper.config.overrides import parse_yaml

    return parse_yaml(text, where)


def _by_the_table(flag: str, value: str, line: CommandLine) -> Settings:
    row = flags()[flag]
    spells = row.get("spells", {value: {row["to"]: _setting(flag, value)} if "to" in row else {}})
    if value not in spells:
        raise click.UsageError(f"--{flag} is one of {', '.join(spells)}, not {value!r}.")
    return {key: setting for to, setting in spells[value].items() for key in line.keys(to)}


def _setting(flag: str, value: str) -> Any:
    """The setting that a flag's value stands for."""
    row = flags()[flag]
    if value.lower() in row.get("values", {}):
        return row["values"][value.lower()]
    if row.get("list"):
        return _names(value)
    return value if row.get("text") else _parsed(value, f"--{flag}")


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def _phase_note(line: CommandLine) -> str | None:
    """A note on flags that set GRPO alone; None if only one phase runs."""
    to = {flag: str(flags()[flag].get("to")) for flag in line.values}
    to = {flag: key for flag, key in to.items() if "{phase}" in key}
    if not to or len(line.running) < 2:
        return None
    names = " and ".join(f"--{flag}" for flag in to)
    keys = " and ".join(f"{key.format(phase='sft')}=..." for key in to.values())
    mean = "mean" if len(to) > 1 else "means"
    return f"{names} {mean} GRPO. SFT stays as the recipe has it; {keys} would change it."


# --- flags of their own --------------------------------------------------------------------------


def _learning_rate(flag: str, value: str, line: CommandLine) -> Settings:
    """With muon there are two rates: the matrices' own keeps its proportion to the other."""
    settings = _by_the_table(flag, value, line)
    ((key, rate),) = settings.items()
    optimizer = getattr(line.recipe, line.running[-1]).optimizer
    if optimizer.name == "muon" and isinstance(rate, int | float):
        muon = optimizer.muon_learning_rate * rate / optimizer.learning_rate
        settings[key.replace("learning_rate", "muon_learning_rate")] = muon
    return settings


def _unique(flag: str, value: str, line: CommandLine) -> Settings:
    """For the data of SFT if it runs: data.train, unless the recipe has data.sft."""
    part = "sft" if "sft" in line.phases and line.recipe.data.sft is not None else "train"
    return {f"data.{part}.unique": _setting(flag, value)}


def _dataset(_flag: str, value: str, line: CommandLine) -> Settings:
    from grouper.data.reading import source_named

    only_sft = tuple(line.phases) == ("sft",) and line.recipe.data.sft is not None
    return {f"data.{'sft' if only_sft else 'train'}": source_named(value)}


def _system_prompt(_flag: str, value: str, _line: CommandLine) -> Settings:
    from grouper.config.loading import read_text

    return {"prompt.system": read_text(Path(value).expanduser()).strip()}


def _rewards(_flag: str, value: str, line: CommandLine) -> Settings:
    """Rewards in the order given, with the weight and parameters that the recipe has for them."""
    rows = [row.model_dump(mode="json", exclude_defaults=True) for row in line.recipe.rewards]
    known = {row["name"]: row for row in rows}
    return {"rewards": [known.get(name, {"name": name}) for name in _names(value)]}


def _push(_flag: str, value: str, line: CommandLine) -> Settings:
    """To `--hub-model-id`, else to a repository of the run's name."""
    if value != "true":
        return {"push_to": None}
    name = line.values.get("run-name") or line.recipe.name
    return {"push_to": line.values.get("hub-model-id", name)}


def _repository(_flag: str, _value: str, line: CommandLine) -> Settings:
    if "push-to-hub" not in line.values:
        raise click.UsageError("--hub-model-id names what --push-to-hub pushes to: give both.")
    return {}


WORKED_OUT: dict[str, Callable[[str, str, CommandLine], Settings]] = {
    "learning-rate": _learning_rate,
    "unique-examples": _unique,
    "dataset": _dataset,
    "rewards": _rewards,
    "system-prompt-file": _system_prompt,
    "push-to-hub": _push,
    "hub-model-id": _repository,
}


def _trackers(line: CommandLine) -> Settings:
    """The trackers that are named, or the recipe's, with what the flags say about them all."""
    values = line.values
    of_all = {flag: row["of_trackers"] for flag, row in flags().items() if "of_trackers" in row}
    about = {key: _setting(flag, values[flag]) for flag, key in of_all.items() if flag in values}
    asked, wandb = _names(values.get("tracker", "")), values.get("use-wandb")
    off = "none" in asked
    if (wandb == "false" and "wandb" in asked) or (
        off and ({*asked} - {"none"} or wandb == "true")
    ):
        no, yes = ("tracker none", "tracker") if off else ("no-wandb", "tracker wandb")
        raise click.UsageError(f"--{no} and --{yes} contradict each other: give one.")
    if off or not (about or asked or wandb):
        return {TRACKERS: []} if off else {}
    rows = line.recipe.tracking.trackers
    known = {row.name: row.model_dump(mode="json", exclude_defaults=True) for row in rows}
    names = [*(asked or known), *(["wandb"] if wandb == "true" else [])]
    found = [
        known.get(n, {"name": n}) for n in dict.fromkeys(names) if (n, wandb) != ("wandb", "false")
    ]
    if about and not found:
        typed = ", ".join(f"--{flag}" for flag in values if flag in of_all)
        what = f"{typed}: the recipe has no trackers"
        raise click.UsageError(f"{what}; add --use-wandb or --tracker NAME.")
    return {TRACKERS: [{**row, **about} for row in found]}


def _batch(line: CommandLine) -> tuple[Settings, str]:
    """The recipe's batch size from those of other trainers, and a note about it."""
    from grouper.config.loading import shipped_recipes

    if not {DEVICE_BATCH, ACCUMULATION} & line.values.keys():
        return {}, ""
    phase, grpo = line.running[-1], line.recipe.grpo
    # A shipped recipe keeps its batch under another run name.
    system = line.name if line.name in shipped_recipes() else line.recipe.name
    device, accumulation = tables()["batches"].get(system, {}).get(phase, (1, 1))
    device = _count(line, DEVICE_BATCH, device)
    accumulation = _count(line, ACCUMULATION, accumulation)
    processes = max(line.nproc, int(os.environ.get("WORLD_SIZE", "1")))
    completions = device * accumulation * processes
    product = f"{device} per device x {accumulation} accumulated x {processes} process(es)"
    product += f" = {completions}"
    if phase == "sft":
        return {"sft.batch_size": completions}, f"SFT: {product} demonstrations per step."
    group = _count(line, "num-generations", grpo.group_size)
    prompts, rest = divmod(completions * grpo.updates_per_batch, group)
    product += f" completions per optimizer step, {grpo.updates_per_batch} step(s) on each batch"
    if rest:
        raise click.UsageError(
            f"{product}: that is not whole groups of {group} (--num-generations). Choose "
            f"--{DEVICE_BATCH} and --{ACCUMULATION} so that it is, or say how many prompts a "
            "batch has: grpo.prompts_per_step=N."
        )
    return {"grpo.prompts_per_step": prompts}, f"GRPO: {product}: {prompts} prompt(s) x {group}."


def _count(line: CommandLine, flag: str, default: int) -> int:
    value = line.values.get(flag, str(default))
    if not value.isdecimal() or int(value) < 1:
        raise click.UsageError(f"--{flag} is a whole number of 1 or more, not {value!r}.")
    return int(value)
