"""Items about the comparison: a gain that is no luck, measured fairly, of the last model."""

from __future__ import annotations

import math
from typing import Any

from grouper.certificate.evidence import Evidence, RunEvidence
from grouper.certificate.finding import (
    Finding,
    failed,
    judged,
    missing,
    not_measured,
    paired_numbers,
    passed,
)
from grouper.errors import plural
from grouper.evaluation.compare import Difference, compare, label
from grouper.evaluation.result import EvaluationResult

# Seeds from which an interval over seeds says something.
FEWEST_SEEDS = 3


def judge_gain(evidence: Evidence) -> Finding:
    """Tell whether the trained model is better than the one before training."""
    gain = evidence.gain
    if gain is None:
        return not_measured(evidence)
    stages = _stage_differences(evidence)
    numbers = {**paired_numbers(gain.paired), "verdict": gain.verdict, "stages": stages}
    return judged(gain.verdict == "better", _gain_sentence(gain), **numbers)


def _gain_sentence(gain: Difference) -> str:
    paired = gain.paired
    base_text = f"{100 * paired.before:.1f} %"
    last_text = f"{100 * paired.after:.1f} %"
    return (
        f"{label(gain.after)} solves {last_text} of {plural(paired.problems, 'problem')}, "
        f"{label(gain.before)} {base_text}: {paired.points}, {gain.verdict}."
    )


def _stage_differences(evidence: Evidence) -> list[dict[str, Any]]:
    """Return the gain of each phase of the first run, by cause."""
    results = [*evidence.runs[0].results]
    if len(results) < 2:
        return []
    differences = compare(results).differences[: len(results) - 1]
    return [
        {
            "from": difference.before,
            "to": difference.after,
            "difference": difference.paired.difference,
            "causes": dict(difference.causes),
        }
        for difference in differences
    ]


def judge_seeds(evidence: Evidence) -> Finding:
    """Tell whether the gain is there over several seeds, of which none was left out."""
    if evidence.left_out:
        names = ", ".join(path.name for path in evidence.left_out)
        return failed(
            f"Beside these lie finished runs of the same recipe that are not named: {names}. A "
            "seed that is left out may be one that did worse.",
            left_out=[path.name for path in evidence.left_out],
        )
    count = len(evidence.runs)
    gain = evidence.gain
    if gain is None:
        return not_measured(evidence)
    if count < FEWEST_SEEDS or gain.seeds is None:
        return missing(
            f"Measured on {plural(count, 'seed')}: luck cannot be told from skill by fewer than "
            f"{FEWEST_SEEDS}. `grouper run RECIPE --seeds {FEWEST_SEEDS}` trains more.",
            seeds=count,
        )
    interval = gain.seeds
    looks = ""
    if evidence.planned_seeds is not None:
        looks = f", which allows for a look after each of up to {evidence.planned_seeds}"
    sentence = (
        f"Over {count} seeds the gain is {100 * gain.paired.difference:+.1f} points "
        f"[{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]{looks}."
    )
    accuracies = [run.last.accuracy for run in evidence.runs if run.last is not None]
    return judged(
        interval.low > 0,
        sentence,
        seeds=count,
        low=interval.low,
        high=interval.high,
        accuracies=accuracies,
    )


# Entries of a card that two evaluations that are compared must have alike.
_CONDITIONS = ("sampling", "k", "n", "prompt")


def judge_conditions(evidence: Evidence) -> Finding:
    """Tell whether both models had the same problems, prompts, tokens and samples."""
    if not evidence.measured:
        return not_measured(evidence)
    for run in evidence.runs:
        assert run.base is not None
        assert run.last is not None
        difference = other_condition(run.base, run.last)
        if difference is not None:
            return failed(f"{run.path.name}: {difference}")
    base = evidence.runs[0].base
    assert base is not None
    sampling = base.card.get("sampling") or {}
    tokens = sampling.get("max_new_tokens", "any number of")
    return passed(
        f"The same {plural(len(base.problems), 'problem')}, prompts and sampling, "
        f"{plural(base.samples, 'sample')} of at most {tokens} tokens.",
        problems=len(base.problems),
        samples=base.samples,
        sampling=sampling,
    )


def other_condition(base: EvaluationResult, last: EvaluationResult) -> str | None:
    """Describe the first condition in which two evaluations differ; None: there is none."""
    for name in _CONDITIONS:
        base_setting = base.card.get(name)
        last_setting = last.card.get(name)
        if base_setting != last_setting:
            return f"{name} was {base_setting} for {base.name} and {last_setting} for {last.name}."
    if base.problems != last.problems:
        return f"{base.name} and {last.name} were measured on different problems."
    prompts = prompts_of(base)
    changed_prompts = [
        problem for problem, prompt in prompts_of(last).items() if prompts[problem] != prompt
    ]
    if changed_prompts:
        return (
            f"{plural(len(changed_prompts), 'problem')} had another prompt for {last.name} than "
            f"for {base.name}, the first is {changed_prompts[0]}."
        )
    for result in (base, last):
        limit = (result.card.get("sampling") or {}).get("max_new_tokens") or math.inf
        longest = max((item.tokens for item in result.slim), default=0)
        if longest > limit:
            return f"a completion of {result.name} has {longest} tokens, above its limit {limit}."
    return None


def prompts_of(result: EvaluationResult) -> dict[str, str]:
    """Return problem -> its prompt."""
    return {item.problem_id: item.prompt for item in result.items}


def judge_base_prompt(evidence: Evidence) -> Finding:
    """Tell whether the trained model is also better than its base in a prompt that suits this."""
    if not evidence.measured:
        return not_measured(evidence)
    differences = []
    for run in evidence.runs:
        assert run.last is not None
        for result in run.base_otherwise:
            if _is_base_otherwise(result, run):
                (difference,) = compare([result, run.last]).differences
                differences.append((result.card.get("prompt"), difference.paired))
    if not differences:
        return missing(
            "The model before training was measured in the prompt of training alone, which it has "
            "never seen. `grouper eval RUN --model BASE --prompt FORMAT` measures it in another "
            "one, such as a few-shot prompt."
        )
    prompt, paired = min(differences, key=lambda pair: pair[1].difference)
    return judged(
        paired.verdict == "better",
        f"Against its base in the prompt {prompt}, which solves "
        f"{100 * paired.before:.1f} %: {paired.points}, {paired.verdict}.",
        **paired_numbers(paired),
        prompt=prompt,
    )


# Entries of `sampling` that a fair prompt leaves as they are.
_SAMPLED_ALIKE = ("temperature", "top_p", "top_k", "min_p")


def _is_base_otherwise(result: EvaluationResult, run: RunEvidence) -> bool:
    """Tell whether a later result is the run's base on its test problems in another prompt.

    It has the same sampling, and as many tokens and samples at least.
    """
    last = run.last
    assert last is not None
    if result.problems != last.problems:
        return False
    if run.base_hash is not None and result.card.get("model_hash") != run.base_hash:
        return False
    if run.base_hash is None and result.card.get("model") != run.base_model:
        return False
    ours = result.card.get("sampling") or {}
    theirs = last.card.get("sampling") or {}
    tokens = ours.get("max_new_tokens") or math.inf
    is_as_long = tokens >= (theirs.get("max_new_tokens") or 0)
    is_sampled_alike = all(ours.get(name) == theirs.get(name) for name in _SAMPLED_ALIKE)
    is_other_prompt = result.card.get("prompt") != last.card.get("prompt")
    is_as_often = result.samples >= last.samples
    return is_other_prompt and is_sampled_alike and is_as_long and is_as_often


def judge_checkpoint(evidence: Evidence) -> Finding:
    """Tell whether the measured model is the last one, and not chosen by its test result."""
    if not evidence.measured:
        return not_measured(evidence)
    for run in evidence.with_controls:
        reason = _why_not_the_last(run)
        if reason is not None:
            return failed(f"{run.path.name}: {reason}")
    lasts = [run.last for run in evidence.runs if run.last is not None]
    steps = sorted({result.step for result in lasts})
    text = " and ".join(f"{step:,}" for step in steps)
    return passed(
        f"Measured after the last step ({text}) of {label(lasts[0].phase)}.",
        steps=[result.step for result in lasts],
    )


def _why_not_the_last(run: RunEvidence) -> str | None:
    """Describe why the measured model is not the last one; None: it is."""
    last = run.last
    if last is None or not run.is_finished:
        return "the model of its last phase was not measured."
    phase = label(last.phase)
    taken = run.steps_taken(last.phase)
    if taken is None:
        return f"no step of {phase} is recorded."
    if last.step != taken:
        return (
            f"it was measured at step {last.step} of {phase}, which went on to step {taken}. A "
            "checkpoint that is chosen by its test result looks better than it is."
        )
    planned = run.model.total if run.model is not None else run.planned_steps(last.phase)
    if planned is not None and last.step < planned:
        return f"it was stopped at step {last.step} of the {planned} that {phase} was to have."
    return None
