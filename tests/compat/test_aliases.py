"""The table of names: every row says one thing, and says it about a setting that exists."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from grouper.compat.aliases import aliases, dialects
from grouper.config.schema import Recipe

ROWS = {**aliases(), **{n: row for table in dialects() for n, row in table["rows"].items()}}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_one_thing(name):
    row = ROWS[name]
    # A reason beside a key is for the values that are not listed.
    said = row.keys() & {"to", "computed", "now"} or row.keys() & {"why"}
    assert len(said) == 1
    assert said == {"why"} or "why" not in row or "values" in row


@pytest.mark.parametrize("name", ROWS)
def test_our_side_of_a_row_is_a_setting(name):
    row = ROWS[name]
    several = [v for v in row.get("values", {}).values() if isinstance(v, dict)]
    keys = [key for mapping in (*several, row.get("also", {})) for key in mapping]
    keys += re.split(r", ", row.get("to") or row.get("computed") or "name")
    for key in [*keys, row.get("share", "name")]:
        for phase in ("sft", "grpo"):
            assert is_setting(key.format(phase=phase)), key


def is_setting(key: str) -> bool:
    model: object = Recipe
    for part in key.replace("[]", "").split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return True  # inside of params or columns
        if part.isdecimal():
            return True  # a position in a list
        if part not in model.model_fields:
            return False
        model = section_of(model.model_fields[part].annotation)
    return True


def section_of(annotation: object) -> object:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (section_of(part) for part in getattr(annotation, "__args__", ()))
    return next((part for part in inner if part is not None), None)


def test_what_has_another_name_now_has_a_row_under_it():
    assert all(row["now"] in ROWS for row in ROWS.values() if "now" in row)
