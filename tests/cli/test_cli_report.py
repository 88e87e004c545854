"""`grouper report`: the file of one run and of several."""

from __future__ import annotations

import json
import shutil

import pytest


def test_a_run_has_written_its_report_with_tokens(finished_run):
    text = (finished_run / "report.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    rows = [sample for group in data["groups"] for sample in group["samples"]]
    traced = [row for row in rows if row["trace"]]
    assert traced
    for row in traced:
        texts, sampled, trained, entropies, _, _ = row["trace"]
        assert len(texts) == len(sampled) == len(entropies) == row["tokens"]
        if trained is not None:
            assert max(abs(a - b) for a, b in zip(sampled, trained, strict=True)) < 0.01
    names = [chosen["name"] for chosen in data["sets"]]
    assert "rollouts in training" in names
    assert any(name.startswith("test: base") for name in names)


@pytest.mark.slow
def test_reports_of_one_run_and_of_several(grouper, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "again")
    (tmp_path / "again" / "report.html").unlink()
    called = grouper("report", tmp_path / "again")
    assert called.code == 0, called.err
    assert called.out.startswith(f"{tmp_path / 'again' / 'report.html'} (")
    both = tmp_path / "both.html"
    called = grouper("report", finished_run, tmp_path / "again", "--output", both)
    assert called.code == 0, called.err
    assert "demo against again" in both.read_text()
    called = grouper("report", finished_run, "--output", tmp_path)
    assert called.out.startswith(f"{tmp_path / 'report.html'} (")
    assert "named twice" in grouper("report", finished_run, finished_run).err
