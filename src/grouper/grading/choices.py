r"""Answers to multiple-choice questions: a letter, or a letter with its value.

The reference `B` is chosen by `(B)`, `B.`, `(b)` and `B: two`. The reference `B. 5` is answered by
the letter, by the value, or by both where both are right.
"""

from __future__ import annotations

import re

from grouper.grading.numerals import read_number

_LETTER = re.compile(r"\(?([A-J])\)?", re.ASCII)
_CHOSEN = re.compile(r"(?:\(?([A-Ja-j])\)|([A-J])[.:])(?: ?([ A-Za-z].*))?", re.ASCII)
_ANOTHER_CHOICE = re.compile(
    r"\b[A-J]\b|\([a-j]\)|\b(?:or|and|not|either|wrong|false|incorrect|except)\b|[,;/&]", re.ASCII
)
_WITH_VALUE = re.compile(r"(?:\(?([A-J])\)|([A-J])[.:]) ?(\S.*)", re.ASCII | re.DOTALL)
_LOWER_MARK = re.compile(r"^\([a-j]\)", re.ASCII)
_ANOTHER_MARK = re.compile(r"\([A-J]\)|\b[A-J][.:)]", re.ASCII)


def is_choice(prediction: str, reference: str) -> bool:
    """Whether a tidy answer chooses the letter that the reference is; a bare `b` is a variable."""
    asked, chosen = _LETTER.fullmatch(reference), _CHOSEN.fullmatch(prediction)
    if asked is None or chosen is None:
        return False
    if _ANOTHER_CHOICE.search(chosen.group(3) or ""):
        return False
    return asked.group(1) == (chosen.group(1) or chosen.group(2)).upper()


def value_of_choice(text: str) -> tuple[str, str] | None:
    """(letter, value) of a choice written with its value, or None.

    >>> value_of_choice("B. 5"), value_of_choice("(A) 3, (B) 4")
    (('B', '5'), None)
    """
    match = _WITH_VALUE.fullmatch(text)
    if match is None or _ANOTHER_MARK.search(match.group(3)):
        return None
    return match.group(1) or match.group(2), match.group(3)


def chosen_value(prediction: str, reference: str) -> bool | tuple[str, str] | None:
    """What a reference of letter and value says about an answer.

    Returns:
        None where neither is such a thing, the two values where only the answer is and they are
        numbers, whether the letter is right where the answer is
        only a letter, False where the letters differ, else the two values to compare.

    >>> chosen_value("B", "B. 5"), chosen_value("(C) 5", "B. 5"), chosen_value("5.0", "B. 5")
    (True, False, ('5.0', '5'))
    """
    asked = value_of_choice(reference)
    if asked is None:
        return _chosen_number(prediction, reference)
    letter, value = asked
    prediction = _LOWER_MARK.sub(lambda match: match.group().upper(), prediction)
    given = value_of_choice(prediction)
    if given is not None:
        return (given[1], value) if given[0] == letter else False
    bare = _LETTER.fullmatch(prediction)
    return (prediction, value) if bare is None else bare.group(1) == letter


def _chosen_number(prediction: str, reference: str) -> tuple[str, str] | None:
    """`(B) 12` where 12 is asked; a letter before anything but a number may be a factor."""
    given = value_of_choice(prediction)
    if given is None or read_number(given[1]) is None or read_number(reference) is None:
        return None
    return given[1], reference
