r"""Grading in two stages that are never fused: find the answer, then compare it.

`extract` follows the prompt format's answer contract; `equivalence.exact` compares by text and by
exact numbers, `symbolic.judge` as expressions. `Grader` does all of it for completions, the
symbolic comparison in worker processes behind a hard deadline. Model output is data: nothing here
raises on it or runs it.
"""

from grouper.grading.extract import extract, extract_lenient
from grouper.grading.pool import (
    TEXT_ALONE,
    Grader,
    by_text_alone,
    grade,
    require_symbolic,
)

__all__ = [
    "TEXT_ALONE",
    "Grader",
    "by_text_alone",
    "extract",
    "extract_lenient",
    "grade",
    "require_symbolic",
]
