"""What can be wrong with models, adapters, run folders and checkpoints."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frozen_calls import TINY, Row

from grouper import (
    RunFolder,
    build_rewards,
    load_generator,
    load_problems,
    load_recipe,
    make_format,
    prepare,
    solve,
    train,
)

Prepare = Callable[[Path], Any]

SETTINGS = " ".join(f'"{text}"' for text in TINY)
"""As the run `tiny` was made, but for its steps."""
STEPS = "sft.steps=4 grpo.steps=2"
AGAIN = f"run demo {SETTINGS} {STEPS} name=tiny output_dir=. --quiet"
FROM = "model={path: tiny/base}"
OTHER = " ".join(f'"{text}"' for text in TINY if not text.startswith("model."))
START = f"run demo {OTHER} {STEPS} output_dir=. name=other --quiet"


def row(name: str, command: str, *prepare: Prepare, **more: object) -> Row:
    """The run `tiny` lies there; things are done to it first."""

    def all_of_them(folder: Path) -> None:
        for change in prepare:
            change(folder)

    return Row(
        name=name,
        command=command,
        prepare=all_of_them,
        **{"run": True, **more},  # type: ignore[arg-type]  # of a row
    )


def written(name: str, text: str | bytes) -> Prepare:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(data)


def deleted(*names: str) -> Prepare:
    def change(folder: Path) -> None:
        for name in names:
            place = folder / name
            shutil.rmtree(place) if place.is_dir() else place.unlink()

    return change


def edited(name: str, **changes: object) -> Prepare:
    """A JSON file with other values; None takes a key out."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        kept = {key: value for key, value in content.items() if key not in changes}
        new = {key: value for key, value in changes.items() if value is not None}
        (folder / name).write_text(json.dumps({**kept, **new}))

    return change


def replaced(name: str, old: str, new: str) -> Prepare:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text, name
        (folder / name).write_text(text.replace(old, new))

    return change


def damaged(name: str) -> Prepare:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def copied(source: str, target: str) -> Prepare:
    def change(folder: Path) -> None:
        shutil.copytree(folder / source, folder / target)

    return change


def adapter(base: str = "tiny/base", stored_rank: int = 2) -> Prepare:
    """A folder `adapter` as PEFT writes it, of rank 2, with weights of another perhaps."""

    def change(folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        shape = json.loads((folder / "tiny/base/config.json").read_text())
        width, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
        (folder / "adapter").mkdir()
        save_file(
            {
                f"{name}_A.weight": torch.zeros(stored_rank, width),
                f"{name}_B.weight": torch.zeros(heads, stored_rank),
            },
            folder / "adapter/adapter_model.safetensors",
        )
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj"],
        }
        (folder / "adapter/adapter_config.json").write_text(json.dumps(config))

    return change


def reshaped(name: str) -> Prepare:
    return edited(f"{name}/config.json", intermediate_size=48)


def infinite(name: str) -> Prepare:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / name)
        weights["model.norm.weight"][0] = float("nan")
        save_file(weights, folder / name, {"format": "pt"})

    return change


class _Opens:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("opened", "w")


ASK = "generate ./model --format xml -Q 2+2? --quiet"
FROM_ADAPTER = f"{START} '{FROM}' grpo.start_from=./adapter --skip-sft"
GRPO = f"{START} '{FROM}' --skip-sft"
RATED = f"{GRPO} 'grpo.difficulty={{path: rates.jsonl}}'"
MODEL = copied("tiny/base", "model")

MODELS = (
    row("model/empty-folder", f"{START} 'model={{path: ./mine}}'", folders=("mine",)),
    row("model/to-evaluate", "eval demo --model ./mine"),
    row("model/to-export", "export ./mine out"),
    row("model/to-export-over", "export ./tiny tiny"),
    row("model/to-preview", "preview demo --model ./mine"),
    row("model/never-made", "preview demo"),
    row("model/never-measured", "eval demo --split test"),
    row("model/of-difficulty", "data difficulty demo --model ./mine"),
    row("model/shapes", ASK, MODEL, reshaped("model")),
    row("model/architecture", ASK, MODEL, edited("model/config.json", model_type="t6")),
    row("model/config", ASK, MODEL, written("model/config.json", "{")),
    row("model/weights", ASK, MODEL, written("model/model.safetensors", "nothing of the kind")),
    row("model/no-weights", ASK, MODEL, deleted("model/model.safetensors")),
    row("model/pickle", ASK, MODEL, deleted("model/model.safetensors"),
        written("model/pytorch_model.bin", pickle.dumps(_Opens(), protocol=2))),
    row("model/not-finite", ASK, MODEL, infinite("model/model.safetensors")),
    row("model/no-stop-token", ASK, MODEL, deleted("model/chat_template.jinja"),
        edited("model/tokenizer_config.json", eos_token=None),
        edited("model/generation_config.json", eos_token_id=None),
        edited("model/config.json", eos_token_id=None)),
    row("model/no-chat-template", f"{START} '{FROM}' prompt.template=chat",
        deleted("tiny/base/chat_template.jinja")),
    row("model/template-fails", f"{START} '{FROM}' prompt.template=chat",
        written("tiny/base/chat_template.jinja", "{{ raise_exception('no.') }}")),
    row("model/template-drops", f"{START} '{FROM}' prompt.template=chat",
        written("tiny/base/chat_template.jinja", "{{ 'Hello' }}")),
    row("model/more-tokens", f"{START} '{FROM}'", MODEL,
        edited("tiny/base/config.json", vocab_size=64)),
    row("model/other-tokenizer", f"{START} '{FROM}' grpo.start_from=./model", MODEL,
        replaced("model/tokenizer.json", '"<answer>"', '"<answr>"')),
    row("model/context", f"{START} '{FROM}' sampling.max_new_tokens=40",
        edited("tiny/base/config.json", max_position_embeddings=40)),
    row("model/lora-layers", f"{START} '{FROM}' 'model.lora={{target_modules: [q_prj]}}'"),
    row("model/device", f"{START} '{FROM}' device=mps"),
    row("adapter/no-tokenizer", "generate ./adapter --format xml -Q 2+2?", adapter()),
    row("adapter/config", FROM_ADAPTER, adapter(), written("adapter/adapter_config.json", "{")),
    row("adapter/no-base", FROM_ADAPTER, adapter(base="")),
    row("adapter/base-gone", FROM_ADAPTER, adapter(base="./gone/base")),
    row("adapter/rank", FROM_ADAPTER, adapter(stored_rank=3)),
    row("adapter/damaged", FROM_ADAPTER, adapter(),
        damaged("adapter/adapter_model.safetensors")),
    row("adapter/other-base", FROM_ADAPTER, MODEL,
        reshaped("model"), adapter(base="model")),
)  # fmt: skip

FAILS_LATER = """
calls = 0
def f(completions, **kwargs):
    global calls
    calls += 1
    if calls > 2:
        raise ValueError("no more")
    return [1.0, 0.0, 0.0, 0.0]
"""
CHECKPOINTS = "tiny/grpo/checkpoint-2", "tiny/sft/checkpoint-4"
UNFINISHED = deleted("tiny/grpo/final", "tiny/evaluations/grpo.json")
RESUME = f"{AGAIN} --resume"
GIVEN = "save_path=mine"

FOLDERS = (
    row("run/there", AGAIN),
    row("run/other-recipe", f"{AGAIN} grpo.beta=0.5"),
    row("run/other-recipe-resumed", f"{RESUME} grpo.beta=0.5 sft.steps=6"),
    row("run/other-recipe-dry", f"{AGAIN} grpo.beta=0.5 --dry-run"),
    row("run/something-else", f"{START} '{FROM}'", files={"other/thesis.tex": "years of work"}),
    row("run/something-else-deleted", f"{START} '{FROM}' --overwrite",
        files={"other/thesis.tex": "years of work"}),
    row("run/output-is-a-file", f"{START} '{FROM}' output_dir=here", files={"here": ""}),
    row("run/data-changed", RESUME, UNFINISHED, replaced("train.jsonl", "Pick 100.", "Pick 99.")),
    row("run/nobody", "run --resume nobody"),
    row("run/info", "diagnose tiny", written("tiny/run.json", "{")),
    row("run/info-gone", "diagnose tiny", deleted("tiny/run.json")),
    row("run/no-run", "diagnose nowhere"),
    row("run/no-step", "diagnose tiny", written("tiny/metrics.jsonl", "")),
    row("run/metrics", "diagnose tiny", written("tiny/metrics.jsonl", '{"phase": 3}\n')),
    row("run/evaluation", "diagnose tiny", written("tiny/evaluations/grpo.json", "{")),
    row("run/recipe", "eval ./tiny", written("tiny/recipe.yaml", "name: [\n")),
    row("run/compare-nothing", "compare tiny other",
        copied("tiny", "other"), deleted("other/evaluations")),
    row("run/compare-other-items", "compare tiny other",
        copied("tiny", "other"),
        lambda f: _other_items(f / "other/evaluations/grpo.jsonl.gz")),
    row("run/no-test", "eval ./tiny data.test=null"),
    row("run/grade-nowhere", "grade nowhere"),
    row("run/grade-no-run", "grade ./"),
    row("run/pass-rates-of-others", "data difficulty ./tiny --output rates.jsonl --quiet",
        written("rates.jsonl",
                '{"problem_id": "a", "correct": 1, "completions": 2, "settings": "b"}\n')),
    row("run/save-path-is-the-run", f"{START} '{FROM}' save_path=other"),
    row("run/save-path-of-something-else", f"{START} '{FROM}' {GIVEN}",
        files={"mine/thesis.tex": "years of work"}),
    row("run/save-path-with-folder", f"{START} '{FROM}' {GIVEN}",
        copied("tiny/base", "mine"), written("mine/recipe.yaml", ""),
        lambda f: (f / "mine/more").mkdir()),
    row("run/difficulty-file", RATED),
    row("run/difficulty-line", RATED,
        written("rates.jsonl", '{"correct": 3}\n')),
    row("checkpoint/all-damaged", RESUME, UNFINISHED,
        damaged(f"{CHECKPOINTS[0]}/optimizer/0.safetensors")),
    row("checkpoint/other-recipe", RESUME, UNFINISHED,
        edited(f"{CHECKPOINTS[0]}/trainer_state.json", recipe_hash="0123456789abcdef")),
    row("checkpoint/state", RESUME, UNFINISHED,
        written(f"{CHECKPOINTS[0]}/trainer_state.json", "{")),
    row("checkpoint/state-key", RESUME, UNFINISHED,
        edited(f"{CHECKPOINTS[0]}/trainer_state.json", started_from=None)),
    row("checkpoint/sft-damaged", RESUME, UNFINISHED,
        damaged("tiny/sft/final/model.safetensors")),
    row("checkpoint/sft-gone", RESUME, UNFINISHED, deleted("tiny/sft/final")),
    row("checkpoint/sft-behind-grpo", RESUME, UNFINISHED, deleted("tiny/sft"),
        replaced(f"{CHECKPOINTS[0]}/trainer_state.json", "sft/final", "base")),
    row("training/cut-off", f"{GRPO} grpo.allow_truncation=false"),
    row("training/alarm", f"{GRPO} grpo.steps=24 on_finding=stop", hide=(r"\d+(?=%)",)),
    row("training/nothing-finite", f"{START} '{FROM}' sft.optimizer.learning_rate=1e30"),
    row("training/reward-fails", f"{GRPO} \"rewards=[{{name: 'mine.py:f'}}]\"",
        files={"mine.py": FAILS_LATER}, hide=(r"(?<=the completion ).*(?= to )",)),
)  # fmt: skip


def _other_items(file: Path) -> None:
    with gzip.open(file, "rt") as rows:
        kept = [row.replace('"problem_id":"', '"problem_id":"other/') for row in rows]
    with gzip.open(file, "wt") as target:
        target.writelines(kept)


def _asked(question: str) -> None:
    with load_generator("tiny") as generator:
        solve(question, generator)


PYTHON = (
    row("python/no-question", "", python=lambda: _asked(" ")),
    row("python/long-question", "", python=lambda: _asked("9 " * 17_000)),
    row("python/override", "", python=lambda: load_recipe("demo").override("seed=-1", nmae="x")),
    row("python/section", "", python=lambda: load_recipe("demo").override(grpo={"stesp": 3})),
    row("python/run", "", python=lambda: train(prepare(load_recipe("tiny/recipe.yaml")))),
    row("python/rewards", "", python=lambda: build_rewards(
        load_recipe("demo", ["rewards=[{name: corectness}]"]).rewards,
        make_format(load_recipe("demo").prompt))),
    row("python/format", "", python=lambda: make_format(
        load_recipe("demo", ["prompt.format=xlm"]).prompt)),
    row("python/problems", "", python=lambda: load_problems(
        load_recipe("demo", ["data.train={source: file, path: none.jsonl}"]).data.train, seed=0)),
    row("python/run-folder", "", python=lambda: RunFolder(Path("nowhere")).read_info()),
)  # fmt: skip

ROWS = (*MODELS, *FOLDERS, *PYTHON)
