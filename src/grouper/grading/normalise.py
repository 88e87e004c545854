r"""Spelling: one way to write what can be written in many, without touching what it means.

`tidy` removes typesetting and keeps words apart, `canonical` is what the text rung compares.
Both are idempotent enough for grading (a canonical text canonicalises to itself) and linear.
"""

from __future__ import annotations

import re

from grouper.grading.extraction import closing_brace

_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5",
    "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "⁄": "/", "∕": "/", "÷": "/",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "π": r"\pi ",
    "√": r"\sqrt ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "∪": r"\cup ", "∩": r"\cap ", "±": r"\pm ", "°": r"^{\circ}", "∈": r"\in ", "θ": r"\theta ",
    "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"',
    "…": "...", "⟨": r"\langle ", "⟩": r"\rangle ",
    "﹣": "-", "＄": "$", "％": "%", "，": ",", "．": ".", "\u3000": " ",
}  # fmt: skip
# Zero-width and direction marks say nothing; leaving them in would make equal answers differ.
_INVISIBLE = "\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\ufeff\u00ad"
_SPACES = "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f"
_TABLE: dict[int, str] = {
    **{ord(c): f"^{{{i}}}" for i, c in enumerate(_SUPERSCRIPTS)},
    **{ord(c): f"_{{{i}}}" for i, c in enumerate(_SUBSCRIPTS)},
    **{ord(c): f" {fraction} " for c, fraction in _VULGAR.items()},
    **{ord(c): text for c, text in _SYMBOLS.items()},
    **{ord(c): "" for c in _INVISIBLE},
    **{ord(c): " " for c in _SPACES},
    **{0xFF10 + i: str(i) for i in range(10)},
    **{0xFF21 + i: chr(65 + i) for i in range(26)},
    **{0xFF41 + i: chr(97 + i) for i in range(26)},
}

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.ASCII), replacement)
    for pattern, replacement in (
        # Thousands marked beyond doubt: 1,\!000 and 1{,}000.
        (r"(?<=\d)(?:,\s*\\!|\{,\}\s*(?:\\!)?)\s*(?=\d{3}(?!\d))", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|middle)(?![A-Za-z])\.?", ""),
        (r"\\!", ""),
        # Asked for or not, a box says nothing; its braces stay, as they are no brackets.
        (r"\\f?box(?:ed)?\s*(?=\{)", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\thinspace(?![A-Za-z])|[\s]+", " "),
        (r"\\[hv]?phantom(?![A-Za-z])\s*(?:\{[^{}]*\})?", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:text(?:rm|bf|it|normal)?|mbox|math(?:rm|bf|it|sf|tt))\s*\{([^{}]*)\}", r" \1 "),
        (r"\\operatorname\*?\s*\{([a-z]+)\}", r"\\\1 "),
        (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
        (r"\\neq(?![A-Za-z])", r"\\ne"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\(?:dots|ldots|cdots)(?![A-Za-z])", "..."),
        (r"^\*\*(.*)\*\*$", r"\1"),
        (r"\\(?:degree|degrees|textdegree)(?![A-Za-z])", r"^{\\circ}"),
        (r"\\%", "%"),
    )
)  # fmt: skip
_TYPESET = re.compile(r"[\\~*{]")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
_LEFT_EDGE = " ,;:="
_RIGHT_EDGE = " .,;:"


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
        text = _MARKED_DIGITS.sub(_with_command, text).translate(_TABLE)
    text = _without_box(_without_dollars(text.strip()))
    if _BREAK.search(text):
        text = _separated(_halved(text))
    if _TYPESET.search(text):
        text = _DELIMITERS.sub(" ", text)
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
    text = " ".join(text.split()).lstrip(_LEFT_EDGE)
    bare = text.rstrip(_RIGHT_EDGE)
    # A full stop ends a sentence; three of them say that digits or items go on.
    return f"{bare}..." if bare and "..." in text[len(bare) :] else bare


def tidy_reference(text: str) -> str:
    r"""A reference without typesetting; that it is an approximation is its author's to say.

    >>> tidy_reference(r"\approx 8.24 \text{ mph}")
    '8.24 mph'
    """
    return tidy(text).removeprefix(r"\approx").lstrip()


# Where a line ends, or a gap is left as wide as between two equations.
_BREAK = re.compile(r"(?:\n|\\\\(?:\[[^\]]*\])?|\\newline(?![A-Za-z])|\\q?quad(?![A-Za-z]))[\s&]*")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|leq|geq|neq|lt|gt)(?![A-Za-z])")
_JOINED = re.compile(
    r"(?:[,;&]|\b(?:and|or)|\\(?:text|mbox)\s*\{\W*(?:and|or)?\W*\})\s*\Z", re.ASCII
)
_JOINS = re.compile(r"[,;]|(?:and|or)\b|\\(?:text|mbox)\s*\{\W*(?:and|or)\W*\}", re.ASCII)
_SYSTEM = re.compile(
    r"(?:\\left\s*\\\{)?\s*\\begin\s*\{(cases|aligned|align\*?|gathered|split)\}(.*)\\end\s*\{\1\}"
    r"(?:\s*\\right\s*\.)?",
    re.DOTALL,
)


_MAX_SYSTEM = 2_000
"""Characters; a longer text is no system of equations but a solution."""


def _separated(text: str) -> str:
    r"""Equations on lines of their own, or with a gap between them, with commas between them.

    >>> _separated("x = 1\ny = 2"), _separated(r"a=1 \quad b=2"), _separated("5\napples")
    ('x = 1, y = 2', 'a=1, b=2', '5\napples')
    """
    if len(text) > _MAX_SYSTEM or len(_RELATION.findall(text)) < 2:
        return text
    if system := _SYSTEM.fullmatch(text):
        text = system[2].strip()
        if not all(map(_RELATION.search, _BREAK.split(text))):
            return system[0]  # a function in pieces
        text = text.replace("&", "")
    elif r"\begin" in text:
        return text
    statement, *rest = re.split(f"({_BREAK.pattern})", text)
    done = ""
    for gap, part in zip(rest[::2], rest[1::2], strict=True):
        if _is_statement(statement) and _is_statement(part):
            joint = " " if _JOINED.search(statement) or _JOINS.match(part) else ", "
            done, statement = f"{done}{statement.rstrip()}{joint}", part
        else:
            statement += (" " if _JOINS.match(part) else gap) + part
    return done + statement


def _is_statement(text: str) -> bool:
    """Whether a relation stands in a text, and not at either end of it."""
    found = list(_RELATION.finditer(text))
    return bool(found and text[: found[0].start()].strip() and text[found[-1].end() :].strip())


_COMMANDS = re.compile(
    r"\\\\(?:[dt]?frac|sqrt|pi|text|math(?:rm|bf|bb)|left|right|cdot|times|infty|circ|begin|angle"
    r"|overline|boxed|quad|theta|alpha|beta|cup|cap|pm|sin|cos|tan|log|ln|leq?|geq?|neq?)(?![A-Za-z])"
)
_BACKSLASHES = re.compile(r"\\+")


def _halved(text: str) -> str:
    r"""A text whose backslashes were all doubled, for JSON or Python, as it was before.

    >>> _halved(r"\\frac{1}{2}"), _halved(r"x=7\\y=2"), _halved(r"\pi \\sqrt{2}")
    ('\\frac{1}{2}', 'x=7\\\\y=2', '\\pi \\\\sqrt{2}')
    """
    runs = _BACKSLASHES.findall(text)
    if not _COMMANDS.search(text) or any(len(run) % 2 for run in runs):
        return text
    return _BACKSLASHES.sub(lambda run: run.group()[::2], text)


_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")


def _without_box(text: str) -> str:
    """The inside of a box around the whole answer; a set in it must not become its own braces."""
    while box := _BOX.match(text):
        end = closing_brace(text, box.end() - 1)
        if end < 0 or text[end + 1 :].strip(_RIGHT_EDGE):
            return text
        text = text[box.end() : end].strip()
    return text


_MARKED_DIGITS = re.compile("(?:[0-9]\u0305)+|[0-9]\u0307")


def _with_command(match: re.Match[str]) -> str:
    """Digits under a combining bar or dot, in LaTeX."""
    digits = match.group()
    command = "dot" if "\u0307" in digits else "overline"
    return rf"\{command}{{{digits.replace(chr(0x305), '').replace(chr(0x307), '')}}}"


def _without_dollars(text: str) -> str:
    r"""Maths-mode dollars removed; a single one before a number is money and becomes `\$`."""
    if "$" not in text:
        return text
    bare = re.sub(r"\\\$", "\0", text)
    if bare.count("$") == 1 and re.search(r"(?:^|[\s(+-])\$\s*[-+]?\.?\d", bare):
        bare = bare.replace("$", "\0")
    return bare.replace("$", " ").replace("\0", r"\$").strip()


_SCRIPT = re.compile(r"([\^_]) ?(-?\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)(?![^{}]*\\begin)", re.ASCII)
_ARGUMENT = r"(\d|[A-Za-z]|\\pi(?![A-Za-z]))"
_FRAC_DIGITS = re.compile(
    rf"\\(frac|binom) ?{_ARGUMENT} ?(\d|[A-Za-z]|\{{|\\pi(?![A-Za-z]))", re.ASCII
)
_FRAC_SECOND = re.compile(rf"(\\(?:frac|binom) ?\{{[^{{}}]*\}}) ?{_ARGUMENT}", re.ASCII)
_SQRT = re.compile(r"\\sqrt ?(\d+|[A-Za-z])", re.ASCII)
_GAPS = re.compile(
    # A space matters only between two words, two digits, or a command and a letter.
    r"(?<=\d) (?!\d)|(?<![A-Za-z\d]) | (?![A-Za-z\d])|(?<=[A-Za-z]) (?=\d)",
    re.ASCII,
)


def braced(text: str) -> str:
    r"""Every script, fraction and root with its braces: `x^2` is `x^{2}`, `\frac12` is complete.

    >>> braced(r"\frac12 x^2"), braced(r"\sqrt5")
    ('\\frac{1}{2} x^{2}', '\\sqrt{5}')
    """
    if "\\" in text:
        text = _FRAC_DIGITS.sub(_two_braces, text)
        text = _FRAC_SECOND.sub(r"\1{\2}", text)
        text = _SQRT.sub(r"\\sqrt{\1}", text)
    if "^" in text or "_" in text:
        text = _SCRIPT.sub(r"\1{\2}", text)
    return text


def _two_braces(match: re.Match[str]) -> str:
    command, first, second = match.groups()
    return rf"\{command}{{{first}}}" + ("{" if second == "{" else f"{{{second}}}")


def canonical(tidied: str) -> str:
    r"""What the text rung compares, of a text that went through `tidy`.

    >>> canonical(tidy(r"2 x^2 + \frac 12")) == canonical(tidy(r"2x^{2}+\dfrac{1}{2}"))
    True
    """
    return _GAPS.sub("", braced(tidied))
