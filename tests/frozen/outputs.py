"""What each command prints on something small; help texts are not recorded.

`python tests/frozen/outputs.py [ROW...]` records them in `outputs.json`, all or those named.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frozen import choose, load, save
from frozen_calls import Row, done, make_tiny_run
from refusals_of_data import lines, sums
from refusals_of_runs import SETTINGS, STEPS

RECIPE = r"^name: (?:.|\n)*\Z"
"""The resolved recipe, which a dry run prints last."""
SAMPLES = r"^\[(?:.|\n)*?(?=^Right:)"
"""What a model has written, in a preview."""

SECONDS = r"(?<=: done in )\S+"
"""How long a part took."""
MACHINE_MEMORY = r"(?<=This machine has )[\d.]+"
STEP = (r"(?<=\d )(no-signal:\S+|learning)(?= \|)", r"\((prefill|update) [^)]*\)")
"""Of a step's line: what it learned from, and where its time went."""
ADVICE = r"(?<=checkpoints not counted\n)(Try: .*\n)*"
"""What a machine that is measured could do better."""

FEW = " ".join(f"data.{part}.options.count=20" for part in ("sft", "train", "validation", "test"))
SAME = f"{SETTINGS} {STEPS} output_dir=."
COMPLETIONS = lines(
    {"text": r"so \boxed{0.5}", "answer": "1/2"},
    {"text": r"so \boxed{7}", "answer": "8"},
    {"text": "no idea", "answer": "8"},
)
TRL = """
num_generations: 8
per_device_train_batch_size: 8
learning_rate: 1e-6
beta: 0.04
reward_funcs: [accuracy_reward]
push_to_hub: true
nmu_iterations: 2
"""
SOME = [*sums(9), sums(1)[0], {"question": "What is 2 + 2?", "answer": "5"},
        {"question": "Half?", "answer": r"\frac{1}{2"}]  # fmt: skip
FOUND = {"some.jsonl": lines(*SOME)}
TEXT = "<reasoning>3 and 4</reasoning><answer>7</answer>"


def output(name: str, command: str, **more: Any) -> Row:
    return Row(name=f"output/{name}", command=command, **more)


def of_run(name: str, command: str, **more: Any) -> Row:
    """On the finished run; its numbers are a model's."""
    wide = {"COLUMNS": "200"}  # where a line is broken depends on the numbers in it
    return output(name, command, run=True, environment=wide, **{"computed": True, **more})


def dry(name: str, command: str) -> Row:
    return of_run(name, f"{command} --dry-run", computed=False, hide=(RECIPE,))


def training(name: str, command: str) -> Row:
    return of_run(name, f"{command} demo {SAME} name=mine", hide=STEP)


WITHOUT_MODELS = (
    output("version", "--version"),
    output("skill", "skill"),
    output("recipes", "recipes"),
    output("recipes-show", "recipes show demo grpo.beta=0.01"),
    output("recipes-fields", "recipes fields"),
    output("recipes-formats", "recipes formats"),
    output("recipes-from-trl", "recipes from grpo.yaml", files={"grpo.yaml": TRL}),
    output("recipes-from-trl-written", "recipes from grpo.yaml -o mine.yaml",
           files={"grpo.yaml": TRL}),
    output("rewards-list", "rewards list"),
    output("rewards-show-reward", "rewards show cosine"),
    output("rewards-show-stack", "rewards show gsm8k-xml"),
    output("rewards-try", f"rewards try demo '{TEXT}' --answer 7"),
    output("rewards-try-stack", f"rewards try stack:gsm8k-xml '{TEXT}' --answer 8"),
    output("rewards-probe", "rewards probe demo"),
    output("rewards-probe-fails", "rewards probe stack:openmath-dapo"),
    output("grade", r"grade 'so \boxed{0.5}' --answer '\frac12'", hide=(r"[\d.]+ m?s\b",)),
    output("grade-wrong", f"grade '{TEXT}' --answer 8 --format xml", hide=(r"[\d.]+ m?s\b",)),
    output("grade-stdin", "grade - --answer 42", stdin="It is\n#### 42\n",
           hide=(r"[\d.]+ m?s\b",)),
    output("grade-file", "grade rows.jsonl", files={"rows.jsonl": COMPLETIONS}),
    output("data-list", "data list"),
    output("data-show", "data show ./some.jsonl limit=3", files=FOUND),
    output("data-show-recipe", f"data show demo -n 1 {FEW}"),
    output("data-audit", "data audit ./some.jsonl --output found.jsonl", files=FOUND),
    output("data-audit-recipe", f"data audit demo {FEW}"),
    output("data-prepare", "data prepare ./some.jsonl validation_share=0.3", files=FOUND),
    output(
        "plan",
        f"plan demo --device cpu --tokens-per-second 9000 {FEW}",
        hide=(SECONDS, MACHINE_MEMORY),
    ),
    output("plan-json", f"plan demo --device cpu --json {FEW} model.new.layers=1", hide=(SECONDS,)),
)  # fmt: skip
WITH_MODELS = (
    training("run", "run"),
    training("sft", "sft"),
    training("grpo", "grpo"),
    of_run("run-resumed", f"run demo {SAME} name=tiny --resume"),
    of_run("run-dry", f"run demo {SAME} --dry-run", computed=False),
    dry("sft-dry", f"sft demo {SAME}"),
    dry("grpo-dry", f"grpo demo {SAME}"),
    of_run("eval", "eval ./tiny"),
    dry("eval-dry", "eval ./tiny"),
    of_run("generate", "generate ./tiny --input rows.jsonl --output out.jsonl",
           files={"rows.jsonl": lines({"question": "2+2?"}, {"question": "9 " * 17_000})}),
    of_run("preview", "preview ./tiny --quiet", hide=(SAMPLES,)),
    of_run("diagnose", "diagnose tiny"),
    of_run("bench", "bench ./tiny --steps 1 --warmup 0 --quiet --completion-tokens 4",
           hide=(ADVICE,)),
    of_run("export", "export ./tiny out"),
    of_run("grade-run", "grade tiny"),
    of_run("runs", "runs .", hide=(r"<date>.*$",)),
    of_run("data-difficulty", "data difficulty ./tiny --samples 2 --output rates.jsonl --quiet",
           hide=(r"#+$",)),
)  # fmt: skip

ROWS: dict[str, Row] = {row.name: row for row in (*WITHOUT_MODELS, *WITH_MODELS)}


def printed(row: Row, folder: Path, tiny: Path | None) -> dict[str, Any]:
    """What is recorded of a row that is done in the new folder."""
    told = done(row, folder, tiny)
    parts = {"out": told.out, "err": told.err}
    return {"exit code": told.code, **{name: _kept(text) for name, text in parts.items()}}


def _kept(text: str) -> Sequence[str]:
    """Lines without the blanks at their ends, which a table has as wide as its numbers."""
    return [re.sub(r"\s+$", "", line) for line in text.splitlines()]


def record(names: Sequence[str]) -> None:
    """Record rows, all where none is named; the others stay as they were recorded."""
    recorded = load("outputs")
    with tempfile.TemporaryDirectory() as place:
        tiny = make_tiny_run(Path(place) / "run")
        for number, name in enumerate(choose(names, ROWS)):
            recorded[name] = printed(ROWS[name], Path(place) / str(number), tiny)
    save("outputs", {name: recorded[name] for name in ROWS})


if __name__ == "__main__":
    record(sys.argv[1:])
