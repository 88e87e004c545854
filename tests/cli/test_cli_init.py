"""`grouper init`: the recipe it writes can be run, and what it cannot write is one paragraph."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cli.conftest import Grouper

from grouper.cli import init
from grouper.config.loading import load_recipe
from grouper.models import device
from grouper.prompts import FORMATS
from grouper.training.prepare import make_base
from grouper.training.problem_sets import load_problem_sets

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(50)]
SYMBOLIC = [{"problem": f"Half of $x^{n}$?", "solution": rf"\boxed{{x^{n}/2}}"} for n in range(50)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    recipe = load_recipe("demo", ["prompt.max_prompt_tokens=99"])
    make_base(recipe, load_problem_sets(recipe), folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("32768", "512"))
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, rows: list[dict[str, str]]) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def written(name: str = "mine.yaml") -> dict[str, Any]:
    text = Path(name).read_text()
    assert len(text.splitlines()) <= 45
    assert text.count("\n# ") + text.count("\n  # ") >= 7
    data: dict[str, Any] = yaml.safe_load(text)
    return data


def test_the_update_takes_what_a_plan_says(grouper: Grouper, model: Path) -> None:
    """It was another figure, in another unit, and half a minute passed before it without a word."""
    data = write("rows.jsonl", ROWS)
    called = grouper("init", "--model", model, "--data", data, "--full", "--no-samples")
    assert called.code == 0, called.err
    assert "GiB of this machine" in called.out
    assert "planning an update ..." in called.err
    said = re.search(r"An update takes (\d+\.\d\d) GiB", called.out)
    command = re.search(r"`grouper (plan .*? --device cpu)`", called.out)
    assert said is not None, called.out
    assert command is not None, called.out
    planned = grouper(*command[1].split(), "--json")
    updates = [part for part in json.loads(planned.out)["memory"] if "update" in part["name"]]
    assert said[1] == f"{updates[0]['peak'] / 2**30:.2f}"


@pytest.mark.slow
def test_what_is_written_passes_a_dry_run(grouper: Grouper, model: Path) -> None:
    called = grouper("init", "--model", model, "--data", write("rows.jsonl", ROWS), "--full")
    assert called.code == 0, called.err
    assert (
        "rows.jsonl (question, answer). Plain numbers among the first 50 answers: 50." in called.out
    )
    assert "Question: What is 0 + 1?\n  Answer: 1\n" in called.out
    assert "of them trained. An update takes" in called.out
    *_, first, then, last = called.out.splitlines()
    assert first == "  grouper preview ./mine.yaml"
    assert "GRPO learns only where the answers to a problem are right at times" in called.out
    assert (then, last) == ("Then train:", "  grouper run ./mine.yaml")
    dry = grouper("run", "./mine.yaml", "--dry-run")
    assert dry.code == 0, dry.err
    recipe = load_recipe("./mine.yaml")
    assert (recipe.name, recipe.prompt.format, recipe.model.lora) == ("mine", "boxed", None)
    assert [reward.name for reward in recipe.rewards] == ["correctness", "boxed_format"]
    assert recipe.sampling.max_new_tokens == 256
    assert recipe.data.validation_share > 0
    # The tiny model answers anything but a box, and there are no solutions: the format is learned
    # from its reward.
    assert "prompt.format: The model knows none yet (0 of 8 answers stood in a box)" in called.out
    assert recipe.skip_sft
    assert not recipe.grpo.require_correct_in_group


@pytest.mark.slow
def test_one_file_is_split_into_parts_that_share_no_question(grouper: Grouper, model: Path) -> None:
    """Of one data file a test is held out: the same problems whatever the seed and the order."""
    rows = ROWS + ROWS[:5]
    data = write("rows.jsonl", rows)
    called = grouper("init", "--model", model, "--data", data, "--no-samples")
    assert "No test problems beside it: 10.0% are held out as data.test_share" in called.out
    recipe = load_recipe("./mine.yaml")
    sets = load_problem_sets(recipe)
    assert sets.train
    assert sets.validation
    assert sets.test
    parts = [
        {p.question for p in part.problems} for part in (sets.train, sets.validation, sets.test)
    ]
    assert set.union(*parts) == {row["question"] for row in ROWS}
    assert sum(map(len, parts)) == len(ROWS)
    write("rows.jsonl", rows[::-1])
    again = load_problem_sets(recipe.override("seed=7"))
    assert again.test
    assert {p.question for p in again.test.problems} == parts[2]


@pytest.mark.slow
def test_a_model_is_asked_only_where_samples_are_wanted(grouper: Grouper, model: Path) -> None:
    arguments = ("--model", model, "--data", write("rows.jsonl", ROWS))
    asked = grouper("init", "a.yaml", *arguments)
    assert "in the format" in asked.out
    assert "--no-samples leaves this out" in asked.out
    silent = grouper("init", "b.yaml", *arguments, "--no-samples")
    assert "in the format" not in silent.out
    assert "Most models have met it in training." in silent.out


@pytest.mark.slow
def test_a_model_without_a_tokenizer_is_judged_by_its_name(
    grouper: Grouper, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "Half-Base"
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    called = grouper("init", "--model", folder, "--data", write("rows.jsonl", ROWS))
    assert called.code == 0, called.err
    assert "the model is judged by its name" in called.err
    assert "is a base model (by its name)" in called.out


@pytest.mark.slow
def test_sft_comes_first_where_solutions_are_there(grouper: Grouper, model: Path) -> None:
    rows = [
        {"question": row["question"], "answer": f"One more than before.\n#### {row['answer']}"}
        for row in ROWS
    ]
    data = write("rows.jsonl", rows)
    called = grouper("init", "--model", model, "--data", data, "--no-samples")
    assert called.code == 0, called.err
    assert not written()["skip_sft"]
    # Preview shows what GRPO would start from, so it comes after SFT.
    lines = [line for line in called.out.splitlines() if line.startswith("  grouper")]
    assert lines == [
        "  grouper sft ./mine.yaml",
        "  grouper preview ./mine.yaml",
        "  grouper run ./mine.yaml --resume",
    ]
    assert grouper("sft", "./mine.yaml").code == 0
    assert "Model:     outputs/mine/sft/final" in grouper("preview", "./mine.yaml").out
    dry = grouper("run", "./mine.yaml", "--resume", "--dry-run")
    assert dry.code == 0, dry.err
    assert "continues the run that is there; finished: sft" in dry.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["set/{}.jsonl", "set/{}/part.jsonl", "set/data/{}-00000-of-00001.jsonl"]
)
def test_a_folder_with_a_test_split_and_answers_that_are_no_numbers(
    grouper: Grouper, model: Path, layout: str
) -> None:
    write(layout.format("train"), SYMBOLIC)
    write(layout.format("test"), SYMBOLIC[:3])
    arguments = ("--model", model, "--data", "set", "--lora", "--memory", "80")
    assert grouper("init", "sub/other one.yaml", *arguments).code == 0
    data = written("sub/other one.yaml")
    assert (data["name"], data["prompt"]["format"]) == ("other-one", "boxed")
    assert data["data"]["test"] == {"source": "file", "path": "set", "split": "test"}
    assert data["model"]["lora"]["rank"] == 32
    assert "# SFT first: " in Path("sub/other one.yaml").read_text()
    assert not data["skip_sft"]
    assert grouper("run", "sub/other one.yaml", "--dry-run").code == 0


@pytest.mark.slow
def test_columns_of_other_names(grouper: Grouper, model: Path) -> None:
    data = write("de.jsonl", [{"Frage": "1 + 1?", "Ergebnis": "2"}] * 3)
    arguments = ("--model", model, "--data", data)
    grouper("init", *arguments).refused("Columns: Ergebnis, Frage", "--question and --answer")
    assert grouper("init", *arguments, "--question", "Frage", "--answer", "Ergebnis").code == 0
    assert written()["data"] == {
        "train": {
            "source": "file",
            "path": "de.jsonl",
            "columns": {"question": "Frage", "answer": "Ergebnis"},
        }
    }
    assert written()["grpo"]["evaluate_every"] == 0  # of so few, none are held out


@pytest.mark.slow
def test_memory_decides_about_the_update(
    grouper: Grouper, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write("rows.jsonl", ROWS)
    monkeypatch.setattr(init, "SHARE", {"cuda": 0.002, "cpu": 0})
    called = grouper("init", "--model", model, "--data", data, "--memory", "1")
    assert "warning: an update does not fit in 1 GB" in called.err
    recipe = load_recipe("./mine.yaml")
    assert recipe.model.gradient_checkpointing
    assert (recipe.grpo.tokens_per_micro_batch, recipe.grpo.prompts_per_step) == (2048, 8)


@pytest.mark.parametrize(("slowdown", "dtype"), [(80.0, "float32"), (0.5, "bfloat16")])
def test_without_a_gpu_the_recipe_is_for_the_cpu(
    grouper: Grouper,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    slowdown: float,
    dtype: str,
) -> None:
    """A recipe in bfloat16 for a GPU of 24 GB took minutes for a step of four rows."""
    monkeypatch.setattr(device, "bfloat16_slowdown", lambda: slowdown)
    data = write("rows.jsonl", ROWS)
    called = grouper("init", "--model", model, "--data", data, "--no-samples")
    assert "The recipe is for the CPU of this machine" in called.out
    assert written()["model"]["dtype"] == dtype
    assert written()["grpo"]["prompts_per_step"] == 8


def test_what_is_too_much_for_the_cpu_is_written_for_a_gpu(
    grouper: Grouper, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "SHARE", {"cuda": 0.9, "cpu": 0})
    data = write("rows.jsonl", ROWS)
    called = grouper("init", "--model", model, "--data", data, "--no-samples")
    assert "the recipe is for a GPU of 24 GB" in called.out
    assert written()["model"]["dtype"] == "bfloat16"
    assert "warning" not in called.err


@pytest.mark.parametrize("known", [True, False])
def test_prompts_with_responses_and_a_test_file_beside(grouper: Grouper, known: bool) -> None:
    prompt = FORMATS["r1-zero"].plain_prompt("1 + {}?") if known else "Add 1 and {}."
    rows = [
        {"prompt": prompt.format(n), "response": f" so </think> <answer> {n + 1} </answer>"}
        for n in range(50)
    ]
    write("set/train.jsonl", rows)
    write("set/test.jsonl", rows[:3])
    called = grouper("init", "--model", "owner/Model-7B", "--data", "set/train.jsonl")
    assert called.code == 0, called.err
    assert ("word for word" in called.out) is not known
    data = written()
    assert data["data"]["train"] == {"source": "prompt-response", "path": "set/train.jsonl"}
    assert data["data"]["test"] == {"source": "prompt-response", "path": "set/test.jsonl"}
    assert data["prompt"]["format"] == ("r1-zero" if known else "boxed")


def test_what_is_not_on_this_machine_is_said(grouper: Grouper) -> None:
    called = grouper("init", "--model", "owner/Model-7B", "--data", "owner/problems")
    assert called.code == 0, called.err
    assert "Model: owner/Model-7B is not on this machine, so it was not checked." in called.out
    assert "Data: owner/problems was not checked: " in called.out
    assert written()["data"]["train"] == {"source": "hub", "path": "owner/problems"}
    recipe = load_recipe("./mine.yaml")
    assert recipe.model.lora is not None
    assert recipe.model.lora.rank == 32  # as its help says
    assert recipe.model.gradient_checkpointing
    assert (recipe.grpo.prompts_per_step, recipe.grpo.tokens_per_micro_batch) == (16, 8192)
    assert (recipe.grpo.evaluate_every, recipe.grpo.optimizer.learning_rate) == (50, 1e-5)
    assert (recipe.sampling.max_new_tokens, recipe.sampling.max_slots) == (512, 64)
    assert [reward.name for reward in recipe.rewards] == ["correctness", "boxed_format"]
    assert "There are no worked solutions for SFT." in Path("mine.yaml").read_text()
    assert recipe.data.test_share == 0.1


@pytest.mark.parametrize(
    ("memory", "slots", "prompts"), [(15.9, 64, 8), (16, 64, 16), (40, 128, 16)]
)
def test_a_source_with_a_test_split_and_a_card(
    grouper: Grouper, memory: float, slots: int, prompts: int
) -> None:
    words = ("--model", "owner/Model-7B", "--data", "gsm8k", "--full", "--memory", str(memory))
    assert grouper("init", *words).code == 0
    data = written()
    assert data["data"]["test"] == {"source": "gsm8k", "split": "test"}
    assert (data["sampling"]["max_slots"], data["grpo"]["prompts_per_step"]) == (slots, prompts)
    assert data["grpo"]["optimizer"]["learning_rate"] == 1e-6
    assert "# Trains all weights." in Path("mine.yaml").read_text()


@pytest.mark.slow
def test_it_asks_where_there_is_a_terminal(
    grouper: Grouper, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(init, "sys", terminal)
    called = grouper("init", stdin=f"{model}\n{write('rows.jsonl', ROWS)}\nn\n48\n")
    assert called.code == 0, called.err
    assert "Train an adapter (LoRA), not all weights? [Y/n]: " in called.out
    assert "lora" not in written()["model"]
    assert "of a GPU of 48 GB" in called.out
    assert written()["sampling"]["max_slots"] == 128


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "{model}"), "no terminal for questions: give --model and --data"),
        (("--model", "{model}", "--data", "rowz.jsonl"), "Did you mean 'rows.jsonl'?"),
        (("--model", "{model}", "--data", "./nowhere"), "no such file or folder"),
        (("--model", "{model}", "--data", "gsmk"), "Did you mean 'gsm8k'?"),
        (("--model", "{model}", "--data", "empty.jsonl"), "there are no rows in it"),
        (("--model", "{model}", "--data", "ab.jsonl"), "Columns: a, b."),
        (("--model", "{model}", "--data", "mixture"), "the list `mixture` of several"),
        (("--model", "set", "--data", "rows.jsonl"), "holds neither a model"),
        (("--model", "./nowhere", "--data", "rows.jsonl"), "there is no folder './nowhere'"),
        (("rows.jsonl", "--model", "{model}", "--data", "gsm8k"), "rows.jsonl exists already"),
        (("rows.jsonl/a.yaml", "--model", "{model}", "--data", "gsm8k"), "cannot write here"),
        (("--model", "{model}", "--data", "gsm8k", "--memory", "0"), "0.0 is not in the range"),
    ],
)
def test_mistakes_are_one_paragraph(
    grouper: Grouper, model: Path, place: Path, arguments: tuple[str, ...], told: str
) -> None:
    write("rows.jsonl", ROWS)
    write("empty.jsonl", [])
    write("ab.jsonl", [{"a": "1", "b": "2"}])
    Path("set").mkdir()
    before = sorted(place.rglob("*"))
    called = grouper("init", *(text.format(model=model) for text in arguments))
    assert called.code == 2
    assert told in called.err
    assert "Traceback" not in called.err
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("data", [".", "./", "..", "/"])
def test_the_folder_one_is_in_is_named_or_refused(grouper: Grouper, model: Path, data: str) -> None:
    """A path without a name ended in a traceback."""
    write("train.jsonl", ROWS)
    write("test.jsonl", ROWS)
    called = grouper("init", "here.yaml", "--model", model, "--data", data)
    if data.startswith("./") or data == ".":
        assert called.code == 0, called.err
        assert written("here.yaml")["data"]["test"]["split"] == "test"
    else:
        called.refused()
