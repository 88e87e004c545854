"""Flags of the training commands: settings by the names that people type for other trainers.

The flags are rows of `aliases.json`. Most set one key of the recipe and are checked by its
own validation; flags that depend on the recipe, or on several flags at once, are handled here.

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

from grouper.compat.aliases import Row, alias, aliases, tables
from grouper.errors import ConfigError, nearest

if TYPE_CHECKING:
    from grouper.config.schema import Recipe, RewardConfig, TrackerConfig

Settings = dict[str, Any]

TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

DEVICE_BATCH = "per-device-train-batch-size"
ACCUMULATION = "gradient-accumulation-steps"

# Similarity from which a mistyped name is a flag, not a setting.
_NEARLY = 0.85

# Flags about trackers change the recipe's and the overrides', so they contradict neither.
TRACKERS = "tracking.trackers"


@cache
def flags() -> dict[str, Row]:
    """Map flags, with dashes, to rows; an alias with `to` is a flag that help does not show."""
    table = dict(tables()["flags"])
    for name, row in aliases().items():
        flag = flag_named(name)
        if "to" not in row or flag in table:
            continue
        default = next(iter(row.get("default", {}).values()), None)
        table[flag] = {
            "to": row["to"],
            "values": row.get("values", {}),
            "switch": isinstance(default, bool),
            "text": isinstance(default, str),
        }
    return table


def flag_named(name: str) -> str:
    """Return the flag of a name in any spelling: `max-steps` of `steps` and `max_steps`.

    A name that no flag has comes back with dashes.
    """
    name = name.replace("_", "-")
    return _flag_of().get(name, name)


@cache
def _flag_of() -> dict[str, str]:
    """Map other names to flags."""
    flag_of: dict[str, str] = {}
    for name, row in aliases().items():
        if "now" in row:
            older_flag = name.replace("_", "-")
            flag_of[older_flag] = row["now"].replace("_", "-")
    for flag, row in tables()["flags"].items():
        flag_of |= dict.fromkeys(row.get("also", ()), flag)
    return flag_of


# --- spelling ------------------------------------------------------------------------------------


def options() -> dict[str, Settings]:
    """Return the settings of click's option for every flag; flags without a help text are hidden.

    A flag may be given several times: `CommandLine.values` refuses values that differ.
    """
    rows = {}
    for flag, row in flags().items():
        rows[flag] = {
            "multiple": True,
            "metavar": "" if row.get("switch") else row.get("metavar"),
            "help": row.get("help", ""),
            "hidden": "help" not in row,
        }
    return rows


def normalized(args: Sequence[str]) -> Iterator[str]:
    """Yield `--rewards=a,b` for `--rewards a b`, `--bf16=true` for `--bf16` and `--bf16 True`."""
    words = deque(args)
    while words:
        word = words.popleft()
        if word == "--":
            yield word
            yield from words
            return
        name, equals, value = word.partition("=")
        flag = flag_named(name.removeprefix("--")) if name.startswith("--") else ""
        switch = _switch_of(flag)
        row = flags().get(flag, {})
        values = [value] if equals else []
        if switch:
            if not values and words and words[0].lower() in TRUTHS:
                values = [words.popleft()]
            typed_value = values[0] if values else "true"
            truth = TRUTHS.get(typed_value.lower())
            if truth is None:
                raise click.UsageError(f"{name} is true or false, not {value!r}.")
            # A flag with `no-` in front sets the opposite.
            setting = truth if switch == flag else not truth
            yield f"--{switch}={json.dumps(setting)}"
        elif flag in flags() and not values and words and words[0].startswith("--"):
            raise click.UsageError(f"{name} needs a value, and {words[0]} is a flag.")
        elif row.get("list") and (values or words):
            if not values:
                values = [words.popleft()]
            while words and not _ends_a_list(words[0]):
                values.append(words.popleft())
            yield f"--{flag}={','.join(values)}"
        else:
            yield word


def _switch_of(flag: str) -> str | None:
    """Return the switch that a flag turns on, or off where it has `no-` in front; else None."""
    opposite = flag_named(flag.removeprefix("no-"))
    for name in (flag, opposite):
        row = flags().get(name, {})
        if row.get("switch"):
            return name
    return None


def _ends_a_list(word: str) -> bool:
    """Tell whether a word after a list is the next flag, an override or RECIPE."""
    from grouper.config.loading import shipped_recipes

    is_file = word.endswith((".yaml", ".yml")) or ("/" in word and ":" not in word)
    return word.startswith("-") or "=" in word or is_file or word in shipped_recipes()


def hint(option: str, args: Sequence[str]) -> str:
    """Say that there is no such option, and what to write instead of it."""
    from grouper.config.loading import load_recipe

    flag = flag_named(option.removeprefix("--"))
    names = [flag_named(word.partition("=")[0].removeprefix("--")) for word in args]
    position = names.index(flag)
    typed, _, value = args[position].partition("=")
    other_names = [name for name, other_flag in _flag_of().items() if other_flag in flags()]
    similar_name = nearest(flag, [*flags(), *other_names], _NEARLY)
    if similar_name and not alias(option):
        return f"There is no option {typed}. Did you mean --{similar_name}?"
    next_words = args[position + 1 :]
    if not value and next_words and not next_words[0].startswith("--"):
        value = next_words[0]
    key = typed.removeprefix("--").replace("-", "_")
    setting = f"{key}={value or 'VALUE'}"
    advice = f"Write {setting}."
    try:
        # The error of any recipe says what to write.
        load_recipe("demo", [setting])
    except ConfigError as error:
        if error.fix:
            advice = error.fix
        elif "." not in typed:
            advice = ""
    return f"There is no option {typed}. {advice}"


# --- meaning -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line, its flags still as typed.

    Args:
        name: the recipe, as typed.
        overrides: `section.key=value`, as typed.
        phases: the phases that the command runs.
        nproc: the number of processes, from `--nproc`.
        typed: the values of each flag; none where it was not typed.
        read_recipe: reads a recipe by its name and overrides.
    """

    name: str
    overrides: Sequence[str]
    phases: Sequence[str]
    nproc: int
    typed: Mapping[str, Sequence[str]]
    read_recipe: Callable[[str, Sequence[str]], Recipe]

    @cached_property
    def values(self) -> dict[str, str]:
        """The one value of each flag; of those that may be repeated, all values with commas.

        Raises:
            click.UsageError: one is given several times with different values.
        """
        values = {}
        for flag, row in flags().items():
            typed = self.typed[flag.replace("-", "_")]
            if len(set(typed)) > 1 and not row.get("repeats"):
                other_names = "".join(f", also --{name}" for name in row.get("also", ()))
                problem = f"given {len(typed)} times, with {' and '.join(typed)}"
                raise click.UsageError(f"--{flag}{other_names}: {problem}. Give it once.")
            if typed:
                values[flag] = ",".join(dict.fromkeys(typed))
        return values

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, read only where a flag depends on it, since other flags may complete it."""
        return self.read_recipe(self.name, self.overrides)

    @cached_property
    def running(self) -> Sequence[str]:
        """The phases of the command that the recipe does not skip."""
        running = [phase for phase in self.phases if phase in self.recipe.phases]
        return running or self.phases

    def keys(self, template: str) -> list[str]:
        """Return the keys of a row of the table: `{phase}` is GRPO where it runs."""
        if "{phases}" in template:
            return [template.format(phases=phase) for phase in self.phases]
        if "{" in template:
            return [template.format(phase=self.running[-1])]
        return [template]


def spelled_out(line: CommandLine) -> tuple[list[str], list[str]]:
    """Turn a command line into overrides, those it has itself among them.

    Returns:
        The overrides, and notes of what the command line itself does not show.

    Raises:
        click.UsageError: flags that contradict each other or an override, or have wrong values.
        ConfigError: a value that is not YAML, or a recipe that cannot be read.
    """
    # Settings that everything else on the command line overrides.
    defaults: Settings = {}
    settings_by_flag: list[tuple[str, Settings]] = []
    for flag, value in line.values.items():
        for template, setting in flags()[flag].get("first", {}).items():
            defaults |= dict.fromkeys(line.keys(template), setting)
        settings_of = WORKED_OUT.get(flag, _by_the_table)
        settings_by_flag.append((flag, settings_of(flag, value, line)))
    batch, batch_note = _batch(line)
    batch_flag = DEVICE_BATCH if DEVICE_BATCH in line.values else ACCUMULATION
    settings_by_flag.append(("tracker", _trackers(line)))
    settings_by_flag.append((batch_flag, batch))
    _refuse_contradictions(settings_by_flag, line.overrides)
    notes = [note for note in (_phase_note(line), batch_note) if note]
    sections: Settings = {}
    values: Settings = {}
    for _, settings in settings_by_flag:
        for key, setting in settings.items():
            if isinstance(setting, dict):
                sections[key] = setting
            else:
                values[key] = setting
    # A section is replaced before overrides set something inside it.
    first = _as_overrides(defaults | sections)
    last = _as_overrides(values)
    return [*first, *line.overrides, *last], notes


def _as_overrides(settings: Settings) -> list[str]:
    overrides = []
    for key, value in settings.items():
        text = json.dumps(value, ensure_ascii=False, default=str)
        overrides.append(f"{key}={text}")
    return overrides


def _refuse_contradictions(
    settings_by_flag: Sequence[tuple[str, Settings]], overrides: Sequence[str]
) -> None:
    """Refuse two flags, or a flag and an override, that set one key to different values."""
    # Key -> the words that set it first, and its value.
    first_settings: dict[str, tuple[str, Any]] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        first_settings[key] = (override, _parsed(value, override))
    first_settings.pop(TRACKERS, None)
    for flag, settings in settings_by_flag:
        inner_settings: Settings = {}
        for key, setting in settings.items():
            if isinstance(setting, dict):
                for name, inner_setting in setting.items():
                    inner_settings[f"{key}.{name}"] = inner_setting
        for key, setting in (settings | inner_settings).items():
            words, first_setting = first_settings.setdefault(key, (f"--{flag}", setting))
            if first_setting != setting:
                problem = f"{words} and --{flag} contradict each other"
                raise click.UsageError(f"{problem}: {key} would be {setting}. Give one of them.")


def _parsed(text: str, where: str) -> Any:
    from grouper.config.overrides import parse_yaml

    return parse_yaml(text, where)


def _by_the_table(flag: str, value: str, line: CommandLine) -> Settings:
    """Return the settings of a flag by its row."""
    row = flags()[flag]
    # Key, perhaps with `{phase}` -> setting.
    templates: Settings = {}
    if "to" in row:
        templates[row["to"]] = _setting(flag, value)
    if "spells" in row:
        if value not in row["spells"]:
            raise click.UsageError(f"--{flag} is one of {', '.join(row['spells'])}, not {value!r}.")
        templates = row["spells"][value]
    settings: Settings = {}
    for template, setting in templates.items():
        settings |= dict.fromkeys(line.keys(template), setting)
    return settings


def _setting(flag: str, value: str) -> Any:
    """Return the setting of a flag's value."""
    row = flags()[flag]
    if value.lower() in row.get("values", {}):
        return row["values"][value.lower()]
    if row.get("list"):
        return _names(value)
    return value if row.get("text") else _parsed(value, f"--{flag}")


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def _phase_note(line: CommandLine) -> str | None:
    """Write a note on flags that set GRPO alone; None if only one phase runs."""
    names = []
    sft_keys = []
    for flag in line.values:
        template = str(flags()[flag].get("to"))
        if "{phase}" in template:
            names.append(f"--{flag}")
            sft_keys.append(f"{template.format(phase='sft')}=...")
    if not names or len(line.running) < 2:
        return None
    verb = "mean" if len(names) > 1 else "means"
    meaning = f"{' and '.join(names)} {verb} GRPO."
    return f"{meaning} SFT stays as the recipe has it; {' and '.join(sft_keys)} would change it."


# --- flags of their own --------------------------------------------------------------------------


def _learning_rate(flag: str, value: str, line: CommandLine) -> Settings:
    """Set both rates of muon: that of the matrices keeps its proportion to the other."""
    settings = _by_the_table(flag, value, line)
    ((key, rate),) = settings.items()
    optimizer = getattr(line.recipe, line.running[-1]).optimizer
    if optimizer.name == "muon" and isinstance(rate, int | float):
        muon_key = key.replace("learning_rate", "muon_learning_rate")
        settings[muon_key] = optimizer.muon_learning_rate * rate / optimizer.learning_rate
    return settings


def _unique(flag: str, value: str, line: CommandLine) -> Settings:
    """Set the data of SFT if it runs: data.train, unless the recipe has data.sft."""
    has_sft_data = "sft" in line.phases and line.recipe.data.sft is not None
    section = "sft" if has_sft_data else "train"
    return {f"data.{section}.unique": _setting(flag, value)}


def _dataset(_flag: str, value: str, line: CommandLine) -> Settings:
    from grouper.data.reading import source_named

    has_only_sft_data = tuple(line.phases) == ("sft",) and line.recipe.data.sft is not None
    section = "sft" if has_only_sft_data else "train"
    return {f"data.{section}": source_named(value)}


def _system_prompt(_flag: str, value: str, _line: CommandLine) -> Settings:
    from grouper.config.loading import read_text

    text = read_text(Path(value).expanduser())
    return {"prompt.system": text.strip()}


def _rewards(_flag: str, value: str, line: CommandLine) -> Settings:
    """Set the rewards, in this order, with the recipe's weights and parameters for them."""
    recipe_rows = _rows_by_name(line.recipe.rewards)
    rows = [recipe_rows.get(name, {"name": name}) for name in _names(value)]
    return {"rewards": rows}


def _rows_by_name(settings: Sequence[RewardConfig | TrackerConfig]) -> dict[str, Settings]:
    """Return rewards or trackers of a recipe, without their defaults, by name."""
    return {row.name: row.model_dump(mode="json", exclude_defaults=True) for row in settings}


def _push(_flag: str, value: str, line: CommandLine) -> Settings:
    """Push to `--hub-model-id`, else to a repository of the run's name."""
    if value != "true":
        return {"push_to": None}
    name = line.values.get("run-name") or line.recipe.name
    return {"push_to": line.values.get("hub-model-id", name)}


def _repository(_flag: str, _value: str, line: CommandLine) -> Settings:
    """Require the flag that uses the repository; `_push` reads its name."""
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
    """Return the named trackers, or the recipe's, with the settings for all of them."""
    shared_settings: Settings = {}
    for flag, value in line.values.items():
        row = flags()[flag]
        if "of_trackers" in row:
            shared_settings[row["of_trackers"]] = _setting(flag, value)
    names = _names(line.values.get("tracker", ""))
    wandb = line.values.get("use-wandb")
    _refuse_other_trackers(names, wandb)
    if "none" in names:
        return {TRACKERS: []}
    if not (shared_settings or names or wandb):
        return {}
    recipe_rows = _rows_by_name(line.recipe.tracking.trackers)
    if not names:
        names = list(recipe_rows)
    if wandb == "true":
        names.append("wandb")
    rows = []
    for name in dict.fromkeys(names):
        if name == "wandb" and wandb == "false":
            continue
        row = recipe_rows.get(name, {"name": name})
        rows.append({**row, **shared_settings})
    if shared_settings and not rows:
        typed = ", ".join(f"--{flag}" for flag in line.values if "of_trackers" in flags()[flag])
        problem = f"{typed}: the recipe has no trackers"
        raise click.UsageError(f"{problem}; add --use-wandb or --tracker NAME.")
    return {TRACKERS: rows}


def _refuse_other_trackers(names: Sequence[str], wandb: str | None) -> None:
    """Refuse trackers that another flag switches off."""
    if "none" in names:
        if set(names) != {"none"} or wandb == "true":
            raise click.UsageError("--tracker none and --tracker contradict each other: give one.")
    elif wandb == "false" and "wandb" in names:
        raise click.UsageError("--no-wandb and --tracker wandb contradict each other: give one.")


def _batch(line: CommandLine) -> tuple[Settings, str]:
    """Return the recipe's batch size from those of other trainers, and a note about it."""
    from grouper.config.loading import shipped_recipes

    if not {DEVICE_BATCH, ACCUMULATION} & line.values.keys():
        return {}, ""
    phase = line.running[-1]
    # A shipped recipe keeps its batch under another run name.
    system = line.name if line.name in shipped_recipes() else line.recipe.name
    default_sizes = tables()["batches"].get(system, {})
    device, accumulation = default_sizes.get(phase, (1, 1))
    device = _count(line, DEVICE_BATCH, device)
    accumulation = _count(line, ACCUMULATION, accumulation)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    processes = max(line.nproc, world_size)
    batch = device * accumulation * processes
    product = f"{device} per device x {accumulation} accumulated x {processes} process(es)"
    product = f"{product} = {batch}"
    if phase == "sft":
        return {"sft.batch_size": batch}, f"SFT: {product} demonstrations per step."
    updates = line.recipe.grpo.updates_per_batch
    group = _count(line, "num-generations", line.recipe.grpo.group_size)
    prompts, remainder = divmod(batch * updates, group)
    product = f"{product} completions per optimizer step, {updates} step(s) on each batch"
    if remainder:
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
