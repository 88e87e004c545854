r"""Grading in two stages that are never fused: find the answer, then compare it.

`extract` follows the prompt format's answer contract; `equivalent` is a ladder of named rungs
(text, number, symbolic). `Grader` runs both over completions, the symbolic rung in worker
processes behind a hard deadline. Model output is data: nothing here raises on it or runs it.
"""

from grouper.grading.equivalence import Equivalence, equivalent
from grouper.grading.extraction import Extraction, extract
from grouper.grading.grader import (
    TEXT_ALONE,
    Grader,
    by_text_alone,
    check_reference,
    grade,
    require_symbolic,
)
from grouper.grading.lenient import extract_lenient

__all__ = [
    "TEXT_ALONE",
    "Equivalence",
    "Extraction",
    "Grader",
    "by_text_alone",
    "check_reference",
    "equivalent",
    "extract",
    "extract_lenient",
    "grade",
    "require_symbolic",
]
