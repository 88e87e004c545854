r"""Labelled pairs: what a third look found, and its near misses.

Rows are (reference, prediction, verdict, note), labels as in `equivalence_table.py`.
"""

# fmt: off
THIRD_ROWS: list[tuple[str, str, str, str]] = [
    # powers too large to write down
    ("2024^{4046}", "2024^{4046}", "+", "a large power is itself"),
    ("2024^{4046}", "2024^{4047}", "-", "another exponent"),
    ("2024^{4046}", "2025^{4046}", "-", "another base"),
    ("2024^{4046}", r"$2024^{4046}$ ways", "+", "with dollars and words"),
    ("2024^{4046}", "n = 2024^{4046}", "+", "with a label"),
    ("2024^{4046}", "2024", "-", "the base alone"),
    ("2024^{4046}", "4046^{2024}", "-", "turned over"),
    ("2^{100000}", "4^{50000}", "+", "another base of the same power"),
    ("2^{100000}", "4^{50001}", "-", "another base of another power"),
    ("2^{100000}", "2^{99999} * 2", "+", "a factorization, as with small numbers"),
    ("2^{100000}", "2^{100000} + 1 - 1", "-", "arithmetic left to be done"),
    ("2^{100000}", "-2^{100000}", "-", "sign"),
    ("2^{100000}", "5", "-", "a small number"),
    ("2^{100000}", "x", "-", "a variable"),
    ("5", "2^{100000}", "-", "a large power for a small number"),
    ("2^{100000} - 1", "-1 + 2^{100000}", "+", "terms in another order"),
    ("2^{100000} - 1", "2^{100000} + 1", "-", "a sign in it"),
    ("2^{100000} - 1", "2^{100000}", "-", "a term less"),
    (r"3 \cdot 2^{100000}", r"2^{100000} \cdot 3", "+", "factors in another order"),
    (r"\frac{4^{50000} - 1}{3}", r"\frac{2^{100000} - 1}{3}", "+", "a fraction"),
    (r"\frac{4^{50000} - 1}{3}", r"\frac{2^{100000} - 1}{2}", "-", "another fraction"),
    (r"2^{-100000}", r"\frac{1}{2^{100000}}", "+", "a negative exponent"),
    ("7^{7^7}", "7^{823543}", "+", "a power of a power"),
    ("7^{7^7}", "7^{49}", "-", "not a power of a power"),
    ("(2^{100000}, 3)", "(4^{50000}, 3)", "+", "in a pair"),
    ("(2^{100000}, 3)", "(4^{50000}, 4)", "-", "in a pair"),
    ("2^{100000}, 3", "3, 2^{100000}", "+", "in a list"),
    ("x = 2^{100000}", "4^{50000}", "+", "a reference with a label"),
    ("x = 2^{100000}", "y = 4^{50000}", "-", "another label"),
    # where precision ends there is no yes
    ("x + 2^{20000}", "x + 2^{20000} + 1", "-", "a term that no precision shows"),
    ("x + 2^{20000}", "2^{20000} + x", "+", "terms in another order"),
    ("x + y = 2^{100000}", "y + x = 2^{100000} + 1", "-", "an equation"),
    ("x + y = 10^{40}", "y + x = 10^{40} + 1", "-", "an equation of a long number"),
    ("x + y = 10^{40}", "2x + 2y = 2 * 10^{40}", "+", "an equation of a long number"),
    ("x + y = 2^{100000}", "y + x = 2^{100000}", "+", "an equation, turned"),
    ("e^{100000}", "e^{100000} + 1", "-", "a large power of e"),
    ("e^{100}", "e^{100} + 1", "-", "a power of e"),
    ("e^{100} + 1", "1 + e^{100}", "+", "a power of e"),
    (r"\pi + 2^{100000}", r"\pi + 2^{100000} + 1", "-", "beside an irrational number"),
    ("9^{9^{9^{9^{9}}}}", "5", "0", "a tower"),
    (r"\sqrt{2^{100000} + 1}", "5", "0", "a root of what cannot be written down"),
]
# fmt: on
