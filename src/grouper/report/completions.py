"""The completions of the page: all those of a problem together, with its prompt once.

There is room for a part of them. Groups are left out whole, and the page says how many.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grouper.errors import RunFolderError
from grouper.evaluation.compare import label
from grouper.evaluation.result import EvaluationItem, EvaluationResult, outcome_of
from grouper.printable import printable
from grouper.report.facts import held_out_results
from grouper.report.formulas import Formulas
from grouper.report.panels import RunView
from grouper.types import FinishReason, Verdict

# Bytes of JSON for the completions of all runs together, by where they come from.
ROLLOUT_BYTES = 800_000
EVALUATION_BYTES = 700_000
# Bytes of JSON for the tokens of rollouts.
TRACE_BYTES = 400_000
# Steps whose rollouts are read, for all runs together.
MOST_STEPS = 40
# Problems of a set whose completions may be in the page.
MOST_PROBLEMS = 300
# Characters of a long text: its beginning and, after the omitted middle, its end.
LONGEST = 3600
# Characters of a text in a group that would take the room of all others.
SHORTEST = 300
FIELDS = (
    "completion", "extracted", "reason", "finish_reason", "tokens", "rewards", "reward",
    "advantage", "sample",
)  # fmt: skip
"""Columns of a rollout, or of an item of an evaluation, in the page."""


def cut(text: str, most: int = LONGEST) -> str:
    """Omit the middle of a long text, and escape characters that steer a terminal or the page."""
    omitted = len(text) - most
    if omitted > 0:
        head = 2 * most // 3
        tail = most - head
        note = f"\n[... {omitted:,} characters are left out here ...]\n"
        text = text[:head] + note + text[-tail:]
    return printable(text)


@dataclass
class Completions:
    """Groups of completions, with notes on those that are left out.

    Args:
        runs: number of runs that share the room.
    """

    runs: int
    sets: list[dict[str, Any]] = field(default_factory=list)
    """Choices of the page: the problems of an evaluation, or the rollouts of a run."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    """Prompt -> its position; each is in the page once."""
    notes: list[str] = field(default_factory=list)
    formulas: Formulas = field(default_factory=Formulas)
    trace_room: int = 0
    """Bytes that are left for the tokens of rollouts."""

    def _add_set(self, name: str, kind: str) -> int:
        """Add a choice; return its position."""
        self.sets.append({"name": name, "kind": kind})
        return len(self.sets) - 1

    def _add_group(
        self,
        group: dict[str, Any],
        rows: Sequence[tuple[str, Mapping[str, Any]]],
        room: int,
        *,
        is_first: bool,
    ) -> int | None:
        """Add a group if there is room for all of it.

        Args:
            group: what its samples share.
            rows: label and columns of each sample.
            room: bytes for all of them.
            is_first: add it in any case, with its texts cut until there is room.

        Returns:
            The bytes that it takes, without tokens; None: it was not added.
        """
        most = LONGEST
        samples = _samples(rows, most)
        while is_first and len(json.dumps(samples)) > room and most > SHORTEST:
            most //= 2
            samples = _samples(rows, most)
        size = len(json.dumps(samples))
        if size > room and not is_first:
            return None
        for sample, (_, row) in zip(samples, rows, strict=True):
            prompt = cut(row["prompt"], most)
            if prompt not in self.prompts:
                size += len(json.dumps(prompt))
            sample["prompt"] = self.prompts.setdefault(prompt, len(self.prompts))
            sample["trace"] = self._trace(row)
            self.formulas.add_from((prompt, sample["completion"]))
        _, first_row = rows[0]
        self.groups.append(
            {
                **group,
                "problem": cut(first_row["problem_id"], SHORTEST),
                "answer": cut(first_row["answer"], SHORTEST),
                "samples": samples,
            }
        )
        return size

    def _trace(self, row: Mapping[str, Any]) -> list[Any] | None:
        """Return the tokens of a rollout with their records, if there is room for them."""
        # No item of an evaluation has texts of tokens.
        texts = row.get("token_texts")
        if texts is None:
            return None
        trace: list[Any] = [[printable(text) for text in texts]]
        for name in ("logprobs", "trainer_logprobs", "entropies"):
            values = row.get(name)
            trace.append(values and [round(value, 3) for value in values])
        trace.append(row.get("clipped") or [])
        spans = row.get("tool_spans") or []
        trace.append([place for start, end in spans for place in range(start, end)])
        size = len(json.dumps(trace))
        if size > self.trace_room:
            return None
        self.trace_room -= size
        return trace

    def add_evaluations(self, views: Mapping[str, RunView]) -> None:
        """Add the problems of each set that any run was measured on."""
        named_results: dict[str, list[tuple[str, EvaluationResult]]] = {}
        for run_name, run in views.items():
            prefix = f"{run_name}: " if len(views) > 1 else ""
            results_of_run = held_out_results(run)
            validations = [result for result in run.evaluations if result.split == "validation"]
            if validations and "validation" not in results_of_run:
                results_of_run["validation"] = validations[-1:]
            for split, results in results_of_run.items():
                for result in results:
                    entry = (f"{prefix}{label(result.name)}", result)
                    named_results.setdefault(split, []).append(entry)
        for split, entries in named_results.items():
            self._add_problems(split, entries, EVALUATION_BYTES // len(named_results))

    def _add_problems(
        self, split: str, entries: Sequence[tuple[str, EvaluationResult]], room: int
    ) -> None:
        """Add problems in turn: got worse, got better, stayed wrong, stayed right."""
        changes = _changes([result for _, result in entries])
        ids = [*changes]
        rows: dict[str, list[tuple[str, EvaluationItem]]] = {id_: [] for id_ in ids[:MOST_PROBLEMS]}
        for name, result in entries:
            for item in result.items:
                if item.problem_id in rows:
                    rows[item.problem_id].append((name, item))
        names = dict.fromkeys(name for name, _ in entries)
        position = self._add_set(f"{split}: {', '.join(names)}", "evaluation")
        problem_count = 0
        for id_, items in rows.items():
            shared: dict[str, Any] = {"set": position, "step": None}
            if len(entries) > 1:
                shared["change"] = changes[id_]
            columns = [(name, asdict(item)) for name, item in items]
            size = self._add_group(shared, columns, room, is_first=problem_count == 0)
            if size is None:
                break
            room -= size
            problem_count += 1
        if problem_count < len(ids):
            self.notes.append(
                f"Of {split}, {problem_count} of {len(ids)} problems are here, in turn those that "
                "got worse, got better, stayed wrong and stayed right."
            )

    def add_rollouts(self, run: RunView, prefix: str) -> None:
        """Add evenly spaced steps, and of each those groups first whose tokens were recorded."""
        files = run.folder.rollout_files()
        if not files:
            self.notes.append(f"{prefix}No rollouts are stored in the run folder.")
            return
        position = self._add_set(f"{prefix}rollouts in training", "rollouts")
        step_count = min(len(files), MOST_STEPS // self.runs)
        budget = ROLLOUT_BYTES // (self.runs * max(1, step_count))
        group_count = 0
        total = 0
        for index in range(step_count):
            phase, step, file = files[index * (len(files) - 1) // max(1, step_count - 1)]
            try:
                groups = _groups(run.folder.shown_rollouts(file))
            except RunFolderError as error:
                self.notes.append(f"Left out: {error.paragraph()}")
                continue
            # Room that a step leaves is for later ones.
            self.trace_room += TRACE_BYTES // (self.runs * step_count)
            room = budget
            for number, rows in enumerate(groups):
                named_rows = [(f"sample {row['sample']}", row) for row in rows]
                shared = {"set": position, "step": step, "phase": label(phase)}
                size = self._add_group(shared, named_rows, room, is_first=number == 0)
                if size is None:
                    break
                room -= size
                group_count += 1
            total += len(groups)
        if group_count < total or step_count < len(files):
            self.notes.append(
                f"{prefix}Rollouts of {step_count} of {len(files)} steps are here, evenly spaced, "
                f"and {group_count:,} of the {total:,} problems of these steps. `grouper show` "
                "reads all of them."
            )


def _samples(rows: Sequence[tuple[str, Mapping[str, Any]]], most: int) -> list[dict[str, Any]]:
    """Return the columns of samples, with texts of at most this many characters."""
    samples = []
    for name, row in rows:
        sample: dict[str, Any] = {"name": name, "outcome": _outcome(row)}
        for column in FIELDS:
            value = row.get(column)
            sample[column] = cut(value, most) if isinstance(value, str) else value
        sample["calls"] = len(row.get("tool_spans") or [])
        samples.append(sample)
    return samples


def _outcome(row: Mapping[str, Any]) -> str:
    """Return the outcome of a row; rows of older versions may not say how a completion ended."""
    finish_reason = row["finish_reason"] or FinishReason.STOP_TOKEN
    try:
        return outcome_of(Verdict(row["verdict"]), FinishReason(finish_reason))
    except ValueError:
        return "not_scored"


def _groups(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Gather the rollouts of each problem; those whose tokens were recorded come first."""
    groups: dict[tuple[Any, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["group"], row["problem_id"]), []).append(row)
    return sorted(groups.values(), key=lambda group: group[0]["token_texts"] is None)


def _changes(results: Sequence[EvaluationResult]) -> dict[str, str]:
    """Return the problems, a kind of change after the other in turn, with what became of each."""
    first_scores = results[0].scores
    last_scores = results[-1].scores
    by_change: dict[str, list[str]] = {
        "got worse": [],
        "got better": [],
        "stayed wrong": [],
        "stayed correct": [],
    }
    for name in first_scores | last_scores:
        first_score = first_scores.get(name, 0.0)
        last_score = last_scores.get(name, 0.0)
        if last_score < first_score:
            change = "got worse"
        elif last_score > first_score:
            change = "got better"
        elif last_score < 1:
            change = "stayed wrong"
        else:
            change = "stayed correct"
        by_change[change].append(name)
    change_of = {name: change for change, names in by_change.items() for name in names}
    in_turn: dict[str, str] = {}
    for turn in itertools.zip_longest(*by_change.values()):
        for name in turn:
            if name is not None:
                in_turn[name] = change_of[name]
    return in_turn
