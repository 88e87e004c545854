"""What four runs do in three small steps of each phase, as plain data.

    python tests/frozen/frozen_runs.py [NAME...]  records runs again in runs/, all or those named
    python tests/frozen/frozen_runs.py --to DIR   writes them elsewhere; the test compares the two

A run is frozen as its resolved recipe, its rollouts, its metrics other than time and memory, and
its weights. The processes that make them use PyTorch's plainest code path, so that the numbers
hardly depend on the processor. Recipes are made small in sizes only, but for two things: they
compute in float32, and one more reward, which any text earns a little of, gives their random
models something to learn.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for place in ("tests", "tests/end_to_end"):
    sys.path.insert(0, str(ROOT / place))

FOLDER = Path(__file__).parent / "runs"
PLAIN = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GROUPER_KERNELS": "0",
    "OMP_NUM_THREADS": "1",
}
"""The environment of the process that runs: arithmetic that all x86 processors share."""

NOT_FROZEN = ("time", "elapsed_s", "memory.", "host.")
"""Beginnings of the metrics that may differ between two equal runs."""

OF_TOKENS = ("token_texts", "logprobs", "trainer_logprobs", "entropies", "clipped")
"""Columns of rollouts with one value per token."""

COIN = """
def coin(*, completions, completion_ids, **kwargs):
    return [sum(ids) % 7 / 10 for ids in completion_ids]
"""

SHAPE = "{hidden_size: 32, layers: 1, intermediate_size: 64, vocab_size: 512}"
SIZES = [
    "model.path=null",
    "model.dtype=float32",
    "model.compute_dtype=float32",
    f"model.new={SHAPE}",
    "sft.steps=3",
    "sft.batch_size=4",
    "sft.max_tokens=null",
    "sft.evaluate_every=0",
    "grpo.steps=3",
    "grpo.prompts_per_step=2",
    "grpo.group_size=4",
    "grpo.evaluate_every=2",
    "grpo.allow_truncation=true",
    "grpo.require_correct_in_group=false",
    "evaluation.samples=1",
    "evaluation.max_new_tokens=16",
    "threads=1",
]


RUNS = {
    # Generated problems, Muon, validation in SFT, checkpoints that are deleted, groups without
    # signal replaced; GSPO's ratio, RLOO's baseline, KL against a reference in the loss.
    "demo": [
        "grpo.dynamic_sampling_rounds=1",
        "sft.evaluate_every=2",
        "grpo.checkpoint_every=1",
        "grpo.keep_checkpoints=1",
        "grpo.ratio=sequence",
        "grpo.advantage=leave_one_out",
        "grpo.updates_per_batch=2",
        "grpo.beta=0.04",
    ],
    # No SFT, LoRA; KL in the reward, advantages over the whole step, REINFORCE's surrogate.
    "gsm8k-xml": [
        "grpo.advantage=batch_standardised",
        "grpo.weighting=sequence_mean",
        "grpo.surrogate=policy_gradient",
        "grpo.beta=0.01",
        "grpo.kl=k1",
    ],
    # A prompt without a template; Dr. GRPO's baseline and weighting, CISPO's surrogate.
    "math-r1-zero": [
        "grpo.advantage=mean",
        "grpo.advantage_eps=null",
        "grpo.weighting=constant",
        "grpo.surrogate=cispo",
        "grpo.updates_per_batch=2",
    ],
    # DAPO: its bounds, completions that were cut off left out.
    "openmath-dapo": ["grpo.overlong=mask", "grpo.advantage_eps=1e-6"],
}
"""Recipe -> what is set in it.

Chosen by coverage: between them they take nearly every branch of the training loop that any shipped
recipe or preset takes. Two are left to other tests: the mark of the best checkpoint, which a random
model never earns (`tests/invariants/test_kills.py`), and the advantage `none`.
"""


def overrides(name: str, folder: Path) -> list[str]:
    """What makes the recipe of a frozen run small; writes its data into `folder`."""
    (folder / "coin.py").write_text(COIN)
    return [*small_data(name, folder), *SIZES, *lengths(name), *rewards(name), *RUNS[name]]


def small_data(name: str, folder: Path) -> list[str]:
    """Overrides that read a few rows in the columns that the recipe reads."""
    from recipe_data import DATA, gsm8k

    from grouper import load_recipe

    if name == "demo":
        counts = {"sft": 16, "train": 12, "validation": 4, "test": 4}
        return [f"data.{part}.options.count={count}" for part, count in counts.items()]
    layouts = ROOT / "tests" / "data" / "layouts"
    (folder / layouts.name).symlink_to(layouts)
    made = DATA.get(name, gsm8k)(ROOT.parent / "shared" / "data", folder / "data")
    if load_recipe(name).data.validation_share:
        made.append("data.validation_share=0.2")
    # Folders of this machine are no part of what is frozen.
    for inside in (folder / "data", layouts):
        made = [text.replace(str(inside), inside.name) for text in made]
    return made


def lengths(name: str) -> list[str]:
    """Overrides for short completions."""
    from grouper import load_recipe

    sampling = load_recipe(name).sampling
    if sampling.max_total_tokens is not None:
        return ["sampling.max_total_tokens=1024"]
    shortest = min(sampling.min_new_tokens, 4)
    return ["sampling.max_new_tokens=16", f"sampling.min_new_tokens={shortest}"]


def rewards(name: str) -> list[str]:
    """The recipe's own rewards, and one that random text earns."""
    from grouper import load_recipe

    own = [reward.model_dump(mode="json") for reward in load_recipe(name).rewards]
    return [f"rewards={json.dumps([*own, {'name': 'coin.py:coin'}])}"]


# --- one run as data -----------------------------------------------------------------------------


def frozen(name: str) -> dict[str, Any]:
    """Run it in the current folder, which is empty, and read what it has left on disk."""
    from grouper import api, load_recipe, prepare, train

    api.draw_pictures = lambda folder: None  # half of the time, and not frozen
    changes = overrides(name, Path.cwd())
    with prepare(load_recipe(name, [*changes, "name=run", "output_dir=."])) as setup:
        path = train(setup).path
    return {
        "recipe": load_recipe(name, RUNS[name]).model_dump(mode="json"),
        "metrics": list(metrics(path / "metrics.jsonl")),
        "rollouts": [row for file in sorted(path.glob("rollouts/*")) for row in rollouts(file)],
        "weights": {
            phase: weights(folder)
            for phase in ("sft", "grpo")
            if (folder := path / phase / "final").exists()
        },
    }


def metrics(file: Path) -> Iterator[dict[str, Any]]:
    """Of the first three steps of each phase, what two equal runs have in common."""
    for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
        row = json.loads(line)
        if row["step"] <= 3:
            columns = {k: v for k, v in row.items() if not k.startswith(NOT_FROZEN)}
            fixed = {name: columns.pop(name) for name in ("phase", "step", "status", "events")}
            yield {**fixed, "metrics": columns}


def rollouts(file: Path) -> Iterator[dict[str, Any]]:
    """Every sample with its grade, rewards and advantage, without what has a value per token."""
    for line in gzip.decompress(file.read_bytes()).decode().split("\n")[:-1]:
        row = json.loads(line)
        yield {name: value for name, value in row.items() if name not in OF_TOKENS}


def written(value: Any, indent: str = "") -> str:
    """JSON with a line for every list of plain values and every small mapping."""
    flat = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if not isinstance(value, dict | list) or (len(flat) < 100 and "{" not in flat[1:]):
        return flat
    deeper = indent + " "
    if isinstance(value, list):
        inner = [written(item, deeper) for item in value]
        opening, closing = "[]"
    else:
        inner = [f"{json.dumps(k)}: {written(v, deeper)}" for k, v in sorted(value.items())]
        opening, closing = "{}"
    lines = ",\n".join(deeper + text for text in inner)
    return f"{opening}\n{lines}\n{indent}{closing}"


def weights(folder: Path) -> dict[str, Any]:
    """A hash of all bytes, and two sums per tensor, which say more where the hash differs."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    sums = {}
    (file,) = folder.glob("*.safetensors")
    for name, tensor in sorted(load_file(file).items()):
        values = tensor.double().flatten()
        digest.update(name.encode() + tensor.float().numpy().tobytes())
        waves = torch.cos(torch.arange(len(values)).double())
        sums[name] = [float(values.sum()), float(values @ waves)]
    return {"sha256": digest.hexdigest(), "sums": sums}


def arithmetic() -> str:
    """A mark of how this process calculates: hashes compare only where it is the same."""
    import torch

    a = torch.sin(torch.arange(64 * 48).float()).view(64, 48)
    made = [a @ a.T, torch.log_softmax(a, 1), torch.tanh(a), torch.rsqrt(a.abs() + 1), a.exp()]
    return hashlib.sha256(b"".join(m.numpy().tobytes() for m in made)).hexdigest()[:16]


def record(to: Path, wanted: list[str]) -> None:
    """Write one file per run, each made in a folder of its own."""
    to = to.resolve()
    to.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found = {"arithmetic": arithmetic(), **frozen(name)}
            os.chdir(to)
        (to / f"{name}.json").write_text(written(found) + "\n", encoding="utf-8")


def record_apart(to: Path, wanted: Sequence[str] = ()) -> None:
    """The same, in a process of its own whose arithmetic is plain."""
    command = [sys.executable, __file__, "--here", "--to", str(to), *wanted]
    subprocess.run(command, env={**os.environ, **PLAIN}, check=True, capture_output=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=FOLDER)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.here:
        record(options.to, options.names or list(RUNS))
    else:
        record_apart(options.to, options.names)
