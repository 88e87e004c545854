"""What a run's record knows of its test problems, as tables: probes and twins.

The report and the model card show the same.
"""

from __future__ import annotations

from pathlib import Path

from grouper.runs.probes import probe_lines, probe_table, read_probes
from grouper.runs.twin_results import read_twins
from grouper.tables import Block, Line, Tone


def contamination_blocks(run: Path) -> list[Block]:
    """Return what was found out of a run's problems; nothing was: no blocks.

    Raises:
        RunFolderError: a record is damaged.
    """
    blocks: list[Block] = []
    probes = read_probes(run)
    if probes:
        blocks += [probe_table(probes), *probe_lines(probes)]
    for recorded in read_twins(run):
        comparison = recorded.comparison
        tone: Tone = "unsure" if comparison.paired.verdict == "worse" else "plain"
        blocks.append(Line(f"Other numbers, {recorded.split}: {comparison.sentence}", tone))
    return blocks
