"""Modal: one GPU for as long as a run takes. Not run by us: a test calls it with Modal replaced.

Start it in a checkout of Grouper, which becomes part of the image:

modal run examples/launch/modal_app.py --recipe gsm8k-lite --overrides "grpo.steps=100 seed=1"
modal volume get grouper-runs gsm8k-lite/report.html

The volume keeps the runs. A run that was stopped by the time limit resumes with the same command.
"""

from __future__ import annotations

import shlex
import subprocess

import modal

GPU = "L4"
HOURS = 12
RUNS = "/runs"

app = modal.App("grouper")
volume = modal.Volume.from_name("grouper-runs", create_if_missing=True)
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("g++")
    .pip_install("torch==2.13.0")
    .add_local_dir("src", "/grouper/src", copy=True)
    .add_local_file("pyproject.toml", "/grouper/pyproject.toml", copy=True)
    .add_local_file("README.md", "/grouper/README.md", copy=True)
    .add_local_file("LICENSE", "/grouper/LICENSE", copy=True)
    .add_local_file("constraints.txt", "/grouper/constraints.txt", copy=True)
    .run_commands("pip install --constraint /grouper/constraints.txt /grouper")
)


@app.function(image=image, gpu=GPU, volumes={RUNS: volume}, timeout=HOURS * 3600)
def train(recipe: str, overrides: list[str]) -> None:
    """Run a recipe on the GPU, or resume it."""
    command = ["grouper", "run", recipe, f"output_dir={RUNS}", *overrides, "--resume"]
    try:
        subprocess.run(command, check=True)
    finally:
        # A run that was stopped has saved its step by now.
        volume.commit()


@app.local_entrypoint()
def main(recipe: str = "demo", overrides: str = "") -> None:
    """Start the run from your machine; `overrides` is one text, as a shell reads it."""
    train.remote(recipe, shlex.split(overrides))
