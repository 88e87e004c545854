"""The parts of a recipe: held-out validation, notes, and rows that cannot be used."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from grouper.config.loading import load_recipe
from grouper.data import find_overlap
from grouper.errors import DataError
from grouper.training import problem_sets
from grouper.training.problem_sets import find_leaks, load_part, load_problem_sets, phase_lines

HELD_OUT = [
    "data.validation=null",
    "data.validation_share=0.1",
    "data.train.options.count=100",
    "data.sft.options.count=50",
    "data.test.options.count=10",
]


def test_a_share_of_train_is_validation():
    recipe = load_recipe("demo", HELD_OUT)
    sets = load_problem_sets(recipe)
    assert (len(sets.train), len(sets.validation), len(sets.sft)) == (90, 10, 50)
    assert find_overlap(sets.for_fitting, sets.validation.problems) == ()
    assert find_leaks(recipe, sets) == []
    assert set(sets.fingerprints) == {"sft", "train", "validation", "test"}
    assert "data.train: validation_share: 10 problems are held out." in phase_lines(recipe, sets)
    assert any(
        "Evaluation on validation: 10 problems" in line for line in phase_lines(recipe, sets)
    )
    other = load_problem_sets(load_recipe("demo", [*HELD_OUT, "seed=1"]))
    assert other.fingerprints["validation"] != sets.fingerprints["validation"]


@pytest.mark.parametrize("part", ["sft", "train", "validation", "test"])
@pytest.mark.parametrize("share", [True, False])
def test_one_part_alone_is_as_in_the_run(part, share):
    recipe = load_recipe("demo", HELD_OUT if share else HELD_OUT[2:])
    assert load_part(recipe, part) == getattr(load_problem_sets(recipe), part)


def test_demonstrations_of_the_same_set_lose_the_held_out_questions():
    """`openmath-dapo`: SFT and GRPO may read one set, and neither may see what is measured."""
    same = "{source: arithmetic, split: train, options: {count: 100}}"
    recipe = load_recipe("demo", [*HELD_OUT, f"data.sft={same}"])
    sets = load_problem_sets(recipe)
    assert len(sets.sft) == 90
    assert {p.id for p in sets.sft.problems} == {p.id for p in sets.train.problems}
    assert find_leaks(recipe, sets) == []


def test_a_set_that_both_phases_train_on_is_looked_through_once(monkeypatch):
    recipe = load_recipe("demo", [*HELD_OUT, "data.sft=null"])
    sets = load_problem_sets(recipe)
    assert sets.sft is sets.train
    looked_through = []
    monkeypatch.setattr(
        problem_sets, "find_overlap", lambda trained, _: looked_through.append(len(trained)) or ()
    )
    assert find_leaks(recipe, sets) == []
    assert looked_through == [90, 90, 10]


def test_what_settings_are_chosen_on_is_not_the_test_set(tmp_path):
    """Two parts of one file, mixed by two seeds, share problems."""
    file = tmp_path / "all.jsonl"
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"source: file, path: {file}, shuffle: 0"
    parts = [f"data.validation={{{source}, limit: 8}}", f"data.test={{{source}, offset: 8}}"]
    apart = load_recipe("demo", [*HELD_OUT[2:4], *parts])
    assert find_leaks(apart, load_problem_sets(apart)) == []
    mixed = apart.override("data.test.shuffle=1")
    (leak,) = find_leaks(mixed, load_problem_sets(mixed))
    assert "problems are in data.validation, too" in leak.warning
    assert "the same `shuffle`" in leak.warning
    # It is the question that counts, not an id, which another file may have as well.
    expected = {"copy": ["data.test: 8 problems are in data.validation"], "other/all": []}
    for name, first in (("copy", 0), ("other/all", 20)):
        place = tmp_path / f"{name}.jsonl"
        place.parent.mkdir(exist_ok=True)
        rows = [
            {"question": f"What is {i} + {i}?", "answer": "8"} for i in range(first, first + 20)
        ]
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elsewhere = apart.override(f"data.test={{source: file, path: {place}}}")
        leaks = find_leaks(elsewhere, load_problem_sets(elsewhere))
        assert [leak.count for leak in leaks] == expected[name]


def test_without_demonstrations_of_its_own_sft_has_the_rest():
    recipe = load_recipe("demo", [*HELD_OUT, "data.sft=null"])
    sets = load_problem_sets(recipe)
    assert sets.sft is sets.train
    assert load_part(recipe, "sft") == sets.sft
    # ... and its notes are told once.
    assert len([line for line in phase_lines(recipe, sets) if "held out" in line]) == 2


def test_what_no_phase_trains_on_leaks_nothing():
    """SFT alone was warned of test problems among those of GRPO."""
    recipe = load_recipe("demo", [*HELD_OUT, "skip_grpo=true"])
    sets = load_problem_sets(recipe)
    copied = replace(sets, train=sets.test)
    assert find_leaks(recipe, copied) == []
    (leak,) = find_leaks(recipe.override("skip_grpo=false"), copied)
    assert "data.test: 10 problems are in the training data" in leak.count


def test_steps_are_those_of_the_problems_that_fit():
    """A dry run said 12 steps where 3 were trained."""
    recipe = load_recipe("demo", [*HELD_OUT, "grpo.steps=null", "sft.steps=null"])
    sets = load_problem_sets(recipe)
    fitting = {"sft": 32, "train": 40, "validation": 7, "test": 3}
    recipe = recipe.override("sft.batch_size=16", "grpo.prompts_per_step=20", "grpo.epochs=1")
    lines = "\n".join(phase_lines(recipe, sets, fitting))
    assert "32 in all, 2 steps per epoch" in lines
    assert "2 steps per epoch; 2 steps, at most" in lines
    assert "Evaluation on validation: 7 problems" in lines
    assert "Evaluation on test: 3 problems" in lines


def test_a_missing_part_is_none():
    recipe = load_recipe("demo", ["data.validation=null", "data.test=null"])
    assert load_part(recipe, "validation") is None
    assert load_part(recipe, "test") is None


def test_few_of_a_set_with_few_bad_rows_are_not_too_many_bad_rows(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [{"question": f"q{i}", "answer": f"so #### {i}"} for i in range(99)]
    rows.append({"question": "q", "answer": "no marker"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = f"data.train={{source: gsm8k, path: {path}, unique: 3}}"
    assert len(load_part(load_recipe("demo", [train]), "train")) == 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[90:]))
    with pytest.raises(DataError, match="1 of 10 rows of gsm8k/train cannot be used"):
        load_part(load_recipe("demo", [train]), "train")


def test_what_is_only_measured_is_kept_whole(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(8)]
    rows += [{"question": f"u{i}", "answer": rf"\foo{{{i}}}^^+"} for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{{source: file, path: {path}}}"
    for part in ("test", "validation"):
        found = load_part(load_recipe("demo", [f"data.{part}={source}"]), part)
        assert len(found) == 10
        assert "2 of 10 references cannot be read" in " ".join(found.notes)
    with pytest.raises(DataError, match="2 of 10 rows of mine cannot be used"):
        load_part(load_recipe("demo", [f"data.train={source}"]), "train")


def test_prepared_parts_are_those_of_the_run(tmp_path):
    from grouper.data.problems import write_problems

    recipe = load_recipe("demo", HELD_OUT)
    sets = load_problem_sets(recipe)
    parts = ("sft", "train", "validation", "test")
    write_problems(tmp_path, {p: getattr(sets, p) for p in parts})
    ready = [f"data.{part}={{source: file, path: {tmp_path}, split: {part}}}" for part in parts]
    again = load_problem_sets(load_recipe("demo", ["data.validation_share=0", *ready]))
    for part in parts:
        before, after = (getattr(of, part).problems for of in (sets, again))
        for one, other in zip(before, after, strict=True):
            assert other == replace(one, id=other.id, source=other.source, columns=other.columns)
