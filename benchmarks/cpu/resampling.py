"""Dynamic sampling of a pretrained model on a CPU: round after round, and as groups become known.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.resampling ../shared/data/gsm8k MODEL

MODEL is a model that solves some problems of GSM8K with its answer in a box. The step is that of
the recipe gsm8k (16 problems x 8, three rounds of replacement) with 160 new tokens. Both ways draw
the same groups, in turns; the seconds are those of sampling and grading. Writes
`results/cpu_resampling.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.machine import where
from grouper.config.loading import load_recipe
from grouper.models.loading import load_policy
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import Sampler, SampleRequest
from grouper.training.collect import requests_of
from grouper.training.curriculum import ProblemStream
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import load_problem_sets
from grouper.training.resampling import Candidates, draw_candidates
from grouper.types import Completion

RESULT = RESULTS / "cpu_resampling.json"


class InRounds:
    """A sampler that takes no request while others are drawn."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        return self._sampler.sample(requests)


def step(prepared: Prepared, sampler: Sampler, number: int) -> dict[str, Any]:
    """Draw the rollouts of one step."""
    recipe = prepared.recipe
    config = recipe.grpo
    stream = ProblemStream(size=len(prepared.train), seed=recipe.seed, phase="grpo")
    most = config.prompts_per_step * (1 + config.dynamic_sampling_rounds)
    first = number * most
    taken = list(itertools.islice(stream.each(first), most))
    requests, references = requests_of(
        [prepared.train[index] for index, _ in taken],
        params=prepared.training_params(),
        group_size=config.group_size,
        key=(recipe.seed, "grpo", number),
    )
    candidates = Candidates(
        requests,
        references,
        group_size=config.group_size,
        count=config.prompts_per_step,
        rounds=config.dynamic_sampling_rounds,
    )
    started = time.perf_counter()
    draw_candidates(candidates, sampler=sampler, grader=prepared.grader, processes=ProcessGroup())
    results = candidates.results()
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "groups": len(results),
        "rounds": candidates.needed()[1],
        "tokens": sum(len(d.completion.token_ids) for group in results for d in group),
        "texts": hash(tuple(d.completion.text for group in results for d in group)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("model", help="a model folder")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], help="settings of the recipe")
    options = parser.parse_args()
    recipe = load_recipe(
        "gsm8k",
        [
            f"model={{path: {options.model}, dtype: bfloat16}}",
            "prompt.format=boxed",
            "rewards=[{name: correctness}]",
            f"data.train={{source: gsm8k, path: {options.data / 'train.jsonl'}}}",
            "data.test=null",
            "sampling.max_new_tokens=160",
            *options.set,
        ],
    )
    sets = load_problem_sets(recipe)
    policy = load_policy(recipe.model, options.model, seed=0)
    with Prepared(recipe, sets, model=options.model, quiet=True) as prepared:
        native = prepared.samplers.over(policy)
        ways: dict[str, Sampler] = {"rounds": InRounds(native), "admitted": native}
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for number in range(options.steps):
            for way in list(ways)[:: 1 if number % 2 else -1]:
                found[way].append(step(prepared, ways[way], number))
                print(way, found[way][-1], flush=True)
    ratios = [
        a["seconds"] / b["seconds"] for a, b in zip(found["rounds"], found["admitted"], strict=True)
    ]
    same = all(
        a.pop("texts") == b.pop("texts")
        for a, b in zip(found["rounds"], found["admitted"], strict=True)
    )
    record = {
        "machine": where(),
        "model": Path(options.model).resolve().parts[-3:],
        "steps": found,
        "ratio": round(statistics.median(ratios), 2),
        "same_texts": same,
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(record["ratio"], same)


if __name__ == "__main__":
    main()
