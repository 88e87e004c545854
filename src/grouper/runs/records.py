"""The rows of a run's record: one per step, one per rollout, one per completion of an evaluation.

Rollouts and evaluations have the same names for the same things. What is read is checked strictly:
a field that is missing, unknown or of another type is damage. NaN and infinities stay what they
are, as Python's `json`, pydantic and pandas read them; null means that nothing was measured.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

from grouper.config.loading import NOT_THE_EXPERIMENT
from grouper.evaluation.items import StoredItems, checked
from grouper.evaluation.result import EvaluationResult
from grouper.types import RolloutGroup, StepReport, Tally, Verdict

# Amounts per completion, and differences per token, of which a single large one may matter. Beside
# the mean, these metrics have their minimum, maximum and count.
# The others are shares, times, counts and settings, of which the mean is enough.
SPREAD = re.compile(r"reward/.+|completion/tokens|policy/(kl|ratio)|sampler_logprob_diff")


# Of a phase: a larger number is damage, and would be counted to.
MOST_STEPS = 10**7
# A number of things: more would be none.
_COUNT: Any = Field(ge=0, lt=2**53)

# In the order in which they happen; `base` is the model before training.
PHASES = ("base", "sft", "grpo")


class MetricsRow(BaseModel, strict=True, frozen=True, extra="allow"):
    """One line of `metrics.jsonl`: a step, with a column for the mean of each metric.

    Those of `SPREAD` also have `<metric>/min`, `<metric>/max` and `<metric>/count`.
    """

    __pydantic_extra__: dict[str, float | None] = Field(init=False)
    phase: Literal["base", "sft", "grpo"]
    step: int = _COUNT
    time: str
    """When the step was done: ISO 8601, UTC."""
    elapsed_s: float
    """Seconds that the run had been going on by then, the time between two starts left out."""
    status: str
    events: list[str]
    recipe_hash: str | None = None
    """Of the run that has done the step; lines of earlier versions have none."""


class RolloutRow(BaseModel, strict=True, frozen=True, extra="forbid"):
    """One line of `rollouts/`; ids and log-probs are there where `tracking.token_groups` is all.

    Those whose tokens are recorded (`tracking.token_groups`) have all from `logprobs` on.
    """

    phase: str
    step: int = _COUNT
    group: int = _COUNT
    sample: int = _COUNT
    problem_id: str = Field(min_length=1)
    prompt: str
    completion: str
    answer: str
    extracted: str | None
    verdict: str = Field(pattern=f"^({'|'.join(verdict.value for verdict in Verdict)})$")
    stage: str
    reason: str
    finish_reason: str
    tokens: int = _COUNT
    policy_version: int
    rewards: dict[str, float | None]
    reward: float | None
    advantage: float | None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    """Of the sampler, one per token; likewise what follows."""
    token_texts: list[str] | None = None
    trainer_logprobs: list[float] | None = None
    """Of the policy before the step; left out where it was not trained on."""
    entropies: list[float] | None = None
    """Of the sampler, in nats."""
    clipped: list[int] | None = None
    """Places of the tokens whose ratio was beyond its bound in some update of the step."""
    recipe_hash: str | None = None
    """As in `MetricsRow`."""


# Each takes a line, or what `read_json` gave, and raises `ValueError` where it is damaged.
parse_step = checked(MetricsRow.model_validate_json)
parse_rollout = checked(RolloutRow.model_validate_json)
_parse_result = checked(TypeAdapter(EvaluationResult).validate_python)


def rollout_of(line: str) -> dict[str, Any]:
    """A row of `rollouts/` to look at; what another version did not record is empty or None.

    Raises:
        ValueError: it is not a row.
    """
    row = json.loads(line)
    if isinstance(row, dict) and row.keys() & _KNOWN.keys():
        _check_known(row)
        return {**_UNKNOWN, **row}
    raise ValueError("this is no row of a rollout")


_COLUMNS = RolloutRow.model_fields.items()
_UNKNOWN = {name: "" if field.annotation is str else None for name, field in _COLUMNS}
_KNOWN: dict[str, Any] = {
    name: (Annotated[field.annotation, *field.metadata, None], _UNKNOWN[name])
    for name, field in _COLUMNS
}
_check_known = checked(
    create_model("Known", __config__=ConfigDict(strict=True), **_KNOWN).model_validate
)


def metrics_row(report: StepReport, *, elapsed: float = 0.0) -> dict[str, Any]:
    """The line of a step that has just been done; see `MetricsRow`."""
    columns: dict[str, float | None] = {}
    for name, tally in report.tallies.items():
        known = tally.count > 0
        columns[name] = tally.mean if known else None
        if SPREAD.fullmatch(name):
            columns[f"{name}/min"] = tally.min if known else None
            columns[f"{name}/max"] = tally.max if known else None
            columns[f"{name}/count"] = tally.count
    return {
        "phase": report.phase,
        "step": report.step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "elapsed_s": round(elapsed, 3),
        "status": report.status,
        "events": list(report.events),
        **columns,
    }


def report_of(row: MetricsRow) -> StepReport:
    """A step as it was written; of metrics that are not in `SPREAD` only the mean is known."""
    columns = row.__pydantic_extra__
    parts = {f"{name}/{p}" for name in columns if SPREAD.fullmatch(name) for p in _PARTS}
    return StepReport(
        phase=row.phase,
        step=row.step,
        status=row.status,
        events=tuple(row.events),
        tallies={name: _tally(name, columns) for name in columns if name not in parts},
    )


_PARTS = ("min", "max", "count")


def _tally(name: str, columns: Mapping[str, float | None]) -> Tally:
    mean = columns[name]
    if mean is None:
        return Tally.of([])
    low, high, count = (columns.get(f"{name}/{part}") for part in _PARTS)
    count = count or 1.0
    total = mean * count
    # The sum is not in the row: of its neighbours, the one whose mean is that of the row.
    near = (total, math.nextafter(total, math.inf), math.nextafter(total, -math.inf))
    total = next((value for value in near if value / count == mean), total)
    return Tally(total, count, mean if low is None else low, mean if high is None else high)


def rollout_rows(
    phase: str,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Sequence[float | None],
    *,
    with_ids: bool = False,
    tokens: Mapping[tuple[int, int], Mapping[str, Any]] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """One row per rollout of a step; see `RolloutRow`.

    Args:
        phase: `grpo`.
        step: as in the step's report: the first step is 1.
        groups: all groups that were sampled, with signal or without.
        advantages: one per rollout, in the order of the groups and of their rollouts; None for a
            rollout that was not trained on.
        with_ids: also keep prompt ids, sampled ids and their log-probs.
        tokens: (group, sample) -> the columns that say more of each token, of some rollouts.
    """
    rollouts = [
        (number, group, sample, rollout)
        for number, group in enumerate(groups)
        for sample, rollout in enumerate(group.rollouts)
    ]
    for (number, group, sample, rollout), advantage in zip(rollouts, advantages, strict=True):
        completion, grade = rollout.completion, rollout.grade
        columns = {**tokens.get((number, sample), {})}
        if with_ids:
            columns |= {
                "prompt_token_ids": list(group.prompt.token_ids),
                "token_ids": list(completion.token_ids),
                "logprobs": list(completion.logprobs),
            }
        row = RolloutRow(
            phase=phase,
            step=step,
            group=number,
            sample=sample,
            problem_id=group.problem.id,
            prompt=group.prompt.text,
            completion=completion.text,
            answer=group.problem.answer,
            extracted=grade.extracted,
            verdict=grade.verdict.value,
            stage=grade.stage,
            reason=grade.reason,
            finish_reason=completion.finish_reason.value,
            tokens=len(completion.token_ids),
            policy_version=completion.policy_version,
            rewards=dict(rollout.reward.components),
            reward=rollout.reward.total,
            advantage=advantage,
            **columns,
        )
        yield row.model_dump(exclude_unset=True)


# What an evaluation is made of beside its items.
_SETTINGS = [field.name for field in fields(EvaluationResult) if field.name != "items"]


def evaluation_summary(result: EvaluationResult) -> dict[str, Any]:
    """The settings of an evaluation, and the derived numbers for people to read."""
    settings = {name: getattr(result, name) for name in _SETTINGS}
    card = settings.pop("card")
    return {**settings, **result.numbers, "card": dict(card)}


def evaluation_of(summary: Mapping[str, Any], items: StoredItems) -> EvaluationResult:
    """Back from both files; the derived numbers are computed again from the items.

    Raises:
        ValueError: the settings are damaged.
    """
    found = {name: value for name, value in summary.items() if name in _SETTINGS}
    if found.get("phase") not in PHASES:
        raise ValueError(f"phase: {found.get('phase')!r} is none of {', '.join(PHASES)}")
    step = found.get("step")
    if type(step) is not int or not 0 <= step <= MOST_STEPS:
        raise ValueError(f"step: {step!r} is no number of steps")
    result = replace(_parse_result({**found, "items": ()}), items=items)
    seed = result.card.get("seed", 0)
    if type(seed) is not int:
        raise ValueError(f"card: seed: {seed!r} is no whole number")
    problems = {item.problem_id for item in items.light}
    if result.samples < 1 or len(problems) * result.samples != len(items):
        raise ValueError(
            f"{result.samples} samples of {len(problems)} problems are not what made "
            f"{len(items)} items"
        )
    return result


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A row without mappings in it.

    >>> flat({"reward": 1.5, "rewards": {"correctness": 1.0, "format": 0.5}})
    {'reward': 1.5, 'rewards/correctness': 1.0, 'rewards/format': 0.5}
    """
    columns: dict[str, Any] = {}
    for name, value in row.items():
        inner = flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else None
        columns |= {f"{prefix}{name}": value} if inner is None else inner
    return columns


# --- what must be the same for a run to go on -----------------------------------------------------

# Dotted key -> [before, now].
Changes = dict[str, list[Any]]

# A finished phase may be given more of these without `--allow-changes`.
LENGTHS = ("sft.steps", "sft.epochs", "grpo.steps", "grpo.epochs")
# Suffixes of settings that say how often to save and print. They change no result.
UPKEEP = (".checkpoint_every", ".keep_checkpoints", ".log_every")

NOT_THERE = "(not there)"


class Change(BaseModel, strict=True, extra="forbid"):
    """What differed when a run was continued."""

    phase: str | None = None
    """With `step`: from where on the changes hold; not known before a checkpoint is loaded."""
    step: int | None = None
    hash_before: str
    hash: str
    changes: Changes


class RunInfo(BaseModel, strict=True, extra="forbid"):
    """The content of `run.json`; all but `host` is equal in equal runs."""

    format: Literal[1] = 1
    recipe_hash: str
    versions: dict[str, str]
    """Of packages and kernels, by name, when the run began."""
    fingerprints: dict[str, str]
    """Part of the data -> hash of its problems."""
    code: dict[str, str] = {}
    """File of the user's own -> hash of its source."""
    host: dict[str, str | int] = Field(default_factory=lambda: host(0, 1))
    """Where and how the run began."""
    changes: list[Change] = []
    resolved: dict[str, int] | None = None
    """Settings that followed from the data."""


parse_info = checked(RunInfo.model_validate)


def content_changes(before: RunInfo, now: RunInfo) -> Changes:
    """The data sets (`data.NAME`) and files of the user's (`code.NAME`) that have other content."""
    both = {"data": (before.fingerprints, now.fingerprints), "code": (before.code, now.code)}
    return {
        f"{kind}.{name}": pair
        for kind, (old, new) in both.items()
        for name, pair in that_differ(old, new).items()
    }


def recipe_changes(before: str, now: str) -> Changes:
    """What two resolved recipes have different, but for what does not change the experiment.

    >>> recipe_changes("grpo: {steps: 6, beta: 0.0}", "grpo: {steps: 8, beta: 0.0}")
    {'grpo.steps': [6, 8]}
    """
    old, new = dict(flat_settings(yaml.safe_load(before))), dict(flat_settings(yaml.safe_load(now)))
    pairs = {key: [old.get(key, NOT_THERE), new.get(key, NOT_THERE)] for key in {**old, **new}}
    return {
        key: [before, now]
        for key, (before, now) in pairs.items()
        if before != now
        and not any(f"{key}.".startswith(f"{name}.") for name in NOT_THE_EXPERIMENT)
    }


def are_harmless(changes: Changes) -> bool:
    """Whether these need no `--allow-changes`: phases get longer, or are saved more or less often.

    >>> are_harmless({"grpo.steps": [6, 8], "grpo.keep_checkpoints": [3, 1]})
    True
    >>> are_harmless({"grpo.steps": [8, 6]})
    False
    """
    return bool(changes) and all(
        key.endswith(UPKEEP) or (key in LENGTHS and None not in pair and pair[0] < pair[1])
        for key, pair in changes.items()
    )


def flat_settings(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted key; `rewards.0.weight` where a list holds sections.

    >>> list(flat_settings({"seed": 0, "rewards": [{"name": "correctness"}]}))
    [('seed', 0), ('rewards.0.name', 'correctness')]
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat_settings(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from flat_settings(inner, f"{prefix}.{index}")
    else:
        yield prefix, value


def that_differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """What both know and has another value now.

    >>> that_differ({"torch": "2.13.0", "peft": "0.19"}, {"torch": "2.14.0", "trl": "1.8"})
    {'torch': ['2.13.0', '2.14.0']}
    """
    return {
        name: [before[name], value]
        for name, value in sorted(now.items())
        if name in before and before[name] != value
    }


def describe_changes(changes: Changes, limit: int = 8) -> str:
    """For people to read, on one line.

    >>> describe_changes({"grpo.steps": [6, 8], "seed": [0, 1]})
    'grpo.steps 6 -> 8, seed 0 -> 1'
    """
    shown = [f"{key} {old} -> {new}" for key, (old, new) in list(changes.items())[:limit]]
    rest = len(changes) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Rising numbers, with each run of consecutive ones as a range.

    >>> numbers_in_words([1, 2, 3, 7, 9, 10])
    '1 to 3, 7, 9 to 10'
    """
    # Within a stretch, a number less its place is the same for all.
    by_start = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    stretches = [[number for _, number in pairs] for _, pairs in by_start]
    return ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in stretches)


def host(threads: int, processes: int) -> dict[str, str | int]:
    """Where and how a run began; of no meaning to the experiment."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.node(),
        "threads": threads,
        "processes": processes,
    }
