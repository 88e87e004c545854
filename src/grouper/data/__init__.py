"""Problems from files, the Hub, or a generator; layer 1, no torch.

    SourceConfig --load_problems--> ProblemSet (problems, fingerprint, quarantined rows)

`sources.py` is the table, `rows.py` reads files, `arithmetic.py` generates, `loading.py` joins.
"""

from grouper.data.arithmetic import ArithmeticOptions
from grouper.data.loading import check_source, load_problems
from grouper.data.problem_set import ProblemSet, Quarantined
from grouper.data.sources import SOURCES, Source

__all__ = [
    "SOURCES",
    "ArithmeticOptions",
    "ProblemSet",
    "Quarantined",
    "Source",
    "check_source",
    "load_problems",
]
