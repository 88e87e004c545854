"""Rows of whole prompt text and response (JSONL of SFT sets) -> question and response.

The question is taken out of a text of a known template and rendered again by the one renderer, so
that SFT and rollouts start from the same text by construction. Any other prompt is left as it is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from grouper.prompts import FORMATS
from grouper.types import AnswerContract, AnswerFormat

_TEMPLATES: tuple[AnswerFormat, ...] = (FORMATS["r1-zero"],)
"""Formats whose plain text is published as whole prompts."""

RESPONSE_CONTRACT: AnswerContract = replace(FORMATS["r1-zero"].contract, open="<answer>")
"""Where the answer of a response is read from, whatever stands between the tags."""


def read_prompt(text: str) -> tuple[str, AnswerFormat, bool] | None:
    r"""The question in a whole prompt, its format, and whether the prompt opens its first tag.

    None where the text follows no known template.

    White space between the parts of the template may differ: the published SFT rows of R1-Zero
    have one blank line more.

    >>> found = read_prompt(FORMATS["r1-zero"].plain_prompt("1+1?"))
    >>> found and found[0]
    '1+1?'
    """
    for fmt in _TEMPLATES:
        match = _pattern(fmt).fullmatch(text)
        if match is not None:
            return match["question"].strip(), fmt, match["prefix"] is not None
    return None


@cache
def _pattern(fmt: AnswerFormat) -> re.Pattern[str]:
    before, _, after = fmt.plain.removeprefix("{system}").partition("{question}")
    return re.compile(
        rf"\s*{_loose(fmt.system)}\s*\n\s*{_loose(before)}(?P<question>.*)\n\s*{_loose(after)}"
        rf"\s*(?P<prefix>{re.escape(fmt.prefix)})?\s*",
        re.DOTALL,
    )


def _loose(text: str) -> str:
    return r"\s+".join(map(re.escape, text.split()))


def read_response(text: str, fmt: AnswerFormat, *, opened: bool) -> str:
    r"""A response as the completion that sampling would have given.

    Word for word, but for its ends: the tag that `fmt`'s prompt opens is not written again, what
    stands after the stop string is cut off, and an answer that was published without its closing
    tag gets it back.

    Args:
        text: the response as published.
        fmt: the format of its prompt.
        opened: whether the published prompt ended in the format's prefix.

    Raises:
        ValueError: it is empty, or neither it nor its prompt opens the first tag.

    >>> r1 = FORMATS["r1-zero"]
    >>> read_response(" 1+1=2 </think> <answer> 2 </answer>\n", r1, opened=True)
    ' 1+1=2 </think> <answer> 2 </answer>'
    >>> read_response("<think> so </think> <answer> 2", r1, opened=False)
    ' so </think> <answer> 2 </answer>'
    """
    if not text.strip():
        raise ValueError("the response is empty")
    if text.lstrip().startswith(fmt.prefix):
        text = text.lstrip().removeprefix(fmt.prefix)
    elif not opened:
        raise ValueError(f"neither the prompt nor the response opens {fmt.prefix}")
    ends = [text.find(stop) + len(stop) for stop in fmt.stop if stop in text]
    if ends:
        return text[: min(ends)]
    if fmt.tags is not None and fmt.tags[2] in text:
        return text.rstrip() + fmt.template.partition("{answer}")[2]
    return text
