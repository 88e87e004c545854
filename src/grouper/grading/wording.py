"""Answers in words, ratios and clock times: compared by what they say, not by arithmetic."""

from __future__ import annotations

import re

from grouper.grading.numerals import read_number

WORDS_DIFFER = "other words"
WORDS_FOR_NUMBER = "words where a number is expected"
_WORDY = re.compile(r"[A-Za-z][A-Za-z' .-]*", re.ASCII)
_SHORT_WORDS = frozenset({"yes", "no", "odd"})
_SYMBOLIC_WORDS = frozenset({"infinity", "infty", "inf"})


_CAPITALS = re.compile(r"[A-Z]{3,}", re.ASCII)


def is_words(text: str) -> bool:
    """Whether a text is words, or letters in an order, rather than a product of variables."""
    if text.lower() in _SHORT_WORDS or _CAPITALS.fullmatch(text):
        return True
    if not _WORDY.fullmatch(text) or text.lower() in _SYMBOLIC_WORDS:
        return False
    return max(map(len, text.split(" "))) >= 4


def same_words(prediction: str, reference: str, wordy: tuple[bool, bool]) -> tuple[bool, str]:
    """Words against words, or against a number; `wordy` says which of the two are words."""
    if wordy == (True, True):
        same = _spoken(prediction) == _spoken(reference)
        return same, "same text" if same else WORDS_DIFFER
    return False, WORDS_FOR_NUMBER if wordy[0] else "a number where words are expected"


def _spoken(text: str) -> str:
    words = re.sub(r"[^a-z ]", "", text.casefold()).split()
    return " ".join(words[1:] if words[:1] in (["the"], ["a"], ["an"]) else words)


_RATIO = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d))?\s*([ap])\.?\s?m\.?", re.ASCII | re.IGNORECASE)


def same_ratio(prediction: str, reference: str) -> tuple[bool | None, str]:
    """Ratios in proportion and clock times; `2:30` could be either and must be the same."""
    clocks = _CLOCK.fullmatch(prediction), _CLOCK.fullmatch(reference)
    if clocks[0] and clocks[1]:
        times = [(int(m[1]), m[2] or "00", m[3].lower()) for m in clocks if m]
        return times[0] == times[1], "clock times"
    ratio = _RATIO.fullmatch(reference)
    if clock := clocks[0] or clocks[1]:
        bare = ratio if clocks[0] else _RATIO.fullmatch(prediction)
        if clock[2] and bare:
            return (int(clock[1]), clock[2]) == (int(bare[1]), bare[2]), "clock times"
    if ratio is None:
        return None, ""
    a, b = int(ratio[1]), int(ratio[2])
    given = _RATIO.fullmatch(prediction)
    if given is None:
        number = read_number(prediction)
        same = number is not None and not number.undone and b != 0 and number.value * b == a
        return (True, "equal ratios") if same else (None, "")
    if len(ratio[2]) == 2 and a <= 24:
        return False, "a time or ratio that differs"
    return int(given[1]) * b == a * int(given[2]), "ratios"
