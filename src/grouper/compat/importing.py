"""Turn the configuration of another trainer into a recipe of the same run.

A dialect is a file of `dialects/`: how such a file is recognized, the recipe that it is based on,
and a row for each of its names; all share TRL's names. Settings that take arithmetic, or several
names, are worked out here.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grouper.compat.aliases import Row, dialect_of, plain_name, word_of
from grouper.compat.scripts import read_script
from grouper.config.checks import validate_json
from grouper.config.loading import load_recipe, read_text, resolved_yaml
from grouper.config.overrides import as_json, parse_yaml, put
from grouper.config.schema import LARGEST, TRACKERS, Recipe
from grouper.errors import ConfigError, nearest

# A data set's name -> the settings of its source.
SourceNamed = Callable[[str], dict[str, Any]]
# Similarity required of a name that is proposed: another trainer's own names are no typos.
_ALIKE = 0.8
# Values that switch off the settings that need theirs.
_OFF: tuple[Any, ...] = (None, False, "", "no", "none", [], ["none"])
# A tag of a system prompt -> the format whose tags these are.
_FORMATS = {"<reasoning>": "xml", "<think>": "think"}
_READABLE = "What can be read: TRL's YAML, JSON and Python, and files that docs/migrating.md lists."
# Keys that every recipe has; a file with all of them is a recipe already.
_KEYS_OF_RECIPES = {"name", "model", "data"}
# Settings of a tracker by their names in TRL.
_TRACKER_FIELDS = {"project": "project", "run_name": "run_name", "wandb_entity": "entity"}
# Rewards that require the tags of a format around the answer.
_TAG_REWARDS = {"format", "soft_format", "tag_count"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecipe:
    """A recipe made from a file."""

    recipe: Recipe
    text: str
    """The recipe as YAML, with notes and what was left out as comments."""
    left_out: dict[str, str]
    """Name in the file -> why it has no counterpart."""


def import_recipe(
    path: str | Path, *, source_named: SourceNamed, rewards: Container[str], nproc: int = 1
) -> ImportedRecipe:
    """Make a recipe from a file of another trainer, which is recognized by its names.

    Settings that the file leaves out get that trainer's defaults, so that the run is the same.

    Args:
        path: YAML or JSON; or Python, whose GRPOConfig or SFTConfig is read and never executed.
        source_named: returns the settings of the source that a data set's name stands for.
        rewards: the names of built-in rewards.
        nproc: processes the file was written for; its batch sizes are per process.

    Raises:
        ConfigError: it cannot be read, belongs to no known trainer, or cannot be trained.
    """
    path = Path(path).expanduser()
    data, left_out = _read(path)
    dialect = dialect_of(data)
    if dialect is None or data.keys() >= _KEYS_OF_RECIPES:
        first_names = ", ".join(str(name) for name in [*data][:5])
        problem = f"these names belong to no known trainer: {first_names}"
        raise ConfigError(problem, where=str(path), fix=_READABLE)
    phases = _settings_by_phase(data, dialect, path, left_out)
    for settings in phases:
        settings.updates = _set_batch(settings, nproc)
        settings.move_rows()
        _set_trackers(settings)
    last = phases[-1]
    _set_names(last, path)
    for rows in last.recipe["data"].values():
        if isinstance(rows, dict):
            source = str(rows["source"])
            rows.update(source_named(source))
    if dialect["recipe"] is None:
        _convert_trl(last, path, rewards)
    elif dialect["recipe"] == "openmath-dapo":
        _convert_openmath_dapo(last)
    for settings in phases:
        settings.account()
    as_text = as_json(last.recipe, (), where=str(path))
    recipe = validate_json(Recipe, as_text, where=str(path))
    yaml_text = resolved_yaml(recipe, defaults=False)
    text = f"{_comments(last, path)}\n{yaml_text}"
    return ImportedRecipe(recipe=recipe, text=text, left_out=left_out)


def _read(path: Path) -> tuple[dict[Any, Any], dict[str, str]]:
    """Read the settings of a file, or a script's arguments; and why some could not be read.

    Raises:
        ConfigError: it cannot be read, or sets nothing; a script has not one configuration.
    """
    text = read_text(path)
    if path.suffix == ".py":
        return read_script(text, str(path))
    if path.suffix == ".json":
        # JSON is YAML, except for tabs before a name.
        text = text.expandtabs()
    data = parse_yaml(text, str(path))
    if isinstance(data, dict) and data:
        return data, {}
    raise ConfigError("this file holds no named settings", where=str(path), fix=_READABLE)


@dataclass
class _Settings:
    """The settings of a file for one phase; all phases fill one recipe."""

    phase: str
    dialect: Row
    where: str
    recipe: dict[str, Any]
    notes: list[str]
    # Name in the file -> why it was not used.
    left_out: dict[str, str]
    # Name -> the value in the file.
    values: dict[str, Any] = field(default_factory=dict)
    # Name -> its spelling in the file.
    spellings: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    # Optimizer steps of one rollout batch, which is a step of ours.
    updates: int = 1

    def row(self, name: str) -> Row:
        row = self.dialect["rows"].get(name, {})
        return Row(row)

    def default(self, name: str) -> Any:
        if self.dialect["recipe"] is None:
            defaults_by_phase = self.row(name).get("default", {})
            return defaults_by_phase.get(self.phase)
        defaults = self.dialect["defaults"].get(self.phase, {})
        return defaults.get(name)

    def get(self, name: str) -> Any:
        """Return the value in the file, else the trainer's default, else None."""
        self.used.add(name)
        value = self.values.get(name, self.default(name))
        same_as = self.row(name).get("same_as")
        if same_as and value is None:
            return self.get(same_as)
        return value

    def number(self, name: str, least: int = 0, *, integer: bool = False) -> Any:
        """Return a number of `least` or more.

        Raises:
            ConfigError: it is no such number, or no integer where `integer` is set.
        """
        value = self.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        has_type = is_number and (isinstance(value, int) or not integer)
        # The upper limit also excludes infinity, and no comparison holds for NaN.
        if has_type and least <= value <= LARGEST:
            return value
        noun = "whole number" if integer else "number"
        spelling = self.spellings.get(name, name)
        problem = f"{spelling} is {value!r}, not a {noun} of {least} or more"
        raise self.refused(problem, self.row(name).get("fix", ""))

    def refused(self, problem: str, fix: str = "") -> ConfigError:
        return ConfigError(problem, where=self.where, fix=fix)

    def put(self, keys: dict[str, Any]) -> None:
        """Set dotted keys of the recipe; `{phase}` in one is the phase."""
        for template, value in keys.items():
            key = template.format(phase=self.phase)
            put(self.recipe, key.split("."), value)

    def leave_out(self, name: str, reason: str) -> None:
        if name in self.values:
            spelling = self.spellings[name]
            self.left_out[spelling] = reason

    def why_unused(self, name: str) -> str:
        """Explain why a name means nothing in this file; empty if it does mean something."""
        row = self.row(name)
        if row.get("default") and self.phase not in row["default"]:
            return f"not a setting of {self.phase.upper()}Config"
        for needed_name, reason in row.get("needs", {}).items():
            if self.get(needed_name) in _OFF:
                return str(reason)
        return ""

    def move_rows(self) -> None:
        """Set everything that has a key of its own."""
        for name, row in self.dialect["rows"].items():
            if not row.keys() & {"to", "values"}:
                continue
            if name not in self.values and self._keeps_our_default(row):
                continue
            if not self.why_unused(name):
                self._move(name, row, self.get(name))

    def _keeps_our_default(self, row: Row) -> bool:
        """Tell whether a setting that the file leaves out keeps the recipe's own default."""
        if self.dialect["recipe"] or not row.get("default"):
            return True
        return bool(row.get("unset") == "ours")

    def _move(self, name: str, row: Row, value: Any) -> None:
        word = word_of(value)
        values = row.get("values", {})
        notes = row.get("notes", {})
        note = notes.get(word)
        if word not in notes and word not in values:
            note = notes.get("*")
        if note:
            self.notes.append(note)
        key = row.get("to", "").format(phase=self.phase)
        if word in values or "*" in values:
            translated = values.get(word, values.get("*"))
            self.put(translated if isinstance(translated, dict) else {key: translated})
        elif values and "otherwise" not in row:
            self.leave_out(name, f"{value!r} has no counterpart, so that {key} keeps its default")
        elif row.get("unit") != "updates":
            self.put({key: value, **row.get("also", {})})
        else:
            self._move_updates(name, row, key)

    def _move_updates(self, name: str, row: Row, key: str) -> None:
        """Set a number of optimizer steps, or a share of them, in steps of ours."""
        updates = self.number(name)
        if not 0 < updates < 1:
            steps = math.ceil(updates / self.updates)
            self.put({key: steps, **row.get("also", {})})
        elif "share" in row:
            self.put({key: None, row["share"]: updates})
        else:
            self.leave_out(name, "a share of the steps has no counterpart: give their number")

    def account(self) -> None:
        """List the settings that were not used, with the reason."""
        for name, value in self.values.items():
            reason = self._why_left_out(name, value)
            is_known = name in self.dialect["rows"]
            if reason and not (is_known and value == self.default(name)):
                self.leave_out(name, reason)

    def _why_left_out(self, name: str, value: Any) -> str:
        """Explain why a value of the file was not used; empty if it was."""
        rows = self.dialect["rows"]
        if name not in rows:
            similar_name = nearest(name, rows, _ALIKE)
            hint = f" (Did you mean {similar_name!r}?)" if similar_name else ""
            return f"not a name in {self.dialect['names']}{hint}"
        row = self.row(name)
        reason = self.why_unused(name)
        if not reason and word_of(value) not in row.get("values", {}):
            reason = row.get("why", "")
        if not reason and "computed" in row and name not in self.used:
            keys = row["computed"].format(phase=self.phase)
            reason = f"not read from such a file: set {keys} in the recipe"
        return reason


def _settings_by_phase(
    data: Row, dialect: Row, path: Path, left_out: dict[str, str]
) -> list[_Settings]:
    """Sort the settings of the file by phase.

    Raises:
        ConfigError: a name is set twice, to different values.
    """
    recipe: dict[str, Any] = {}
    if dialect["recipe"] is not None:
        recipe = load_recipe(dialect["recipe"]).model_dump(mode="json", exclude_unset=True)
    notes: list[str] = []
    sections = dialect["sections"]
    by_phase: dict[str, _Settings] = {}
    for phase in sections.values():
        by_phase[phase] = _Settings(phase, dialect, str(path), recipe, notes, left_out)
    last_phase = [*by_phase][-1]
    for section, name, value in _flat(data, dialect):
        phase = sections.get(section, last_phase)
        _add_value(by_phase[phase], section, name, value)
    for settings in by_phase.values():
        if not settings.phase:
            settings.phase = _phase_of(settings)
        start = dialect["start"].get(settings.phase, {})
        settings.put(copy.deepcopy(start))
    return list(by_phase.values())


def _add_value(settings: _Settings, section: str, name: str, value: Any) -> None:
    """Add a value of the file under its present name."""
    dialect = settings.dialect
    full_name = f"{section}.{name}" if section else name
    key = full_name
    if section in dialect["sections"] and full_name not in dialect["rows"]:
        key = name
    row = settings.row(key)
    if "now" in row:
        key = row["now"]
        value = row.get("values", {}).get(word_of(value), value)
    first_value = settings.values.setdefault(key, value)
    if first_value != value:
        raise settings.refused(f"{key} is set twice, to different values")
    settings.spellings.setdefault(key, full_name)


def _phase_of(settings: _Settings) -> str:
    """Return `grpo` if any of the names is GRPO's alone, else `sft`."""
    for name in settings.values:
        phases = [*settings.row(name).get("default", ())]
        if phases == ["grpo"]:
            return "grpo"
    return "sft"


def _flat(data: dict[Any, Any], dialect: Row) -> Iterator[tuple[str, str, Any]]:
    """Yield (section, name, value) of every setting; a heading that is no section means nothing."""
    rows = dialect["rows"]
    sections = {name.partition(".")[0] for name in rows if "." in name}
    for heading, value in data.items():
        section = plain_name(heading)
        inner_values: dict[str, Any] = {}
        if isinstance(value, dict):
            inner_values = {plain_name(name): inner for name, inner in value.items()}
        if section in sections and isinstance(value, dict | None):
            for name, inner in inner_values.items():
                yield section, name, inner
        elif section not in rows and inner_values.keys() & rows.keys():
            for name, inner in inner_values.items():
                yield "", name, inner
        else:
            yield "", section, value


def _set_batch(settings: _Settings, nproc: int) -> int:
    """Set the batch sizes; return the optimizer steps of one rollout batch."""
    per_forward = settings.number("per_device_train_batch_size", 1, integer=True) * nproc
    accumulated = settings.number("gradient_accumulation_steps", 1, integer=True)
    per_update = per_forward * accumulated
    if settings.phase == "sft":
        settings.put({"sft.batch_size": per_update})
        return 1
    group_size = settings.number("num_generations", 2, integer=True)
    per_generation = per_forward * settings.number("steps_per_generation", 1, integer=True)
    if settings.get("generation_batch_size") is not None:
        per_generation = settings.number("generation_batch_size", 1, integer=True)
    # Sampling several times before one optimizer step is sampling once: the policy is the same.
    batch = max(per_generation, per_update)
    if batch % group_size or batch % per_update or batch % per_generation:
        groups = f"groups of {group_size} (num_generations)"
        raise settings.refused(
            f"{batch} completions for {nproc} process(es) cannot be cut into {groups} "
            f"and optimizer steps of {per_update}",
            "If the file was written for more processes, give --nproc; for Unsloth or TRL 0.14, "
            "multiply per_device_train_batch_size by num_generations.",
        )
    prompts = batch // group_size
    updates = batch // per_update
    settings.put({"grpo.group_size": group_size, "grpo.prompts_per_step": prompts})
    settings.put({"grpo.updates_per_batch": updates})
    step = f"{prompts} prompts x {group_size} = {batch} completions per step"
    note = f"For {nproc} process(es): {step}, cut into {updates} optimizer step(s)."
    settings.notes.append(note)
    iterations = settings.number("num_iterations", 1, integer=True)
    return int(updates * iterations)


def _set_trackers(settings: _Settings) -> None:
    """Set the trackers of `report_to`; those that Grouper lacks are left out."""
    shared_fields: dict[str, Any] = {}
    for their_name, our_name in _TRACKER_FIELDS.items():
        if settings.values.get(their_name):
            shared_fields[our_name] = settings.get(their_name)
    trackers = []
    for name in _listed(settings.get("report_to")):
        if name in TRACKERS:
            trackers.append(shared_fields | {"name": name})
        elif name != "none":
            reason = f"no tracker here: there are {', '.join(TRACKERS)}"
            settings.left_out[f"report_to: {name}"] = reason
    if trackers:
        settings.put({"tracking.trackers": trackers})
        settings.notes.append("Trackers stay offline unless their mode is online (--online).")


def _listed(value: Any) -> list[str]:
    """Return the entries of a list, or of a single value, as text."""
    if isinstance(value, list):
        return [str(entry) for entry in value]
    return [str(value)] if value else []


def _set_names(settings: _Settings, path: Path) -> None:
    """Set the name of the run, its folder and its place on the Hub."""
    output_dir = str(settings.get("output_dir") or "outputs")
    folder = Path(output_dir)
    if folder.name == "outputs":
        # This is the folder of all runs, not of one.
        folder = folder / path.stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.")
    if not name:
        name = "imported"
    label = settings.dialect["label"]
    settings.put({"name": name, "description": f"From {path.name}, a file for {label}"})
    settings.put({"output_dir": str(folder.parent)})
    if settings.get("push_to_hub"):
        settings.put({"push_to": settings.get("hub_model_id") or name})


def _convert_trl(settings: _Settings, path: Path, built_in_rewards: Container[str]) -> None:
    """Convert the parts that depend on more than one of TRL's settings."""
    train = settings.recipe["data"]["train"]
    # A source of ours knows which split is for training, where the file does not say.
    if train["source"] in ("hub", "file") or "dataset_train_split" in settings.values:
        train["split"] = settings.get("dataset_train_split")
    if settings.get("eval_strategy") in ("steps", "epoch"):
        validation = train | {"split": settings.get("dataset_test_split")}
        settings.put({"data.validation": validation})
    if path.suffix == ".py":
        note = "What a script computes is not read: compare model, data, LoRA and rewards."
        settings.notes.append(note)
    if settings.get("bf16") is False and not settings.get("fp16"):
        settings.put({"model.compute_dtype": settings.recipe["model"]["dtype"]})
    if settings.phase == "grpo":
        _set_rewards(settings, path.parent, built_in_rewards)
    if settings.get("loss_type") == "cispo":
        # TRL bounds the ratio itself, above only.
        clip_high = settings.number("epsilon_high", 1) - 1.0
        settings.put({"grpo.clip_low": 1.0, "grpo.clip_high": clip_high})


def _set_rewards(settings: _Settings, folder: Path, built_in_rewards: Container[str]) -> None:
    """Set the rewards of `reward_funcs`; paths are relative to the working directory."""
    rows = _reward_rows(settings, folder, built_in_rewards)
    notes = settings.notes
    if not rows:
        notes.append("No reward_funcs: the reward is correctness. TRL's are given in the script.")
    has_tags = any(row["name"] in _TAG_REWARDS for row in rows)
    if not has_tags:
        notes.append("Answers are read from \\boxed{} (prompt.format), as TRL's accuracy_reward.")
    settings.put({"rewards": rows or [{"name": "correctness"}]})
    settings.put({"prompt.format": "think" if has_tags else "boxed"})
    instruction = str(settings.get("system_prompt") or "")
    for tag, name in _FORMATS.items():
        if tag in instruction and "<answer>" in instruction:
            settings.put({"prompt.format": name})
            notes.append(f"The system prompt asks for {tag} and <answer>: prompt.format={name}.")


def _reward_rows(
    settings: _Settings, folder: Path, built_in_rewards: Container[str]
) -> list[dict[str, Any]]:
    """Return a recipe's row for each of `reward_funcs`; those without a counterpart are left out.

    Raises:
        ConfigError: the weights are not as many as the rewards.
    """
    functions = _listed(settings.get("reward_funcs"))
    names = [name.removeprefix("trl.rewards.") for name in functions]
    weights = None
    if names:
        weights = settings.get("reward_weights")
    weights = weights or [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(names):
        problem = f"reward_weights has not one weight for each of {len(names)} reward_funcs"
        raise settings.refused(problem)
    rows = []
    for name, weight in zip(names, weights, strict=True):
        our_name = name if name in built_in_rewards else _importable(name, folder)
        counterpart = settings.dialect["rewards"].get(name, {})
        row = {"name": our_name, **counterpart, "weight": weight}
        if row["name"] is None:
            reason = "no reward here (`grouper rewards` lists them)"
            settings.left_out[f"reward_funcs: {name}"] = reason
        else:
            rows.append(row)
    return rows


def _importable(name: str, folder: Path) -> str | None:
    """Return `path/to/file.py:name` if there is such a file, else `module:name`; None: neither."""
    separator = ":" if ":" in name else "."
    module, _, function = name.rpartition(separator)
    is_file_name = module.endswith(".py")
    if not module or ("/" in module and not is_file_name):
        return None
    file_name = module if is_file_name else f"{module.replace('.', '/')}.py"
    for base in (folder, Path()):
        file = base / file_name
        if file.is_file():
            return f"{os.path.relpath(file)}:{function}"
    return f"{module}:{function}"


def _convert_openmath_dapo(settings: _Settings) -> None:
    """Convert the settings of openmath-dapo's set-up that take arithmetic."""
    length = settings.number("model.max_seq_length", 1, integer=True)
    percentile = settings.number("data.max_length_percentile")
    if percentile <= 1:
        percentile = 100 * percentile
    train_share = settings.number("grpo_training.train_validation_split")
    validation_share = min(train_share, 1 - train_share)
    demonstration_length = length * settings.number("data.truncate_ratio")
    folder = Path(str(settings.get("grpo_training.output_dir")))
    if folder.name == "grpo":
        folder = folder.parent
    settings.put({"sft.max_tokens": int(demonstration_length)})
    settings.put({"prompt.max_percentile": percentile})
    settings.put({"data.validation_share": round(validation_share, 6)})
    settings.put({"output_dir": str(folder)})
    if template := settings.get("prompt.system_prompt_template"):
        # str: the schema refuses what is no text.
        settings.put({"prompt.system": _filled_in(settings, str(template))})
    dropped_rewards = set()
    for name, row in settings.dialect["rows"].items():
        if "drops" in row and settings.get(name) is False:
            dropped_rewards.add(row["drops"])
    rewards = [row for row in settings.recipe["rewards"] if row["name"] not in dropped_rewards]
    settings.put({"rewards": rewards})


def _filled_in(settings: _Settings, template: str) -> str:
    """Replace the names of tags in a system prompt by the tags."""
    tags = settings.recipe["prompt"]["tags"]
    for name in ("reasoning_start", "reasoning_end", "solution_start", "solution_end"):
        key = settings.row(f"prompt.{name}")["to"]
        tag = key.rpartition(".")[2]
        template = template.replace(f"{{{name}}}", str(tags[tag]))
    return template


def _comments(settings: _Settings, path: Path) -> str:
    """Write the comments above a recipe: its origin, notes and what was left out."""
    dialect = settings.dialect
    head = dialect["head"].format(file=path.name, phase=settings.phase.upper())
    lines = head.splitlines()
    if settings.notes:
        lines.append("")
        lines += [f"- {note}" for note in settings.notes]
    if settings.left_out:
        lines += ["", "Without a counterpart:"]
        lines += [f"  {name}: {reason}" for name, reason in settings.left_out.items()]
    comments = [f"# {line}".rstrip() for line in lines]
    return "\n".join(comments) + "\n"
