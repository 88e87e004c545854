"""Turn pydantic's errors into ours: the key, what is wrong, and what to write instead.

An unknown key is looked up among settings of older versions, then among settings of that name in
other sections, then among the names of other trainers (`aliases`), then among similar names.
"""

from __future__ import annotations

import copy
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from grouper.config.aliases import (
    Row,
    alias,
    aliases,
    keys_of,
    of_set_ups,
    tables,
    word_of,
)
from grouper.errors import ConfigError, did_you_mean, nearest, raise_all

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]
Fields = Mapping[str, FieldInfo]

# Settings that one hint names, and characters of a value that it repeats.
_MOST_PLACES = 4
_LONGEST_VALUE = 60
# Sections with at most so many names are listed if there is no other hint.
_FEW_NAMES = 20
# Similarity required of a name in another section; in its own it is the usual 0.6.
_ALIKE = 0.85


def validate_json(model: type[Model], text: str, *, where: str, place: Sequence[str] = ()) -> Model:
    """`text` as a `model`.

    Args:
        model: the pydantic class to build.
        text: a JSON object.
        where: the file or recipe named in errors.
        place: keys that lead to this object in that file, put before its own keys.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False)
    fields = dict(settings(model))
    complaints: dict[str, list[tuple[str, str]]] = {}
    for detail in details:
        location = tuple(part for part in detail["loc"] if not _is_union_tag(part))
        value = detail.get("input")
        if detail["type"] == "extra_forbidden":
            noun = "section" if isinstance(value, dict) else "setting"
            what = f"there is no {noun} {location[-1]!r} here"
            opened = _opened(location, value, fields)
            rows = [(inner, (what, advice(inner, v, fields))) for inner, v in opened]
        else:
            what, fix = _explain(detail["type"], detail["msg"], value)
            fix = _present(f"{_dotted(location)}{_equals(value)}", value) or fix
            rows = [(location, (what, fix))]
        for inner, complaint in rows:
            complaints.setdefault(_dotted((*place, *inner)), []).append(complaint)
    raise_all(
        [
            ConfigError(what, where=f"{where}: {key}" if key else where, fix=fix)
            for key, of_key in complaints.items()
            for what, fix in _as_one(of_key)
        ]
    )
    raise AssertionError("a ValidationError has at least one problem")


def settings(
    model: type[BaseModel], prefix: str = "", usual: BaseModel | None = None
) -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every setting, sections opened; `rewards[].weight` is of each entry.

    Args:
        model: the class of a section.
        prefix: the key of that section, with a dot after it.
        usual: the section where a recipe leaves it out, whose values are the defaults.
    """
    for name, field in model.model_fields.items():
        default = field.default if usual is None else getattr(usual, name)
        section = next(_models_in(field.annotation), None)
        if section is not None:
            entries = "[]" if typing.get_origin(field.annotation) is tuple else ""
            inner = default if isinstance(default, section) else None
            yield from settings(section, f"{prefix}{name}{entries}.", inner)
        else:
            shown = copy.copy(field)
            shown.default = default
            yield f"{prefix}{name}", shown


def meant(name: str, fields: Fields, section: str = "") -> tuple[Row, list[str]]:
    """The settings that a name stands for, as ours or else as another trainer's.

    Args:
        name: without its section.
        fields: every setting there is, by dotted key.
        section: where the name was written; of several settings, those in a section that it names
            are taken (`sampling` of `vllm_sampling`).

    Returns:
        The row of the table of aliases (empty for a name of ours), and the keys, short ones first.
    """
    row: Row = {}
    found = [key for key in fields if key.rpartition(".")[2] == name]
    if not found:
        theirs = of_set_ups()
        _, row = alias(name) or (name, theirs.get(name, {}))
        row = theirs.get(f"{section}.{name}", row)
        if "now" in row:
            return meant(row["now"], fields, section)
        found = [key for phase in ("grpo", "sft") for key in keys_of(row, phase)]
    words = re.split(r"[._]", section)
    inside = [key for key in found if key.partition(".")[0] in words]
    return row, sorted(dict.fromkeys(inside or found), key=lambda key: key.count("."))


def _as_one(complaints: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Merge the errors that members of a union report for the same value.

    >>> _as_one([("should be 1 or more (got 0)", ""), ("should be 'all' (got 0)", "")])
    [("should be 1 or more, or 'all' (got 0)", '')]
    """
    cut = [(*what.rpartition(" (got "), fix) for what, fix in complaints]
    wishes = [what.removeprefix("should be ") for what, *_ in cut]
    same = len({got for _, _, got, _ in cut}) == 1
    if not same or wishes == [what for what, *_ in cut]:
        return complaints
    return [(f"should be {', or '.join(dict.fromkeys(wishes))} (got {cut[0][2]}", cut[0][3])]


def _explain(kind: str, message: str, value: Any) -> tuple[str, str]:
    if kind == "missing":
        return "this setting is required", "Add it to the recipe."
    if kind == "value_error":
        return message.removeprefix("Value error, "), ""
    kinds = {dict: "a section", list: "a list", type(None): "nothing"}
    return f"{plain(message)} (got {kinds.get(type(value)) or repr(value)})", ""


def plain(message: str) -> str:
    """A message of pydantic's in the words of a recipe.

    >>> plain("Input should be a valid array"), plain("Field required")
    ('should be a list', 'Field required')
    """
    for theirs, ours in tables()["messages"].items():
        message = message.replace(theirs, ours)
    return message.strip()


def _is_union_tag(part: int | str) -> bool:
    # pydantic adds the union member's name to the location: 'literal[...]', 'constrained-int'.
    part = str(part)  # a number is a place in a list
    return "[" in part or part.startswith("constrained-") or part in ("bool", "int", "float", "str")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


# --- what to write instead -----------------------------------------------------------------------


def _opened(location: Location, value: Any, fields: Fields) -> Iterator[tuple[Location, Any]]:
    """Every setting in an unknown section, each with its own location and value."""
    name = str(location[-1])
    row, keys = meant(name, fields)
    # What is about the section itself is said once.
    kinds = {typing.get_origin(fields[key].annotation) for key in keys if key in fields}
    whole = "why" in row or dict in kinds
    if isinstance(value, dict) and value and not whole and name not in tables()["former"]:
        for name, inner in value.items():
            yield from _opened((*location, name), inner, fields)
    else:
        yield location, value


def advice(location: Location, value: Any, fields: Fields) -> str:
    """What to write instead of an unknown key."""
    name, above = str(location[-1]), _dotted(location[:-1])
    if sentence := _present(_dotted(location), value) or _present(name, value):
        return sentence
    section = re.sub(r"\.\d+", "[]", above)
    start = f"{section}." if section else ""
    own = {re.split(r"[.\[]", key[len(start) :])[0] for key in fields if key.startswith(start)}
    word = name
    row, keys = meant(name, fields, section)
    if not row and not keys:
        word = nearest(name, own) or name
        if f"{start}{word}" in fields:
            keys = [f"{start}{word}"]
        elif word not in own:
            names = {key.rpartition(".")[2] for key in fields}
            word = nearest(name, {*names, *aliases()}, _ALIKE) or name
            row, keys = meant(word, fields, section)
    if "why" in row:
        return f"{word} has no counterpart: {row['why']}."
    if "reward" in row:
        params = f"{{{keys[0].rpartition('.')[2]}: {_equals(value)[1:]}}}"
        return f"It is a parameter: {{name: {row['reward']}, params: {params}}} among the rewards."
    if keys:
        entry = next(iter(re.findall(r"\.\d+", above)), ".0")
        text = _translated(value, row)
        texts = [key.replace("[]", entry) + text for key in keys[:_MOST_PLACES]]
        return _sentence(texts, guessed=word != name)
    if 0 < len(own) <= _FEW_NAMES or word in own:
        return did_you_mean(name, own)
    return "`grouper recipes fields` lists all settings; add words to search names and meanings."


def _present(old: str, value: Any) -> str:
    """What to write instead of a key, or `key=value`, of an older version; empty for others."""
    new: str = tables()["former"].get(old, "")
    if not new or " " in new:
        return new
    return f"It has another name now: write {new if '=' in new else new + _equals(value)}."


def _translated(value: Any, row: Row) -> str:
    """`=value` as a setting takes it; empty if another trainer's value has no counterpart."""
    if "values" in row:
        word = word_of(value)
        if word not in row["values"] and row.get("otherwise") != "same":
            return ""
        value = row["values"].get(word, value)
    elif "computed" in row and not row.get("same"):
        return ""
    return _equals(value)


def _equals(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"={text}" if len(text) <= _LONGEST_VALUE and text.isprintable() else "=..."


def _sentence(texts: Sequence[str], *, guessed: bool) -> str:
    if not any("=" in text for text in texts):
        return f"See {' and '.join(texts)}."
    *others, last = texts
    choice = f"{', '.join(others)} or {last}" if others else last
    return f"Did you mean {choice}?" if guessed else f"Write {choice}."


def _dotted(location: Iterable[int | str]) -> str:
    return ".".join(map(str, location))
