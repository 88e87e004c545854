r"""The regular expressions by which answers are read, each with an example that it matches.

A module takes what it needs by name: `PATTERNS["choice"]`. All of them are linear in the length of
an answer. Tests check that every example is matched.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Row(NamedTuple):
    """One pattern of the table."""

    name: str
    pattern: str
    example: str
    """A text with a match, the way it occurs in an answer."""
    match: str = ""
    """The part of the example that is matched; empty: all of it."""
    flags: re.RegexFlag = re.ASCII


# Digits and letters of all alphabets.
_UNICODE = re.NOFLAG
_IGNORE_CASE = re.IGNORECASE
_ANY_CASE = re.ASCII | re.IGNORECASE
_LINES = re.ASCII | re.DOTALL

# --- parts of several patterns -------------------------------------------------------------------

_BRACKET = r"[()\[\]{}]"
_INEQUALITY = r"[<>]=?|\\(?:le|ge|lt|gt|ne)(?![A-Za-z])"
_FUNCTION = r"\\?(?:arc)?(?:sin|cos|tan|cot|sec|csc|det|dim|deg|log|ln)h?"
_ARGUMENT = r"(?:\((?:[^()]|\([^()]*\)){1,60}\)|\[[^\[\]]{1,60}\])"
# What LaTeX takes for an argument without braces.
_UNBRACED = r"(\d|[A-Za-z]|\\pi(?![A-Za-z]))"
_SIMPLE_FRACTION = r"\\frac ?(?:\d\d|(?:\{(?:[^{}]|\{\w*\})*\} ?){2})|\d+/\d+"
_TRIG = "(?:sin|cos|tan|cot|sec|csc)"
_DOTTED_DIGITS = r"\\dot\{?\d\}?(?:(?:\d|\\dot\{?\d\}?)*\\dot\{?\d\}?)?"

# --- whole answers -------------------------------------------------------------------------------

_ANSWERS = (
    # Two of these are compared as decimals and read no further.
    Row(
        "plain decimal",
        r"(?:\\?\$)?(-?)(?:\\?\$)?"
        r"([0-9]{1,300}|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.([0-9]{1,300}))?",
        "$1,234.50",
        flags=_UNICODE,
    ),
    Row(
        "choice",
        r"(?:[Oo]ption |[Cc]hoice )?(?:(?:\(([A-Ja-j])\)|([A-J])[.:)]) ?(.*)|([A-J]))",
        "B. 5",
        flags=_LINES,
    ),
    Row(
        "another choice",
        r"\b[A-J]\b|\([a-j]\)|\b(?:or|and|not|either|wrong|false|incorrect|except)\b|[,;/&]",
        "and (c)",
        "and",
    ),
    Row(
        "congruence",
        r"(?:(\\?[A-Za-z]{1,8}) ?(?:\\equiv|=) ?)?(-?\d{1,300}) ?"
        r"(?:\\pmod|\(? ?\\?(?:bmod|mod)) ?\{? ?([1-9]\d{0,300}) ?\}? ?\)?",
        r"x \equiv 3 \pmod{7}",
    ),
    # Three powers of numbers on top of each other.
    Row(
        "tower",
        r"\d\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)\s*[({]*\s*\d+\s*(?:\^|\*\*)",
        "9^{9^{9^9}}",
        "9^{9^{9^",
    ),
    Row("lettered", r"[^\w(]*(?:text\w*\{)?[A-J]\)", "B) 5", "B)"),
    Row("word", r"[A-Za-z]{3,}", "18 apples", "apples", _UNICODE),
)

# --- shapes --------------------------------------------------------------------------------------

# A separator counts only outside brackets, so that these match brackets, too.
_SEPARATORS = (
    Row(
        "conjunction",
        rf"{_BRACKET}|,? (?:and|or) (?=\S)|(?<=[)\]}}]) ?(?:and|or) ?(?=[(\[{{\\])|[,;]",
        "2, and 3",
        ", and ",
    ),
    Row("equals", rf"{_BRACKET}|=", "x=5", "="),
    Row("colon", rf"{_BRACKET}|:", "3:4", ":"),
    Row("listed", rf"{_BRACKET}|[,;]", "3; 4", ";"),
    Row("bracket", _BRACKET, "f(x)", "(", _UNICODE),
)
_SHAPES = (
    # `1, 000` is a thousand; no member of a list is written `000`.
    Row("group of zero", r"(?<=\d), (?=0\d\d(?!\d))", "1, 000", ", "),
    Row("decimal comma", r"([-+]?\d+),(\d+)", "3,14"),
    # `f(1,2)` and `(1,2)`: commas that separate no thousands.
    Row("comma in brackets", r"[(\[{][^)\]}]*,", "f(1,2)", "(1,", _UNICODE),
    Row(
        "preamble",
        r"^(?:(?:so |thus |hence |therefore,? )?(?:the |our |my )?(?:final |correct )?"
        r"(?:answer|result|solution|root|value)s?(?: (?:is|are)(?::| )| ?:)"
        r"|(?!not |wrong)[a-z]{3,}(?: [a-z]+){0,4}: )",
        "The answer is 5",
        "The answer is ",
        _IGNORE_CASE,
    ),
    # Two equations with nothing between them.
    Row(
        "spaced equations",
        r"(?<=[\d)\]}]) (?=(?:[A-Za-z]|[A-Z]{2,3}|\\(?!pi ?=)[a-z]+)(?:_(?:\{[^{}]*\}|\w))?"
        r"(?:\([\w, ]*\))? ?=)",
        "a=1 b=2",
        " ",
    ),
    Row("and or", " or | and ", "x<1 or x>3", " or ", _UNICODE),
    Row("digit or backslash", r"[\d\\]", r"\pi", "\\", _UNICODE),
    Row("inequality", _INEQUALITY, "x<5", "<", _UNICODE),
    Row("relation", f"{_INEQUALITY}|=", "x=5", "=", _UNICODE),
    Row("region joint", r",| or | and |\\cup|\\cap", "x<1 or x>3", " or ", _UNICODE),
    # A fraction may stand before it.
    Row(
        "matrix",
        rf"(?:(-? ?(?:{_SIMPLE_FRACTION})) ?(?:\\cdot )?)?"
        r"\\begin ?\{(?:[pbB]?(?:small)?matrix\}|array\}(?: ?\{[clr| ]*\})?)(.*)"
        r"\\end ?\{(?:[pbB]?(?:small)?matrix|array)\}",
        r"\frac{1}{2}\begin{pmatrix} 4 \\ 6 \end{pmatrix}",
        flags=re.DOTALL,
    ),
    Row("end of row", r"\\\\(?:\[[^\]]*\])?", r"1 & 2 \\ 3 & 4", r"\\", _UNICODE),
    Row("pair of brackets", r"[(\[{][)\]}]", "(]", flags=_UNICODE),
    # The set of all `x` with a condition.
    Row(
        "builder",
        r"\\\{ ?([A-Za-z]) ?(?:\\in ?\\mathbb ?\{ ?R ?\} ?|\\in ?R )?"
        r"(?:\\mid(?![A-Za-z])|\||:)(.+)\\\}",
        r"\{x \mid x \ge 0\}",
    ),
    Row("builder bar", r"\||\\mid(?![A-Za-z])|:", r"n \mid 12", r"\mid", _UNICODE),
    Row("plus or minus", r"\\pm(?![A-Za-z]) ?", r"2 \pm i", r"\pm ", _UNICODE),
    # An atom with one of these may describe a set, so it may equal an interval or a list.
    Row(
        "set-like",
        r"[<>|]|\\\{|\\(?:le|ge|lt|gt|in|cup|cap|setminus|mathbb|mid|ne)(?![A-Za-z])",
        r"x \in A",
        r"\in",
        _UNICODE,
    ),
    # A name before a set or tuple.
    Row(
        "named",
        r"([^=:]*?)\s*(=|\\in(?![A-Za-z])|:(?!\d))\s*(.*)",
        "A = (1, 2)",
        flags=re.DOTALL,
    ),
    Row("item label", r"(\\?[A-Za-z]+)(?:_\{?\w+\}?)? ?=", "x_1 = 5", "x_1 ="),
)

# --- equations -----------------------------------------------------------------------------------

_EQUATIONS = (
    # What belongs to a name and says nothing about what kind of name it is.
    Row(
        "label marks",
        r"\\(?:angle|triangle|overline|widehat|hat|vec|bar|tilde|d?dot|overrightarrow|arc)(?![a-z])"
        r" ?|_(?:\{[^{}]*\}|\w|\\[A-Za-z]+)|'+|\^\{?(?:\\prime|\\ast|\*)\}?"
        r"|\^(?:\{-1\}|-1|\{\(\w\)\})|\\?\||[{}]",
        r"\angle A",
        r"\angle ",
    ),
    # x, AB, \sin A, the area; f(x+1); P(A), (x, y), [ABC], AB/CD
    Row(
        "label",
        rf"(?:{_FUNCTION}(?:\^\d)? ?)?\(?(?:\\?[A-Za-z]+|[A-Za-z ]+)\)?"
        rf"|(?:[fghFGHPENn]|\\?[A-Za-z]{{3,}}|\([A-Za-z] ?\\circ ?[A-Za-z]\)) ?{_ARGUMENT}"
        r"|\\?[A-Za-z] ?\([\w, ]*\)|\([\\A-Za-z, ]+\)|\[[A-Z]{3,}\]|[A-Za-z]{1,3}/[A-Za-z]{1,3}",
        "f(x+1)",
    ),
    # Typesetting in a label, and the `m` of `m\angle A`.
    Row("label typesetting", r"^m ?(?=\(?\\angle)|[\s{}()\\]", r"m\angle A", "m", _UNICODE),
    # `AB`, `BA`, `|AB|` and `\overline{AB}` are one length.
    Row("segment", r"(?:overline|\|)?([A-Z]{2})\|?", "|AB|", flags=_UNICODE),
    # With a relation other than `=` a text is no chain of equal sides.
    Row("no chain", rf"[!:]=|{_INEQUALITY}", "x != 5", "!=", _UNICODE),
    Row(
        "unknown",
        r"\\?[A-Za-z](?:_(?:\{\w+\}|\w))?|\\(?!angle|triangle)[a-z]+",
        r"x_{1}",
    ),
    Row(
        "end of sentence",
        r"[.:;?!] +[A-Za-z]|\\(?:Rightarrow|Leftrightarrow|rightarrow|implies|iff|to)(?![A-Za-z])",
        r"x+1 \Rightarrow x",
        r"\Rightarrow",
    ),
    # Words which no letters of a formula are.
    Row(
        "statement",
        r"\b(?:is|are|was|were|equals)\b.*(?:\d|\\[A-Za-z])"
        r"|(?:\d|\\[A-Za-z]).*\b(?:where|when|if|is|are)\b",
        "It is 150",
        "is 150",
        _LINES,
    ),
    Row("name", r"\\?[A-Za-z]+", r"2\theta", r"\theta", _UNICODE),
)

# --- values in words -----------------------------------------------------------------------------

_WORDS = (
    Row("wordy", r"[A-Za-z][A-Za-z' .-]*", "red and blue"),
    # Short words, and letters in an order.
    Row("short word", r"(?i:yes|no|odd)|[A-Z]{3,}", "No"),
    Row("article or mark", r"^(?:the|an?) |[^a-z ]", "the red one", "the ", _UNICODE),
    Row(
        "clock",
        r"(\d{1,2})(?=:| ?[ap])(?::([0-5]\d))?(?:(?<=:\d\d):([0-5]\d))?(?: ?([ap])\.? ?m\.?)?",
        "9:30 a.m.",
        flags=_ANY_CASE,
    ),
    Row("digit or command", r"\d|\\[A-Za-z]", r"\sqrt{2}", r"\s", _UNICODE),
    Row("digit, command or variable", r"\d|\\[A-Za-z]|^[A-Za-z]$", "x", flags=_UNICODE),
    Row("spelled word", r"[a-z](?:[a-z'-]*[a-z])?", "twenty-one", flags=_UNICODE),
    Row(
        "condition",
        r",? ?\b(?:for (?:all|every|any|each)|where)\b .*",
        "4t for all t",
        " for all t",
        re.DOTALL,
    ),
)

# --- units ---------------------------------------------------------------------------------------

_UNITS = (
    Row("per", r" ?/ ?| per ", "miles per hour", " per ", _IGNORE_CASE),
    Row("raised unit", r"(.*?) ?\^ ?\{? ?([23]|-[1-3]) ?\}?", "m^{2}", flags=_UNICODE),
    Row(
        "degrees",
        r"(?<=[\d})]) ?(?:\^ ?\{? ?(?:\\circ|o\b) ?\}?|\\circ(?![A-Za-z])) ?(?=[A-Za-z]*$)",
        r"45^{\circ}",
        r"^{\circ}",
        _UNICODE,
    ),
    Row(
        "unit in parentheses",
        r"\A(.*[0-9})!%]) ?\(([A-Za-z][A-Za-z /.'-]*)\)\Z",
        "9 (apples)",
        flags=re.DOTALL,
    ),
    Row(
        "with words",
        r"(.*?(?:[\d})!]|(?<![A-Za-z])pi))(\s*)"
        r"((?!pi\b)[A-Za-z€£¥₹][A-Za-z/.' -]*(?:\s*\^\s*\{?\s*(?:[23]|-[1-3])\s*\}?)?)",
        "12 square feet",
        flags=_LINES,
    ),
    Row("mark in a unit", r"[/.']", "km/h", "/", _UNICODE),
    Row("letter", "[A-Za-z]", "12cm", "c", _UNICODE),
    Row("variable", r"(?<![\\A-Za-z])[A-Za-z]", r"\pi r", "r", _UNICODE),
    Row("per in an amount", r" ?/ ?(?=[A-Za-z]{2})", "5/hour", "/", _UNICODE),
)

# --- numbers -------------------------------------------------------------------------------------

_NUMBERS = (
    Row("plain number", r"[-+]?(\d*)(?:\.(\d*))?(?:[eE]([-+]?\d+))?", "-1.5e-3"),
    Row(
        "thousands",
        r"[-+]?[1-9]\d{0,2}(?:(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?"
        r"|(?P<european>(?:\.\d{3}){2,}(?:,\d+)?|\.\d{3},\d+))",
        "1.234.567,5",
    ),
    Row(
        "grouped digits",
        r"(?<![\d.])(?<!\d,)[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)",
        "x = 1,234",
        "1,234",
    ),
    Row(
        "repeating decimal",
        r"([-+]?)(\d*)\.(\d*?)"
        rf"(?:\\(?:overline|bar)\{{?(\d+)\}}?|\((\d+)\)|({_DOTTED_DIGITS}))",
        r"0.1\overline{6}",
    ),
    Row("no digit", r"\D", r"\dot{3}", "\\", _UNICODE),
    Row(
        "number with base",
        r"(-?)([0-9A-Za-z]+)(?:\.([0-9A-Za-z]+))? ?_ ?(?:\{? ?(\d{1,2}|[a-z]{3,7}) ?\}?)",
        "52_{8}",
    ),
    # One sign and one currency: what comes after them is read by another call.
    Row(
        "sign in words",
        r"(?:negative|minus)\s+(?!negative|minus|[-+−])",
        "negative ten",
        "negative ",
        _IGNORE_CASE,
    ),
    Row("currency", r"([-+]?)\s*\\?([$€£¥₹])\s*([^$€£¥₹]*)", r"\$1,234.50", flags=_UNICODE),
    Row(
        "percent",
        r"(.*?)\s*(?:%|percent|per cent|pct)",
        "40 percent",
        flags=re.DOTALL | re.IGNORECASE,
    ),
    Row("spoken word", r"[^\s-]+", "twenty-one", "twenty", _UNICODE),
    Row(
        "token",
        r"\s*(\\[A-Za-z]+|\d+(?:\.\d*)?|\.\d+|\*\*|[-+*/^!(){}\[\]])",
        r"\frac{1}{2}",
        r"\frac",
    ),
    Row("spaced mixed number", r"(?<![\d./])(\d+) (\d+)/(\d+)", "1 1/2"),
    # What multiplies without a sign: a bracket, and a number or root beside a power.
    Row(
        "juxtaposed",
        r"(?<=[\d)}!]) ?(?=\()|(?<=[)}]) ?(?=\\frac)|(?<=\d) (?=\d+ ?(?:\^|\*\*))"
        r"|(?P<power>(?:\^|\*\*) ?(?:\{ ?-?\d+ ?\}|\( ?-?\d+ ?\)|\d+(?= ))) ?(?=\d|\\sqrt)",
        "2^{3} 3^{2}",
        "^{3} ",
    ),
    # A sum, two quotients or factorials, a power of a power or root, a zeroth or first power of
    # anything but ten (`6.2*10^1` is a number).
    Row(
        "arithmetic",
        r"[\d.)}\]!] ?[-+]|\\div(?![A-Za-z])|(?:!|/|\\frac).*(?:!|/|\\frac)"
        r"|(?:\^|\\sqrt)[^()]*\) ?(?:\^|\*\*)|(?<!\b10)(?:\^|\*\*) ?[{(]* ?\+?[01](?![\d.])",
        "12+7",
        "2+",
    ),
    Row("product sign", r"\\(?:times|cdot)(?![A-Za-z])|(?<!\*)\*(?!\*)", r"2 \times 3", r"\times"),
)

# --- typesetting ---------------------------------------------------------------------------------

_TYPESETTING = (
    Row("command", r"\\([A-Za-z]+)((?<=left)\.|(?<=right)\.)?", r"\left.", flags=_UNICODE),
    # Exponents and indices as characters of their own.
    Row("script characters", "[²³¹⁰ⁱ⁴-ⁿ]+|[₀-ₜ]+", "10¹²", "¹²", _UNICODE),
    # A digit with a line or a dot above, which repeats.
    Row("marked digit", "([0-9])[\u0305\u0307]", "0.3\u0307", "3\u0307", _UNICODE),
    Row("typeset", r"[\\~*{<]|[)\]] ?U", r"\frac12", "\\", _UNICODE),
    Row("delimiter", r"(?<!\\)\\[()\[\]]", r"\( 5 \)", r"\(", _UNICODE),
    # The end of a line, or a gap as wide as between two equations.
    Row(
        "break",
        r"(?:\n|\\\\(?:\[[^\]]*\])?|\\newline(?![A-Za-z])|\\q?quad(?![A-Za-z]))[\s&]*",
        r"a=1 \quad b=2",
        r"\quad ",
        _UNICODE,
    ),
    Row(
        "relation sign",
        r"[=<>]|\\(?:le|ge|ne|leq|geq|neq|lt|gt)(?![A-Za-z])",
        r"x \leq 5",
        r"\leq",
        _UNICODE,
    ),
    # What joins two equations at the end of one line or the beginning of the next.
    Row(
        "joint",
        r"\s*(?:[,;&]|\b(?:and)|\\(?:text|mbox)\s*\{\W*(?:and)?\W*\})\s*\Z"
        r"|\A\s*(?:[,;]|(?:and)\b|\\(?:text|mbox)\s*\{\W*(?:and)\W*\})",
        "x = 1 and",
        " and",
    ),
    Row(
        "system",
        r"(?:\\left\s*\\\{)?\s*\\begin\s*\{(cases|aligned|align\*?|gathered|split)\}(.*)"
        r"\\end\s*\{\1\}(?:\s*\\right\s*\.)?",
        r"\begin{cases} x = 1 \\ y = 2 \end{cases}",
        flags=re.DOTALL,
    ),
    # The whole text, or in stars a part of it that stands apart: `2**3**2` has none.
    Row(
        "emphasized",
        r"(\*{1,3}|_{1,2}|`{1,3})(?=[^\s*_`])([^*_`]*[^\s*_`])\1([.,;:!]?)",
        "**16**.",
        flags=re.DOTALL,
    ),
    Row(
        "bold",
        r"(?<![\w)}\]*])\*\*(?=[^\s*])([^*]*[^\s*])\*\*(?![\w({\[*])",
        "**16** apples",
        "**16**",
        _UNICODE,
    ),
    # A backslash of JSON or Python.
    Row(
        "doubled backslash",
        r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|pi|text|mbox|math(?:rm|bf|bb)|left|right|cdot|times"
        r"|infty|circ|begin|end|angle|overline|boxed|quad|theta|alpha|beta|cup|cap|pm|sin|cos|tan"
        r"|log|ln|leq?|geq?|neq?)(?![A-Za-z])|[{}])",
        r"\\frac{1}{2}",
        "\\\\",
        _UNICODE,
    ),
    Row("box", r"\\(?:frame|f)?box(?:ed)?\s*\{", r"\boxed{5}", r"\boxed{", _UNICODE),
    Row("brace", r"\\.|[{}]", r"\{1}", r"\{", re.DOTALL),
    # A single dollar before a number is money.
    Row("money", r"(?:^|[\s(+-])\$\s*[-+]?\.?\d", "$70,000", "$7", _UNICODE),
    Row(
        "gap",
        r"(?<=\d) (?!\d)|(?<![A-Za-z\d]) | (?![A-Za-z\d])|(?<=[A-Za-z]) (?=\d)",
        "2 x",
        " ",
    ),
    Row(
        "script",
        r"([\^_]) ?(-?\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)(?![^{}]*\\begin)",
        "x^12",
        "^12",
    ),
    # LaTeX takes one digit for the exponent: this is a product.
    Row("power beside a power", r"\^ ?(\d)([1-9]\d*)(?= ?\^)", "2^33^2", "^33"),
    Row(
        "first argument",
        rf"(\\(?:frac|binom)) ?{_UNBRACED} ?(?=[\dA-Za-z{{]|\\pi(?![A-Za-z]))",
        r"\frac12",
        r"\frac1",
    ),
    Row(
        "second argument",
        rf"(\\(?:frac|binom) ?\{{[^{{}}]*\}}) ?{_UNBRACED}",
        r"\frac{1}2",
    ),
    Row("unbraced root", r"\\sqrt(\[\d+\])? *(\d+|[A-Za-z])", r"\sqrt[3]5"),
    Row(
        "mixed number",
        r"(?<![\w.}])(?<!\d )(\d+) ?\\frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}",
        r"1\frac{1}{2}",
    ),
)

# --- expressions, for the symbolic stage ---------------------------------------------------------

_EXPRESSIONS = (
    # Degrees or radians, and a logarithm to what base.
    Row(
        "convention",
        rf"(?<![A-Za-z])(?:{_TRIG}(?![A-Za-z])(?!.*(?:\\circ|\\pi))|log(?! ?_))",
        r"\sin 30",
        "sin",
        _UNICODE,
    ),
    # Letters of words and of figures, which the parser would multiply; the base of a number, which
    # it drops; and vectors, which have two products.
    Row(
        "name or base",
        r"(?<![\\A-Za-z])(?!theta|infinity|sqrt|arc|deg)[A-Za-z]{4,}(?![A-Za-z({^])"
        r"|\\(?:angle|triangle|odot|parallel|perp|cong|sim)(?![A-Za-z])"
        r"|(?<![A-Za-z_\\\d{])\d+ ?_|\\(?:vec|overrightarrow).*\\(?:times|cdot)(?![A-Za-z])",
        r"204_{six}",
        "204_",
        _UNICODE,
    ),
    # What problems ask for; repeating it is not an answer.
    Row(
        "question",
        r"\\(?:sum|prod|i*int|oint|lim|gcd|lcm|max|min|lfloor|lceil|floor|ceil|b?mod|pmod|det)"
        r"(?![A-Za-z])|(?<![A-Za-z\\])(?:gcd|lcm|max|min|floor|ceil|mod|det)(?![A-Za-z])"
        r"|\\frac ?\{d\}",
        r"\sum_{k=1}^{10} k",
        r"\sum",
        _UNICODE,
    ),
    # Functions, which do not belong in a constant where the reference has none.
    Row(
        "function",
        rf"(?<![A-Za-z])(?:(?:arc)?{_TRIG}h?|log|ln|lg|exp|cis|e)(?![A-Za-z])",
        r"\arcsin 1",
        "arcsin",
        _UNICODE,
    ),
    # Arithmetic, which does not belong in a number. A sign is one of arithmetic unless a bracket,
    # another sign or nothing stands before it.
    Row(
        "unevaluated",
        r"[^\s({\[^*/+-] ?[-+]|\\(?:times|cdot|div|pm|mp)(?![A-Za-z])|\*(?!\*)|\)\("
        r"|[)}!] ?\d|\d \d|[\d)}] ?\\frac|[\d)}|] ?\|.*\|",
        r"19+0\pi",
        "9+",
        _UNICODE,
    ),
    # Words, clock times and ordinals: the text stage is all they need.
    Row(
        "prose",
        r"(?<!\\)(?<![A-Za-z])[A-Za-z]{3,}(?![A-Za-z({^])",
        "red",
    ),
    Row(
        "time or ordinal",
        r"\d{1,2}:\d\d.*|\d{1,2} ?[apAP]\.? ?[mM]\.?|\d+(?:st|nd|rd|th)",
        "9 a.m.",
    ),
    Row("formula sign", r"[\\^_=+*<>|{}\[\]]", "x+1", "+", _UNICODE),
    # Functions and names as on a calculator.
    Row(
        "plain function",
        r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sqrt|pi|sin|cos|tan|cot|sec|csc|ln|log|exp|infinity"
        r"|theta)(?![A-Za-z])",
        "sqrt(2)",
        "sqrt",
        _UNICODE,
    ),
    Row(
        "argument in parentheses",
        r"(\\sqrt|\^) ?\((?=([^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*)*)\))\2\)",
        "x^(1/2)",
        "^(1/2)",
        _UNICODE,
    ),
    # The parser drops an index or a prime after anything but a name, as if it were not there.
    Row("dropped index", r"[)\]}\d] ?[_']", "(x+1)_2", ")_", _UNICODE),
    Row(
        "angular function",
        rf"\\(?:arc)?{_TRIG}(?![A-Za-z])|cis|e ?\^|\\exp|\\pi",
        r"\tan 15^\circ",
        r"\tan",
        _UNICODE,
    ),
    Row(
        "degree sign",
        r"((?:\d+ ?)?\\frac\{[^{}]*\}\{[^{}]*\}|\d+(?:\.\d+)?|\.\d+|\\?[A-Za-z]+|\([^()]*\)"
        r"|\{[^{}]*\})?"
        r"(?: ?\^ ?\{? ?\\circ ?\}?|\\circ(?![A-Za-z])| ?(?<=[\d)}\s])deg(?:rees?)?\b)",
        r"\tan 15^\circ",
        r"15^\circ",
        _UNICODE,
    ),
    # `x \in [1, 2]`: the variable of a region.
    Row("member", r"^([A-Za-z]) *\\in(?![A-Za-z])", r"x \in [1, 2]", r"x \in"),
)

TABLE: tuple[Row, ...] = (
    *_ANSWERS,
    *_SEPARATORS,
    *_SHAPES,
    *_EQUATIONS,
    *_WORDS,
    *_UNITS,
    *_NUMBERS,
    *_TYPESETTING,
    *_EXPRESSIONS,
)

PATTERNS: dict[str, re.Pattern[str]] = {
    row.name: re.compile(row.pattern, row.flags) for row in TABLE
}
