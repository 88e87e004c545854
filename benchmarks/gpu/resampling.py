"""How long dynamic sampling takes on a graphics card, simulated: rounds, admission, a step ahead.

    python -m benchmarks.gpu.resampling

The step of the GSM8K recipe at 0.5B on an H100: 16 problems x 8 completions of at most 512 tokens,
in 128 slots.
A decoding step takes 2.1 ms whatever the number of rows (counted kernels and bytes, not measured),
finished sequences are seen every 8 tokens, and a refill waits for an eighth of the slots and takes
10 ms. Going on with a sequence of the step before runs its text again, which takes 5 microseconds a
token (1 GFLOP at a quarter of the rate of products). Lengths are log-normal with a median of 200
tokens, cut off at 512. The groups that are flat, and their order, are drawn at random; what belongs
to a step is the same for all ways to draw it. One step ahead is the mean of the second to the sixth
of six steps in a row. No model runs: `Candidates` and the rules of the native sampler do. Writes
`results/resampling.json`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.checkout import RESULTS
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import Admission, PartialCompletion, SampleRequest, draw_seed
from grouper.sampling.native import REFILL_SHARE, STEPS_PER_SYNC
from grouper.training.begun import BegunSample
from grouper.training.resampling import Candidates, draw_candidates
from grouper.types import Completion, FinishReason, Grade, Prompt, SamplingParams, Verdict

RESULT = RESULTS / "resampling.json"

PROMPTS, GROUP, LONGEST, ROUNDS = 16, 8, 512, 3
SLOTS = 128
DECODE_SECONDS = 0.0021
REFILL_SECONDS = 0.010
REFILL_SECONDS_PER_TOKEN = 5e-6
STEPS_IN_A_ROW = 6
SEEDS = range(200)

# Problems that a step may need.
MOST = PROMPTS * (1 + ROUNDS)


class ClockedSampler:
    """Counts the seconds that sampling would take.

    Args:
        lengths: tokens of each request.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self.seconds = 0.0
        self.tokens = 0
        self.unfinished: dict[int, PartialCompletion] = {}

    def draw(
        self, requests: Sequence[SampleRequest], admitted: Admission
    ) -> Generator[tuple[int, Completion]]:
        """Yield requests as their sequences end, each 8 tokens."""
        left: dict[int, int] = {}
        begun = 0
        slots = min(SLOTS, admitted(idle=True) or 0)
        while (limit := admitted(idle=not left)) is not None:
            free = slots - len(left)
            if begun < limit and free >= (REFILL_SHARE * slots if left else 1):
                new = range(begun, min(limit, begun + free))
                for place in new:
                    before = requests[place].count_before
                    left[place] = self._lengths[requests[place].key] - before
                    self.seconds += REFILL_SECONDS_PER_TOKEN * before
                begun = new.stop
                self.seconds += REFILL_SECONDS
            if not left:
                break
            steps = STEPS_PER_SYNC["cuda"]
            self.seconds += steps * DECODE_SECONDS
            self.tokens += sum(min(steps, tokens) for tokens in left.values())
            left = {place: tokens - steps for place, tokens in left.items()}
            for place in [place for place, tokens in left.items() if tokens <= 0]:
                del left[place]
                yield place, _completion(requests[place].key)
        for place, tokens in left.items():
            drawn = self._lengths[requests[place].key] - tokens
            self.unfinished[place] = _partial(drawn)


class InRounds(ClockedSampler):
    """Draws one batch after the other."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        def all_at_once(*, idle: bool) -> int:
            del idle
            return len(requests)

        return self.draw(requests, all_at_once)


class Admitting(InRounds):
    """Takes requests as slots become free."""

    sample_admitted = ClockedSampler.draw


def _completion(request: int) -> Completion:
    return Completion(
        token_ids=(0,),
        logprobs=(0.0,),
        text=str(request),
        finish_reason=FinishReason.STOP_TOKEN,
        policy_version=0,
    )


def _partial(tokens: int) -> PartialCompletion:
    return PartialCompletion(
        token_ids=(0,) * tokens, logprobs=(0.0,) * tokens, entropies=(), policy_version=0
    )


class Solved:
    """Grades at once: in a mixed group, the first completion alone is right."""

    def __init__(self, flat: Sequence[bool]) -> None:
        self._flat = flat

    def submit(self, text: str, _: str) -> Future[Grade]:
        request = int(text)
        right = not self._flat[request // GROUP] and request % GROUP == 0
        verdict = Verdict.CORRECT if right else Verdict.INCORRECT
        grade: Future[Grade] = Future()
        grade.set_result(Grade(verdict=verdict, extracted=text, stage="", reason=""))
        return grade


AHEAD = "one step ahead"

WAYS: dict[str, tuple[type[InRounds], bool]] = {
    "rounds": (InRounds, False),
    "batches of the expected size": (InRounds, True),
    "admitted when needed": (Admitting, False),
    "admitted when expected": (Admitting, True),
}


def simulate(flat_share: float, way: str, seed: int) -> tuple[float, int]:
    """Return the seconds and the tokens of a step."""
    if way == AHEAD:
        steps = simulate_ahead(flat_share, seed)[1:]
        seconds = statistics.fmean(seconds for seconds, _ in steps)
        return seconds, round(statistics.fmean(tokens for _, tokens in steps))
    problems = Problems(flat_share, seed, MOST)
    kind, expected = WAYS[way]
    sampler = kind(problems.lengths)
    candidates = Candidates(
        problems.requests,
        [""] * len(problems.requests),
        group_size=GROUP,
        count=PROMPTS,
        rounds=ROUNDS,
        mixed_share=1 - flat_share if expected else None,
    )
    draw_candidates(candidates, sampler=sampler, grader=problems.grader, processes=ProcessGroup())
    return sampler.seconds, sampler.tokens


class Problems:
    """Requests of problems, and what will come of them."""

    def __init__(self, flat_share: float, seed: int, count: int) -> None:
        random = np.random.default_rng(seed)
        self.grader: Any = Solved((random.random(count) < flat_share).tolist())
        lengths = random.lognormal(np.log(200), 0.6, count * GROUP)
        lengths = np.minimum(lengths, LONGEST).astype(int)
        self.lengths: list[int] = np.maximum(1, lengths).tolist()
        params = SamplingParams(max_new_tokens=LONGEST)
        prompt = Prompt(problem_id="p", text="", token_ids=(0,))
        self.requests = [
            SampleRequest(prompt=prompt, params=params, key=n) for n in range(count * GROUP)
        ]


def simulate_ahead(flat_share: float, seed: int) -> list[tuple[float, int]]:
    """Return the seconds and the tokens of steps in a row, each beginning the next one."""
    problems = Problems(flat_share, seed, MOST * STEPS_IN_A_ROW)
    start = 0
    begun: list[BegunSample] = []
    steps = []
    for _ in range(STEPS_IN_A_ROW):
        requests = problems.requests[start : start + (MOST + PROMPTS) * GROUP]
        for number, sample in enumerate(begun):
            requests[number] = replace(requests[number], partial=sample.partial)
        candidates = Candidates(
            requests,
            [""] * len(requests),
            group_size=GROUP,
            count=PROMPTS,
            rounds=ROUNDS,
            ahead=PROMPTS,
        )
        for number, sample in enumerate(begun):
            if sample.completion is not None:
                grade = problems.grader.submit(sample.completion.text, "")
                candidates.add(number, sample.completion, grade)
        sampler = Admitting(problems.lengths)
        draw_candidates(
            candidates, sampler=sampler, grader=problems.grader, processes=ProcessGroup()
        )
        needed, _ = candidates.needed()
        start += needed * GROUP
        begun = [sample for group in candidates.begun() for sample in group]
        steps.append((sampler.seconds, sampler.tokens))
    return steps


def main() -> None:
    found = {}
    for flat_share in (0.0, 0.25, 0.5, 0.75):
        rows = {}
        for way in (*WAYS, AHEAD):
            steps = [simulate(flat_share, way, draw_seed("resampling", seed)) for seed in SEEDS]
            rows[way] = {
                "seconds": round(statistics.fmean(seconds for seconds, _ in steps), 2),
                "tokens": round(statistics.fmean(tokens for _, tokens in steps)),
            }
        found[f"{flat_share:.0%} flat"] = rows
        print(f"{flat_share:.0%} flat", rows, flush=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
