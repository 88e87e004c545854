r"""Grading in two stages that are never fused: find the answer, then compare it.

`extract` follows the prompt format's answer contract; `equivalent` compares by text, by exact
numbers, and as expressions. `Grader` does both for completions, the symbolic comparison in worker
processes behind a hard deadline. Model output is data: nothing here raises on it or runs it.
"""

from grouper.grading.equivalence import Equivalence, equivalent
from grouper.grading.extract import Extraction, extract, extract_lenient
from grouper.grading.pool import (
    TEXT_ALONE,
    Grader,
    by_text_alone,
    grade,
    require_symbolic,
)

__all__ = [
    "TEXT_ALONE",
    "Equivalence",
    "Extraction",
    "Grader",
    "by_text_alone",
    "equivalent",
    "extract",
    "extract_lenient",
    "grade",
    "require_symbolic",
]
