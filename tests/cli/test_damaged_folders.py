"""Whatever is damaged in a run or a model ends in one paragraph, and in no wrong answer.

Every file of a finished run and of a model folder is damaged in every way that `damages` has, and
every command that reads it is called. It may say what is wrong (exit code 2, a paragraph), warn of
what it leaves out, or be right: without a word, its output is that of the undamaged folder.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cli.conftest import Called, call
from cli.damages import BYTES, ODD, TEXTS, Damage, in_gzip, keys
from safetensors.torch import load_file, save_file

STATE = ("phase", "step", "total", "policy_version", "files", "best", "difficulty", "asked")

RUN_FILES: dict[str, tuple[dict[str, Damage], tuple[str, ...]]] = {
    "recipe.yaml": ({**BYTES, **TEXTS}, ("runs", "diagnose", "generate", "resume")),
    "run.json": (
        {**BYTES, **TEXTS, **dict(keys("recipe_hash", "versions", "changes", "format"))},
        ("runs", "show", "diagnose", "resume"),
    ),
    "metrics.jsonl": (
        {**BYTES, **TEXTS, **dict(keys("phase", "step", "time", "elapsed_s", "events"))},
        ("runs", "compare", "diagnose", "report"),
    ),
    "evaluations/grpo.json": (
        {
            **BYTES,
            **TEXTS,
            **dict(keys("name", "phase", "step", "samples", "card", "items_crc32", "card.seed")),
        },
        ("runs", "compare", "diagnose", "export"),
    ),
    "evaluations/grpo.jsonl.gz": (
        {
            **BYTES,
            **{
                f"{name}, inside": in_gzip(damage)
                for name, damage in {**TEXTS, **dict(keys("problem_id", "verdict"))}.items()
            },
        },
        ("runs", "compare", "diagnose", "grade"),
    ),
    "rollouts/grpo-000002.jsonl.gz": (
        {
            **BYTES,
            **{
                f"{name}, inside": in_gzip(damage)
                for name, damage in {**TEXTS, **dict(keys("tokens", "verdict"))}.items()
            },
        },
        ("show", "diagnose", "grade"),
    ),
    "grpo/final/trainer_state.json": (
        {**BYTES, **TEXTS, **dict(keys(*STATE))},
        ("runs", "diagnose", "generate", "export"),
    ),
    "grpo/final/model.safetensors": (BYTES, ("generate", "export")),
    "grpo/final/config.json": ({**BYTES, **TEXTS}, ("generate", "export")),
    "grpo/final/tokenizer.json": ({**BYTES, **TEXTS}, ("generate",)),
    "training.log": (BYTES, ("runs", "diagnose")),
}
"""File -> its damages, and the commands that read it."""

VALUES_OF_A_TYPE = {
    ("evaluations/grpo.jsonl.gz", "verdict"),
    ("metrics.jsonl", "elapsed_s"),
    ("metrics.jsonl", "time"),
    # A flipped bit in a line or a setting can leave what could have been written.
    ("metrics.jsonl", "flipped"),
    ("recipe.yaml", "flipped"),
    ("run.json", "flipped"),
}
"""What no reader can tell from what was written: there only a traceback is a mistake."""


def commands(run: Path, out: Path) -> dict[str, tuple[str | Path, ...]]:
    asked = ("--question", "What is 3 + 4?", "--max-new-tokens", "2")
    return {
        "runs": ("runs", run.parent),
        "show": ("show", run),
        "report": ("report", run, "--output", out / "report.html"),
        "compare": ("compare", run),
        "diagnose": ("diagnose", run),
        "grade": ("grade", run, "grading.symbolic=false"),
        "generate": ("generate", run, *asked),
        "export": ("export", run, out / "exported"),
        "resume": ("run", run, "--resume", "--quiet", "--output-dir", run.parent),
    }


def called(words: tuple[str | Path, ...]) -> Called:
    """A command without the handlers that an earlier one has left, which print elsewhere."""
    logger = logging.getLogger("grouper")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    assert logging.lastResort is not None
    logger.addHandler(logging.lastResort)  # writes to whatever is standard error by then
    try:
        return call(*words)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        pytest.fail(f"{words[0]}: {type(error).__name__}: {error}")
    finally:
        logger.removeHandler(logging.lastResort)


def told(result: Called) -> bool:
    """Whether a command says that something is wrong; checks that it says so in paragraphs."""
    assert result.code in (0, 1, 2), result
    assert "Traceback" not in result.err, result.err
    if result.code == 2:
        lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
        assert lines, f"no paragraph: {result.err}"
        assert not any(line.endswith(": .") or len(line) < 20 for line in lines), lines
        return True
    return any(word in result.err.lower() for word in ("warning", "lost", "damaged", "cannot be"))


def shown(command: str, result: Called) -> object:
    """What a command answers, without times and places."""
    if command in ("export", "report", "resume"):
        return result.code
    out = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d\S*", "TIME", result.out)
    return result.code, re.sub(r"[\d.]+ (MB|ms|s)\b", "N", out)


@pytest.fixture(scope="module")
def undamaged(
    finished_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], object]:
    """What each command answers of the run as it is."""
    place = tmp_path_factory.mktemp("undamaged")
    shutil.copytree(finished_run, place / "runs" / "demo")
    known: dict[str, object] = {}

    def answer(command: str) -> object:
        if command not in known:
            result = called(commands(place / "runs" / "demo", place)[command])
            assert not told(result) or command == "resume", result
            known[command] = _without(place, shown(command, result))
        return known[command]

    return answer


def _without(place: Path, answer: object) -> object:
    return json.loads(json.dumps(answer).replace(str(place), "PLACE"))


def cases() -> Iterator[object]:
    """Every damage of every file of a run; a few of each are fast."""
    fast = {"missing", "half", "zeros", "nested", "null, inside", "phase: null", "step: a text"}
    for file, (damages, names) in RUN_FILES.items():
        for damage in damages:
            marks = () if damage in fast and "final/" not in file else (pytest.mark.slow,)
            yield pytest.param(file, damage, names, marks=marks, id=f"{file}-{damage}")


@pytest.mark.parametrize(("file", "damage", "names"), [*cases()])
def test_a_damaged_file_of_a_run_is_told_or_changes_nothing(
    finished_run: Path,
    undamaged: Callable[[str], object],
    tmp_path: Path,
    file: str,
    damage: str,
    names: tuple[str, ...],
) -> None:
    run = tmp_path / "runs" / "demo"
    shutil.copytree(finished_run, run)
    RUN_FILES[file][0][damage](run / file)
    kind = damage.partition(":")[0]
    for name in names:
        if name in ("report", "resume", "export", "grade") and damage not in {**BYTES, **TEXTS}:
            continue  # they read the records as the others do, and take longer
        result = called(commands(run, tmp_path)[name])
        if file == "grpo/final/model.safetensors":
            assert told(result), f"{name} uses weights that are not those that were trained"
        if not told(result) and (file, kind) not in VALUES_OF_A_TYPE:
            answer = _without(tmp_path, shown(name, result))
            assert answer == undamaged(name), f"{name} says nothing, and answers otherwise"


# --- models --------------------------------------------------------------------------------------


def all_zero(path: Path) -> None:
    tensors = {name: torch.zeros_like(value) for name, value in load_file(path).items()}
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def not_a_number(path: Path) -> None:
    tensors = {name: value * float("nan") for name, value in load_file(path).items()}
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def as_pickle(path: Path) -> Path:
    """The weights as `pytorch_model.bin`."""
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()
    return path.with_name("pytorch_model.bin")


SHAPE = ("hidden_size", "vocab_size", "num_hidden_layers", "model_type", "dtype", "rms_norm_eps")
MODEL_FILES: dict[str, dict[str, Damage]] = {
    "config.json": {**BYTES, **TEXTS, **dict(keys(*SHAPE, "eos_token_id", "rope_parameters"))},
    "model.safetensors": {**BYTES, "all zero": all_zero, "not a number": not_a_number},
    "pytorch_model.bin": BYTES,
    "tokenizer.json": {**BYTES, **TEXTS, **dict(keys("model", "added_tokens"))},
    "tokenizer_config.json": {**BYTES, **TEXTS, **dict(keys("eos_token", "model_max_length"))},
    "generation_config.json": {**BYTES, **TEXTS, **dict(keys("eos_token_id"))},
}


def model_cases() -> Iterator[object]:
    fast = {"half", "nested", "hidden_size: negative", "eos_token_id: a text", "all zero"}
    for file, damages in MODEL_FILES.items():
        for damage in damages:
            marks = () if damage in fast else (pytest.mark.slow,)
            yield pytest.param(file, damage, marks=marks, id=f"{file}-{damage}")


@pytest.mark.parametrize(("file", "damage"), [*model_cases()])
def test_a_damaged_file_of_a_model_is_told(
    finished_run: Path, tmp_path: Path, file: str, damage: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(finished_run / "base", model)
    if file == "pytorch_model.bin":
        as_pickle(model / "model.safetensors")
    MODEL_FILES[file][damage](model / file)
    asked = ("--format", "xml", "--question", "What is 3 + 4?", "--max-new-tokens", "2")
    results = {
        "generate": called(("generate", model, *asked)),
        "export": called(("export", model, tmp_path / "out")),
    }
    complaints = {name: told(result) for name, result in results.items()}
    weights = file in ("model.safetensors", "pytorch_model.bin") and damage != "flipped"
    if weights or (file, damage) in {
        ("config.json", d) for d in {**BYTES, **TEXTS} if d != "flipped"
    }:
        assert all(complaints.values()), (complaints, results)
        assert not (tmp_path / "out").exists()


OTHER_READERS = [
    ("config.json", "nested"),
    ("config.json", "hidden_size: negative"),
    ("tokenizer.json", "half"),
    ("tokenizer_config.json", "zeros"),
    ("generation_config.json", "eos_token_id: a text"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "damage"), OTHER_READERS)
def test_what_plans_or_validates_a_damaged_model_ends_in_a_paragraph(
    finished_run: Path, tmp_path: Path, file: str, damage: str
) -> None:
    """`plan`, `init` and a dry evaluation load no weights, and read everything else."""
    model = tmp_path / "model"
    shutil.copytree(finished_run / "base", model)
    MODEL_FILES[file][damage](model / file)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(30))
    )
    new = ("init", tmp_path / "new.yaml", "--model", model, "--data", rows, "--no-samples")
    results = {
        "plan": called(("plan", "demo", "model.new=null", f"model.path={model}")),
        "init": called(new),
        "eval": called(("eval", model, "--on", rows, "--dry-run")),
    }
    complaints = {name: told(result) for name, result in results.items()}
    # A dry evaluation makes no model of the shape that the configuration has.
    whole = {"nested": {"plan", "init", "eval"}, "hidden_size: negative": {"plan", "init"}}
    silent = [name for name in whole.get(damage, ()) if not complaints[name]]
    assert not silent, results


def test_the_kinds_of_damage_are_many() -> None:
    kinds = {
        (kind, damage)
        for kind, table in (
            ("run", {name: damages for name, (damages, _) in RUN_FILES.items()}),
            ("model", MODEL_FILES),
        )
        for damages in table.values()
        for damage in damages
    }
    assert len(kinds) >= 88
    assert len(ODD) == 8
