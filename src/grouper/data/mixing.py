"""Several problem sets by weight, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grouper.data.problem_set import (
    ProblemSet,
    Quarantined,
    fingerprint_of,
    require_distinct_ids,
)
from grouper.errors import DataError
from grouper.types import Problem


def mix(members: Sequence[tuple[ProblemSet, float]], *, seed: int) -> ProblemSet:
    """As many problems as the weights allow without using one twice, in a seeded order.

    The member that runs out first, for its weight, sets the size; of the others a random part is
    taken. Ids that two members share get the member's position in front (`2/...`).

    Args:
        members: (set, weight) each.
        seed: of the choice and the order.

    Raises:
        DataError: a member is too small for its weight.
    """
    size = min(len(problems) / weight for problems, weight in members)
    counts = [round(size * weight) for _, weight in members]
    draw = np.random.default_rng([seed, len(members)])
    chosen: list[Problem] = []
    shared = _shared_ids([problems for problems, _ in members])
    for position, ((problems, _), count) in enumerate(zip(members, counts, strict=True), start=1):
        if count == 0:
            raise DataError(
                f"{problems.name} would give no problem at this weight",
                where="data.mixture",
                fix="Raise its weight, or give the others more problems.",
            )
        places = sorted(draw.permutation(len(problems))[:count].tolist())
        for place in places:
            problem = problems.problems[place]
            if problem.id in shared:
                problem = replace(problem, id=f"{position}/{problem.id}")
            chosen.append(problem)
    order = draw.permutation(len(chosen)).tolist()
    mixed = [chosen[place] for place in order]
    require_distinct_ids(mixed, where="data.mixture")
    parts = [
        f"{count:,} of the {len(problems):,} in {problems.name}"
        for (problems, _), count in zip(members, counts, strict=True)
    ]
    return ProblemSet(
        name="+".join(problems.name for problems, _ in members),
        problems=tuple(mixed),
        fingerprint=fingerprint_of(mixed),
        quarantined=tuple(
            Quarantined(row=row.row, reason=f"{problems.name}: {row.reason}")
            for problems, _ in members
            for row in problems.quarantined
        ),
        notes=(
            *(f"{p.name}: {note}" for p, _ in members for note in p.notes),
            f"mixture: {', '.join(parts)}.",
        ),
        left_out=sum(p.left_out + len(p) for p, _ in members) - len(mixed),
    )


def _shared_ids(sets: Sequence[ProblemSet]) -> set[str]:
    seen: set[str] = set()
    shared: set[str] = set()
    for problems in sets:
        ids = {problem.id for problem in problems.problems}
        shared |= ids & seen
        seen |= ids
    return shared
