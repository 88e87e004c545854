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
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

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


@dataclass(slots=True)
class _Problem:
    """A problem with one key of a recipe."""

    text: str
    # The value of the key, in brackets; empty if that says nothing more.
    value: str = ""
    fix: str = ""


def validate_json(model: type[Model], text: str, *, where: str, place: Sequence[str] = ()) -> Model:
    """Build a `model` from JSON.

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
    problems: dict[str, _Problem] = {}
    for detail in details:
        if detail["type"] == "extra_forbidden":
            problems |= _unknown_keys(detail, place, fields)
        else:
            _add_wrong_value(problems, detail, place)
    errors = []
    for key, problem in problems.items():
        full_place = f"{where}: {key}" if key else where
        message = problem.text + problem.value
        errors.append(ConfigError(message, where=full_place, fix=problem.fix))
    raise_all(errors)
    raise AssertionError("a ValidationError has at least one problem")


def _unknown_keys(
    detail: ErrorDetails, place: Sequence[str], fields: Fields
) -> dict[str, _Problem]:
    """Return the problem of an unknown setting, or of every setting in an unknown section."""
    *sections, name = detail["loc"]
    # The last key may be any word, also one that looks like pydantic's tag of a union.
    location = (*_keys(tuple(sections)), name)
    value = detail.get("input")
    noun = "section" if isinstance(value, dict) else "setting"
    text = f"there is no {noun} {name!r} here"
    problems = {}
    for inner_location, inner_value in _opened(location, value, fields):
        key = _dotted((*place, *inner_location))
        fix = advice(inner_location, inner_value, fields)
        problems[key] = _Problem(text, fix=fix)
    return problems


def _add_wrong_value(
    problems: dict[str, _Problem], detail: ErrorDetails, place: Sequence[str]
) -> None:
    """Add the problem of a value; the members of a union share one."""
    location = _keys(detail["loc"])
    text, value = _explain(detail["type"], detail["msg"], detail.get("input"))
    key = _dotted((*place, *location))
    if key in problems and text != problems[key].text:
        alternative = text.removeprefix("should be ")
        text = f"{problems[key].text}, or {alternative}"
    fix = ""
    if detail["type"] == "model_type":
        fix = f"`grouper recipes fields {key}` lists its settings."
    problems[key] = _Problem(text, value, fix)


def settings(
    model: type[BaseModel], prefix: str = "", usual: BaseModel | None = None
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) of every setting; `rewards[].weight` is that of each entry.

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
            field_with_default = copy.copy(field)
            field_with_default.default = default
            yield f"{prefix}{name}", field_with_default


def meant(name: str, fields: Fields, section: str = "") -> tuple[Row, list[str]]:
    """Find the settings that a name stands for, as ours or else as another trainer's.

    Args:
        name: without its section.
        fields: every setting there is, by dotted key.
        section: where the name was written; of several settings, those in a section that it names
            are taken (`sampling` of `vllm_sampling`).

    Returns:
        The row of the table of aliases (empty for a name of ours), and the keys, short ones first.
    """
    row: Row = {}
    keys = [key for key in fields if key.rpartition(".")[2] == name]
    if not keys:
        file_rows = of_set_ups()
        row = file_rows.get(f"{section}.{name}") or alias(name) or file_rows.get(name, {})
        if "now" in row:
            present_name = row["now"]
            return meant(present_name, fields, section if present_name != name else "")
        keys = _our_keys(row)
    section_words = re.split(r"[._]", section)
    keys_of_section = [key for key in keys if key.partition(".")[0] in section_words]
    # dict: each key once, in order.
    distinct_keys = dict.fromkeys(keys_of_section or keys)
    return row, sorted(distinct_keys, key=lambda key: key.count("."))


def _our_keys(row: Row) -> list[str]:
    """Return the keys that a row of another trainer's name stands for, in both phases."""
    templates = str(row.get("to") or row.get("computed") or "")
    keys = []
    for template in templates.split(", "):
        if template:
            keys += [template.format(phase="grpo"), template.format(phase="sft")]
    return keys


def _explain(error_type: str, message: str, value: Any) -> tuple[str, str]:
    """Explain a problem; return it, and the value in brackets where that says more."""
    if error_type == "value_error":
        return message.removeprefix("Value error, "), ""
    if error_type == "missing":
        return plain(message), ""
    nouns = {dict: "a section", list: "a list", type(None): "nothing"}
    value_text = nouns.get(type(value)) or repr(value)
    return plain(message), f" (got {value_text})"


def plain(message: str) -> str:
    """Say a message of pydantic's in the words of a recipe.

    >>> plain("Input should be a valid array"), plain("Field required")
    ('should be a list', 'this is required')
    """
    for pydantic_words, recipe_words in tables()["messages"].items():
        message = message.replace(pydantic_words, recipe_words)
    return message.strip()


def _keys(location: Location) -> Location:
    """Return a location without pydantic's tags of unions."""
    # pydantic adds the union member's name to the location: 'literal[...]', 'constrained-int'.
    tags = r"\[|^(constrained-.*|bool|int|float|str)$"
    return tuple(key for key in location if not re.search(tags, str(key)))


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Find the class of a section in an annotation, such as `Names | LoraConfig`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        section = _section_in(argument)
        if section is not None:
            return section
    return None


# --- what to write instead -----------------------------------------------------------------------


def _opened(location: Location, value: Any, fields: Fields) -> Iterator[tuple[Location, Any]]:
    """Yield every setting in an unknown section, each with its own location and value."""
    row, keys = meant(str(location[-1]), fields)
    types = {typing.get_origin(fields[key].annotation) for key in keys if key in fields}
    # Advice about the section itself is given once, not for each of its settings.
    is_one_setting = "why" in row or dict in types
    if isinstance(value, dict) and value and not is_one_setting:
        for name, inner in value.items():
            yield from _opened((*location, name), inner, fields)
    else:
        yield location, value


def advice(location: Location, value: Any, fields: Fields) -> str:
    """Tell what to write instead of an unknown key."""
    *sections, last_key = location
    name = str(last_key)
    parent = _dotted(sections)
    section = re.sub(r"\.\d+", "[]", parent)
    siblings = _names_in(section, fields)
    word, row, keys = _closest(name, section, siblings, fields)
    if "why" in row:
        return f"{word} has no counterpart: {row['why']}."
    if "reward" in row:
        parameter = keys[0].rpartition(".")[2]
        params = f"{{{parameter}: {_value_text(value)}}}"
        return f"It is a parameter: {{name: {row['reward']}, params: {params}}} among the rewards."
    if keys:
        positions = re.findall(r"\.\d+", parent)
        position = positions[0] if positions else ".0"
        assignment = _translated(value, row)
        choices = [key.replace("[]", position) + assignment for key in keys[:_MOST_PLACES]]
        if not assignment:
            return f"See {' and '.join(choices)}."
        choice = " or ".join(choices)
        return f"Write {choice}." if word == name else f"Did you mean {choice}?"
    if 0 < len(siblings) <= _FEW_NAMES or word in siblings:
        return did_you_mean(name, siblings)
    return "`grouper recipes fields` lists all settings; add words to search names and meanings."


def _names_in(section: str, fields: Fields) -> set[str]:
    """Return the names of the settings and sections directly in a section."""
    prefix = f"{section}." if section else ""
    names = set()
    for key in fields:
        if key.startswith(prefix):
            inner_key = key.removeprefix(prefix)
            names.add(re.split(r"[.\[]", inner_key)[0])
    return names


def _closest(
    name: str, section: str, siblings: set[str], fields: Fields
) -> tuple[str, Row, list[str]]:
    """Find the name, or a similar one, that means something; return it with `meant` of it."""
    setting_names = {key.rpartition(".")[2] for key in fields}
    similar_sibling = nearest(name, siblings)
    similar_name = nearest(name, setting_names | aliases().keys(), _ALIKE)
    key_in_section = f"{section}." if section else ""
    # The name itself always, even an empty one.
    words = [name, *(word for word in (similar_sibling, similar_name) if word)]
    for word in words:
        row, keys = meant(word, fields, section)
        if word in siblings:
            keys = [key for key in keys if key == f"{key_in_section}{word}"]
        if row or keys or word in siblings:
            break
    return word, row, keys


def _translated(value: Any, row: Row) -> str:
    """Return `=value` for our setting; empty if another trainer's value has no counterpart."""
    if "values" in row:
        # A mapping sets several keys, or none.
        default = value if row.get("otherwise") == "same" else {}
        value = row["values"].get(word_of(value), default)
        if isinstance(value, dict):
            return ""
    elif "computed" in row and not row.get("same"):
        return ""
    return f"={_value_text(value)}"


def _value_text(value: Any) -> str:
    """Return a value as an override has it; `...` if it is long or has control characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > _LONGEST_VALUE or not text.isprintable():
        return "..."
    return text


def _dotted(location: Iterable[int | str]) -> str:
    return ".".join(str(key) for key in location)
