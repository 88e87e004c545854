"""What to write instead of a setting that there is not.

An unknown key is looked up among settings of that name in other sections, then among the names of
other trainers (`aliases`), then among similar names.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from typing import Any

from grouper.compat.aliases import Row, alias, aliases, of_set_ups, word_of
from grouper.config.checks import Fields, Location, dotted
from grouper.errors import did_you_mean, nearest

# Settings that one hint names, and characters of a value that it repeats.
_MOST_PLACES = 4
_LONGEST_VALUE = 60
# Sections with at most so many names are listed if there is no other hint.
_FEW_NAMES = 20
# Similarity required of a name in another section; in its own it is the usual 0.6.
_ALIKE = 0.85


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


def opened(location: Location, value: Any, fields: Fields) -> Iterator[tuple[Location, Any]]:
    """Yield every setting in an unknown section, each with its own location and value."""
    row, keys = meant(str(location[-1]), fields)
    types = {typing.get_origin(fields[key].annotation) for key in keys if key in fields}
    # Advice about the section itself is given once, not for each of its settings.
    is_one_setting = "why" in row or dict in types
    if isinstance(value, dict) and value and not is_one_setting:
        for name, inner in value.items():
            yield from opened((*location, name), inner, fields)
    else:
        yield location, value


def advice(location: Location, value: Any, fields: Fields) -> str:
    """Tell what to write instead of an unknown key."""
    *sections, last_key = location
    name = str(last_key)
    parent = dotted(sections)
    section = re.sub(r"\.\d+", "[]", parent)
    siblings = _names_in(section, fields)
    word, row, keys = _closest(name, section, siblings, fields)
    parameter_of = row.get("reward")
    if "why" in row:
        return f"{word} has no counterpart: {row['why']}."
    if parameter_of is not None:
        parameter = keys[0].rpartition(".")[2]
        params = f"{{{parameter}: {_value_text(value)}}}"
        return f"It is a parameter: {{name: {parameter_of}, params: {params}}} among the rewards."
    if keys:
        return _settings_to_write(
            keys, parent, assignment=_translated(value, row), is_exact=word == name
        )
    if 0 < len(siblings) <= _FEW_NAMES or word in siblings:
        return did_you_mean(name, siblings)
    return "`grouper recipes fields` lists all settings; add words to search names and meanings."


def _settings_to_write(keys: list[str], parent: str, *, assignment: str, is_exact: bool) -> str:
    """Name the settings to write.

    Args:
        keys: dotted keys.
        parent: where the unknown key was written; it says which entry of a list is meant.
        assignment: `=value`; empty if the value has no counterpart.
        is_exact: the keys stand for the name as it was written, not for a similar one.
    """
    positions = re.findall(r"\.\d+", parent)
    position = positions[0] if positions else ".0"
    choices = [key.replace("[]", position) + assignment for key in keys[:_MOST_PLACES]]
    if not assignment:
        return f"See {' and '.join(choices)}."
    choice = " or ".join(choices)
    return f"Write {choice}." if is_exact else f"Did you mean {choice}?"


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
