"""A certificate: every item with its finding, and the digests of the files that they rest on.

It is written as JSON and as a page. `check` computes everything again from the run folders and
says what is no longer so; a certificate that was edited, or whose runs were, does not pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from grouper.certificate.evidence import Evidence, RunEvidence, digests, gather
from grouper.certificate.finding import Finding, Status, failed, finite, missing, same_json
from grouper.certificate.items import ITEMS, Item
from grouper.certificate.record_items import judge_replay
from grouper.certificate.replay import replay
from grouper.errors import GrouperError, RunFolderError, plural
from grouper.evaluation.items import checked
from grouper.files import read_errors_as, read_json, write_atomic
from grouper.runs.progress import Progress

_DAMAGED = "the certificate is damaged"
_FIX = "Make a new one with `grouper certify RUN...`."
REPLAY = "replay"
REPLAY_QUESTION = "Does the recipe give this model?"


class CertifiedRun(BaseModel, strict=True, extra="forbid"):
    """A run that a certificate is about."""

    path: str
    """Relative to the certificate."""
    name: str
    seed: int
    recipe_hash: str
    commit: str
    files: dict[str, str]
    """Path in the run -> SHA-256."""

    @property
    def identity(self) -> tuple[str, ...]:
        """What it is called, and what it was made of."""
        return (self.name, f"seed {self.seed}", f"recipe {self.recipe_hash}", f"at {self.commit}")


class CertifiedItem(BaseModel, strict=True, extra="forbid"):
    """An item and its finding."""

    name: str
    question: str
    status: Status
    sentence: str
    numbers: dict[str, Any]


class Certificate(BaseModel, strict=True, extra="forbid"):
    """The content of a certificate."""

    format: Literal[1] = 1
    grouper: str
    made: str
    """Time: ISO 8601, UTC."""
    runs: list[CertifiedRun] = Field(min_length=1)
    controls: list[CertifiedRun]
    items: list[CertifiedItem]

    def count(self, status: Status) -> int:
        """Return the number of items with a status."""
        return sum(item.status == status for item in self.items)

    @property
    def verdict(self) -> str:
        """All items in a few words."""
        failed = self.count("fail")
        missing = self.count("missing")
        if failed:
            return f"{plural(failed, 'item')} failed"
        if missing:
            return f"nothing failed, {plural(missing, 'item')} missing"
        return "all items passed"


_parse = checked(Certificate.model_validate)


def certify(
    runs: Sequence[Path],
    controls: Sequence[Path] = (),
    *,
    folder: Path,
    with_replay: bool = False,
    display: Progress | None = None,
) -> Certificate:
    """Make the certificate of runs.

    Args:
        runs: seeds of one recipe.
        controls: runs of the same recipe with shuffled rewards.
        folder: where the certificate will be; paths in it are relative to that.
        with_replay: train the last steps again.
        display: where to show progress; nowhere by default.

    Raises:
        GrouperError: a folder is no run, or the runs do not belong together.
    """
    display = display or Progress(quiet=True)
    evidence = gather(runs, controls)
    items = []
    with display.within("certify", len(ITEMS)) as task:
        for number, (name, item) in enumerate(ITEMS.items(), start=1):
            items.append(_item(name, item.question, _judge(item, evidence)))
            task(number, len(ITEMS))
    replays = [replay(run, display) for run in evidence.runs] if with_replay else []
    items.append(_item(REPLAY, REPLAY_QUESTION, judge_replay(replays)))
    return Certificate(
        grouper=version("grouper-rl"),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        runs=_certified(evidence.runs, folder),
        controls=_certified(evidence.controls, folder),
        items=items,
    )


def _judge(item: Item, evidence: Evidence) -> Finding:
    """Return the finding of an item; a record that cannot be read fails it."""
    try:
        return item.judge(evidence)
    except RunFolderError as error:
        return failed(f"{error.where}: {error.what}.")
    except GrouperError as error:
        return missing(f"This cannot be told here: {error.what}.")


def _item(name: str, question: str, finding: Finding) -> CertifiedItem:
    return CertifiedItem(
        name=name,
        question=question,
        status=finding.status,
        sentence=finding.sentence,
        numbers=finite(dict(finding.numbers)),
    )


def _certified(runs: Sequence[RunEvidence], folder: Path) -> list[CertifiedRun]:
    return [_certified_run(run, folder) for run in runs]


def _certified_run(run: RunEvidence, folder: Path) -> CertifiedRun:
    return CertifiedRun(
        path=os.path.relpath(run.path.resolve(), folder.resolve()),
        name=run.recipe.name,
        seed=run.recipe.seed,
        recipe_hash=run.info.recipe_hash,
        commit=str(run.info.host.get("commit", "")),
        files=digests(run),
    )


def write_certificate(certificate: Certificate, file: Path) -> None:
    """Write a certificate as JSON."""
    write_atomic(file, (certificate.model_dump_json(indent=1) + "\n").encode())


def read_certificate(file: Path) -> Certificate:
    """Read a certificate.

    Raises:
        RunFolderError: the file is none, or damaged.
    """
    content = read_json(file, _DAMAGED)
    with read_errors_as(file, _DAMAGED, _FIX):
        certificate = _parse(content)
    return certificate  # noqa: RET504 - to mypy the block above may swallow an error


# --- checking ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A certificate beside what its runs give now."""

    stated: Certificate
    computed: Certificate
    differences: tuple[str, ...]
    """What is not as the certificate says, one sentence each."""


def check(file: Path, display: Progress | None = None) -> Check:
    """Compute a certificate again from the run folders that it names.

    Raises:
        GrouperError: the file is damaged, or a run is no longer where it says.
    """
    stated = read_certificate(file)
    folder = file.absolute().parent
    for run in (*stated.runs, *stated.controls):
        if not (folder / run.path / "run.json").is_file():
            raise RunFolderError(
                f"the run {run.name} is not in {run.path}, as seen from the certificate",
                where=str(file),
                fix="Put the run folders where they were beside the certificate.",
            )
    was_replayed = any(item.name == REPLAY and item.status != "missing" for item in stated.items)
    computed = certify(
        [folder / run.path for run in stated.runs],
        [folder / run.path for run in stated.controls],
        folder=folder,
        with_replay=was_replayed,
        display=display,
    )
    differences = (*_file_differences(stated, computed), *_item_differences(stated, computed))
    return Check(stated=stated, computed=computed, differences=differences)


def _file_differences(stated: Certificate, computed: Certificate) -> Iterator[str]:
    stated_runs = (*stated.runs, *stated.controls)
    computed_runs = (*computed.runs, *computed.controls)
    for old, new in zip(stated_runs, computed_runs, strict=True):
        if old.identity != new.identity:
            yield f"{old.name}: the run in {old.path} is {', '.join(new.identity)}."
        for name in sorted({*old.files, *new.files}):
            if name not in new.files:
                yield f"{old.name}: {name} is gone."
            elif name not in old.files:
                yield f"{old.name}: {name} is new."
            elif old.files[name] != new.files[name]:
                yield f"{old.name}: {name} has other content."


def _item_differences(stated: Certificate, computed: Certificate) -> Iterator[str]:
    computed_items = {item.name: item for item in computed.items}
    listed = [item.name for item in stated.items]
    left_out = [name for name in computed_items if name not in listed]
    for name in left_out:
        yield f"{name}: the certificate leaves this item out."
    if not left_out and listed != [*computed_items]:
        yield "The items are in another order, or one of them is listed twice."
    for item in stated.items:
        difference = (
            _difference(item, computed_items[item.name]) if item.name in computed_items else None
        )
        if difference is not None:
            yield f"{item.name}: {difference}"


def _difference(stated: CertifiedItem, computed: CertifiedItem) -> str | None:
    """Describe what an item says otherwise; None: nothing."""
    if stated.status != computed.status:
        return f"stated {stated.status}, computed {computed.status}. {computed.sentence}"
    if not same_json(stated.numbers, computed.numbers):
        return f"it states other numbers than those computed. {computed.sentence}"
    if stated.question != computed.question:
        return f"the question is {computed.question!r}, not {stated.question!r}."
    if stated.sentence != computed.sentence:
        return f"it states {stated.sentence!r}; computed: {computed.sentence!r}"
    return None
