r"""Normalization: one spelling for what can be written in many ways, with the same meaning.

`tidy` removes typesetting and keeps words apart, `canonical` is what the text stage compares.
Both are idempotent enough for grading (a canonical text canonicalises to itself) and linear.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

from grouper.grading.patterns import PATTERNS

_DATA = json.loads(Path(__file__).with_name("spelling.json").read_text("utf-8"))
_TABLE = str.maketrans(
    {
        **_DATA["characters"],
        # Zero-width and direction marks mean nothing, but would make equal answers differ.
        **dict.fromkeys(_DATA["invisible"], ""),
    }
)
_COMMANDS: dict[str, str] = {
    **_DATA["commands"],
    **dict.fromkeys(_DATA["command nothing"].split(), ""),
}
# Letters in Greek that stand for something, and names that do not.
GREEK: frozenset[str] = frozenset(_DATA["variables"].split())
CONSTANTS: frozenset[str] = frozenset(_DATA["constants"].split())
_COMMAND = PATTERNS["command"]
_RULES = tuple(
    (re.compile(pattern, re.ASCII), replacement)
    for pattern, replacement in (
        # Unmistakable thousands: 1,\!000 and 1{,}000.
        (r"(?<=\d)(?:,\s*\\!|\{,\}\s*(?:\\!)?)\s*(?=\d{3}(?!\d))", ""),
        # Colors and gaps: `\color{red} 5`.
        (r"\\!|\\(?:hspace|(?:text)?color)(?![A-Za-z])\s*(?:\{[^{}]*\})?", ""),
        # What is not shown: `\phantom{0}5`.
        (r"\\[hv]?phantom(?![A-Za-z])\s*(?:\{[^{}]*\}|[^{\\])", ""),
        # A box means nothing; its braces stay, as they group: `2\boxed{5}`.
        (r"\\(?:frame|f)?box(?:ed)?\s*(?=\{)", ""),
        # Spaces: `3,\,5`.
        (r"(?<!\\)\\[,;:> ]|~|\s+", " "),
        # Fonts: `5 \text{ cm}`.
        (r"\\(?:text(?:rm|bf|it|normal)?|mbox|math(?:rm|bf|it|sf|tt))\s*\{([^{}]*)\}", r" \1 "),
        # Functions: `\operatorname{lcm}(4, 6)`.
        (r"\\operatorname\*?\s*\{([a-z]+)\}", r"\\\1 "),
        # Emphasis that the rules above have laid bare: `\!**5**`.
        (r"^\*\*(.*)\*\*$", r"\1"),
        # Percent: `5\%`.
        (r"\\%", "%"),
        # Ordinals: `5^{th}`.
        (r"(?<=\d) ?\^ ?\{? ?(st|nd|rd|th) ?\}?$", r" \1"),
        # Unequal: `x \not= 5`.
        (r"\\not\s*=", r"\\ne "),
        # A vector: `<1, 2>`.
        (r"^ ?(?:\\left)? ?<([^<>]+,[^<>]+?)(?:\\right)? ?> ?$", r"(\1)"),
        # A union of intervals: `(0, 1) U (2, 3)`.
        (r"(?<=[)\]]) ?U ?(?=[(\[][^()\[\]]*,)", r"\\cup "),
    )
)
_SCRIPT_CHARACTERS = PATTERNS["script characters"]
_MARKED_DIGIT = PATTERNS["marked digit"]
_TYPESET = PATTERNS["typeset"]
_DELIMITER = PATTERNS["delimiter"]
_LEFT_EDGE = " ,;:="
_RIGHT_EDGE = " .,;:\\"


def tidy(text: str) -> str:
    r"""The answer without typesetting: spaces, sizes, fonts, dollar signs of math mode.

    >>> tidy(r"$\left( 3,\, \dfrac{1}{2} \right)$.")
    '( 3, \\frac{1}{2} )'
    >>> tidy("1,\\!296,\\!540")
    '1296540'
    >>> tidy("$70,000")
    '\\$70,000'
    """
    if not text.isascii():
        text = _SCRIPT_CHARACTERS.sub(_script, _MARKED_DIGIT.sub(r"\\dot{\1}", text)).translate(
            _TABLE
        )
        text = unicodedata.normalize("NFKC", text)  # other spaces, full-width forms, fonts
    text = text.strip()
    if text and (text[0] in "*_`" or "**" in text):
        text = _without_emphasis(text)
    text = _without_box(_without_dollars(text))
    if _BREAK.search(text):
        # Backslashes are doubled where a text went through JSON or Python.
        text = _separated(_DOUBLED_BACKSLASH.sub(r"\\", text))
    if _TYPESET.search(text):
        text = _DELIMITER.sub(" ", text)
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
        text = _COMMAND.sub(lambda m: _COMMANDS.get(m[1], m[0]), text)
    text = " ".join(text.split()).lstrip(_LEFT_EDGE)
    bare = text.rstrip(_RIGHT_EDGE)
    # A full stop ends a sentence; three of them say that digits or items go on.
    return f"{bare}..." if bare and "..." in text[len(bare) :] else bare


def _script(run: re.Match[str]) -> str:
    """All of an exponent or index: `10¹²` is `10^{12}`, and no power of a power."""
    return f"{'_' if run[0] >= '₀' else '^'}{{{unicodedata.normalize('NFKC', run[0])}}}"


_BREAK = PATTERNS["break"]
_RELATION_SIGN = PATTERNS["relation sign"]
_JOINT = PATTERNS["joint"]
_SYSTEM = PATTERNS["system"]
# Characters; a longer text is a solution, not a system of equations.
_MAX_SYSTEM = 2_000


def _separated(text: str) -> str:
    r"""Equations on separate lines, or with a gap between them, joined by commas.

    >>> _separated("x = 1\ny = 2"), _separated(r"a=1 \quad b=2"), _separated("5\napples")
    ('x = 1, y = 2', 'a=1, b=2', '5\napples')
    """
    if len(text) > _MAX_SYSTEM:
        return text
    system = _SYSTEM.fullmatch(text)
    inside = system[2].replace("&", "") if system else text
    parts = [
        stripped for part in _BREAK.split(inside) if (stripped := _JOINT.sub("", part).strip())
    ]
    if r"\begin" in inside or not all(map(_is_statement, parts)):
        return text
    return ", ".join(parts)


def _is_statement(text: str) -> bool:
    """Whether a text holds a relation with something on both sides."""
    first, *rest = _RELATION_SIGN.split(text)
    return bool(rest and first.strip() and rest[-1].strip())


_EMPHASIZED = PATTERNS["emphasized"]
_BOLD = PATTERNS["bold"]


def _without_emphasis(text: str) -> str:
    """A text without the marks of Markdown around it.

    >>> [_without_emphasis(t) for t in ("**16**.", "*16*", "`x+1`", "**16** apples", "2**3")]
    ['16.', '16', 'x+1', '16 apples', '2**3']
    """
    if match := _EMPHASIZED.fullmatch(text):
        return match[2] + match[3]
    return _BOLD.sub(r"\1", text)


_DOUBLED_BACKSLASH = PATTERNS["doubled backslash"]


_BOX = PATTERNS["box"]


def _without_box(text: str) -> str:
    """The inside of a box around the whole answer; a set in it must not become its own braces."""
    while box := _BOX.match(text):
        end = closing_brace(text, box.end() - 1)
        if end < 0 or text[end + 1 :].strip(_RIGHT_EDGE):
            return text
        text = text[box.end() : end].strip()
    return text


_BRACE = PATTERNS["brace"]


def closing_brace(text: str, start: int) -> int:
    r"""Index of the brace that closes the one at `start`, or -1; `\{` and `\}` do not count.

    >>> closing_brace(r"{a{b}\}c}", 0)
    8
    """
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += (match.group() == "{") - (match.group() == "}")
        if depth == 0:
            return match.start()
    return -1


_MONEY = PATTERNS["money"]


def _without_dollars(text: str) -> str:
    r"""Maths-mode dollars removed; a single one before a number is money and becomes `\$`."""
    if "$" not in text:
        return text
    bare = text.replace(r"\$", "\0")
    if bare.count("$") == 1 and _MONEY.search(bare):
        bare = bare.replace("$", "\0")
    return bare.replace("$", " ").replace("\0", r"\$").strip()


_SCRIPT = PATTERNS["script"]
_POWER_BESIDE_A_POWER = PATTERNS["power beside a power"]
_FIRST_ARGUMENT = PATTERNS["first argument"]
_SECOND_ARGUMENT = PATTERNS["second argument"]
_UNBRACED_ROOT = PATTERNS["unbraced root"]


def braced(text: str) -> str:
    r"""Every script, fraction and root with its braces: `x^2` is `x^{2}`, `\frac12` is complete.

    >>> braced(r"\frac12 x^2"), braced(r"\sqrt5")
    ('\\frac{1}{2} x^{2}', '\\sqrt{5}')
    """
    if "\\" in text:
        text = _SECOND_ARGUMENT.sub(r"\1{\2}", _FIRST_ARGUMENT.sub(r"\1{\2}", text))
        text = _UNBRACED_ROOT.sub(r"\\sqrt\1{\2}", text)
    if "^" in text:
        text = _POWER_BESIDE_A_POWER.sub(r"^{\1}\2", text)
    return _SCRIPT.sub(r"\1{\2}", text) if "^" in text or "_" in text else text


_MIXED_NUMBER = PATTERNS["mixed number"]


def unmixed(text: str) -> str:
    r"""Mixed numbers as sums. Their fractions are below one: `12\frac{7}{1}` stays as it is.

    >>> unmixed(r"1\frac{1}{2}x"), unmixed(r"12\frac{7}{1}")
    ('(1+\\frac{1}{2})x', '12\\frac{7}{1}')
    """

    def summed(mixed: re.Match[str]) -> str:
        whole, top, bottom = mixed.groups()
        return rf"({whole}+\frac{{{top}}}{{{bottom}}})" if int(top) < int(bottom) else mixed[0]

    return _MIXED_NUMBER.sub(summed, text)


_GAP = PATTERNS["gap"]


def canonical(tidied: str) -> str:
    r"""What the text stage compares, of a text that went through `tidy`.

    >>> canonical(tidy(r"2 x^2 + \frac 12")) == canonical(tidy(r"2x^{2}+\dfrac{1}{2}"))
    True
    """
    return _GAP.sub("", braced(tidied))
