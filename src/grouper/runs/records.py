"""The rows of a run's record: one per step, one per rollout, one per completion of an evaluation.

Rollouts and evaluations have the same names for the same things. Rows are checked strictly when
they are read: a field that is missing, unknown or of another type is damage. NaN and infinities are
kept, as Python's `json`, pydantic and pandas read them; null means that nothing was measured.
"""

from __future__ import annotations

import json
import math
import platform
import re
import subprocess
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

# Metrics that have columns for minimum, maximum and count beside the mean: amounts per completion
# and differences per token, of which a single large one may matter. The mean is enough for the
# others, which are shares, times, counts and settings.
SPREAD = re.compile(r"reward/.+|completion/tokens|policy/(kl|ratio)|sampler_logprob_diff")


# Steps of a phase; a larger number is damage, and loops over the steps would not end.
MOST_STEPS = 10**7
# Field of a count; a larger number is damage.
_COUNT: Any = Field(ge=0, lt=2**53)

# In the order in which they happen; `base` is the model before training.
PHASES = ("base", "sft", "grpo")


class MetricsRow(BaseModel, strict=True, frozen=True, extra="allow"):
    """Line of `metrics.jsonl`: a step, with a column for the mean of each metric.

    The metrics of `SPREAD` also have `<metric>/min`, `<metric>/max` and `<metric>/count`.
    """

    __pydantic_extra__: dict[str, float | None] = Field(init=False)
    phase: Literal["base", "sft", "grpo"]
    step: int = _COUNT
    time: str
    """Time when the step was done: ISO 8601, UTC."""
    elapsed_s: float
    """Seconds that the run has been running, without the time between two starts."""
    status: str
    events: list[str]
    recipe_hash: str | None = None
    """Recipe hash of the run that has done the step; lines of earlier versions have none."""


class RolloutRow(BaseModel, strict=True, frozen=True, extra="forbid"):
    """Line of `rollouts/`; ids and log-probs are recorded if `tracking.token_groups` is all.

    Rollouts whose tokens are recorded (`tracking.token_groups`) have all fields from `logprobs` on.
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
    tool_spans: list[list[int]] | None = None
    """[start, end) of the tokens that tools wrote; missing if there are none."""
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    """Log-probs under the sampler, one per token, as in the following fields."""
    token_texts: list[str] | None = None
    trainer_logprobs: list[float] | None = None
    """Log-probs under the policy before the step; missing if the rollout was not trained on."""
    entropies: list[float] | None = None
    """Entropies of the sampler, in nats."""
    clipped: list[int] | None = None
    """Positions of the tokens whose ratio was beyond its bound in some update of the step."""
    recipe_hash: str | None = None
    """As in `MetricsRow`."""


# Parsers of a line, or of the result of `read_json`; they raise `ValueError` if it is damaged.
parse_step = checked(MetricsRow.model_validate_json)
parse_rollout = checked(RolloutRow.model_validate_json)
_parse_result = checked(TypeAdapter(EvaluationResult).validate_python)


def rollout_of(line: str) -> dict[str, Any]:
    """Parse a row of `rollouts/` of any version for display.

    Columns that another version did not record are empty or None.

    Raises:
        ValueError: it is not a row.
    """
    row = json.loads(line)
    if isinstance(row, dict) and row.keys() & _FIELDS.keys():
        _check_fields(row)
        return {**_DEFAULTS, **row}
    raise ValueError("this is not a row of a rollout")


# The columns of a rollout, all of them optional.
_COLUMNS = RolloutRow.model_fields.items()
_DEFAULTS = {name: "" if field.annotation is str else None for name, field in _COLUMNS}
_FIELDS: dict[str, Any] = {
    name: (Annotated[field.annotation, *field.metadata, None], _DEFAULTS[name])
    for name, field in _COLUMNS
}
_check_fields = checked(
    create_model("Known", __config__=ConfigDict(strict=True), **_FIELDS).model_validate
)


def metrics_row(report: StepReport, *, elapsed: float = 0.0) -> dict[str, Any]:
    """Return the line of a step that has just been done; see `MetricsRow`."""
    columns: dict[str, float | None] = {}
    for name, tally in report.tallies.items():
        is_measured = tally.count > 0
        columns[name] = tally.mean if is_measured else None
        if SPREAD.fullmatch(name):
            columns[f"{name}/min"] = tally.min if is_measured else None
            columns[f"{name}/max"] = tally.max if is_measured else None
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
    """Return the report of a recorded step.

    Metrics that are not in `SPREAD` have only their mean.
    """
    columns = row.__pydantic_extra__
    spread_columns = set()
    for name in columns:
        if SPREAD.fullmatch(name):
            spread_columns |= {f"{name}/min", f"{name}/max", f"{name}/count"}
    return StepReport(
        phase=row.phase,
        step=row.step,
        status=row.status,
        events=tuple(row.events),
        tallies={name: _tally(name, columns) for name in columns if name not in spread_columns},
    )


def _tally(name: str, columns: Mapping[str, float | None]) -> Tally:
    """Return the tally of a metric from its columns."""
    mean = columns[name]
    if mean is None:
        return Tally.of([])
    low = columns.get(f"{name}/min")
    high = columns.get(f"{name}/max")
    count = columns.get(f"{name}/count") or 1.0
    if low is None:
        low = mean
    if high is None:
        high = mean
    return Tally(_sum_of_mean(mean, count), count, low, high)


def _sum_of_mean(mean: float, count: float) -> float:
    """Return the sum of `count` values whose mean is exactly `mean`.

    The product may be off by one rounding, so its neighbors are tried as well.
    """
    product = mean * count
    above = math.nextafter(product, math.inf)
    below = math.nextafter(product, -math.inf)
    for candidate in (product, above, below):
        if candidate / count == mean:
            return candidate
    return product


def rollout_rows(
    phase: str,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Sequence[float | None],
    *,
    with_ids: bool = False,
    tokens: Mapping[tuple[int, int], Mapping[str, Any]] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """Yield one row per rollout of a step; see `RolloutRow`.

    Args:
        phase: `grpo`.
        step: as in the step's report: the first step is 1.
        groups: all groups that were sampled, with signal or without.
        advantages: one per rollout, in the order of the groups and of their rollouts; None for a
            rollout that was not trained on.
        with_ids: also record prompt ids, sampled ids and their log-probs.
        tokens: (group, sample) -> columns with an entry per token; only some rollouts have them.
    """
    rollouts = [
        (number, group, sample, rollout)
        for number, group in enumerate(groups)
        for sample, rollout in enumerate(group.rollouts)
    ]
    for (number, group, sample, rollout), advantage in zip(rollouts, advantages, strict=True):
        completion = rollout.completion
        grade = rollout.grade
        columns = dict(tokens.get((number, sample), {}))
        if completion.tool_spans:
            columns["tool_spans"] = [list(span) for span in completion.tool_spans]
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


# Fields of an evaluation without its items.
_SETTINGS = [field.name for field in fields(EvaluationResult) if field.name != "items"]


def evaluation_summary(result: EvaluationResult) -> dict[str, Any]:
    """Return the settings of an evaluation, and the derived numbers for people to read."""
    settings = {name: getattr(result, name) for name in _SETTINGS}
    card = settings.pop("card")
    return {**settings, **result.numbers, "card": dict(card)}


def evaluation_of(summary: Mapping[str, Any], items: StoredItems) -> EvaluationResult:
    """Restore an evaluation from both files; derived numbers are computed again from the items.

    Raises:
        ValueError: the settings are damaged.
    """
    settings = {name: value for name, value in summary.items() if name in _SETTINGS}
    if settings.get("phase") not in PHASES:
        raise ValueError(f"phase: {settings.get('phase')!r} is none of {', '.join(PHASES)}")
    step = settings.get("step")
    if type(step) is not int or not 0 <= step <= MOST_STEPS:
        raise ValueError(f"step: {step!r} is not a number of steps")
    result = replace(_parse_result({**settings, "items": ()}), items=items)
    seed = result.card.get("seed", 0)
    if type(seed) is not int:
        raise ValueError(f"card: seed: {seed!r} is not a whole number")
    problems = {item.problem_id for item in items.slim}
    if result.samples < 1 or len(problems) * result.samples != len(items):
        raise ValueError(
            f"{result.samples} samples of {len(problems)} problems are not what made "
            f"{len(items)} items"
        )
    return result


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten the mappings of a row into columns.

    >>> flat({"reward": 1.5, "rewards": {"correctness": 1.0, "format": 0.5}})
    {'reward': 1.5, 'rewards/correctness': 1.0, 'rewards/format': 0.5}
    """
    columns: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            columns |= flat(value, f"{prefix}{name}/")
        else:
            columns[f"{prefix}{name}"] = value
    return columns


# --- changes between two starts of a run ----------------------------------------------------------

# Dotted key -> [old value, new value].
Changes = dict[str, list[Any]]

# Settings of a phase's length, which may be increased without `--allow-changes`.
LENGTHS = ("sft.steps", "sft.epochs", "grpo.steps", "grpo.epochs")
# Suffixes of the settings of how often to save and print. They change no result.
UPKEEP = (".checkpoint_every", ".keep_checkpoints", ".log_every")

NOT_THERE = "(not there)"


class Change(BaseModel, strict=True, extra="forbid"):
    """Changes with which a run was continued."""

    phase: str | None = None
    """Phase in which the changes begin, at `step`; not known before a checkpoint is loaded."""
    step: int | None = None
    hash_before: str
    hash: str
    changes: Changes


class RunInfo(BaseModel, strict=True, extra="forbid"):
    """The content of `run.json`; all but `host` is equal in equal runs."""

    format: Literal[1] = 1
    recipe_hash: str
    versions: dict[str, str]
    """Versions of packages and kernels, by name, when the run began."""
    fingerprints: dict[str, str]
    """Part of the data -> hash of its problems."""
    code: dict[str, str] = {}
    """File of the user -> hash of its source."""
    host: dict[str, str | int] = Field(default_factory=lambda: host(0, 1))
    """Machine and time of the run's start."""
    changes: list[Change] = []
    resolved: dict[str, int] | None = None
    """Settings that followed from the data."""


parse_info = checked(RunInfo.model_validate)


class RunEnd(BaseModel, strict=True, extra="forbid", frozen=True):
    """The content of `ended.json`: how the process that last wrote the run ended.

    A killed process leaves none.
    """

    state: Literal["finished", "stopped", "failed"]
    """All phases are finished; the user stopped the run; or an error ended it."""
    reason: str = ""
    """The signal, or the first line of the error."""


parse_end = checked(RunEnd.model_validate)


def content_changes(old: RunInfo, new: RunInfo) -> Changes:
    """Return the data sets (`data.NAME`) and user's files (`code.NAME`) that have other content."""
    changes = {}
    for name, hashes in that_differ(old.fingerprints, new.fingerprints).items():
        changes[f"data.{name}"] = hashes
    for name, hashes in that_differ(old.code, new.code).items():
        changes[f"code.{name}"] = hashes
    return changes


def recipe_changes(old_yaml: str, new_yaml: str) -> Changes:
    """Return the settings that differ in two resolved recipes.

    Settings that do not change the experiment are left out.

    >>> recipe_changes("grpo: {steps: 6, beta: 0.0}", "grpo: {steps: 8, beta: 0.0}")
    {'grpo.steps': [6, 8]}
    """
    old_settings = dict(flat_settings(yaml.safe_load(old_yaml)))
    new_settings = dict(flat_settings(yaml.safe_load(new_yaml)))
    changes: Changes = {}
    for key in {**old_settings, **new_settings}:
        old = old_settings.get(key, NOT_THERE)
        new = new_settings.get(key, NOT_THERE)
        if old != new and _changes_experiment(key):
            changes[key] = [old, new]
    return changes


def _changes_experiment(key: str) -> bool:
    """Return whether a setting belongs to the experiment."""
    return not any(f"{key}.".startswith(f"{name}.") for name in NOT_THE_EXPERIMENT)


def are_harmless(changes: Changes) -> bool:
    """Return whether changes need no `--allow-changes`.

    They do not if phases get longer, or are saved more or less often.

    >>> are_harmless({"grpo.steps": [6, 8], "grpo.keep_checkpoints": [3, 1]})
    True
    >>> are_harmless({"grpo.steps": [8, 6]})
    False
    """
    if not changes:
        return False
    for key, (old, new) in changes.items():
        is_upkeep = key.endswith(UPKEEP)
        is_longer = key in LENGTHS and None not in (old, new) and old < new
        if not is_upkeep and not is_longer:
            return False
    return True


def flat_settings(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted key; `rewards.0.weight` if a list holds sections.

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


def that_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Return the entries that both mappings have, with different values.

    >>> that_differ({"torch": "2.13.0", "peft": "0.19"}, {"torch": "2.14.0", "trl": "1.8"})
    {'torch': ['2.13.0', '2.14.0']}
    """
    return {
        name: [old[name], value]
        for name, value in sorted(new.items())
        if name in old and old[name] != value
    }


def describe_changes(changes: Changes, limit: int = 8) -> str:
    """Describe changes on one line, for people to read.

    >>> describe_changes({"grpo.steps": [6, 8], "seed": [0, 1]})
    'grpo.steps 6 -> 8, seed 0 -> 1'
    """
    listed = list(changes.items())[:limit]
    text = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in listed)
    omitted = len(changes) - len(listed)
    if omitted:
        text += f" and {omitted} more"
    return text


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Write rising numbers, with each run of consecutive ones as a range.

    >>> numbers_in_words([1, 2, 3, 7, 9, 10])
    '1 to 3, 7, 9 to 10'
    """
    ranges: list[list[int]] = []  # first and last number of each
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(
        str(first) if first == last else f"{first} to {last}" for first, last in ranges
    )


def host(threads: int, processes: int, hardware: str = "") -> dict[str, str | int]:
    """Return machine, commit and time of a run's start, which have no meaning to the experiment.

    Args:
        threads: of PyTorch.
        processes: of the run.
        hardware: processor or GPUs; left out if it is empty.
    """
    facts: dict[str, str | int] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.node(),
        "threads": threads,
        "processes": processes,
    }
    if hardware:
        facts["hardware"] = hardware
        facts["commit"] = working_commit()
    return facts


def working_commit() -> str:
    """Return the commit of the Git repository around the working directory.

    Returns:
        Its first 12 digits, with `-dirty` after them if tracked files differ from it; empty outside
        of a repository, or without Git.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip()
