"""Problems from files, the Hub, or a generator; layer 1, no torch.

    SourceConfig --load_problems--> ProblemSet (problems, fingerprint, quarantined rows)

`sources.py` is the table, `rows.py` reads files, `arithmetic.py` generates, `loading.py` joins;
`overlap.py` looks for leaks between training and test problems.
"""

from grouper.data.arithmetic import ArithmeticOptions
from grouper.data.loading import check_source, load_problems
from grouper.data.overlap import Overlap, find_overlap
from grouper.data.problem_set import ProblemSet, Quarantined
from grouper.data.sources import SOURCES, Source

__all__ = [
    "SOURCES",
    "ArithmeticOptions",
    "Overlap",
    "ProblemSet",
    "Quarantined",
    "Source",
    "check_source",
    "find_overlap",
    "load_problems",
]
