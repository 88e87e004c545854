r"""Equations as chains of equal sides, `label = value = ... = value`, and what a label is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from grouper.grading.brackets import COLON, EQUALS, split
from grouper.grading.lazy import once
from grouper.grading.patterns import PATTERNS
from grouper.grading.values import Value, variables

# --- labels --------------------------------------------------------------------------------------

_LABEL_MARKS = PATTERNS["label marks"]
_LABEL = PATTERNS["label"]
_LABEL_TYPESETTING = PATTERNS["label typesetting"]
_SEGMENT = PATTERNS["segment"]
# Characters.
_MAX_LABEL = 120


def is_label(text: str) -> bool:
    r"""Return whether a side is a name rather than a value.

    >>> [is_label(t) for t in ("x", "f^{-1}(x)", r"\sin A", "AB:CD", r"\frac{V_1}{V_2}", "a_n")]
    [True, True, True, True, True, True]
    >>> [is_label(t) for t in ("7", r"\pi", "2x", "x+y", r"\sin 30", "x(x+1)", "x^2")]
    [False, False, False, False, False, False, False]
    """
    if not text or len(text) > _MAX_LABEL or text[0].isdigit():
        return False
    parts = split(text, COLON)
    if len(parts) > 1:
        return all(is_label(part.strip()) for part in parts)
    bare = _LABEL_MARKS.sub("", text).strip()
    if _LABEL.fullmatch(bare) is None:
        return False
    return len(text) == 1 or bool(variables(text))


def same_label(label: str, other: str) -> bool:
    r"""Return whether two labels are the same, but for typesetting and the `m` of `m\angle A`.

    >>> same_label(r"m\angle A", r"\angle A"), same_label("AB", r"\overline{BA}")
    (True, True)
    """
    return _key(label) == _key(other)


@lru_cache(maxsize=8192)
def _key(label: str) -> str:
    """Return one spelling for all labels that name the same."""
    bare = _LABEL_TYPESETTING.sub("", label)
    segment = _SEGMENT.fullmatch(bare)
    return "".join(sorted(segment[1])) if segment else bare


# --- chains --------------------------------------------------------------------------------------

_NO_CHAIN = PATTERNS["no chain"]
_UNKNOWN = PATTERNS["unknown"]
_STATEMENT = PATTERNS["statement"]
_END_OF_SENTENCE = PATTERNS["end of sentence"]


@dataclass(frozen=True)
class Chain:
    """The sides of one answer, `label = value = ... = value`; mostly a single value."""

    label: str
    """What the values are equal to by name; may be empty."""
    values: tuple[Value, ...]
    """At least one; the last is the answer."""

    @property
    def last(self) -> Value:
        """The value that the chain arrives at."""
        return self.values[-1]

    @once
    def sides(self) -> tuple[str, ...]:
        """The texts of all sides, the label first."""
        texts = tuple(value.text for value in self.values)
        return (self.label, *texts) if self.label else texts

    @once
    def is_equation(self) -> bool:
        """Whether neither side is the value of the other: `2x + 3y = 6`."""
        if self.label or len(self.values) == 1:
            return False
        return any(value.variables for value in self.values)

    @once
    def is_sentence(self) -> bool:
        """Whether words or an arrow before the last side say something: `It is 150 = 150`."""
        if any(_STATEMENT.search(side) for side in self.sides[:-1]):
            return True
        return _END_OF_SENTENCE.search(self.sides[0]) is not None

    @once
    def has_unknown(self) -> bool:
        """Whether the label is a variable, so that the equation may be solved for another one."""
        return _UNKNOWN.fullmatch(self.label) is not None


@lru_cache(maxsize=8192)
def chain_of(text: str) -> Chain:
    r"""Return the sides of a tidy text, reversed if the label comes last.

    What follows `\approx` is dropped, unless only a label comes before it.

    >>> chain_of(r"k = \frac12 = 0.5")
    Chain(label='k', values=(Value(text='\\frac12'), Value(text='0.5')))
    >>> chain_of("5 = x").label, chain_of("7 = 11a+c").label, chain_of("x+1").sides
    ('x', '', ('x+1',))
    """
    before, sign, after = text.partition(r"\approx")
    exact = before.strip()
    if sign and exact:
        text = f"{before}={after}" if is_label(exact) else exact
    sides = [side.strip() for side in split(text, EQUALS)]
    if len(sides) == 1 or not (sides[0] and sides[-1]) or _NO_CHAIN.search(text):
        return Chain("", (Value(text),))
    sides = [side for side in sides if side]
    if not is_label(sides[0]) and is_label(sides[-1]):
        sides.reverse()
    label = sides.pop(0) if is_label(sides[0]) else ""
    return Chain(label, tuple(Value(side) for side in sides))
