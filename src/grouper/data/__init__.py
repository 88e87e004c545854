"""Problems from files, the Hub, or a generator; layer 1, no torch.

    SourceConfig --load_problems--> ProblemSet (problems, fingerprint, invalid rows, notes)

`sources.py` is the table of sources and of what a row's columns mean; `reading.py` reads rows,
streamed or whole; `arithmetic.py` generates them; `references.py` checks the reference answers;
`problems.py` filters, splits, mixes and writes; `loading.py` puts it together. `audit.py` and
`overlap.py` look for errors and leaks.
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
