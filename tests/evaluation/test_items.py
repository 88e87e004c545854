"""Items are written as they come, gone on with after a kill, and never all in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evaluation.test_evaluate import FakeGrader, make_items
from tiny_models import ScriptedSampler, tiny_model

from grouper.errors import RunFolderError
from grouper.evaluation.evaluate import Measurement, few_at_a_time, measure, weights_mark
from grouper.evaluation.items import PartialEvaluation, StoredItems
from grouper.evaluation.result import EvaluationResult
from grouper.files import write_lines
from grouper.models.policy import Policy
from grouper.runs.folder import RunFolder
from grouper.sampling.base import SampleRequest
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.types import Completion, SamplingParams

PART = ".test-greedy.part"


class Counting:
    """Answers `=1`, in reverse, and stops with an error after `limit` completions."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.drawn = limit, 0

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        inner = ScriptedSampler(lambda request, index: "=1")
        for index in reversed(range(len(requests))):
            if self.drawn == self.limit:
                raise KeyboardInterrupt
            self.drawn += 1
            ((_, completion),) = inner.sample([requests[index]])
            yield index, completion


def measured(
    folder: Path | None,
    sampler: Counting | None = None,
    *,
    grader: FakeGrader | None = None,
    resume: bool = True,
    progress: Callable[[int, int], None] | None = None,
    **changes: Any,
) -> EvaluationResult:
    settings: dict[str, Any] = {
        "name": "test-greedy",
        "phase": "base",
        "step": 0,
        "split": "test",
        "items": make_items(["1", "2", "1"]),
        "params": SamplingParams(max_new_tokens=5),
        "samples": 2,
        "seed": 7,
    }
    return measure(
        Measurement(**{**settings, **changes}),
        sampler or Counting(),
        grader or FakeGrader(),
        folder=folder,
        resume=resume,
        progress=progress,
    )


def test_on_disk_and_in_memory_are_the_same_items(tmp_path):
    stored, held = measured(tmp_path), measured(None)
    assert stored == held
    assert isinstance(held.items, tuple)
    assert stored.items[1] == held.items[1]
    assert stored.items[-2:] == held.items[-2:]
    assert [item.completion for item in stored.items] == ["=1"] * 6
    assert {item.completion for item in stored.slim} == {""}
    assert stored.items != held.items[:-1]
    assert stored.numbers == held.numbers
    assert {path.name for path in tmp_path.iterdir()} == {"test-greedy.jsonl.gz", PART}


def test_what_was_drawn_before_a_kill_is_not_drawn_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, Counting(limit=4))
    part = tmp_path / PART / "0.jsonl"
    whole = part.read_bytes()
    assert len(whole.splitlines()) == 4
    part.write_bytes(whole[:-7])  # a line that the kill has cut
    sampler = Counting()
    assert measured(tmp_path, sampler) == measured(None)
    assert sampler.drawn == 3


NESTED = b'{"place":3,"completion":' + b"[" * 200_000


@pytest.mark.parametrize(
    "damage",
    [
        bytes(80),
        b"\xff\xfe not text",
        b'{"place":7,"completion":[[2],"=1","stop_token",0]}',
        b'{"place":-3,"completion":[]}',
        b'{"place":3,"completion":[[2],"=1","stop_token",0],"grade":{},"lenient":"correct"}',
        b'{"place":3,"completion":[[2],"=1","no such reason",0]}',
        b'{"place":3,',
        b"[]",
        b"",
        NESTED,
    ],
)
def test_a_damaged_line_of_what_was_drawn_is_drawn_again(tmp_path, damage):
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, Counting(limit=4))
    part = tmp_path / PART / "0.jsonl"
    lines = part.read_bytes().split(b"\n")
    lines[1] = damage
    part.write_bytes(b"\n".join(lines))
    sampler = Counting()
    assert measured(tmp_path, sampler) == measured(None)
    assert sampler.drawn == 3


def test_what_other_weights_have_drawn_is_drawn_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, Counting(limit=4), weights="a")
    for weights, drawn in (("a", 2), ("b", 6)):
        sampler = Counting()
        measured(tmp_path, sampler, weights=weights)
        assert sampler.drawn == drawn


def test_the_weights_of_a_model_are_told_from_those_a_step_later():
    first, second = (Policy(tiny_model()) for _ in range(2))
    assert weights_mark(first) == weights_mark(second)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.add_(1e-3 * torch.sign(parameter))
    assert weights_mark(first) != weights_mark(second)


@pytest.mark.parametrize(
    ("size", "rate", "slots"),
    [
        (10**5, 1.25e11, 64),
        (5 * 10**8, 1.25e11, 32),
        # Measured a little slower.
        (5 * 10**8, 1.2e11, 32),
        (5 * 10**8, 0.6e11, 16),
        (7 * 10**9, 1.25e11, 8),
    ],
)
def test_of_a_large_model_few_are_drawn_at_a_time_on_a_cpu(size, rate, slots, monkeypatch):
    """All of 45 completions of 300 tokens ended at once, after the kill."""
    monkeypatch.setattr("grouper.evaluation.evaluate.cpu_product_rate", lambda _: rate)
    policy = Policy(tiny_model())
    sampler = NativeSampler(SamplingWeights(policy), None, stop_token_ids=[2], max_slots=64)
    big = SimpleNamespace(parameters=lambda: [torch.empty(size, device="meta")])
    fake = SimpleNamespace(device=torch.device("cpu"), model=big, products_dtype=torch.float32)
    with few_at_a_time(sampler, fake):
        assert sampler.max_slots == slots
    assert sampler.max_slots == 64
    with few_at_a_time(sampler, fake):
        sampler.max_slots = 4  # memory ran out
    assert sampler.max_slots == 4


def test_a_kill_before_the_summary_is_written_loses_nothing(tmp_path):
    """The items alone are no evaluation, and the folder of what was drawn was gone."""
    home = tmp_path / "evaluations"
    measured(home)
    sampler = Counting()
    result = measured(home, sampler)
    assert sampler.drawn == 0
    RunFolder(tmp_path).write_evaluation(result)
    assert not (home / PART).exists()
    assert RunFolder(tmp_path).read_evaluation("test-greedy") == result


@pytest.mark.parametrize("change", [{"seed": 8}, {"params": SamplingParams(max_new_tokens=6)}])
def test_what_other_settings_have_drawn_is_not_gone_on_with(tmp_path, change):
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, Counting(limit=4))
    sampler = Counting()
    measured(tmp_path, sampler, **change)
    assert sampler.drawn == 6


def test_without_resume_everything_is_drawn(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, Counting(limit=4))
    sampler = Counting()
    measured(tmp_path, sampler, resume=False)
    assert sampler.drawn == 6


def test_results_of_other_settings_get_a_name_of_their_own(tmp_path):
    folder = RunFolder(tmp_path)
    card = {"seed": 1, "sampling": {"temperature": 0.0, "stop": []}, "n": 3}
    assert folder.name_for("a", "test", card) == "a"
    result = measured(tmp_path / "evaluations", name="a")
    folder.write_evaluation(result)
    assert folder.name_for("a", "test", result.card) == "a"
    assert folder.name_for("a", "gsm8k", result.card) == "a-2"
    assert folder.name_for("a", "test", card) == "a-2"
    PartialEvaluation(tmp_path / "evaluations", "a-2", card).begin(resume=True)
    assert folder.name_for("a", "test", card) == "a-2"
    assert folder.name_for("a", "test", {**card, "seed": 2}) == "a-3"


def test_a_summary_beside_streamed_items_reads_back(tmp_path):
    folder = RunFolder(tmp_path)
    result = measured(tmp_path / "evaluations", name="base")
    folder.write_evaluation(result)
    again = folder.read_evaluation("base")
    assert again == result
    assert isinstance(again.items, StoredItems)
    # Made elsewhere, it is written as a whole.
    other = RunFolder(tmp_path / "other")
    other.write_evaluation(replace(result, items=tuple(result.items)))
    assert other.read_evaluation("base") == result


def test_half_a_character_pair_is_read_back_as_a_question_mark(tmp_path):
    """JSON carries one as an escape, and pydantic reads none."""
    (item, *_) = measured(None).items
    write_lines(tmp_path / "a.jsonl.gz", [{**asdict(item), "completion": "a \ud83d b"}])
    (read,) = StoredItems.read(tmp_path / "a.jsonl.gz")
    assert read == replace(item, completion="a ? b")


def test_a_damaged_item_names_the_field(tmp_path):
    (item, *_) = measured(None).items
    write_lines(tmp_path / "a.jsonl.gz", [{**asdict(item), "sample": "two"}])
    with pytest.raises(RunFolderError, match=r"a\.jsonl\.gz.*sample: should be"):
        StoredItems.read(tmp_path / "a.jsonl.gz")


def test_a_time_budget_takes_the_first_problems_that_fit(tmp_path, monkeypatch):
    from grouper.evaluation import evaluate as module

    # Two problems take a second; 20 of them, which fit in 10 seconds, take all of it.
    clock = iter([0, 1, 10, 0, 1, 10])
    monkeypatch.setattr(module, "_FIRST_WAVE", 2)
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    result = measured(tmp_path, items=make_items(["1"] * 30), seconds=10.0)
    assert [item.problem_id for item in result.items][::2] == [f"p/{i}" for i in range(20)]
    assert result.card["n"] == 20
    whole = measured(tmp_path, items=make_items(["1"] * 30), seconds=1000.0)
    assert len(whole.items) == 60


@pytest.mark.slow
def test_memory_is_flat(tmp_path):
    """2,000 problems with 8 samples of 2 kB each: 32 MB of text."""

    class Long:
        def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
            for index in range(len(requests)):
                drawn = ScriptedSampler(lambda r, i: "=1").sample(requests[:1])
                yield index, replace(next(drawn)[1], text=f"{index} " * 400 + "=1")

    class Grading(FakeGrader):
        calls: Any = property(lambda self: [], lambda self, value: None)

    items = make_items(["1"] * 2_000)
    params = SamplingParams(max_new_tokens=3000)
    tracemalloc.start()
    try:
        result = measured(tmp_path, Long(), items=items, samples=8, grader=Grading(), params=params)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(result.items) == 16_000
    assert result.accuracy == 1.0
    assert max(held, peak) < 16e6, (held, peak)
    assert json.dumps(result.numbers)


MEASURE = """
import sys
from pathlib import Path
from grouper.runs.folder import RunFolder
print(RunFolder(Path(sys.argv[1])).name_for(sys.argv[2], "test", {}))
"""


@pytest.mark.slow
def test_what_another_process_is_measuring_is_refused(tmp_path):
    def other(name: str) -> str:
        words = [sys.executable, "-c", MEASURE, str(tmp_path), name]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    folder = RunFolder(tmp_path)
    assert folder.name_for("a", "test", {}) == "a"
    PartialEvaluation(tmp_path / "evaluations", "a", {}).begin(resume=True)  # keeps the lock
    assert f"process {os.getpid()} on" in (said := other("a"))
    assert "is writing this evaluation" in said
    assert other("b") == "b\n"
    folder.write_evaluation(measured(tmp_path / "evaluations", name="a"))
    assert "is writing" not in other("a")
