"""Problems from files, the Hub, or a generator; layer 1, no torch.

    SourceConfig --load_problems--> ProblemSet (problems, fingerprint, quarantined rows, notes)

`sources.py` is the table; `rows.py` and `hub.py` read, `streaming.py` what is larger than memory;
`columns.py`, `templates.py` and `arithmetic.py` make problems of rows; `references.py` asks the
grader; `filters.py`, `mixing.py` and `splitting.py` choose; `loading.py` joins. `audit.py` and
`overlap.py` look for what is wrong.
"""

from grouper.data.arithmetic import ArithmeticOptions
from grouper.data.loading import check_source, load_problems
from grouper.data.overlap import Overlap, find_overlap
from grouper.data.problem_set import ProblemSet, Quarantined
from grouper.data.sources import SOURCES, Source
from grouper.data.splitting import hold_out, without

__all__ = [
    "SOURCES",
    "ArithmeticOptions",
    "Overlap",
    "ProblemSet",
    "Quarantined",
    "Source",
    "check_source",
    "find_overlap",
    "hold_out",
    "load_problems",
    "without",
]
