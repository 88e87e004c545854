"""One evaluation: draw completions, grade each once, keep every item.

Knows nothing of training: anything that meets the sampler and grader protocols can be measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from grouper.errors import DataError
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.grading import by_text_alone
from grouper.models.process_group import ProcessGroup, SingleProcess
from grouper.rewards import Notes, RewardStack
from grouper.rewards.builtin import format_holds
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.graded import Drawn, Grader, draw_and_grade
from grouper.types import AnswerFormat, AnswerKind, Problem, Prompt, Reward, SamplingParams

log = logging.getLogger(__name__)

Items = Sequence[tuple[Problem, Prompt]]


def evaluate(
    *,
    name: str,
    phase: str,
    step: int,
    split: str,
    items: Items,
    sampler: Sampler,
    grader: Grader,
    params: SamplingParams,
    samples: int,
    seed: int,
    confidence: float = 0.95,
    progress: Callable[[int, int], None] | None = None,
    card: Mapping[str, Any] | None = None,
    processes: ProcessGroup | None = None,
    fmt: AnswerFormat | None = None,
    rewards: RewardStack | None = None,
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
        processes: the processes among which the problems are divided; each is measured once.
        fmt: the prompt format; with `rewards`, each item also has its format and reasoning.
        rewards: also scores each completion; a reward that fails stops nothing.

    Raises:
        DataError: there are no problems.
    """
    if not items:
        where = f"evaluation {name}"
        raise DataError("there are no problems", where=where, fix="Check data.test and its limit.")
    assert len({problem.id for problem, _ in items}) == len(items), "loading refuses repeated ids"
    for problem, prompt in items:
        assert problem.id == prompt.problem_id, f"{problem.id} has {prompt.problem_id}'s prompt"
    # Neither name nor step is part of a key: all models of a run meet the same uniform numbers.
    requests = [
        SampleRequest(prompt=prompt, params=params, key=draw_seed(seed, "eval", problem.id, sample))
        for problem, prompt in items
        for sample in range(samples)
    ]
    drawn, _ = draw_and_grade(
        requests,
        [problem.answer for problem, _ in items for _ in range(samples)],
        sampler=sampler,
        grader=grader,
        lenient=True,
        processes=processes,
        progress=progress,
    )

    # On rank 0 alone, since a reward may call a judge.
    scored: Sequence[Reward | None] = (processes or SingleProcess()).on_rank0(
        lambda: [] if rewards is None else _score(name, items, drawn, samples, rewards)
    )
    return EvaluationResult(
        name=name,
        phase=phase,
        step=step,
        split=split,
        items=tuple(_items(items, drawn, scored or [None] * len(drawn), samples, fmt)),
        samples=samples,
        confidence=confidence,
        card={
            "prompt_of_item_0": items[0][1].text,
            "sampling": {**asdict(params), "stop": list(params.stop)},
            "grader": type(grader).__qualname__,
            "n": len(items),
            "k": samples,
            "seed": seed,
            **(card or {}),
        },
    )


def settings_name(split: str, params: SamplingParams, problems: int, samples: int) -> str:
    """A file name with the settings of a measurement.

    >>> settings_name("test", SamplingParams(temperature=0), 500, 1)
    'test-greedy-500x1'
    >>> settings_name("test", SamplingParams(temperature=0.7, top_p=0.9), 500, 8)
    'test-t0.7-p0.9-500x8'
    """
    drawn = {
        "t": params.temperature,
        "p": params.top_p if params.top_p < 1 else 0,
        "k": params.top_k,
        "m": params.min_p,
    }
    how = [f"{letter}{value:g}" for letter, value in drawn.items() if value]
    return "-".join([split, *(how if params.temperature else ["greedy"]), f"{problems}x{samples}"])


def _items(
    problems: Items,
    drawn: Sequence[Drawn],
    rewards: Sequence[Reward | None],
    samples: int,
    fmt: AnswerFormat | None,
) -> Iterator[EvaluationItem]:
    for place, (one, reward) in enumerate(zip(drawn, rewards, strict=True)):
        problem, prompt = problems[place // samples]
        completion, grade = one.completion, by_text_alone(one.grade, problem.answer)
        observed: dict[str, Any] = {}
        if reward is not None and fmt is not None:
            observed = {
                "format": format_holds(completion.text, fmt),
                "reasoning": len(reasoning_of(completion.text, fmt)),
                "rewards": dict(reward.components),
                "reward": reward.total,
            }
        yield EvaluationItem(
            problem_id=problem.id,
            subject=problem.subject,
            level=problem.level,
            sample=place % samples,
            prompt=prompt.text,
            completion=completion.text,
            answer=problem.answer,
            extracted=grade.extracted,
            verdict=grade.verdict,
            lenient=grade.correct if one.lenient is None else one.lenient,
            reason=grade.reason,
            stage=grade.stage,
            finish_reason=completion.finish_reason,
            tokens=len(completion.token_ids),
            **observed,
        )


def _score(
    name: str, items: Items, drawn: Sequence[Drawn], samples: int, rewards: RewardStack
) -> list[Reward]:
    """The reward of each completion; without components where its group cannot be scored."""
    notes = Notes(place=name)
    found: list[Reward] = []
    for number, (problem, prompt) in enumerate(items):
        group = drawn[number * samples : (number + 1) * samples]
        found += rewards.score(
            problem=problem,
            prompt=prompt,
            completions=[one.completion for one in group],
            grades=[one.grade for one in group],
            notes=notes,
        )
    if notes.events:
        log.warning(
            "Rewards failed on %d groups of the evaluation, which have none; the first: %s",
            len(notes.events),
            notes.events[0],
        )
    return found


def reasoning_of(text: str, fmt: AnswerFormat) -> str:
    r"""The reasoning in a completion: the text between its tags, or else before the answer.

    Empty where a tag is missing. The tag that the prompt opens counts.

    >>> from grouper.prompts import FORMATS
    >>> reasoning_of(r"2 and 2, so \boxed{4}.", FORMATS["boxed"])
    '2 and 2, so'
    """
    if fmt.tags is None:
        mark = _ANSWER_MARKS.get(fmt.contract.kind)
        return (text if mark is None else text.rpartition(mark)[0]).strip()
    _, opened, rest = (fmt.prefix + text).partition(fmt.tags[0])
    inside, closed, _ = rest.partition(fmt.tags[1])
    return inside.strip() if opened and closed else ""


# Where the answer of a format without tags begins.
_ANSWER_MARKS = {AnswerKind.BOXED: "\\boxed", AnswerKind.HASHES: "####"}
