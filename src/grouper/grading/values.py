r"""A single value, read once: the smallest part of an answer that is compared.

A `Value` is made of a tidy text. What is rarely needed is worked out when it is first asked for and
then kept: its number, its unit, its words, the parts of a ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from grouper.grading.brackets import COLON, split
from grouper.grading.choices import choice_of
from grouper.grading.lazy import once
from grouper.grading.normalize import CONSTANTS, GREEK, canonical
from grouper.grading.numbers import (
    LargeNumber,
    Number,
    TooLargeError,
    Unit,
    is_number,
    read_counted,
    read_large,
    read_number,
    split_unit,
)
from grouper.grading.patterns import PATTERNS

_NAME = PATTERNS["name"]
_WORDY = PATTERNS["wordy"]
_SHORT_WORD = PATTERNS["short word"]
_ARTICLE_OR_MARK = PATTERNS["article or mark"]
_CLOCK = PATTERNS["clock"]
# Letters of a word of which no text of variables has as many.
_LONG_WORD = 4


class ClockTime(NamedTuple):
    """A time of day as written: `9:00 a.m.`."""

    hour: int
    minute: str
    second: str
    """Empty if it is not written."""
    half: str
    """`a` or `p`; empty if it is not written."""

    def is_same(self, other: ClockTime) -> bool:
        """Whether two times are the same; `a.m.` or `p.m.` on one side only is ignored."""
        if self.half and other.half and self.half != other.half:
            return False
        mine = self.hour, self.minute, self.second or "00"
        return mine == (other.hour, other.minute, other.second or "00")


@dataclass(frozen=True)
class Value:
    """One value without a label, as a tidy text and everything that the text says."""

    text: str

    @once
    def canonical(self) -> str:
        """The spelling that the text stage compares."""
        return canonical(self.text)

    @once
    def unsigned(self) -> str:
        """The canonical spelling without a plus sign in front."""
        return self.canonical.removeprefix("+")

    @once
    def _number_and_size(self) -> tuple[Number | None, bool]:
        """The number, and whether it is one that is too large to write down."""
        try:
            return read_number(self.text), False
        except TooLargeError:
            return None, True

    @property
    def is_too_large(self) -> bool:
        """Whether the text spells a number that is too large to write down; see `large`."""
        return self._number_and_size[1]

    @property
    def is_number(self) -> bool:
        """Whether the text spells one exact number, however large."""
        number, is_too_large = self._number_and_size
        return is_too_large or number is not None

    @property
    def number(self) -> Number | None:
        """The exact number that the text spells; None if it spells none.

        Raises:
            TooLargeError: it is too large to write down.
        """
        number, is_too_large = self._number_and_size
        if is_too_large:
            raise TooLargeError
        return number

    @once
    def counted(self) -> Number | None:
        """The number behind the letter of a choice, or of things counted in words.

        Raises:
            TooLargeError: see `number`.

        >>> Value("sixteen apples").counted.value, Value("B. 16").counted.value
        (Fraction(16, 1), Fraction(16, 1))
        """
        value_behind_letter = choice_of(self.text).value
        if value_behind_letter == self.text:
            number = self.number
        else:
            number = read_number(value_behind_letter)
        return number or read_counted(self.text)

    @once
    def remainders(self) -> LargeNumber | None:
        """The remainders of the number, however large it is; None where they are not known."""
        return read_large(self.text)

    @once
    def _core_and_unit(self) -> tuple[Value, Unit | None]:
        core, unit = split_unit(self.text)
        return (self if core == self.text else Value(core)), unit

    @property
    def core(self) -> Value:
        """The value without its unit."""
        return self._core_and_unit[0]

    @property
    def unit(self) -> Unit | None:
        """The known unit behind the value."""
        return self._core_and_unit[1]

    @once
    def variables(self) -> frozenset[str]:
        """The variables in the value; see `variables`."""
        return variables(self.text)

    @once
    def is_words(self) -> bool:
        """Whether it is words, or letters in an order, rather than a product of variables."""
        if _SHORT_WORD.fullmatch(self.text):
            return True
        if _WORDY.fullmatch(self.text) is None:
            return False
        return max(len(word) for word in self.text.split(" ")) >= _LONG_WORD

    @once
    def spoken(self) -> str:
        """The words without case, marks and article."""
        return _ARTICLE_OR_MARK.sub("", " ".join(self.text.casefold().split()))

    @once
    def clock(self) -> ClockTime | None:
        """The time of day that the text states; None if it states none."""
        match = _CLOCK.fullmatch(self.text)
        if match is None:
            return None
        hour, minute, second, half = match.groups("")
        return ClockTime(int(hour), minute or "00", second, half.lower())

    @once
    def ratio(self) -> Ratio:
        """The value as a ratio; of one part if it is none."""
        return Ratio(tuple(split(self.text, COLON)))


@dataclass(frozen=True)
class Ratio:
    r"""The parts of a ratio: `1:\sqrt2`."""

    parts: tuple[str, ...]

    @once
    def quotient(self) -> Value:
        """The first part divided by the second: the ratio of two as one value."""
        return _quotient(self.parts[0], self.parts[1])

    @once
    def proportions(self) -> tuple[Value, ...]:
        """Every further part divided by the first."""
        return tuple(_quotient(part, self.parts[0]) for part in self.parts[1:])

    @once
    def has_empty_part(self) -> bool:
        """Whether a part is zero or missing, by which nothing can be divided."""
        return not all(part.strip("0 ") for part in self.parts)


def _quotient(top: str, bottom: str) -> Value:
    return Value(rf"\frac{{{top}}}{{{bottom}}}")


def variables(text: str) -> frozenset[str]:
    r"""Return the variables in a tidy text: not the letters of a unit or a function.

    >>> sorted(variables(r"2x\theta")), sorted(variables(r"2\sqrt{3} cm")), sorted(variables("e"))
    (['\\theta', 'x'], [], [])
    """
    if is_number(text):
        return frozenset()
    expression, _ = split_unit(text)
    names: set[str] = set()
    for name in _NAME.findall(expression):
        if name in CONSTANTS:
            continue
        if name[0] != "\\":
            names.update(name)  # a product of one-letter variables
        if name[1:] in GREEK:
            names.add(name)
    return frozenset(names)
