r"""Grading in two stages that are never fused: find the answer, then compare it.

`extract` follows the prompt format's answer contract; `equivalence.exact` compares by text and by
exact numbers, `symbolic.judge` as expressions. `Grader` does all of it for completions, the
symbolic comparison in worker processes behind a hard deadline. Model output is data: nothing here
raises on it or runs it.
"""

from grouper.grading.extract import extract as extract
from grouper.grading.lenient import extract_lenient as extract_lenient
from grouper.grading.pool import TEXT_ALONE as TEXT_ALONE
from grouper.grading.pool import Grader as Grader
from grouper.grading.pool import by_text_alone as by_text_alone
from grouper.grading.pool import grade as grade
from grouper.grading.pool import require_symbolic as require_symbolic
