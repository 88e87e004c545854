r"""Numbers in words: cardinals, simple fractions and what stands between them.

`seventeen`, `twenty-one`, `one hundred and five`, `two million`, `one half`, `three quarters`,
`two and a half`. A sign may be a word too, before words or digits: `negative 10`, `minus one`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
CARDINALS: dict[str, int] = {
    **{word: value for value, word in enumerate(_ONES.split())},
    **{word: 10 * tens for tens, word in enumerate(_TENS.split(), start=2)},
}
SCALES: dict[str, int] = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_PARTS = """third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth
fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"""
_DENOMINATORS: dict[str, int] = {
    "half": 2,
    "quarter": 4,
    "hundredth": 100,
    "thousandth": 1000,
    **{word: value for value, word in enumerate(_PARTS.split(), start=3)},
}
_PARTS_OF_ONE: dict[str, int] = {
    **_DENOMINATORS,
    **{f"{word}s": value for word, value in _DENOMINATORS.items()},
    "halves": 2,
}
_KNOWN = frozenset({*CARDINALS, *SCALES, *_PARTS_OF_ONE, "a", "an", "and"})
_LETTERS = re.compile(r"[A-Za-z]+(?:[ -]+[A-Za-z]+)*", re.ASCII)
_SIGN = re.compile(r"(?:negative|minus)\s+(?=\S)", re.IGNORECASE)
_MAX_WORDS = 16


def spoken_sign(text: str) -> str | None:
    """What follows `negative` or `minus` at the start of a text, or None."""
    match = _SIGN.match(text)
    return None if match is None else text[match.end() :]


@lru_cache(maxsize=4096)
def read_words(text: str) -> Fraction | None:
    """The number that a text says in words alone, or None.

    >>> read_words("twenty-one"), read_words("Three Quarters"), read_words("two and a half")
    (Fraction(21, 1), Fraction(3, 4), Fraction(5, 2))
    >>> read_words("one two") is None, read_words("three and four") is None
    (True, True)
    """
    if not _LETTERS.fullmatch(text):
        return None
    words = text.lower().replace("-", " ").split()
    if len(words) > _MAX_WORDS or not _KNOWN.issuperset(words):
        return None
    return _fraction(words) if words[-1] in _PARTS_OF_ONE else _cardinal(words)


def _fraction(words: list[str]) -> Fraction | None:
    """`three quarters`, `a half`, `half`, and a whole number `and` one of these before it."""
    *before, part = words
    whole: Fraction | None = Fraction(0)
    if "and" in before:
        at = len(before) - 1 - before[::-1].index("and")
        whole, before = _cardinal(before[:at]), before[at + 1 :]
    count = Fraction(1) if before in ([], ["a"], ["an"]) else _cardinal(before)
    if whole is None or count is None:
        return None
    value = count / _PARTS_OF_ONE[part]
    return None if whole and value >= 1 else whole + value


def _cardinal(words: list[str]) -> Fraction | None:
    """A whole number; each scale is smaller than the one before, `and` stands before the rest."""
    total, group = 0, None
    smallest = None
    for at, word in enumerate(words):
        if word in CARDINALS:
            group = _joined(group, CARDINALS[word])
            if group is None:
                return None
        elif word == "hundred" and group is not None and 0 < group < 10:
            group *= 100
        elif word in SCALES and group and (smallest is None or SCALES[word] < smallest):
            smallest = SCALES[word]
            total, group = total + group * smallest, None
        elif word != "and" or at == 0 or at + 1 == len(words) or words[at - 1] not in SCALES:
            return None
    return None if group is None and smallest is None else Fraction(total + (group or 0))


def _joined(group: int | None, value: int) -> int | None:
    """`twenty` and `one`, `hundred` and `five`; nothing else may follow each other."""
    if group is None:
        return value
    if (group % 100 == 0 and value > 0 and group > 0) or (
        group % 10 == 0 and group % 100 >= 20 and 0 < value < 10
    ):
        return group + value
    return None
