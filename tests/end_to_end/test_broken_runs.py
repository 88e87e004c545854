"""Real runs, broken on purpose: the diagnosis names what was done to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper.advice.checks import find, read_record
from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.errors import ModelError
from grouper.runs.progress import Progress
from grouper.training.run import Run

pytestmark = pytest.mark.slow

LONGER = """
def longer(*, completion_ids, **kwargs):
    return [len(ids) / 100 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems, and a model that SFT has taught the format."""
    folder = tmp_path_factory.mktemp("broken")
    write_problems(folder)
    (folder / "longer.py").write_text(LONGER)
    for answer in ("1", "7"):
        rows = [
            {"question": f"Pick {100 + i}.", "answer": answer, "solution": answer}
            for i in range(12)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"always_{answer}.jsonl").write_text(text)
    run(folder, "good", "skip_grpo=true")
    return folder


def run(folder: Path, name: str, *overrides: str) -> Path:
    recipe = load_recipe(
        "demo",
        [*TINY_RUN, *data_from(str(folder)), f"output_dir={folder / name}", *overrides],
    )
    with Run(recipe, Progress(quiet=True)) as open_run:
        return train(open_run).path


def always(folder: Path, answer: str) -> str:
    return f"data.train={{source: file, path: {folder}/always_{answer}.jsonl}}"


BROKEN: dict[str, tuple[list[str], set[str]]] = {
    "impossible": (["data.train.path=ALWAYS/always_7.jsonl"], {"no-signal:all-wrong"}),
    "no-room": (["sampling.max_new_tokens=2"], {"no-signal:truncated"}),
    "far-too-fast": (["grpo.optimizer.learning_rate=3.0"], {"learning-rate-too-high"}),
    "far-too-slow": (["grpo.optimizer.learning_rate=1e-12"], {"learning-rate-too-low"}),
    "too-easy": (
        [
            "data.train.path=ALWAYS/always_1.jsonl",
            "grpo.optimizer={learning_rate: 1e-2, schedule: constant}",
            "grpo.steps=80",
        ],
        {"reward-saturation", "no-signal:all-right"},
    ),
    "pays-length": (
        [
            "rewards=[{name: 'ALWAYS/longer.py:longer'}]",
            "grpo.require_correct_in_group=false",
            "grpo.weighting=sequence_mean",
            "grpo.optimizer.learning_rate=5e-3",
            "sampling.max_new_tokens=64",
        ],
        {"length-blow-up"},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_failure_is_named(place: Path, name: str) -> None:
    overrides, expected = BROKEN[name]
    path = run(
        place,
        name,
        "skip_sft=true",
        f"grpo.start_from={place / 'good/demo/sft/final'}",
        "grpo.steps=40",
        "grpo.allow_truncation=true",
        *(text.replace("ALWAYS", str(place)) for text in overrides),
    )
    found = {finding.name for finding in find(read_record(path))}
    print(name, found)
    assert found & expected, found


@pytest.mark.parametrize(
    ("phase", "overrides"),
    [
        ("sft", ["skip_grpo=true", "sft.optimizer.learning_rate=1e30"]),
        (
            "grpo",
            [
                "grpo.steps=9",
                "grpo.updates_per_batch=2",
                "grpo.require_correct_in_group=false",
                "grpo.optimizer.learning_rate=1e25",
            ],
        ),
    ],
)
def test_weights_that_overflow_stop_the_run_and_leave_their_evidence(
    place: Path, phase: str, overrides: list[str]
) -> None:
    with pytest.raises(ModelError, match=f"{phase} step .* nothing finite came out of 3"):
        run(place, f"overflow-{phase}", *overrides)
    path = place / f"overflow-{phase}" / "demo"
    (dump,) = (path / "nan_dump").iterdir()
    assert dump.name.startswith(phase)
    texts = [json.loads(line) for line in (dump / "texts.jsonl").open()]
    assert all("Pick" in row["prompt"] for row in texts)
    assert "not-finite" in {finding.name for finding in find(read_record(path))}
