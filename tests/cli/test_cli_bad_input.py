"""Every mistake a user can make: one paragraph that says what, where and what to do; exit code 2;
nothing half-written."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def from_file(path: Path) -> list[str]:
    """Overrides that read training problems from a file instead of generating them."""
    return [
        "skip_sft=true",
        "data.sft=null",
        "data.validation=null",
        "data.test=null",
        "data.train={source: file, path: '" + str(path) + "'}",
    ]


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("command", ["run", "sft", "grpo", "eval"])
def test_an_unknown_key_is_named_with_the_nearest(grouper, tmp_path, command):
    called = grouper(command, "demo", "grpo.group_sise=4", f"output_dir={tmp_path}/out")
    called.refused("recipe demo", "group_sise", "group_size")
    assert not (tmp_path / "out").exists()


def test_a_wrong_type_and_a_wrong_value_are_told_together(grouper, tmp_path):
    called = grouper("run", "demo", "grpo.steps=many", "seed=-1", f"output_dir={tmp_path}/out")
    called.refused("grpo.steps", "seed")
    assert called.err.count("error: ") == 2
    assert not (tmp_path / "out").exists()


def test_an_unknown_recipe_and_a_missing_file(grouper):
    grouper("run", "dmeo").refused("there is no recipe 'dmeo'", "Did you mean 'demo'?")
    grouper("run", "./nothing.yaml").refused("./nothing.yaml", "there is no recipe file")


def test_a_folder_without_a_recipe_is_no_run(grouper, tmp_path):
    grouper("eval", tmp_path).refused(str(tmp_path), "no recipe.yaml")


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_missing_column_names_those_that_are_there(grouper, small, tmp_path, dry):
    rows = [{"query": "What is 1 + 1?", "answer": "2"}] * 3
    path = write_rows(tmp_path / "rows.jsonl", rows)
    out = f"output_dir={tmp_path}/out"
    called = grouper("run", "demo", *small[1:], *from_file(path), out, *dry)
    called.refused("no column holds the question", "columns: {question: ...}", "answer, query")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_an_empty_data_set(grouper, small, tmp_path, dry):
    path = write_rows(tmp_path / "rows.jsonl", [])
    out = f"output_dir={tmp_path}/out"
    called = grouper("run", "demo", *small[1:], *from_file(path), out, *dry)
    called.refused(str(path), "there are no rows in it")
    assert not (tmp_path / "out").exists()


def test_a_model_folder_that_is_missing_or_empty(grouper, small, tmp_path):
    (tmp_path / "model-a").mkdir()
    for name, text in (("model-b", "there is no folder"), ("model-a", "config.json")):
        overrides = ["model.new=null", f"model.path={tmp_path}/{name}"]
        out = f"output_dir={tmp_path}/out"
        # The small shape belongs to model.new.
        settings = [text for text in small if not text.startswith("model.")]
        for dry in (["--dry-run"], []):
            called = grouper("run", "demo", *settings, *overrides, out, *dry)
            called.refused("model.path", f"{tmp_path}/{name}", text)
        grouper("eval", "demo", "--model", tmp_path / name).refused("--model", text)
        asked = grouper("generate", tmp_path / name, "--format", "xml", "--question", "2+2?")
        asked.refused("MODEL", text)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_tokenizer_without_a_stop_token(grouper, small, finished_run, tmp_path, dry):
    model = tmp_path / "model"
    shutil.copytree(finished_run / "base", model)
    for name in ("tokenizer_config.json", "generation_config.json"):
        values = json.loads((model / name).read_text())
        values.pop("eos_token", None)
        values.pop("eos_token_id", None)
        (model / name).write_text(json.dumps(values))
    (model / "chat_template.jinja").unlink()
    settings = [text for text in small if not text.startswith("model.")]
    overrides = ["model.new=null", f"model.path={model}", f"output_dir={tmp_path}/out"]
    called = grouper("run", "demo", *settings, *overrides, *dry)
    called.refused("the tokenizer has no stop token", "eos_token")
    assert not (tmp_path / "out" / "demo").exists()


def test_references_that_cannot_be_read_are_refused_above_a_share(grouper, small, tmp_path):
    broken = [{"question": "What is a half?", "answer": r"\frac{1}{2"}]
    path = write_rows(tmp_path / "rows.jsonl", ROWS[:9] + broken)
    out = f"output_dir={tmp_path}/out"
    called = grouper("run", "demo", *small[1:], *from_file(path), out, "--dry-run")
    called.refused("data.train", "1 of 10 rows", "row 9", "unbalanced braces", "At most 5%")
    write_rows(path, ROWS + broken)
    called = grouper("run", "demo", *small[1:], *from_file(path), out, "--dry-run")
    assert called.code == 0, called.err
    assert "warning: " in called.err
    assert "1 of 41 rows" in called.err


def test_the_output_folder_of_another_recipe_is_left_alone(grouper, small, finished_run):
    before = files_below(finished_run)
    out = f"output_dir={finished_run.parent}"
    for extra in ([], ["--resume"], ["--dry-run"], ["--dry-run", "--resume"]):
        called = grouper("run", "demo", *small, out, "grpo.beta=0.5", *extra)
        called.refused(str(finished_run), "another recipe", "--overwrite")
    called = grouper("run", "demo", *small, out)
    called.refused(str(finished_run), "already holds a run", "--resume")
    called = grouper("run", "demo", *small, out, "--dry-run")
    assert called.code == 0, called.err
    assert "it will take --resume or --overwrite" in called.out
    called = grouper("run", "demo", *small, out, "--resume", "--overwrite")
    assert called.code == 2
    assert "give one" in called.err
    assert files_below(finished_run) == before


def test_a_folder_of_something_else_is_left_alone(grouper, small, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("years of work")
    for extra in ([], ["--overwrite"], ["--dry-run"]):
        called = grouper("run", "demo", *small, f"output_dir={tmp_path}", *extra)
        called.refused("not a run of Grouper", "thesis.tex")
    assert files_below(tmp_path) == {"demo/thesis.tex": b"years of work"}


def test_a_reward_that_fails_is_found_before_training(grouper, small, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **kwargs):\n    return [1.0]\n")
    called = grouper(
        "run",
        "demo",
        *small,
        f"rewards=[{{name: '{file}:short'}}]",
        f"output_dir={tmp_path}/out",
        "--dry-run",
    )
    called.refused("'short' returned [1.0]", "for 4 completions", "one number")


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("hooks=['nowhere.py:f']", "hooks"),
        ("tracking.trackers=[{name: 'nowhere.py:f'}]", "tracking.trackers"),
    ],
)
def test_what_is_called_after_each_step_is_found_before_the_first(grouper, setting, where):
    grouper("run", "demo", setting, "--dry-run").refused(f"{where}: there is no file nowhere.py")


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A write beyond `size` fails with EFBIG: a full disk for those who are not root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "where"),
    [
        (1_000, "recipe.yaml"),
        (100_000, "base"),
    ],
)
def test_a_full_disk_leaves_nothing_half_written(grouper, small, tmp_path, room, where):
    arguments = ["run", "demo", *small, f"output_dir={tmp_path}", "sft.checkpoint_every=1", "-q"]
    with largest_file(room):
        called = grouper(*arguments)
    called.refused("Free some space")
    (line,) = [line for line in called.err.splitlines() if line.startswith("error: ")]
    assert where in line
    left = [path.name for path in (tmp_path / "demo").rglob("*")]
    assert where not in left
    assert not [name for name in left if name.endswith(".tmp") or name.startswith(".")]
    if where == "recipe.yaml":
        return  # there is nothing yet to go on from
    again = grouper(*arguments, "--resume")
    assert again.code == 0, again.err
    assert (tmp_path / "demo" / "grpo" / "final" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_checkpoint_that_finds_no_room_does_not_end_the_run(grouper, small, tmp_path):
    arguments = ["run", "demo", *small, f"output_dir={tmp_path}", "sft.checkpoint_every=1", "-q"]
    with largest_file(450_000):  # enough for the weights, not for the optimizer's state
        called = grouper(*arguments)
    assert called.code == 0, called.err
    assert "warning: Training continues with no checkpoint at step 1" in called.err
    left = [path.name for path in (tmp_path / "demo").rglob("*")]
    assert "final" in left
    assert "checkpoint-1" not in left
    assert not [name for name in left if name.endswith(".tmp") or name.startswith(".")]


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (("export", "./nowhere", "{out}"), "SOURCE"),
        (("data", "difficulty", "demo", "--model", "./nowhere"), "--model"),
        (("export", "nowhere", "{out}"), "there is no such folder here"),
    ],
)
def test_a_model_that_is_not_there_is_named_by_where_it_was_asked_for(
    grouper, tmp_path, command, where
):
    called = grouper(*(part.format(out=tmp_path / "out") for part in command))
    called.refused(where, "nowhere")
    assert "model.path" not in called.err
