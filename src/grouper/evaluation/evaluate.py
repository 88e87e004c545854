"""One evaluation: draw completions, grade each once, keep every item.

Knows nothing of training: anything that meets the sampler and grader protocols can be measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from grouper.errors import DataError
from grouper.evaluation.metrics import Behaviour
from grouper.evaluation.result import Accuracy, EvaluationItem, EvaluationResult, Outcome
from grouper.grading import by_text_alone
from grouper.models.process_group import ProcessGroup, SingleProcess
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.graded import Drawn, Grader, draw_and_grade
from grouper.types import Problem, Prompt, SamplingParams

__all__ = [
    "Accuracy",
    "EvaluationItem",
    "EvaluationResult",
    "Grader",
    "Outcome",
    "evaluate",
]


def evaluate(
    *,
    name: str,
    phase: str,
    step: int,
    split: str,
    items: Sequence[tuple[Problem, Prompt]],
    sampler: Sampler,
    grader: Grader,
    params: SamplingParams,
    samples: int,
    seed: int,
    confidence: float = 0.95,
    progress: Callable[[int, int], None] | None = None,
    card: Mapping[str, Any] | None = None,
    processes: ProcessGroup | None = None,
    behaviour: Behaviour | None = None,
) -> EvaluationResult:
    """Measure one model on one set of problems.

    Args:
        name: names the files: `base`, `sft`, `grpo`, `validation-grpo-000020`, ...
        phase: `base`, `sft` or `grpo`.
        step: optimizer steps of the phase the model has seen.
        split: `test` or `validation`.
        items: problems with their rendered prompts; ids must differ.
        sampler: draws the completions.
        grader: grades each completion once.
        params: how to draw; the same for every model that is to be compared.
        samples: completions per problem.
        seed: the run's; what is drawn depends on it alone, whatever model is measured.
        confidence: of the intervals.
        progress: called with (completions drawn, completions in all) after each.
        card: more to record beside the settings: hashes of the model and data, grader version.
        processes: the processes that share the problems out; each is measured exactly once.
        behaviour: also observes format, reasoning and rewards of each completion.

    Raises:
        DataError: no problems, or two of the same id.
    """
    _check(name, items)
    drawn, _ = draw_and_grade(
        *_asked(items, params, samples, seed),
        sampler=sampler,
        grader=grader,
        lenient=True,
        processes=processes,
        progress=progress,
    )
    processes = processes or SingleProcess()
    observed = processes.on_rank0(lambda: _observe(behaviour, items, drawn, samples))
    return EvaluationResult(
        name=name,
        phase=phase,
        step=step,
        split=split,
        items=_measured(items, drawn, observed, samples),
        samples=samples,
        confidence=confidence,
        card={**_settings(items, params, grader, samples, seed), **(card or {})},
    )


def _asked(
    items: Sequence[tuple[Problem, Prompt]], params: SamplingParams, samples: int, seed: int
) -> tuple[list[SampleRequest], list[str]]:
    """What is drawn, and the reference of each.

    Neither name nor step is part of a key: all models of a run meet the same uniform numbers.
    """
    requests = [
        SampleRequest(prompt=prompt, params=params, key=draw_seed(seed, "eval", problem.id, sample))
        for problem, prompt in items
        for sample in range(samples)
    ]
    return requests, [problem.answer for problem, _ in items for _ in range(samples)]


def _measured(
    items: Sequence[tuple[Problem, Prompt]],
    drawn: Sequence[Drawn],
    observed: Sequence[Mapping[str, Any]],
    samples: int,
) -> tuple[EvaluationItem, ...]:
    return tuple(
        _item(*items[index // samples], index % samples, one, observed[index])
        for index, one in enumerate(drawn)
    )


def _observe(
    behaviour: Behaviour | None,
    items: Sequence[tuple[Problem, Prompt]],
    drawn: Sequence[Drawn],
    samples: int,
) -> Sequence[Mapping[str, Any]]:
    """What each item holds of its completion's behaviour; nothing where nobody asked."""
    if behaviour is None:
        return [{} for _ in drawn]
    return [asdict(observed) for observed in behaviour.observe(items, drawn, samples)]


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
    drawn: Drawn,
    observed: Mapping[str, Any],
) -> EvaluationItem:
    completion, grade = drawn.completion, by_text_alone(drawn.grade, problem.answer)
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
        lenient=grade.correct if drawn.lenient is None else drawn.lenient,
        reason=grade.reason,
        rung=grade.rung,
        finish_reason=completion.finish_reason,
        tokens=len(completion.token_ids),
        **observed,
    )
