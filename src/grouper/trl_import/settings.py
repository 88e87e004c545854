"""A TRL file as it was given, TRL's defaults where it says nothing, and the recipe it becomes."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from grouper.config.overrides import parse_yaml
from grouper.errors import ConfigError, did_you_mean

Phase = Literal["sft", "grpo"]


SHORT = 6
"""Letters of a name for which no other one is proposed."""


@cache
def _tables() -> dict[str, Any]:
    file = importlib.resources.files("grouper.config") / "aliases.json"
    tables: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return tables


def names() -> dict[str, dict[str, Any]]:
    """Every field of TRL 1.16's classes -> where it goes, or why nowhere, and its defaults.

    A row has one of `to` (our key, with `values` where they have other names), `computed` (what
    it takes part in) and `why` (there is no counterpart); `default` is by phase.
    """
    table: dict[str, dict[str, Any]] = _tables()["names"]
    return table


def others() -> dict[str, dict[str, Any]]:
    """Names of older versions and of well-known training scripts; `now` is the name in TRL 1.16."""
    table: dict[str, dict[str, Any]] = _tables()["others"]
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class TRLFile:
    """What a file says."""

    settings: dict[str, Any]
    """By their names in TRL 1.16 where they have one."""
    groups: tuple[str, ...]
    """Headings in the file whose settings were taken out of them."""


def read_file(path: Path) -> TRLFile:
    """Read a YAML or JSON file; settings may stand under headings of the file's own.

    Raises:
        ConfigError: it cannot be read, says something twice, or holds no name of TRL.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error})", where=str(path)) from error
    data = _parsed(text, path)
    if not isinstance(data, dict) or not data:
        raise ConfigError(
            "this holds no settings with names",
            where=str(path),
            fix="Give the YAML or JSON file of a GRPOConfig or SFTConfig, one `name: value` each.",
        )
    rows, groups = _flat(data)
    settings: dict[str, Any] = {}
    for name, value in rows:
        meant = _as_meant(name, value)
        if settings.setdefault(name, meant) != meant:
            raise ConfigError(f"{name} is set twice, to different values", where=str(path))
    if not any(map(_is_known, settings)):
        raise ConfigError(
            f"none of its names is TRL's: {', '.join(list(settings)[:5])}",
            where=str(path),
            fix="Files of other trainers are not read: docs/migrating.md has the names here.",
        )
    return TRLFile(settings=settings, groups=groups)


def _flat(data: dict[Any, Any]) -> tuple[list[tuple[str, Any]], tuple[str, ...]]:
    """(name, value) of every setting, and the headings: unknown names over known ones."""
    rows: list[tuple[str, Any]] = []
    groups = []
    for name, value in data.items():
        now = _name_now(str(name))
        inside = {_name_now(str(n)): v for n, v in value.items()} if isinstance(value, dict) else {}
        if not _is_known(now) and any(map(_is_known, inside)):
            groups.append(str(name))
            rows += inside.items()
        else:
            rows.append((now, value))
    return rows, tuple(groups)


def _is_known(name: str) -> bool:
    return name in names() or name in others()


def _as_meant(name: str, value: Any) -> Any:
    """A number in quotes, where TRL has one; and a strategy `no`, which YAML reads as false."""
    if value is False and name.endswith("_strategy"):
        return "no"
    defaults = names().get(name, {}).get("default", {}).values()
    if isinstance(value, str) and any(type(d) in (int, float) for d in defaults):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def _parsed(text: str, path: Path) -> Any:
    if path.suffix != ".json":
        return parse_yaml(text, str(path))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"this is not valid JSON: {error.msg}",
            where=f"{path}, line {error.lineno}",
            fix="JSON has no comments, and no comma before a closing bracket.",
        ) from error


def _name_now(name: str) -> str:
    name = name.removeprefix("--").replace("-", "_")
    row = others().get(name, {})
    return str(row.get("now", name))


def phase_of(given: dict[str, Any]) -> Phase | None:
    """What the names in the file are settings of, or None where they would do for both."""
    only = {
        phase
        for name in given
        if len(default := names().get(name, {}).get("default", {})) == 1
        for phase in default
    }
    return "grpo" if "grpo" in only else "sft" if "sft" in only else None


class Settings:
    """What the file says, and what becomes of it.

    Args:
        given: the file's settings.
        phase: whose settings they are.
        where: the file, for messages.
    """

    def __init__(self, given: dict[str, Any], phase: Phase, where: str) -> None:
        self.given = given
        self.phase = phase
        self.where = where
        self.recipe: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        """Name -> why it has no counterpart."""
        self.notes: list[str] = []

    def get(self, name: str) -> Any:
        """What the file says, else TRL's default, else None."""
        if name in self.given:
            return self.given[name]
        return names().get(name, {}).get("default", {}).get(self.phase)

    def whole(self, name: str) -> int:
        """A number of something.

        Raises:
            ConfigError: it is none, or below 1.
        """
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refused(f"{name} is {value!r}, not a whole number of 1 or more")
        return value

    def number(self, name: str) -> float:
        """Any number.

        Raises:
            ConfigError: it is none.
        """
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refused(f"{name} is {value!r}, not a number")
        return value

    def refused(self, what: str, fix: str = "") -> ConfigError:
        return ConfigError(what, where=self.where, fix=fix)

    def put(self, key: str, value: Any) -> None:
        """Set a dotted key of the recipe; `{phase}` in it is the phase."""
        *path, last = key.format(phase=self.phase).split(".")
        node = self.recipe
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value

    def leave_out(self, name: str, why: str) -> None:
        if name in self.given:
            self.left_out[name] = why

    def move_rows(self) -> None:
        """Everything that has a key of its own in the recipe, and the list of what has none."""
        for name, row in {**names(), **others()}.items():
            if "to" in row:
                self._move(name, row)
            elif "why" in row and self.get(name) != self._default(row):
                self.leave_out(name, row["why"])
        for name in self.given:
            self._check_name(name)

    def _default(self, row: dict[str, Any]) -> Any:
        return row.get("default", {}).get(self.phase)

    def _move(self, name: str, row: dict[str, Any]) -> None:
        fits = self.phase in row.get("default", {self.phase: None})
        if not fits or (name not in self.given and row.get("unset", "theirs") == "ours"):
            return
        value, values = self.get(name), row.get("values")
        if name not in self.given and value is None:
            return
        word = str(value).lower() if isinstance(value, bool) or value is None else str(value)
        if values is not None and word in values:
            self.put(row["to"], values[word])
        elif values is None or row.get("otherwise") == "same":
            self.put(row["to"], value)
        elif value is not None:
            key = row["to"].format(phase=self.phase)
            known = ", ".join(sorted(set(map(str, values))))
            self.leave_out(name, f"{value!r} has no counterpart, {key} keeps its default ({known})")

    def _check_name(self, name: str) -> None:
        known = {**names(), **others()}
        if name not in known:
            self.leave_out(name, f"no name of TRL 1.16 {_nearest(name, known)}".strip())
        elif self.phase not in known[name].get("default", {self.phase: None}):
            other = "SFTConfig" if self.phase == "grpo" else "GRPOConfig"
            self.leave_out(name, f"a setting of {other}, which this file is not")


def _nearest(name: str, known: dict[str, Any]) -> str:
    """A name that a typo may have made of it; a short name is near to too many."""
    near = did_you_mean(name, known)
    return f"({near})" if near.startswith("Did") and len(name) > SHORT else ""
