"""Turn pydantic's complaints into our errors: the key, what is wrong, and the nearest name."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from grouper.errors import ConfigError, did_you_mean, raise_all

Model = TypeVar("Model", bound=BaseModel)


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
        raise_as_config_error(error, model, where=where, place=place)


def raise_as_config_error(
    error: ValidationError, model: type[BaseModel], *, where: str, place: Sequence[str] = ()
) -> NoReturn:
    """Raise one `ConfigError` that carries every problem of `error`."""
    told: dict[str, list[tuple[str, str]]] = {}
    for detail in error.errors(include_url=False):
        location = tuple(part for part in detail["loc"] if not _is_union_tag(part))
        key = ".".join([*place, *(str(part) for part in location)])
        said = _explain(detail["type"], detail["msg"], detail.get("input"), model, location)
        told.setdefault(key, []).append(said)
    raise_all(
        [
            ConfigError(what, where=f"{where}: {key}" if key else where, fix=fix)
            for key, said in told.items()
            for what, fix in _as_one(said)
        ]
    )
    raise AssertionError("a ValidationError has at least one problem")


def _as_one(said: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Each member of a union complains of the same value; that is one mistake.

    >>> _as_one([("should be 1 or more (got 0)", ""), ("should be 'all' (got 0)", "")])
    [("should be 1 or more, or 'all' (got 0)", '')]
    """
    cut = [(*what.rpartition(" (got "), fix) for what, fix in said]
    wishes = [what.removeprefix("should be ") for what, *_ in cut]
    same = len({got for _, _, got, _ in cut}) == 1
    if not same or wishes == [what for what, *_ in cut]:
        return said
    return [(f"should be {', or '.join(dict.fromkeys(wishes))} (got {cut[0][2]}", cut[0][3])]


def _explain(
    kind: str, message: str, value: Any, model: type[BaseModel], location: Sequence[int | str]
) -> tuple[str, str]:
    if kind == "extra_forbidden":
        parent = _model_at(model, location[:-1])
        known = parent.model_fields if parent else ()
        return f"there is no setting {location[-1]!r} here", did_you_mean(str(location[-1]), known)
    if kind == "missing":
        return "this setting is required", "Add it to the recipe."
    if kind == "value_error":
        return message.removeprefix("Value error, "), ""
    shown = repr(value) if not isinstance(value, dict | list) else type(value).__name__
    return f"{message.removeprefix('Input ').strip()} (got {shown})", ""


def _is_union_tag(part: int | str) -> bool:
    # pydantic adds the union member's name to the location: 'literal[...]', 'constrained-int'.
    if not isinstance(part, str):
        return False
    return "[" in part or part.startswith("constrained-") or part in ("bool", "int", "float", "str")


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """The pydantic class found by following field names and list positions from `model`."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None:
            return None
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        current = next(_models_in(field.annotation), None) if field else None
    return current


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
