"""Turn pydantic's errors into ours: the key, what is wrong, and what to write instead.

What to write instead of an unknown key is known by `grouper.compat.hints`, together with the names
of other trainers.
"""

from __future__ import annotations

import copy
import importlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from grouper.errors import ConfigError, raise_all

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]
Fields = Mapping[str, FieldInfo]

# What pydantic says -> what a recipe's author reads.
_MESSAGES = {
    r"String should match pattern '^(auto|cuda:\d+|https?://\S+)$'": (
        "should be a GPU (cuda:1), a server (http://127.0.0.1:8765) or auto"
    ),
    r"String should match pattern '^(same|cpu|cuda(:\d+)?)$'": (
        "should be same, cpu or a GPU (cuda, cuda:1)"
    ),
    "String should match pattern '^[A-Za-z][A-Za-z0-9_-]*$'": (
        "should be letters, digits, hyphens and underscores, with a letter first"
    ),
    "String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'": (
        "should be letters, digits, dots, hyphens and underscores, with a letter or digit first"
    ),
    "Field required": "this is required",
    "Tuple should": "should",
    "String should have": "should have",
    " after validation, not": ", not",
    "Input ": "",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid array": "a list",
    "a valid dictionary": "a section of settings",
    "an object": "a section of settings",
}


@dataclass(slots=True)
class _Problem:
    """A problem with one key of a recipe."""

    text: str
    # The value of the key, in brackets; empty if that says nothing more.
    value: str = ""
    fix: str = ""


def guest_room(module: str) -> ModuleType:
    """Import a module of the guest room, which knows the names of other trainers.

    It is imported by its name and only for an error: the recipe does not depend on the guest room,
    which depends on it.
    """
    return importlib.import_module(f"grouper.compat.{module}")


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
    hints = guest_room("hints")
    for inner_location, inner_value in hints.opened(location, value, fields):
        key = dotted((*place, *inner_location))
        fix = hints.advice(inner_location, inner_value, fields)
        problems[key] = _Problem(text, fix=fix)
    return problems


def _add_wrong_value(
    problems: dict[str, _Problem], detail: ErrorDetails, place: Sequence[str]
) -> None:
    """Add the problem of a value; the members of a union share one."""
    location = _keys(detail["loc"])
    text, value = _explain(detail["type"], detail["msg"], detail.get("input"))
    key = dotted((*place, *location))
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
    for pydantic_words, recipe_words in _MESSAGES.items():
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


def dotted(location: Iterable[int | str]) -> str:
    """Return keys as they are written: `data.train.path`."""
    return ".".join(str(key) for key in location)
