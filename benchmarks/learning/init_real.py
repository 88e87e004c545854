"""Does the recipe that `grouper init` writes teach a real model anything?

For each model: `init` with GSM8K's training file, the SFT that the recipe has (if any), and the
first 16 groups of 8 rollouts that GRPO would draw. A group is mixed where some of its answers are
right and some are not: only there correctness teaches. On a CPU one pass of SFT over 7,473
solutions takes hours, so that it is shortened, and the result says to how many steps.

    python -m benchmarks.learning.init_real TRAIN.jsonl MODEL... [--sft-steps 24] [--until-mixed]

Results go to benchmarks/results/init_real.json, one model after the other; a model whose stages are
in the folder already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS, ROOT

RESULT = RESULTS / "init_real.json"
PAGE = ROOT / "docs" / "your-own-model.md"
# Around the table in the page.
BEGIN = "<!-- written by benchmarks/learning/init_real.py -->\n"
END = "<!-- end -->\n"
GROUPS = 16
GROUP_SIZE = 8
# Groups that are drawn together.
AT_ONCE = 4
# Nothing is evaluated here, so that nothing is held out.
ALL_FOR_TRAINING = {"validation_share": 0.0, "test": None, "test_share": 0.0}


def write_recipe(model: str, train: Path, folder: Path, *, seconds: float) -> dict[str, Any]:
    """Call `grouper init` as a user does; returns its output and the seconds that it took."""
    record = folder / "init.json"
    if record.is_file():
        return dict(json.loads(record.read_text()))
    started = time.perf_counter()
    words = ["init", "recipe.yaml", "--model", model, "--data", str(train)]
    words += ["--sample-seconds", str(seconds)]
    called = subprocess.run(
        [sys.executable, "-m", "grouper", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = {"seconds": time.perf_counter() - started, "output": called.stdout}
    record.write_text(json.dumps(found))
    return found


def train_sft(folder: Path, *, steps: int, batch_size: int) -> tuple[str | None, dict[str, Any]]:
    """Run the SFT of the recipe, shortened; returns the folder of its model, if it has SFT."""
    import grouper
    from grouper.models.device import fastest_dtype

    recipe = grouper.load_recipe(folder / "recipe.yaml")
    if recipe.skip_sft:
        return None, {}
    short = recipe.override(
        f"sft.steps={steps}",
        f"sft.batch_size={batch_size}",
        "sft.evaluate_every=0",
        "tracking.token_groups=0",
        data=ALL_FOR_TRAINING,
        skip_grpo=True,
        output_dir=str(folder),
        name="sft-run",
        # The recipe's is meant for a GPU.
        model={"dtype": fastest_dtype()},
    )
    final = folder / "sft-run" / "sft" / "final"
    started = time.perf_counter()
    if not final.is_dir():
        grouper.train(short, resume=(folder / "sft-run").exists())
    whole = 7473 // recipe.sft.batch_size
    return str(final), {
        "steps": steps,
        "batch_size": batch_size,
        "steps_of_the_recipe": whole,
        "batch_size_of_the_recipe": recipe.sft.batch_size,
        "seconds": time.perf_counter() - started,
    }


def first_groups(folder: Path, model: str, *, until_mixed: bool) -> dict[str, Any]:
    """Draw the first groups as GRPO and `grouper preview` would, and count.

    Args:
        folder: of the recipe.
        model: what GRPO would start from.
        until_mixed: draw no more once a group is mixed.
    """
    import grouper
    from grouper.models.device import fastest_dtype
    from grouper.rewards.builtin import format_holds
    from grouper.training.assemble import advantages_of
    from grouper.training.collect import collect
    from grouper.training.curriculum import first_met
    from grouper.training.prepare import Prepared
    from grouper.training.problem_sets import ProblemSets, load_part

    recipe = grouper.load_recipe(folder / "recipe.yaml")
    recipe = recipe.override(data=ALL_FOR_TRAINING, model={"dtype": fastest_dtype()})
    started = time.perf_counter()
    groups: list[Any] = []
    sets = ProblemSets(train=load_part(recipe, "train"))
    with Prepared(recipe, sets, model=model, quiet=True) as prepared:
        sampler = prepared.samplers.over(prepared.load(model))
        items = [prepared.train[i] for i in first_met(len(prepared.train), GROUPS, seed=0)]
        for begin in range(0, GROUPS, AT_ONCE):
            groups += collect(
                items[begin : begin + AT_ONCE],
                sampler=sampler,
                grader=prepared.grader,
                rewards=prepared.rewards,
                params=prepared.training_params(),
                group_size=GROUP_SIZE,
                key=(recipe.seed, "preview"),
            ).groups
            solved = [group.solved for group in groups]
            print(f"{time.perf_counter() - started:.0f} s, solved: {solved}", flush=True)
            if until_mixed and any(0 < count < GROUP_SIZE for count in solved):
                break
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        held = sum(format_holds(r.completion.text, prepared.format) for r in rollouts)
    return {
        "groups": len(groups),
        "group_size": GROUP_SIZE,
        "max_new_tokens": recipe.sampling.max_new_tokens,
        "solved": solved,
        "mixed": sum(0 < count < GROUP_SIZE for count in solved),
        "with_signal": sum(any(values) for values in advantages_of(groups, recipe.grpo)),
        "in_format": held,
        "truncated": sum(r.completion.truncated for r in rollouts),
        "rollouts": len(rollouts),
        "tokens": sum(len(r.completion.token_ids) for r in rollouts) / len(rollouts),
        "seconds": time.perf_counter() - started,
        "first": rollouts[0].completion.text,
    }


def table_of(rows: dict[str, Any]) -> str:
    """The results as a Markdown table, one model a row."""
    columns = ("model", "asked", "chosen", "SFT", "in the format", "right", "mixed groups")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, row in rows.items():
        groups, sft = row["groups"], row["sft"]
        recipe = dict(line.strip().partition(": ")[::2] for line in row["recipe"].splitlines())
        seen = [line for line in row["init"]["output"].splitlines() if line.startswith("│ ")]
        asked = []
        for line in seen:
            fmt, answers, held, right, *_ = (cell.strip() for cell in line.strip("│").split("│"))
            asked.append(f"{fmt}: {held} of {answers} in it, {right} right")
        trained = "none"
        if sft:
            trained = f"{sft['steps']} steps of {sft['batch_size']} (recipe: "
            trained += f"{sft['steps_of_the_recipe']} of {sft['batch_size_of_the_recipe']})"
        cells = (
            name,
            "; ".join(asked) or "not asked",
            recipe["prompt"].strip("{}").removeprefix("format: "),
            trained,
            f"{groups['in_format']} of {groups['rollouts']}",
            f"{sum(groups['solved'])}",
            f"{groups['mixed']} of {groups['groups']}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def render(page: str, rows: dict[str, Any]) -> str:
    """The page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table_of(rows)}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("train", type=Path, help="GSM8K's training file")
    parser.add_argument("models", nargs="*", help="model folders; none: write the page alone")
    parser.add_argument("--sft-steps", type=int, default=24)
    parser.add_argument("--sample-seconds", type=float, default=75, help="as `init` has it")
    parser.add_argument("--sft-batch", type=int, default=8)
    parser.add_argument(
        "--until-mixed", action="store_true", help="draw no more groups once one is mixed"
    )
    parser.add_argument("--folder", type=Path, default=Path("init_real"))
    parser.add_argument("--results", type=Path, default=RESULT)
    arguments = parser.parse_intermixed_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = json.loads(arguments.results.read_text()) if arguments.results.is_file() else {}
    for named in arguments.models:
        name = Path(named).name
        # `init` is run in a folder of its own.
        model = str(Path(named).absolute()) if Path(named).exists() else named
        folder = (arguments.folder / name).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        init = write_recipe(
            model, arguments.train.absolute(), folder, seconds=arguments.sample_seconds
        )
        start, sft = train_sft(folder, steps=arguments.sft_steps, batch_size=arguments.sft_batch)
        groups = first_groups(folder, start or model, until_mixed=arguments.until_mixed)
        recipe = (folder / "recipe.yaml").read_text()
        # Where they lie on this machine is nobody's business.
        places = {model: name, str(arguments.train.absolute()): arguments.train.name}
        for place, short in places.items():
            recipe = recipe.replace(place, short)
            init["output"] = init["output"].replace(place, short)
        rows[name] = {"init": init, "recipe": recipe, "sft": sft, "groups": groups}
        arguments.results.write_text(json.dumps(rows, indent=1) + "\n")
        print(name, json.dumps(groups["solved"]), f"mixed: {groups['mixed']}", flush=True)
    if arguments.results == RESULT:
        PAGE.write_text(render(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
