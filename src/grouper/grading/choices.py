"""Multiple choice: the letter of an answer and the value behind it."""

from __future__ import annotations

from typing import NamedTuple

from grouper.grading.patterns import PATTERNS

_CHOICE = PATTERNS["choice"]
_ANOTHER_CHOICE = PATTERNS["another choice"]


class Choice(NamedTuple):
    """A tidy text as a choice: `B. 5`."""

    letter: str
    """In upper case; empty if the text is no choice."""
    value: str
    """What stands behind the letter; the whole text if the text is no choice."""

    @property
    def is_hedged(self) -> bool:
        """Whether the value names another choice or denies this one: `(a) or (c)`."""
        return _ANOTHER_CHOICE.search(self.value) is not None


def choice_of(text: str) -> Choice:
    """Return a tidy text as a choice. A bare `b` is a variable.

    >>> choice_of("B. 5"), choice_of("(b)")
    (Choice(letter='B', value='5'), Choice(letter='B', value=''))
    >>> choice_of("b")
    Choice(letter='', value='b')
    """
    match = _CHOICE.fullmatch(text)
    if match is None:
        return Choice("", text)
    letter = match[1] or match[2] or match[4]
    return Choice(letter.upper(), match[3] or "")
