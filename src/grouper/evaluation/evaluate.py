"""One evaluation: draw completions, grade each once, keep every item.

Knows nothing of training: anything that meets the sampler and grader protocols can be measured.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from grouper.errors import DataError
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.grading import by_text_alone
from grouper.models.process_group import ProcessGroup, SingleProcess
from grouper.rewards import Notes, RewardStack
from grouper.rewards.builtin import format_holds
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.sampling.graded import Drawn, Grader, draw_and_grade
from grouper.types import AnswerFormat, AnswerKind, Problem, Prompt, SamplingParams

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

    def observe() -> Sequence[Observed]:
        return [] if behaviour is None else behaviour.observe(items, drawn, samples)

    # By rank 0 alone, which may have to ask a judge.
    observed = (processes or SingleProcess()).on_rank0(observe) or [_UNOBSERVED] * len(drawn)
    return EvaluationResult(
        name=name,
        phase=phase,
        step=step,
        split=split,
        items=tuple(
            _item(*items[place // samples], place % samples, one, seen)
            for place, (one, seen) in enumerate(zip(drawn, observed, strict=True))
        ),
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
    """A file name that says how a model is measured.

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


def _check(name: str, items: Items) -> None:
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
    problem: Problem, prompt: Prompt, sample: int, drawn: Drawn, observed: Observed
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
        stage=grade.stage,
        finish_reason=completion.finish_reason,
        tokens=len(completion.token_ids),
        **observed,
    )


# --- what a completion is like, whatever its answer is worth -------------------------------------


class Observed(TypedDict):
    """Part of an `EvaluationItem`; nothing of it is known where nobody asked."""

    format: bool | None
    reasoning: int | None
    rewards: Mapping[str, float | None] | None
    reward: float | None


_UNOBSERVED = Observed(format=None, reasoning=None, rewards=None, reward=None)


class Behaviour:
    """Observes completions through a prompt format and the rewards of a run.

    Args:
        layout: the prompt format.
        rewards: the run's stack; what fails stops nothing.
        place: the name of the evaluation.
    """

    def __init__(self, layout: AnswerFormat, rewards: RewardStack, place: str = "") -> None:
        self._layout, self._rewards, self._place = layout, rewards, place

    def observe(self, items: Items, drawn: Sequence[Drawn], samples: int) -> list[Observed]:
        """One per completion.

        Args:
            items: the problems with their prompts.
            drawn: `samples` completions of each problem, in order.
            samples: completions per problem.
        """
        found: list[Observed] = []
        notes = Notes(place=self._place)
        for number, (problem, prompt) in enumerate(items):
            group = drawn[number * samples : (number + 1) * samples]
            rewards = self._rewards.score(
                problem=problem,
                prompt=prompt,
                completions=[one.completion for one in group],
                grades=[one.grade for one in group],
                notes=notes,
            )
            for one, reward in zip(group, rewards, strict=True):
                text = one.completion.text
                found.append(
                    Observed(
                        format=format_holds(text, self._layout),
                        reasoning=len(reasoning_of(text, self._layout)),
                        rewards=dict(reward.components),
                        reward=reward.total,
                    )
                )
        if notes.events:
            log.warning(
                "Rewards failed on %d groups of the evaluation, which have none; the first: %s",
                len(notes.events),
                notes.events[0],
            )
        return found


def reasoning_of(text: str, layout: AnswerFormat) -> str:
    r"""The reasoning in a completion: what stands between its tags, else before the answer.

    Empty where a tag is missing. What the prompt has opened counts as written.

    >>> from grouper.prompts import FORMATS
    >>> reasoning_of(r"2 and 2, so \boxed{4}.", FORMATS["boxed"])
    '2 and 2, so'
    """
    if layout.tags is None:
        mark = _ANSWER_MARKS.get(layout.contract.kind)
        return (text if mark is None else text.rpartition(mark)[0]).strip()
    _, opened, rest = (layout.prefix + text).partition(layout.tags[0])
    inside, closed, _ = rest.partition(layout.tags[1])
    return inside.strip() if opened and closed else ""


# Where the answer of a format without tags begins.
_ANSWER_MARKS = {AnswerKind.BOXED: "\\boxed", AnswerKind.HASHES: "####"}
