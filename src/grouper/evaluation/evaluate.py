"""One evaluation: draw completions, grade each once, keep every item.

Knows nothing of training: anything that meets the sampler and grader protocols can be measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Protocol

from grouper.errors import DataError
from grouper.evaluation.result import Accuracy, EvaluationItem, EvaluationResult, Outcome
from grouper.sampling.base import Sampler, SampleRequest, address
from grouper.types import Completion, Grade, Problem, Prompt, SamplingParams, Verdict

__all__ = [
    "Accuracy",
    "EvaluationItem",
    "EvaluationResult",
    "Grader",
    "Outcome",
    "evaluate",
]


class Grader(Protocol):
    """What an evaluation needs of a grader; grading goes on while the next one is sampled."""

    def submit(self, text: str, reference: str) -> Future[Grade]:
        """Grade a completion's text against a reference answer; never raises."""
        ...

    def submit_lenient(self, text: str, reference: str) -> Future[Grade]:
        """The same with the answer taken from wherever it stands, in whatever format."""
        ...


def evaluate(
    *,
    name: str,
    step: int,
    items: Sequence[tuple[Problem, Prompt]],
    sampler: Sampler,
    grader: Grader,
    params: SamplingParams,
    samples: int,
    seed: int,
    confidence: float = 0.95,
    phase: str | None = None,
    split: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    card: Mapping[str, Any] | None = None,
) -> EvaluationResult:
    """Measure one model on one set of problems.

    The draw of (problem, sample) depends on the seed and nothing else, so that every model of a
    run, whatever its name and step, meets the same uniform numbers.

    Args:
        name: names the files: `base`, `sft`, `grpo`, `validation-grpo-000020`, ...
        step: optimizer steps of the phase the model has seen.
        items: problems with their rendered prompts; ids must differ.
        sampler: draws the completions.
        grader: grades each completion once.
        params: how to draw; the same for every model that is to be compared.
        samples: completions per problem.
        seed: the run's seed.
        confidence: of the intervals.
        phase: `base`, `sft` or `grpo`; left out, the one that `name` contains.
        split: `test` or `validation`; left out, `test` exactly when `name` is just a phase.
        progress: called with (completions drawn, completions in all) after each.
        card: more to record beside the settings: hashes of the model and data, grader version.

    Raises:
        DataError: no problems, or two of the same id.
    """
    _check(name, items)
    requests = [
        SampleRequest(prompt=prompt, params=params, key=address(seed, "eval", problem.id, sample))
        for problem, prompt in items
        for sample in range(samples)
    ]
    references = [problem.answer for problem, _ in items for _ in range(samples)]
    graded = _draw_and_grade(requests, references, sampler, grader, progress)
    lenient = _grade_leniently(graded, references, grader)
    return EvaluationResult(
        name=name,
        phase=phase or _phase_in(name),
        step=step,
        split=split or ("test" if name in _PHASES else "validation"),
        items=tuple(
            _item(*items[index // samples], index % samples, graded[index], lenient[index])
            for index in range(len(requests))
        ),
        samples=samples,
        confidence=confidence,
        card={**_settings(items, params, grader, samples, seed), **(card or {})},
    )


def _settings(
    items: Sequence[tuple[Problem, Prompt]],
    params: SamplingParams,
    grader: Grader,
    samples: int,
    seed: int,
) -> dict[str, Any]:
    return {
        "prompt_of_item_0": items[0][1].text,
        "sampling": {**asdict(params), "stop": list(params.stop)},
        "grader": type(grader).__qualname__,
        "n": len(items),
        "k": samples,
        "seed": seed,
    }


def _draw_and_grade(
    requests: Sequence[SampleRequest],
    references: Sequence[str],
    sampler: Sampler,
    grader: Grader,
    progress: Callable[[int, int], None] | None,
) -> list[tuple[Completion, Grade]]:
    """One completion and its grade a request, in their order; grading overlaps sampling."""
    drawn: dict[int, tuple[Completion, Future[Grade]]] = {}
    for index, completion in sampler.sample(requests):
        assert index not in drawn, f"the sampler answered request {index} twice"
        drawn[index] = completion, grader.submit(completion.text, references[index])
        if progress is not None:
            progress(len(drawn), len(requests))
    assert len(drawn) == len(requests), (
        f"the sampler answered {len(drawn)} of {len(requests)} requests"
    )
    in_order = (drawn[index] for index in range(len(requests)))
    return [(completion, future.result()) for completion, future in in_order]


def _grade_leniently(
    graded: Sequence[tuple[Completion, Grade]], references: Sequence[str], grader: Grader
) -> list[bool | None]:
    """Whether the maths is right, format aside; what is right as asked is not graded again."""
    again = {
        index: grader.submit_lenient(completion.text, references[index])
        for index, (completion, grade) in enumerate(graded)
        if not grade.correct and grade.verdict is not Verdict.NOT_SCORED
    }
    return [
        None
        if grade.verdict is Verdict.NOT_SCORED
        else grade.correct or _known(again[index].result())
        for index, (_, grade) in enumerate(graded)
    ]


def _known(grade: Grade) -> bool | None:
    return None if grade.verdict is Verdict.NOT_SCORED else grade.correct


_PHASES = ("base", "sft", "grpo")


def _phase_in(name: str) -> str:
    found = [part for part in name.split("-") if part in _PHASES]
    if len(found) != 1:
        raise ValueError(f"say which phase the evaluation {name!r} belongs to")
    return found[0]


def _check(name: str, items: Sequence[tuple[Problem, Prompt]]) -> None:
    where = f"evaluation {name}"
    if not items:
        raise DataError("there are no problems", where=where, fix="Check data.test and its limit.")
    twice = [id_ for id_, count in Counter(p.id for p, _ in items).items() if count > 1]
    if twice:
        raise DataError(
            f"{len(twice)} problem ids are listed more than once, the first is {twice[0]!r}",
            where=where,
            fix="Give every problem its own id; each must be measured exactly once.",
        )
    for problem, prompt in items:
        assert problem.id == prompt.problem_id, f"{problem.id} has {prompt.problem_id}'s prompt"


def _item(
    problem: Problem,
    prompt: Prompt,
    sample: int,
    answered: tuple[Completion, Grade],
    lenient: bool | None,
) -> EvaluationItem:
    completion, grade = answered
    return EvaluationItem(
        problem_id=problem.id,
        subject=problem.subject,
        level=problem.level,
        sample=sample,
        prompt=prompt.text,
        completion=completion.text,
        answer=problem.answer,
        extracted=grade.extracted,
        verdict=grade.verdict,
        lenient=lenient,
        reason=grade.reason,
        rung=grade.rung,
        finish_reason=completion.finish_reason,
        tokens=len(completion.token_ids),
    )
