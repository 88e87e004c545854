"""The table of `grouper init` on real models is that of its results."""

from __future__ import annotations

import json

from benchmarks.learning.init_real import PAGE, RESULT, render


def test_the_page_has_the_results() -> None:
    rows = json.loads(RESULT.read_text())
    page = PAGE.read_text()
    assert render(page, rows) == page, "run `python -m benchmarks.learning.init_real TRAIN.jsonl`"
    assert rows.keys()
    for row in rows.values():
        groups = row["groups"]
        mixed = [0 < count < groups["group_size"] for count in groups["solved"]]
        assert groups["mixed"] == sum(mixed)
