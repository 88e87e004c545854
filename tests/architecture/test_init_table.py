"""The table of `grouper init` on real models is that of its results."""

from __future__ import annotations

import json
import runpy

from codebase import ROOT


def test_the_page_has_the_results() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "init_real.py"))
    rows = json.loads(script["RESULTS"].read_text())
    page = script["PAGE"].read_text()
    assert script["render"](page, rows) == page, "run `python benchmarks/init_real.py TRAIN.jsonl`"
    assert rows.keys()
    for row in rows.values():
        groups = row["groups"]
        mixed = [0 < count < groups["group_size"] for count in groups["solved"]]
        assert groups["mixed"] == sum(mixed)
