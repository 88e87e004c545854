r"""References with several equations, chains, labels and function names, spoiled and rewritten.

Each reference is drawn as a structure (statements of a label and its values), written out, and then
either spoiled in one part or written in another harmless way. What changes is decided by the
structure, never by patterns over the text: these rules share nothing with the labeled tables.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple


class Case(NamedTuple):
    """One pair, and what was done to the reference."""

    reference: str
    prediction: str
    harmless: bool
    how: str


class Family(NamedTuple):
    """One drawn reference with everything that can be made of it."""

    reference: str
    spoiled: Sequence[tuple[str, str]]
    """(text, what was done)."""
    harmless: Sequence[tuple[str, str]]


def cases(count: int, seed: int, real: Sequence[str] = ()) -> list[Case]:
    """At least `count` spoiled and `count` harmless pairs, all different, in a fixed order."""
    rng = random.Random(seed)
    found: dict[tuple[str, str], Case] = {}
    wanted = {False: count, True: count}
    for number in range(20 * count):
        if max(wanted.values()) <= 0:
            break
        family = MAKERS[number % len(MAKERS)](rng, real)
        for harmless, made in ((False, family.spoiled), (True, family.harmless)):
            for text, how in made:
                pair = family.reference, text
                if text != family.reference and pair not in found:
                    found[pair] = Case(*pair, harmless, how)
                    wanted[harmless] -= 1
    return list(found.values())


# --- values --------------------------------------------------------------------------------------


def number(rng: random.Random) -> Fraction:
    top = rng.choice([n for n in range(-40, 90) if n])
    return Fraction(top, rng.choice((1, 1, 1, 2, 4, 5, 8)))


def another(value: Fraction, rng: random.Random) -> Fraction:
    """A number with another size and sign, and no percentage of the first."""
    return value + rng.choice((1, 2, 3, -1, -2, Fraction(1, 2), 7))


def decimal(value: Fraction) -> str:
    return f"{float(value):.10f}".rstrip("0").rstrip(".")


def written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def rewritten(value: Fraction, rng: random.Random) -> str:
    """The same number in another spelling."""
    ways = [decimal(value), f"{decimal(value)}{'' if '.' in decimal(value) else '.'}0"]
    if value.denominator > 1:
        ways += [written(value).replace("frac", "dfrac"), f"{value.numerator}/{value.denominator}"]
        top, bottom = 3 * value.numerator, 3 * value.denominator
        ways.append(rf"\frac{{{top}}}{{{bottom}}}")
    return rng.choice([way for way in ways if way != written(value)])


# --- several equations ---------------------------------------------------------------------------

NAMES = (
    "x",
    "y",
    "z",
    "a",
    "b",
    "c",
    "k",
    "m",
    "n",
    "p",
    "AB",
    "CD",
    "x_1",
    "x_2",
    r"\alpha",
    r"\beta",
)
GAPS = ("\n", r" \\ ", r"\\", r" \quad ", r"\qquad ", ", ", "; ", r"\text{ and }", ",\n", " and ")


def system(rng: random.Random, real: Sequence[str]) -> Family:
    """`y=1\nz=2`: two or three equations between one kind of gap."""
    names = rng.sample(NAMES, rng.choice((2, 2, 3)))
    values = [number(rng) for _ in names]
    sign, gap, other_gap = rng.choice(("=", " = ")), rng.choice(GAPS), rng.choice(GAPS)

    def text(labels: Sequence[str], said: Sequence[str], gap: str = gap) -> str:
        return gap.join(f"{name}{sign}{value}" for name, value in zip(labels, said, strict=True))

    said = [written(value) for value in values]
    at = rng.randrange(len(names))
    off = [*said]
    off[at] = written(another(values[at], rng))
    fresh = [*names]
    fresh[at] = rng.choice([n for n in ("u", "v", "w", "EF") if n not in names])
    spoiled = [
        (text(names, off), f"value {at} of a system"),
        (text(names, off, other_gap), f"value {at} of a system, another gap"),
        (text(fresh, said), f"label {at} of a system"),
        (text(names[:at] + names[at + 1 :], said[:at] + said[at + 1 :]), f"equation {at} left out"),
    ]
    if values[0] != values[1]:
        spoiled.append((text(names, [said[1], said[0], *said[2:]]), "two values exchanged"))
    order = rng.sample(range(len(names)), len(names))
    reordered = [names[i] for i in order], [said[i] for i in order]
    again = [rewritten(value, rng) if i == at else said[i] for i, value in enumerate(values)]
    lines = text(names, said, r" \\ ")
    harmless = [
        (text(names, said, other_gap), "another gap"),
        (text(*reordered), "another order"),
        (text(*reordered, other_gap), "another order and gap"),
        (text(names, again, other_gap), "a number in another spelling"),
        (rf"\begin{{cases}}{lines}\end{{cases}}", "a system in braces"),
        (", ".join(f"{s} = {n}" for n, s in zip(names, said, strict=True)), "sides exchanged"),
    ]
    return Family(text(names, said), spoiled, harmless)


def real_system(rng: random.Random, real: Sequence[str]) -> Family:
    """Two references of MATH as the values of two names."""
    values = [
        r for r in real if re.fullmatch(r"-?(?:\d{1,4}|\\frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\})", r)
    ]
    if not values:
        return system(rng, real)
    first, second, third = rng.sample(values, 3)
    one, two = rng.sample(("x", "y", "r", "s", "AB", "BC"), 2)
    gap, other_gap = rng.choice(GAPS), rng.choice(GAPS)
    reference = f"{one} = {first}{gap}{two} = {second}"
    spoiled = [
        (f"{one} = {third}{gap}{two} = {second}", "the first of two values of MATH"),
        (f"{one} = {first}{gap}{two} = {third}", "the second of two values of MATH"),
        (f"{two} = {first}{gap}{one} = {second}", "labels exchanged"),
    ]
    harmless = [
        (f"{one}={first}{other_gap}{two}={second}", "another gap"),
        (f"{two} = {second}{gap}{one} = {first}", "another order"),
        (f"{first} = {one}{gap}{second} = {two}", "sides exchanged"),
    ]
    distinct = len({numeric(v) for v in (first, second, third)}) == 3
    return Family(reference, spoiled if distinct else (), harmless)


def numeric(text: str) -> float:
    fraction = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", text)
    if fraction:
        return float(f"{fraction[1]}1") * int(fraction[2]) / int(fraction[3])
    root = re.fullmatch(r"(-?)(\d*)\\sqrt\{(\d+)\}", text)
    if root:
        return float(f"{root[1]}1") * int(root[2] or 1) * int(root[3]) ** 0.5
    return float(text)


# --- chains --------------------------------------------------------------------------------------


def chain(rng: random.Random, real: Sequence[str]) -> Family:
    r"""`PQ = 5\times 3 = 15`, `k = \frac{1}{2} = 0.5`."""
    name = rng.choice(NAMES)
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    value = rng.choice((Fraction(a * b), Fraction(a, rng.choice((2, 4, 5, 8)))))
    whole = value == a * b
    way = (
        rf"{a}\times {b}"
        if whole
        else written(value)
        if value.denominator > 1
        else f"{2 * a}/{2 * a // int(value)}"
    )
    other = rf"{a}\cdot {b}" if whole else f"{value.numerator}/{value.denominator}"
    wrong_way = rf"{a}\times {b + 1}" if whole else written(value + 1)
    last, wrong = decimal(value), decimal(value + rng.choice((1, 2, 10)))
    reference = f"{name} = {way} = {last}"
    spoiled = [
        (f"{name} = {wrong_way} = {last}", "the middle of a chain"),
        (f"{name} = {way} = {wrong}", "the end of a chain"),
        (f"{name} = {wrong_way} = {wrong}", "middle and end of a chain"),
        (f"{wrong_way} = {last}", "the middle of a chain, no label"),
        (f"w = {way} = {last}", "the label of a chain"),
    ]
    harmless = [
        (f"{name}={way}={last}", "no spaces"),
        (f"{name} = {last}", "the middle left out"),
        (last, "the value alone"),
        (f"{name} = {other} = {last}", "the middle in another spelling"),
        (f"{way} = {last}", "no label"),
        (f"{last} = {way} = {name}", "turned round"),
    ]
    return Family(reference, spoiled, harmless)


def formula_chain(rng: random.Random, real: Sequence[str]) -> Family:
    r"""`A = \pi r^2 = 9\pi`: a formula on the way."""
    r = rng.randint(2, 15)
    name, formula, wrong, other, value, off = rng.choice(
        (
            ("A", r"\pi r^2", r"\pi r^3", r"r^2 \pi", rf"{r * r}\pi", rf"{r * r + 1}\pi"),
            ("C", r"2\pi r", r"3\pi r", r"2 r \pi", rf"{2 * r}\pi", rf"{2 * r - 1}\pi"),
            ("V", "abc", "abd", "cab", f"{r * 6}", f"{r * 6 + 5}"),
            ("S", r"\frac{n(n+1)}{2}", r"\frac{n(n-1)}{2}", r"\frac{n^2+n}{2}", f"{r}", f"{r + 2}"),
        )
    )
    reference = f"{name} = {formula} = {value}"
    spoiled = [
        (f"{name} = {wrong} = {value}", "a formula"),
        (f"{name} = {formula} = {off}", "the value of a formula"),
        (f"{name} = {formula}", "the value left out"),
        (f"W = {formula} = {value}", "the label of a formula"),
    ]
    harmless = [
        (f"{name} = {other} = {value}", "the formula in another order"),
        (f"{name}={value}", "no formula"),
        (value, "the value alone"),
    ]
    return Family(reference, spoiled, harmless)


# --- numbers on the left -------------------------------------------------------------------------


def left_number(rng: random.Random, real: Sequence[str]) -> Family:
    r"""`5=x`, `\frac{40}{3}=a`."""
    name, value = rng.choice(NAMES), number(rng)
    said, sign = written(value), rng.choice(("=", " = "))
    spoiled = [
        (f"{written(another(value, rng))}{sign}{name}", "a number on the left"),
        (f"{name}{sign}{written(another(value, rng))}", "a number on the left, turned round"),
        (name, "the number left out"),
        (f"{said}{sign}w", "the name on the right"),
    ]
    harmless = [
        (f"{name}{sign}{said}", "turned round"),
        (said, "the value alone"),
        (f"{rewritten(value, rng)}{sign}{name}", "another spelling"),
    ]
    return Family(f"{said}{sign}{name}", spoiled, harmless)


def left_equation(rng: random.Random, real: Sequence[str]) -> Family:
    """`7 = 11a+c`, `0 = x^2-4`: neither side is the answer."""
    a, b, c = rng.randint(2, 19), rng.randint(2, 30), rng.randint(2, 9)
    x, y = rng.sample("xyzabc", 2)
    left, first, second, off = rng.choice(
        (
            (b, f"{a}{x}", y, f"{a + 1}{x}+{y}"),
            (0, f"{x}^2", f"{-b}", f"{x}^2{-b - 1}"),
            (a, f"{c}{x}", f"{c + 1}{y}", f"{c}{x}+{c + 2}{y}"),
        )
    )
    plus = "" if second.startswith("-") else "+"
    right = f"{first}{plus}{second}"
    reference = f"{left} = {right}"
    twice = re.sub(r"(?<![\^\d])(\d*)([a-z])", lambda m: f"{2 * int(m[1] or 1)}{m[2]}", right)
    twice = f"{2 * left} = " + (twice if plus else f"2{first}{-2 * b}")
    spoiled = [
        (right, "the number on the left taken away"),
        (f"{left + 1} = {right}", "the number on the left"),
        (f"{left} = {off}", "a coefficient on the right"),
        (f"{left}", "only the number on the left"),
    ]
    harmless = [
        (f"{right} = {left}", "turned round"),
        (f"{left}={right}", "no spaces"),
        (twice, "twice both sides"),
        (f"{left} = {second}+{first}", "another order of terms"),
    ]
    return Family(reference, spoiled, harmless)


# --- labels and function names -------------------------------------------------------------------

LABELS = (
    # label, another one, the same one otherwise
    (r"\sin A", r"\cos A", r"\sin(A)"),
    (r"\tan B", r"\tan C", r"\tan{B}"),
    (r"m\angle A", r"m\angle B", r"\angle A"),
    (r"\angle ABC", r"\angle ACB", r"\angle{ABC}"),
    ("a_5", "a_6", "a_{5}"),
    ("S_{10}", "S_{9}", "S_{10}"),
    ("f(2)", "f(3)", "f( 2 )"),
    ("f^{-1}(3)", "f(3)", "f^{-1} (3)"),
    ("y'", "y''", "y '"),
    ("P(X=3)", "P(X=4)", "P(X = 3)"),
    ("P(A|B)", "P(B|A)", "P(A | B)"),
    ("|AB|", "|AC|", "| AB |"),
    (r"\overline{AB}", r"\overline{CD}", r"\overline{ AB }"),
    (r"\frac{AB}{CD}", r"\frac{AB}{CE}", r"\dfrac{AB}{CD}"),
    ("V_{max}", "V_{min}", r"V_{\text{max}}"),
    (r"\lambda_1", r"\lambda_2", r"\lambda_{1}"),
    ("h(f(1))", "f(h(1))", "h( f(1) )"),
)


def label(rng: random.Random, real: Sequence[str]) -> Family:
    r"""`\sin A = \frac12`, `m\angle A = 30`: what the value is said of is no plain name."""
    name, wrong, same = rng.choice(LABELS)
    value, sign = number(rng), rng.choice(("=", " = "))
    said, off = written(value), written(another(value, rng))
    spoiled = [
        (f"{name}{sign}{off}", "the value of a label"),
        (off, "the value of a label, alone"),
        (f"{wrong}{sign}{said}", "a label"),
        (f"{off}{sign}{name}", "the value of a label, turned round"),
        (name, "only the label"),
    ]
    harmless = [
        (said, "the value alone"),
        (rewritten(value, rng), "the value alone in another spelling"),
        (f"{name}{sign}{rewritten(value, rng)}", "another spelling of the value"),
        (f"{same}{sign}{said}", "another spelling of the label"),
        (f"{said}{sign}{name}", "turned round"),
    ]
    return Family(f"{name}{sign}{said}", spoiled, harmless)


def ratio(rng: random.Random, real: Sequence[str]) -> Family:
    """`AB:CD=2:3`."""
    a, b = rng.sample((2, 3, 5, 7, 11, 13, 17), 2)
    name, wrong, same = rng.choice(
        (
            ("AB:CD", "CD:AB", "AB : CD"),
            ("V_{1}:V_{2}", "V_{1}:V_{3}", "V_1:V_2"),
            (r"S_1:S_2", "S_2:S_3", "S_{1} : S_{2}"),
            ("x:y", "y:z", "x : y"),
        )
    )
    spoiled = [
        (f"{name}={a}:{b + 1}", "a ratio"),
        (f"{b}:{a}", "a ratio turned over"),
        (f"{wrong}={a}:{b}", "what the ratio is of"),
    ]
    harmless = [
        (f"{a}:{b}", "the ratio alone"),
        (f"{same} = {a}:{b}", "another spelling of the label"),
        (f"{name} = {a}:{b}", "spaces"),
    ]
    return Family(f"{name}={a}:{b}", spoiled, harmless)


FUNCTIONS = (
    ("C(h)", "D(h)", "h"),
    ("f(x)", "g(x)", "x"),
    ("f^{-1}(x)", "f(x)", "x"),
    ("y'", "y", "x"),
    ("a_n", "a_m", "n"),
    ("P(t)", "P(s)", "t"),
    ("(f \\circ g)(x)", "(g \\circ f)(x)", "x"),
    ("f(x+1)", "f(x-1)", "x"),
    ("f''(x)", "f'(x)", "x"),
    ("T_{n}", "U_{n}", "n"),
)


def function(rng: random.Random, real: Sequence[str]) -> Family:
    """`C(h) = 4h + 4`: equal left sides, and right sides that are compared as expressions."""
    name, wrong, x = rng.choice(FUNCTIONS)
    a, b, k = rng.randint(2, 9), rng.randint(1, 9), rng.randint(2, 5)
    sign = rng.choice(("=", " = "))
    body = f"{k * a}{x} + {k * b}"
    root = rf"{a}{x}^2 - \frac{{{b}}}{{{k}}}"
    said, same, off = rng.choice(
        (
            (body, f"{k}({a}{x}+{b})", f"{k * a}{x} + {k * b + 1}"),
            (body, f"{k * b}+{k * a}{x}", f"{k * a + 1}{x} + {k * b}"),
            (root, rf"-\frac{{{b}}}{{{k}}} + {a}{x}^{{2}}", rf"{a}{x}^2 + \frac{{{b}}}{{{k}}}"),
            (root, rf"\frac{{{a * k}{x}^2-{b}}}{{{k}}}", rf"{a}{x}^3 - \frac{{{b}}}{{{k}}}"),
        )
    )
    spoiled = [
        (f"{name}{sign}{off}", "the body of a function"),
        (off, "the body of a function, alone"),
        (f"{wrong}{sign}{said}", "the name of a function"),
        (f"{name}{sign}{off}{sign}{said}", "a false step on the way to the body"),
    ]
    harmless = [
        (f"{name}{sign}{same}", "the body in another form"),
        (same, "the body alone in another form"),
        (f"{name}{sign}{same}{sign}{said}", "a step on the way to the body"),
        (said, "the body alone"),
    ]
    return Family(f"{name}{sign}{said}", spoiled, harmless)


def real_equation(rng: random.Random, real: Sequence[str]) -> Family:
    """An equation of MATH: a coefficient changed, or written with other spaces and turned round."""
    equations = [r for r in real if r.count("=") == 1 and "," not in r and "%" not in r]
    if not equations:
        return left_equation(rng, real)
    reference = rng.choice(equations)
    left, right = (side.strip() for side in reference.split("="))
    places = list(re.finditer(r"(?<![\^\d.])\d+(?![\d.])", reference))
    spoiled = []
    if places:
        place = rng.choice(places)
        changed = str(int(place.group()) + rng.choice((1, 2, 3)))
        text = reference[: place.start()] + changed + reference[place.end() :]
        spoiled.append((text, "a number of an equation of MATH"))
    if right == "0":
        spoiled.append((left, "an equation of MATH without its right side"))
        spoiled.append((f"{left} = 1", "the right side of an equation of MATH"))
    harmless = [
        (f"{right} = {left}", "turned round"),
        (reference.replace(" ", ""), "no spaces"),
        (rf"\({left}\,=\,{right}\)", "thin spaces"),
    ]
    return Family(reference, spoiled, harmless)


MAKERS: tuple[Callable[[random.Random, Sequence[str]], Family], ...] = (
    system,
    chain,
    left_number,
    label,
    function,
    real_system,
    left_equation,
    formula_chain,
    ratio,
    real_equation,
    system,
)
