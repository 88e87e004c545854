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

from grouper.config.aliases import Row, alias, aliases, of_set_ups, tables, word_of
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
    # Key -> what is wrong, the value that it got, and what to do.
    found: dict[str, tuple[str, str, str]] = {}
    for detail in details:
        location = _keys(detail["loc"])
        value = detail.get("input")
        if detail["type"] == "extra_forbidden":
            location = (*_keys(detail["loc"][:-1]), detail["loc"][-1])  # the last may be any word
            noun = "section" if isinstance(value, dict) else "setting"
            what = f"there is no {noun} {location[-1]!r} here"
            for inner, v in _opened(location, value, fields):
                found[_dotted((*place, *inner))] = what, "", advice(inner, v, fields)
            continue
        what, got = _explain(detail["type"], detail["msg"], value)
        key = _dotted((*place, *location))
        if key in found and what != found[key][0]:  # of another member of a union
            what = f"{found[key][0]}, or {what.removeprefix('should be ')}"
        fix = ""
        if detail["type"] == "model_type":
            fix = f"`grouper recipes fields {key}` lists its settings."
        found[key] = what, got, fix
    raise_all(
        [
            ConfigError(what + got, where=f"{where}: {key}" if key else where, fix=fix)
            for key, (what, got, fix) in found.items()
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
        section = _section_in(field.annotation)
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
        row = theirs.get(f"{section}.{name}") or alias(name) or theirs.get(name, {})
        if "now" in row:
            return meant(row["now"], fields, section if row["now"] != name else "")
        keys = filter(None, str(row.get("to") or row.get("computed") or "").split(", "))
        found = [key.format(phase=phase) for key in keys for phase in ("grpo", "sft")]
    words = re.split(r"[._]", section)
    inside = [key for key in found if key.partition(".")[0] in words]
    return row, sorted(dict.fromkeys(inside or found), key=lambda key: key.count("."))


def _explain(kind: str, message: str, value: Any) -> tuple[str, str]:
    """What is wrong, and the value in brackets where that says more."""
    if kind == "value_error":
        return message.removeprefix("Value error, "), ""
    kinds = {dict: "a section", list: "a list", type(None): "nothing"}
    got = f" (got {kinds.get(type(value)) or repr(value)})"
    return plain(message), "" if kind == "missing" else got


def plain(message: str) -> str:
    """A message of pydantic's in the words of a recipe.

    >>> plain("Input should be a valid array"), plain("Field required")
    ('should be a list', 'this is required')
    """
    for theirs, ours in tables()["messages"].items():
        message = message.replace(theirs, ours)
    return message.strip()


def _keys(place: Location) -> Location:
    # pydantic adds the union member's name to the location: 'literal[...]', 'constrained-int'.
    tags = r"\[|^(constrained-.*|bool|int|float|str)$"
    return tuple(part for part in place if not re.search(tags, str(part)))


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


# --- what to write instead -----------------------------------------------------------------------


def _opened(location: Location, value: Any, fields: Fields) -> Iterator[tuple[Location, Any]]:
    """Every setting in an unknown section, each with its own location and value."""
    name = str(location[-1])
    row, keys = meant(name, fields)
    # What is about the section itself is said once.
    kinds = {typing.get_origin(fields[key].annotation) for key in keys if key in fields}
    whole = "why" in row or dict in kinds
    if isinstance(value, dict) and value and not whole:
        for name, inner in value.items():
            yield from _opened((*location, name), inner, fields)
    else:
        yield location, value


def advice(location: Location, value: Any, fields: Fields) -> str:
    """What to write instead of an unknown key."""
    name, above = str(location[-1]), _dotted(location[:-1])
    section = re.sub(r"\.\d+", "[]", above)
    start = f"{section}." if section else ""
    own = {re.split(r"[.\[]", key[len(start) :])[0] for key in fields if key.startswith(start)}
    names = {key.rpartition(".")[2] for key in fields}
    near = nearest(name, own), nearest(name, {*names, *aliases()}, _ALIKE)
    for word in filter(None, (name, *near)):
        row, keys = meant(word, fields, section)
        keys = [key for key in keys if word not in own or key == f"{start}{word}"]
        if row or keys or word in own:
            break
    if "why" in row:
        return f"{word} has no counterpart: {row['why']}."
    if "reward" in row:
        params = f"{{{keys[0].rpartition('.')[2]}: {_equals(value)[1:]}}}"
        return f"It is a parameter: {{name: {row['reward']}, params: {params}}} among the rewards."
    if keys:
        entry = next(iter(re.findall(r"\.\d+", above)), ".0")
        text = _translated(value, row)
        places = [key.replace("[]", entry) + text for key in keys[:_MOST_PLACES]]
        choice = " or ".join(places)
        told = f"Write {choice}." if text else f"See {' and '.join(places)}."
        return told if word == name or not text else f"Did you mean {choice}?"
    if 0 < len(own) <= _FEW_NAMES or word in own:
        return did_you_mean(name, own)
    return "`grouper recipes fields` lists all settings; add words to search names and meanings."


def _translated(value: Any, row: Row) -> str:
    """`=value` as a setting takes it; empty if another trainer's value has no counterpart."""
    if "values" in row:
        # A mapping sets several keys, or none.
        value = row["values"].get(word_of(value), value if row.get("otherwise") == "same" else {})
        if isinstance(value, dict):
            return ""
    elif "computed" in row and not row.get("same"):
        return ""
    return _equals(value)


def _equals(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"={text}" if len(text) <= _LONGEST_VALUE and text.isprintable() else "=..."


def _dotted(location: Iterable[int | str]) -> str:
    return ".".join(map(str, location))
