"""Texts of models and files as people may see them: without what steers a terminal or a page."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escape the control characters of a text that comes from a model or a file.

    Line breaks and tabs stay; direction marks and lone surrogates are escaped, too.

    >>> print(printable("red \x1b[31m\tand\nplain"))
    red \x1b[31m   and
    plain
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
