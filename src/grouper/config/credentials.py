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

from grouper.errors import GrouperError, register_secret

_REFERENCE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = re.compile(
    "apikey|auth|authorization|bearer|cookie|credentials?|key|passphrase|passwd|password|pat|pwd|"
    "secret|token"
)
# Values that are secrets whatever their key: of Hugging Face, GitHub, GitLab, OpenAI and those that
# do the same, Slack, AWS; signed tokens, and private keys.
_VALUE = re.compile(
    r"(?<![A-Za-z0-9_])(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})|-----BEGIN [A-Z ]*PRIVATE KEY"
)
# A name and a password before the host of an address.
_IN_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/:@]*:(?!\$\{)[^\s/@]+@", re.IGNORECASE)
# The keys of W&B are 40 hex digits; so are commits, which these words name.
_HEX = re.compile(r"(?<![0-9a-fA-F])[0-9a-f]{40}(?![0-9a-fA-F])")
_COMMITS = {"commit", "hash", "revision", "sha", "version"}


def refuse_literal_secrets(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters, if none of them is a secret in plain text.

    A text counts as a secret if its key, or one that contains it, has `key`, `token`, `secret`,
    `password`, `auth` or the like among its words; if it looks like the secret of a known service;
    or if it is an address with a password in it.

    Raises:
        ValueError: names the key, never the value.

    >>> refuse_literal_secrets({"api_key": "${JUDGE_KEY}", "max_token": 12, "tokenizer": "gpt2"})
    {'api_key': '${JUDGE_KEY}', 'max_token': 12, 'tokenizer': 'gpt2'}
    """
    for path, text in _texts(params):
        words = {word.lower() for word in _WORD.findall(".".join(path))}
        has_secret_key = any(_SECRET.fullmatch(word) for word in words)
        is_secret_by_key = has_secret_key and not _REFERENCE.search(text)
        is_hex_key = _HEX.search(text) is not None and not words & _COMMITS
        if text and (is_secret_by_key or is_hex_key or is_secret(text)):
            name = "_".join(_WORD.findall(path[-1])).upper()
            problem = f"{'.'.join(path)} looks like a secret, and recipes are shared"
            fix = f"write ${{{name}}} instead and set {name} in the environment"
            raise ValueError(f"{problem}: {fix}")
    return params


def is_secret(text: str) -> bool:
    """Tell whether a text holds what can only be a secret, whatever its key.

    >>> is_secret("hf_" + "a1B2" * 8), is_secret("https://me:hunter2@host/v1")
    (True, True)
    >>> is_secret("hf_model"), is_secret("https://me:${PASSWORD}@host")
    (False, False)
    """
    return bool(_VALUE.search(text) or _IN_URL.search(text))


def places_of_secrets(settings: Mapping[str, Any]) -> list[str]:
    """List the dotted keys of nested settings whose texts hold a secret; see `is_secret`."""
    keys: list[str] = []
    for path, text in _texts(settings):
        key = ".".join(path)
        if is_secret(text) and key not in keys:
            keys.append(key)
    return keys


def _texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text in nested settings, with the keys that lead to it."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, path)


def expanded(params: Any, *, where: str, error: type[GrouperError]) -> Any:
    """Replace every `${NAME}` in parameters by that variable of the environment.

    Args:
        params: settings, nested or not.
        where: the recipe key, for messages.
        error: the class of the exception.

    Raises:
        GrouperError: of class `error`: a variable that is not set.
    """
    try:
        text = json.dumps(params)
        expanded_text = _REFERENCE.sub(_value, text)
        return json.loads(expanded_text)
    except KeyError as missing:
        name = missing.args[0]
        fix = f"Set it (export {name}=...), or name another one."
        raise error(f"the environment has no variable {name}", where=where, fix=fix) from missing


def _value(reference: re.Match[str]) -> str:
    """Return the value of a reference as JSON has it within quotes, and hide it in messages."""
    name = reference[1]
    value = os.environ[name]
    register_secret(value, reference[0])
    quoted = json.dumps(value)
    return quoted[1:-1]
