r"""Normalisation: one spelling for what can be written in many ways, with the same meaning.

`tidy` removes typesetting and keeps words apart, `canonical` is what the text stage compares.
Both are idempotent enough for grading (a canonical text canonicalises to itself) and linear.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

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
_COMMAND = re.compile(r"\\([A-Za-z]+)((?<=left)\.|(?<=right)\.)?")
_RULES = tuple(
    (re.compile(pattern, re.ASCII), replacement)
    for pattern, replacement in (
        # Unmistakable thousands: 1,\!000 and 1{,}000.
        (r"(?<=\d)(?:,\s*\\!|\{,\}\s*(?:\\!)?)\s*(?=\d{3}(?!\d))", ""),
        (r"\\!|\\(?:hspace|(?:text)?color)(?![A-Za-z])\s*(?:\{[^{}]*\})?", ""),
        (r"\\[hv]?phantom(?![A-Za-z])\s*(?:\{[^{}]*\}|[^{\\])", ""),
        # A box means nothing; its braces stay, as they group.
        (r"\\(?:frame|f)?box(?:ed)?\s*(?=\{)", ""),
        (r"(?<!\\)\\[,;:> ]|~|\s+", " "),
        (r"\\(?:text(?:rm|bf|it|normal)?|mbox|math(?:rm|bf|it|sf|tt))\s*\{([^{}]*)\}", r" \1 "),
        (r"\\operatorname\*?\s*\{([a-z]+)\}", r"\\\1 "),
        (r"^\*\*(.*)\*\*$", r"\1"),
        (r"\\%", "%"),
        (r"(?<=\d) ?\^ ?\{? ?(st|nd|rd|th) ?\}?$", r" \1"),
        (r"\\not\s*=", r"\\ne "),
        (r"^ ?(?:\\left)? ?<([^<>]+,[^<>]+?)(?:\\right)? ?> ?$", r"(\1)"),  # a vector
        (r"(?<=[)\]]) ?U ?(?=[(\[][^()\[\]]*,)", r"\\cup "),  # between intervals
    )
)
_SCRIPTS = re.compile("[²³¹⁰ⁱ⁴-ⁿ]+|[₀-ₜ]+")
_MARKED_DIGIT = re.compile("([0-9])[\u0305\u0307]")
_TYPESET = re.compile(r"[\\~*{<]|[)\]] ?U")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
_LEFT_EDGE = " ,;:="
_RIGHT_EDGE = " .,;:\\"


def tidy(text: str) -> str:
    r"""The answer without typesetting: spaces, sizes, fonts, dollar signs of maths mode.

    >>> tidy(r"$\left( 3,\, \dfrac{1}{2} \right)$.")
    '( 3, \\frac{1}{2} )'
    >>> tidy("1,\\!296,\\!540")
    '1296540'
    >>> tidy("$70,000")
    '\\$70,000'
    """
    if not text.isascii():
        text = _SCRIPTS.sub(_script, _MARKED_DIGIT.sub(r"\\dot{\1}", text)).translate(_TABLE)
        text = unicodedata.normalize("NFKC", text)  # other spaces, full-width forms, fonts
    text = text.strip()
    if text and (text[0] in "*_`" or "**" in text):
        text = _without_emphasis(text)
    text = _without_box(_without_dollars(text))
    if _BREAK.search(text):
        # Backslashes are doubled where a text went through JSON or Python.
        text = _separated(_DOUBLED.sub(r"\\", text))
    if _TYPESET.search(text):
        text = _DELIMITERS.sub(" ", text)
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


# The end of a line, or a gap as wide as between two equations.
_BREAK = re.compile(r"(?:\n|\\\\(?:\[[^\]]*\])?|\\newline(?![A-Za-z])|\\q?quad(?![A-Za-z]))[\s&]*")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|leq|geq|neq|lt|gt)(?![A-Za-z])")
_JOINT = re.compile(
    r"\s*(?:[,;&]|\b(?:and)|\\(?:text|mbox)\s*\{\W*(?:and)?\W*\})\s*\Z"
    r"|\A\s*(?:[,;]|(?:and)\b|\\(?:text|mbox)\s*\{\W*(?:and)\W*\})",
    re.ASCII,
)
_SYSTEM = re.compile(
    r"(?:\\left\s*\\\{)?\s*\\begin\s*\{(cases|aligned|align\*?|gathered|split)\}(.*)\\end\s*\{\1\}"
    r"(?:\s*\\right\s*\.)?",
    re.DOTALL,
)
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
    first, *rest = _RELATION.split(text)
    return bool(rest and first.strip() and rest[-1].strip())


# The whole text, or in stars a part of it that stands apart: `2**3**2` has none.
_EMPHASIZED = re.compile(
    r"(\*{1,3}|_{1,2}|`{1,3})(?=[^\s*_`])([^*_`]*[^\s*_`])\1([.,;:!]?)", re.DOTALL
)
_BOLD = re.compile(r"(?<![\w)}\]*])\*\*(?=[^\s*])([^*]*[^\s*])\*\*(?![\w({\[*])")


def _without_emphasis(text: str) -> str:
    """A text without the marks of Markdown around it.

    >>> [_without_emphasis(t) for t in ("**16**.", "*16*", "`x+1`", "**16** apples", "2**3")]
    ['16.', '16', 'x+1', '16 apples', '2**3']
    """
    if match := _EMPHASIZED.fullmatch(text):
        return match[2] + match[3]
    return _BOLD.sub(r"\1", text)


_DOUBLED = re.compile(
    r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|pi|text|mbox|math(?:rm|bf|bb)|left|right|cdot|times|infty"
    r"|circ|begin|end|angle|overline|boxed|quad|theta|alpha|beta|cup|cap|pm|sin|cos|tan|log|ln|leq?"
    r"|geq?|neq?)(?![A-Za-z])|[{}])"
)


_BOX = re.compile(r"\\(?:frame|f)?box(?:ed)?\s*\{")


def _without_box(text: str) -> str:
    """The inside of a box around the whole answer; a set in it must not become its own braces."""
    while box := _BOX.match(text):
        end = closing_brace(text, box.end() - 1)
        if end < 0 or text[end + 1 :].strip(_RIGHT_EDGE):
            return text
        text = text[box.end() : end].strip()
    return text


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


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


def _without_dollars(text: str) -> str:
    r"""Maths-mode dollars removed; a single one before a number is money and becomes `\$`."""
    if "$" not in text:
        return text
    bare = text.replace(r"\$", "\0")
    if bare.count("$") == 1 and re.search(r"(?:^|[\s(+-])\$\s*[-+]?\.?\d", bare):
        bare = bare.replace("$", "\0")
    return bare.replace("$", " ").replace("\0", r"\$").strip()


_SCRIPT = re.compile(r"([\^_]) ?(-?\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)(?![^{}]*\\begin)", re.ASCII)
# LaTeX takes one digit for the exponent: `2^33^2` is a product.
_POWER_BESIDE = re.compile(r"\^ ?(\d)([1-9]\d*)(?= ?\^)", re.ASCII)
_ARGUMENT = r"(\d|[A-Za-z]|\\pi(?![A-Za-z]))"
_FIRST = re.compile(
    rf"(\\(?:frac|binom)) ?{_ARGUMENT} ?(?=[\dA-Za-z{{]|\\pi(?![A-Za-z]))", re.ASCII
)
_SECOND = re.compile(rf"(\\(?:frac|binom) ?\{{[^{{}}]*\}}) ?{_ARGUMENT}", re.ASCII)
_SQRT = re.compile(r"\\sqrt(\[\d+\])? *(\d+|[A-Za-z])", re.ASCII)


def braced(text: str) -> str:
    r"""Every script, fraction and root with its braces: `x^2` is `x^{2}`, `\frac12` is complete.

    >>> braced(r"\frac12 x^2"), braced(r"\sqrt5")
    ('\\frac{1}{2} x^{2}', '\\sqrt{5}')
    """
    if "\\" in text:
        text = _SECOND.sub(r"\1{\2}", _FIRST.sub(r"\1{\2}", text))
        text = _SQRT.sub(r"\\sqrt\1{\2}", text)
    if "^" in text:
        text = _POWER_BESIDE.sub(r"^{\1}\2", text)
    return _SCRIPT.sub(r"\1{\2}", text) if "^" in text or "_" in text else text


_MIXED = re.compile(r"(?<![\w.}])(?<!\d )(\d+) ?\\frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}", re.ASCII)


def unmixed(text: str) -> str:
    r"""Mixed numbers as sums. Their fractions are below one: `12\frac{7}{1}` stays as it is.

    >>> unmixed(r"1\frac{1}{2}x"), unmixed(r"12\frac{7}{1}")
    ('(1+\\frac{1}{2})x', '12\\frac{7}{1}')
    """

    def summed(mixed: re.Match[str]) -> str:
        whole, top, bottom = mixed.groups()
        return rf"({whole}+\frac{{{top}}}{{{bottom}}})" if int(top) < int(bottom) else mixed[0]

    return _MIXED.sub(summed, text)


_GAPS = re.compile(
    # A space matters only between two words, two digits, or a command and a letter.
    r"(?<=\d) (?!\d)|(?<![A-Za-z\d]) | (?![A-Za-z\d])|(?<=[A-Za-z]) (?=\d)",
    re.ASCII,
)


def canonical(tidied: str) -> str:
    r"""What the text stage compares, of a text that went through `tidy`.

    >>> canonical(tidy(r"2 x^2 + \frac 12")) == canonical(tidy(r"2x^{2}+\dfrac{1}{2}"))
    True
    """
    return _GAPS.sub("", braced(tidied))
