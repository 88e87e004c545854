"""Problems from files, the Hub, or a generator; layer 1, no torch.

    SourceConfig --load_problems--> ProblemSet (problems, fingerprint, quarantined rows, notes)

`sources.py` is the table, and says what a row's columns mean; `reading.py` reads rows, streamed or
whole; `arithmetic.py` makes them up; `references.py` asks the grader; `problems.py` filters,
splits, mixes and writes; `loading.py` joins. `audit.py` and `overlap.py` look for what is wrong.
"""

from grouper.data.loading import check_source, load_problems
from grouper.data.overlap import Overlap, find_overlap
from grouper.data.problems import ProblemSet, hold_out, without
from grouper.data.sources import SOURCES

__all__ = [
    "SOURCES",
    "Overlap",
    "ProblemSet",
    "check_source",
    "find_overlap",
    "hold_out",
    "load_problems",
    "without",
]
