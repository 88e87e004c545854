"""Secrets stay out of recipes: a parameter holds `${NAME}`, which the environment resolves.

A recipe is written into the run folder, sent to trackers and shared, so a key or a token in it
would be published. `${NAME}` is stored as it is and replaced from the environment only where a
reward or a tracker is built; its value is masked in messages and logs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from grouper.errors import GrouperError, hide

_REFERENCE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = re.compile("apikey|authorization|credentials?|key|passwd|password|secret|token")


def refuse_literal_secrets(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters, if none of them is a secret in plain text.

    A text counts as a secret if its key, or one that contains it, has `key`, `token`, `secret`,
    `password`, `authorization` or the like among its words.

    Raises:
        ValueError: names the key, never the value.

    >>> refuse_literal_secrets({"api_key": "${JUDGE_KEY}", "max_token": 12, "tokenizer": "gpt2"})
    {'api_key': '${JUDGE_KEY}', 'max_token': 12, 'tokenizer': 'gpt2'}
    """
    for path, text in _texts(params):
        secret = any(_SECRET.fullmatch(word.lower()) for word in _WORD.findall(".".join(path)))
        if text and secret and not _REFERENCE.search(text):
            name = "_".join(_WORD.findall(path[-1])).upper()
            what = f"{'.'.join(path)} looks like a secret, and recipes are shared"
            raise ValueError(f"{what}: write ${{{name}}} instead and set {name} in the environment")
    return params


def _texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text in nested settings, with the keys that lead to it."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, path)


def expanded(params: Any, *, where: str, error: type[GrouperError]) -> Any:
    """The parameters with every `${NAME}` replaced by that variable of the environment.

    Args:
        params: settings, nested or not.
        where: the recipe key, for messages.
        error: the class of what is raised.

    Raises:
        GrouperError: of class `error`: a variable that is not set.
    """
    try:
        return json.loads(_REFERENCE.sub(_value, json.dumps(params)))
    except KeyError as missing:
        name = missing.args[0]
        fix = f"Set it (export {name}=...), or name another one."
        raise error(f"the environment has no variable {name}", where=where, fix=fix) from missing


def _value(reference: re.Match[str]) -> str:
    value = os.environ[reference[1]]
    hide(value, reference[0])
    return json.dumps(value)[1:-1]
