"""Turn the configuration of another trainer into a recipe of the same run.

A dialect is a file of `dialects/`: how such a file is recognised, the recipe that it is based on,
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

from grouper.config.aliases import Row, dialect_of, plain_name, word_of
from grouper.config.checks import validate_json
from grouper.config.loading import load_recipe, read_text, resolved_yaml
from grouper.config.overrides import as_json, parse_yaml, put
from grouper.config.schema import LARGEST, TRACKERS, Recipe
from grouper.config.scripts import read_script
from grouper.errors import ConfigError, nearest

# A data set's name -> the settings of its source.
SourceNamed = Callable[[str], dict[str, Any]]
# Similarity required of a name that is proposed: another trainer's own names are no typos.
_ALIKE = 0.8
# What switches off the settings that need it.
_OFF: tuple[Any, ...] = (None, False, "", "no", "none", [], ["none"])
# A tag of a system prompt -> the format whose tags these are.
_FORMATS = {"<reasoning>": "xml", "<think>": "think"}
_READABLE = "What can be read: TRL's YAML, JSON and Python, and files that docs/migrating.md lists."


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
    """Make a recipe from a file of another trainer, which is recognised by its names.

    Settings that the file leaves out get that trainer's defaults, so that the run is the same.

    Args:
        path: YAML or JSON; or Python, whose GRPOConfig or SFTConfig is read and never executed.
        source_named: what a data set's name stands for.
        rewards: the names of built-in rewards.
        nproc: processes the file was written for; its batch sizes are per process.

    Raises:
        ConfigError: it cannot be read, belongs to no known trainer, or cannot be trained.
    """
    path = Path(path).expanduser()
    data, left_out = _read(path)
    dialect = dialect_of(data)
    if dialect is None or {"name", "model", "data"} <= data.keys():  # the three of every recipe
        what = f"these names belong to no known trainer: {', '.join(map(str, [*data][:5]))}"
        raise ConfigError(what, where=str(path), fix=_READABLE)
    parts = _parts(data, dialect, path, left_out)
    last = parts[-1]
    for s in parts:
        s.updates = _batch(s, nproc)
        s.move_rows()
        _trackers(s)
    folder = Path(str(last.get("output_dir") or "outputs"))
    folder = folder / path.stem if folder.name == "outputs" else folder  # of all runs, not of one
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.") or "imported"
    last.put({"name": name, "description": f"From {path.name}, a file for {dialect['label']}"})
    last.put({"output_dir": str(folder.parent)})
    if last.get("push_to_hub"):
        last.put({"push_to": last.get("hub_model_id") or name})
    for rows in last.recipe["data"].values():
        if isinstance(rows, dict):
            rows.update(source_named(str(rows["source"])))
    if dialect["recipe"] is None:
        _of_trl(last, path, rewards)
    elif dialect["recipe"] == "openmath-dapo":
        _both_phases(last)
    for s in parts:
        s.account()
    recipe = validate_json(Recipe, as_json(last.recipe, (), where=str(path)), where=str(path))
    lines = dialect["head"].format(file=path.name, phase=last.phase.upper()).splitlines()
    lines += ["", *(f"- {note}" for note in last.notes)] if last.notes else []
    listed = [f"  {name}: {why}" for name, why in left_out.items()]
    lines += ["", "Without a counterpart:", *listed] if listed else []
    comments = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    text = f"{comments}\n{resolved_yaml(recipe, defaults=False)}"
    return ImportedRecipe(recipe=recipe, text=text, left_out=left_out)


def _read(path: Path) -> tuple[dict[Any, Any], dict[str, str]]:
    """What a file sets: its names, or a script's arguments; and why some could not be read.

    Raises:
        ConfigError: it cannot be read, or sets nothing; a script has not one configuration.
    """
    text = read_text(path)
    if path.suffix != ".py":
        # JSON is YAML, but for the tabs before a name.
        data = parse_yaml(text.expandtabs() if path.suffix == ".json" else text, str(path))
        if isinstance(data, dict) and data:
            return data, {}
        raise ConfigError("this file holds no named settings", where=str(path), fix=_READABLE)
    return read_script(text, str(path))


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
    given: dict[str, Any] = field(default_factory=dict)
    # Name -> as it is in the file.
    spelled: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    # Optimizer steps of one rollout batch, which is a step of ours.
    updates: int = 1

    def row(self, name: str) -> Row:
        return Row(self.dialect["rows"].get(name, {}))

    def default(self, name: str) -> Any:
        if self.dialect["recipe"] is None:
            return self.row(name).get("default", {}).get(self.phase)
        return self.dialect["defaults"].get(self.phase, {}).get(name)

    def get(self, name: str) -> Any:
        """The value in the file, else the trainer's default, else None."""
        self.used.add(name)
        value = self.given.get(name, self.default(name))
        same = self.row(name).get("same_as")
        return self.get(same) if same and value is None else value

    def number(self, name: str, least: int = 0, *, whole: bool = False) -> Any:
        """A number of `least` or more; if `whole`, an integer.

        Raises:
            ConfigError: it is not one.
        """
        value = self.get(name)
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not fits or not least <= value <= LARGEST:  # infinity and NaN are not, either
            wanted = f"a {'whole number' if whole else 'number'} of {least} or more"
            what = f"{self.spelled.get(name, name)} is {value!r}, not {wanted}"
            raise self.refused(what, self.row(name).get("fix", ""))
        return value

    def refused(self, what: str, fix: str = "") -> ConfigError:
        return ConfigError(what, where=self.where, fix=fix)

    def put(self, keys: dict[str, Any]) -> None:
        """Set dotted keys of the recipe; `{phase}` in one is the phase."""
        for key, value in keys.items():
            put(self.recipe, key.format(phase=self.phase).split("."), value)

    def leave_out(self, name: str, why: str) -> None:
        if name in self.given:
            self.left_out[self.spelled[name]] = why

    def why_unused(self, name: str) -> str:
        """Why a name means nothing in this file; empty if it does mean something."""
        row = self.row(name)
        if row.get("default") and self.phase not in row["default"]:
            return f"not a setting of {self.phase.upper()}Config"
        off = (why for other, why in row.get("needs", {}).items() if self.get(other) in _OFF)
        return next(off, "")

    def move_rows(self) -> None:
        """Set everything that has a key of its own."""
        for name, row in self.dialect["rows"].items():
            ours = self.dialect["recipe"] or not row.get("default") or row.get("unset") == "ours"
            said = name in self.given or not ours
            if row.keys() & {"to", "values"} and said and not self.why_unused(name):
                self._move(name, row, self.get(name))

    def _move(self, name: str, row: Row, value: Any) -> None:
        word, values, notes = word_of(value), row.get("values", {}), row.get("notes", {})
        if note := notes.get(word, "" if word in values else notes.get("*")):
            self.notes.append(note)
        key = row.get("to", "").format(phase=self.phase)
        if word in values or "*" in values:
            value = values.get(word, values.get("*"))
            self.put(value if isinstance(value, dict) else {key: value})
        elif values and "otherwise" not in row:
            self.leave_out(name, f"{value!r} has no counterpart, so that {key} keeps its default")
        elif row.get("unit") != "updates":
            self.put({key: value, **row.get("also", {})})
        elif not 0 < self.number(name) < 1:
            self.put({key: math.ceil(value / self.updates), **row.get("also", {})})
        elif "share" in row:
            self.put({key: None, row["share"]: value})
        else:
            self.leave_out(name, "a share of the steps has no counterpart: give their number")

    def account(self) -> None:
        """List the settings that were not used, with the reason."""
        rows = self.dialect["rows"]
        for name, value in self.given.items():
            row, why = self.row(name), self.why_unused(name)
            if name not in rows:
                near = nearest(name, rows, _ALIKE)
                meant = f" (Did you mean {near!r}?)" if near else ""
                why = f"not a name in {self.dialect['names']}{meant}"
            elif not why and word_of(value) not in row.get("values", {}):
                why = row.get("why", "")
            if not why and "computed" in row and name not in self.used:
                keys = row["computed"].format(phase=self.phase)
                why = f"not read from such a file: set {keys} in the recipe"
            if why and (name not in rows or value != self.default(name)):
                self.leave_out(name, why)


def _parts(data: Row, dialect: Row, path: Path, left_out: dict[str, str]) -> list[_Settings]:
    """The settings of the file by phase.

    Raises:
        ConfigError: a name is set twice, to different values.
    """
    recipe: dict[str, Any] = {}
    if dialect["recipe"] is not None:
        recipe = load_recipe(dialect["recipe"]).model_dump(mode="json", exclude_unset=True)
    notes: list[str] = []
    shared = (dialect, str(path), recipe, notes, left_out)
    parts = {phase: _Settings(phase, *shared) for phase in dialect["sections"].values()}
    for section, name, value in _flat(data, dialect):
        s = parts[dialect["sections"].get(section, [*parts][-1])]
        full = f"{section}.{name}" if section else name
        key = name if section in dialect["sections"] and full not in dialect["rows"] else full
        row = s.row(key)
        meant = row.get("values", {}).get(word_of(value), value) if "now" in row else value
        key = row.get("now", key)
        if s.given.setdefault(key, meant) != meant:
            raise s.refused(f"{key} is set twice, to different values")
        s.spelled.setdefault(key, full)
    for s in parts.values():
        if not s.phase:  # GRPO if any of the names is GRPO's alone
            grpo = any([*s.row(name).get("default", ())] == ["grpo"] for name in s.given)
            s.phase = "grpo" if grpo else "sft"
        s.put(copy.deepcopy(dialect["start"].get(s.phase, {})))
    return list(parts.values())


def _flat(data: dict[Any, Any], dialect: Row) -> Iterator[tuple[str, str, Any]]:
    """(section, name, value) of every setting; a heading that is no section means nothing."""
    known = dialect["rows"]
    sections = {name.partition(".")[0] for name in known if "." in name}
    for name, value in data.items():
        section = plain_name(name)
        inside = {plain_name(n): v for n, v in value.items()} if isinstance(value, dict) else {}
        if section in sections and isinstance(value, dict | None):
            yield from ((section, n, v) for n, v in inside.items())
        elif section not in known and inside.keys() & known.keys():
            yield from (("", n, v) for n, v in inside.items())
        else:
            yield "", section, value


def _batch(s: _Settings, nproc: int) -> int:
    """Set the batch sizes; return the optimizer steps of one rollout batch."""
    device = s.number("per_device_train_batch_size", 1, whole=True) * nproc
    a_step = device * s.number("gradient_accumulation_steps", 1, whole=True)
    if s.phase == "sft":
        s.put({"sft.batch_size": a_step})
        return 1
    group = s.number("num_generations", 2, whole=True)
    sampled = device * s.number("steps_per_generation", 1, whole=True)
    if s.get("generation_batch_size") is not None:
        sampled = s.number("generation_batch_size", 1, whole=True)
    # Sampling several times before one optimizer step is sampling once: the policy is the same.
    batch = max(sampled, a_step)
    if batch % group or batch % a_step or batch % sampled:
        raise s.refused(
            f"{batch} completions for {nproc} process(es) cannot be cut into groups of {group} "
            f"(num_generations) and optimizer steps of {a_step}",
            "If the file was written for more processes, give --nproc; for Unsloth or TRL 0.14, "
            "multiply per_device_train_batch_size by num_generations.",
        )
    prompts, updates = batch // group, batch // a_step
    s.put({"grpo.group_size": group, "grpo.prompts_per_step": prompts})
    s.put({"grpo.updates_per_batch": updates})
    step = f"{prompts} prompts x {group} = {batch} completions per step"
    s.notes.append(f"For {nproc} process(es): {step}, cut into {updates} optimizer step(s).")
    return int(updates * s.number("num_iterations", 1, whole=True))


def _trackers(s: _Settings) -> None:
    asked = _listed(s.get("report_to"))
    why = f"no tracker here: there are {', '.join(TRACKERS)}"
    s.left_out |= {f"report_to: {n}": why for n in asked if n not in (*TRACKERS, "none")}
    fields = {"project": "project", "run_name": "run_name", "wandb_entity": "entity"}
    about = {ours: s.get(name) for name, ours in fields.items() if s.given.get(name)}
    if rows := [about | {"name": name} for name in asked if name in TRACKERS]:
        s.put({"tracking.trackers": rows})
        s.notes.append("Trackers stay offline unless their mode is online (--online).")


def _listed(value: Any) -> list[str]:
    return [str(v) for v in (value if isinstance(value, list) else [value] if value else [])]


def _of_trl(s: _Settings, path: Path, rewards: Container[str]) -> None:
    """What takes more than one of TRL's settings."""
    train = s.recipe["data"]["train"]
    # A source of ours knows which split is for training, where the file does not say.
    if train["source"] in ("hub", "file") or "dataset_train_split" in s.given:
        train["split"] = s.get("dataset_train_split")
    if s.get("eval_strategy") in ("steps", "epoch"):
        s.put({"data.validation": train | {"split": s.get("dataset_test_split")}})
    if path.suffix == ".py":
        s.notes.append("What a script computes is not read: compare model, data, LoRA and rewards.")
    if s.get("bf16") is False or s.get("fp16"):
        s.put({"model.compute_dtype": s.recipe["model"]["dtype"]})
    if s.phase == "grpo":
        _rewards(s, path.parent, rewards)
    if s.get("loss_type") == "cispo":  # TRL bounds the ratio itself, above only
        s.put({"grpo.clip_low": 1.0, "grpo.clip_high": s.number("epsilon_high", 1) - 1.0})


def _rewards(s: _Settings, folder: Path, known: Container[str]) -> None:
    """Set the rewards of `reward_funcs`; paths are relative to the working directory."""
    asked = [name.removeprefix("trl.rewards.") for name in _listed(s.get("reward_funcs"))]
    weights = (asked and s.get("reward_weights")) or [1.0] * len(asked)
    if not isinstance(weights, list) or len(weights) != len(asked):
        raise s.refused(f"reward_weights has not one weight for each of {len(asked)} reward_funcs")
    rows = []
    for name, weight in zip(asked, weights, strict=True):
        ours = name if name in known else _importable(name, folder)
        row = {"name": ours, **s.dialect["rewards"].get(name, {}), "weight": weight}
        if row["name"] is None:
            s.left_out[f"reward_funcs: {name}"] = "no reward here (`grouper rewards` lists them)"
        else:
            rows.append(row)
    if not rows:
        s.notes.append("No reward_funcs: the reward is correctness. TRL's are given in the script.")
    tagged = {row["name"] for row in rows} & {"format", "soft_format", "tag_count"}
    if not tagged:
        s.notes.append("Answers are read from \\boxed{} (prompt.format), as TRL's accuracy_reward.")
    s.put({"rewards": rows or [{"name": "correctness"}]})
    s.put({"prompt.format": "think" if tagged else "boxed"})
    instruction = str(s.get("system_prompt") or "")
    for tag, name in _FORMATS.items():
        if tag in instruction and "<answer>" in instruction:
            s.put({"prompt.format": name})
            s.notes.append(f"The system prompt asks for {tag} and <answer>: prompt.format={name}.")


def _importable(name: str, folder: Path) -> str | None:
    """`path/to/file.py:name` if there is such a file, else `module:name`; None: neither."""
    place, _, function = name.rpartition(":" if ":" in name else ".")
    if not place or ("/" in place and not place.endswith(".py")):
        return None
    file = place if place.endswith(".py") else f"{place.replace('.', '/')}.py"
    found = [base / file for base in (folder, Path()) if (base / file).is_file()]
    return f"{os.path.relpath(found[0]) if found else place}:{function}"


def _both_phases(s: _Settings) -> None:
    """Settings that take arithmetic in the YAML of openmath-dapo's set-up."""
    length = s.number("model.max_seq_length", 1, whole=True)
    percentile = s.number("data.max_length_percentile")
    share = s.number("grpo_training.train_validation_split")
    folder = Path(str(s.get("grpo_training.output_dir")))
    s.put({"sft.max_tokens": int(length * s.number("data.truncate_ratio"))})
    s.put({"prompt.max_percentile": percentile if percentile > 1 else 100 * percentile})
    s.put({"data.validation_share": round(min(share, 1 - share), 6)})
    s.put({"output_dir": str(folder.parent if folder.name == "grpo" else folder)})
    if template := s.get("prompt.system_prompt_template"):
        for name in ("reasoning_start", "reasoning_end", "solution_start", "solution_end"):
            tag = s.row(f"prompt.{name}")["to"].rpartition(".")[2]
            # str: the schema refuses what is no text.
            template = str(template).replace(f"{{{name}}}", str(s.recipe["prompt"]["tags"][tag]))
        s.put({"prompt.system": template})
    rows = s.dialect["rows"].items()
    off = {row["drops"] for name, row in rows if "drops" in row and s.get(name) is False}
    s.put({"rewards": [reward for reward in s.recipe["rewards"] if reward["name"] not in off]})
