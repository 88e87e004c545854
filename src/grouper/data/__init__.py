"""Problems from files, the Hub, or a generator; layer 1, no torch.

    SourceConfig --load_problems--> ProblemSet (problems, fingerprint, invalid rows, notes)

`sources.py` is the table of sources and of the meaning of a row's columns; `reading.py` reads rows,
streamed or in full; `generated.py` is the table of sources that generate problems
(`arithmetic.py`, `calculation.py`, `stories.py`); `references.py` checks the reference answers;
`problems.py` filters, splits, mixes and writes; `loading.py` calls them in order. `audit.py` and
`overlap.py` look for errors and leaks.
"""

from grouper.data.loading import check_source as check_source
from grouper.data.loading import load_problems as load_problems
from grouper.data.overlap import Overlap as Overlap
from grouper.data.overlap import find_overlap as find_overlap
from grouper.data.problems import ProblemSet as ProblemSet
from grouper.data.problems import hold_out as hold_out
from grouper.data.problems import without as without
from grouper.data.sources import SOURCES as SOURCES
