"""The items of an evaluation on disk: written as they come, read when they are used."""

from __future__ import annotations

import json
import math
import re
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from sys import intern
from typing import Any, BinaryIO, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from grouper.config.checks import plain
from grouper.evaluation.result import EvaluationItem
from grouper.files import append_line, dumps, os_errors_as, read_lines, write_atomic
from grouper.types import Completion, Grade, Verdict

Row = TypeVar("Row")


_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def checked(read: Callable[[Any], Row]) -> Callable[[Any], Row]:
    """Wrap a reading function of pydantic's; a `ValueError` names the first invalid value."""

    def parse(content: Any) -> Row:
        try:
            if isinstance(content, str) and _SURROGATE.search(content):
                # pydantic reads no lone surrogates, which a text may have.
                text = json.dumps(json.loads(content), ensure_ascii=False)
                return read(text.encode("utf-8", "replace"))
            return read(content)
        except ValidationError as error:
            first = error.errors()[0]
            location = "".join(f"{key}: " for key in first["loc"])
            raise ValueError(location + plain(first["msg"])) from error

    return parse


parse_item = checked(TypeAdapter(EvaluationItem).validate_json)


class StoredItems(Sequence[EvaluationItem]):
    """The items of a file, in its order; the file is read again for each use of them.

    Args:
        path: the file.
        slim: the same items without their texts, from `Slimmer`.
    """

    def __init__(self, path: Path, slim: Sequence[EvaluationItem]) -> None:
        self.path = path.absolute()
        self.slim = tuple(slim)
        """The items without texts, in memory: every number of an evaluation follows from them."""

    @classmethod
    def read(cls, path: Path) -> StoredItems:
        """Read the items of a file.

        Raises:
            RunFolderError: it is missing or damaged.
        """
        without_texts = Slimmer()
        slim = [without_texts(item) for item in read_lines(path, parse_item)]
        return cls(path, slim)

    def __len__(self) -> int:
        return len(self.slim)

    def __iter__(self) -> Iterator[EvaluationItem]:
        return iter(read_lines(self.path, parse_item))

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment] # as a list


class Slimmer:
    """A function that removes the texts of items, and lets equal items share their values."""

    def __init__(self) -> None:
        self._rewards: dict[tuple[object, ...], Mapping[str, float | None]] = {}

    def __call__(self, item: EvaluationItem) -> EvaluationItem:
        shared_texts: dict[str, Any] = {}
        for name in _SHARED:
            text = getattr(item, name)
            shared_texts[name] = text and intern(text)
        rewards = item.rewards
        if rewards:
            rewards = self._rewards.setdefault(tuple(rewards.items()), rewards)
        return replace(item, prompt="", completion="", reason="", rewards=rewards, **shared_texts)


# Short texts that many items have in common.
_SHARED = ("problem_id", "subject", "level", "answer", "stage", "extracted")


class Drawn(NamedTuple):
    """A completion as an unfinished evaluation keeps it."""

    completion: Completion
    """The completion without log-probs, which are all 0."""
    grade: Grade
    lenient: Verdict
    """The verdict on the answer found in any format."""
    logprob: float
    """Mean log-prob of the sampled tokens."""


def _drawn(row: Mapping[str, Any]) -> Drawn:
    """Read a completion from its line."""
    fields_of_grade = {**row["grade"]}
    fields_of_grade["verdict"] = Verdict(fields_of_grade["verdict"])
    token_ids, text, finish_reason, policy_version = row["completion"]
    return Drawn(
        completion=Completion.bare(token_ids, text, finish_reason, policy_version),
        grade=Grade(**fields_of_grade),
        lenient=Verdict(row["lenient"]),
        logprob=float(row["logprob"]),
    )


def _mean_logprob(completion: Completion) -> float:
    """Return the mean log-prob of the tokens that the model sampled."""
    sampled = [
        logprob
        for logprob, is_sampled in zip(completion.logprobs, completion.sampled, strict=True)
        if is_sampled
    ]
    # Rounded: in another batch the same completion may differ in its last digits.
    return round(math.fsum(sampled) / max(1, len(sampled)), 4)


def _place_of(line: bytes, count: int, *, check: bool) -> int | None:
    """Return the place that a line is of; None where it is damaged.

    Args:
        line: the line with its end.
        count: the number of places.
        check: check all of the line and not only its place.
    """
    try:
        place = int(line[_PLACE : line.index(b",")])
        if check:
            row = json.loads(line)
            _drawn(row)
            if row["place"] != place:
                return None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return place if 0 <= place < count else None


# Position of the number in a line, which can be read without parsing the line.
_PLACE = len('{"place":')
# More processes than will ever evaluate together.
_MOST_FILES = 1 << 16
# The fields of an item, in order.
FIELDS = [field.name for field in fields(EvaluationItem)]


def row_of(item: EvaluationItem) -> dict[str, Any]:
    """Return the line of an item; `asdict` would copy the values."""
    return {name: getattr(item, name) for name in FIELDS}


class PartialEvaluation:
    """The completions that an evaluation has sampled so far, a line each, in a file per process.

    Args:
        folder: the folder of the evaluation's files.
        name: the name of the evaluation.
        settings: all settings that change completions; completions of other settings are sampled
            again.
        places: the number of completions when it is finished.
    """

    def __init__(
        self, folder: Path, name: str, settings: Mapping[str, Any], places: int = 0
    ) -> None:
        self.folder = folder / f".{name}.part"
        self._settings = dumps(settings).encode()
        # The open files, in the order of their names.
        self._files: list[BinaryIO] = []
        # Start of the line of each place, times `_MOST_FILES`, plus the number of its file: a few
        # bytes for each completion. -1: it is not written yet.
        self._lines = array("q", [-1]) * places

    def of_others(self) -> bool:
        """Tell whether an evaluation of other settings has begun under this name."""
        marker = self.folder / "settings.json"
        return marker.exists() and marker.read_bytes() != self._settings

    def begin(self, *, resume: bool) -> list[int]:
        """Return the places that are written; none without `resume` or with other settings."""
        marker = self.folder / "settings.json"
        with os_errors_as(self.folder):
            if not resume or not marker.exists() or self.of_others():
                self.folder.mkdir(parents=True, exist_ok=True)
                for file in self.folder.glob("*.json*"):  # and not the lock
                    file.unlink()
                write_atomic(marker, self._settings)
            self.index(cut=True)
            written = [place for place, line in enumerate(self._lines) if line >= 0]
            self.close()
            return written

    def index(self, *, cut: bool = False) -> None:
        """Open the files, and find their complete lines.

        Args:
            cut: check whole lines, and remove an incomplete one that a kill left at the end.
        """
        self.close()
        for number, path in enumerate(sorted(self.folder.glob("*.jsonl"))):
            file = path.open("r+b")
            self._files.append(file)
            self._index_file(number, file, cut=cut)

    def _index_file(self, number: int, file: BinaryIO, *, cut: bool) -> None:
        """Find the complete lines of one file."""
        start = 0
        for line in file:
            if not line.endswith(b"\n"):
                if cut:
                    file.truncate(start)
                break
            place = _place_of(line, len(self._lines), check=cut)
            # A damaged line has no place; its completion is sampled again.
            if place is not None:
                self._lines[place] = start * _MOST_FILES + number
            start += len(line)

    def read(self, place: int) -> Drawn:
        """Read the completion of a place, which `index` has found."""
        assert self._lines[place] >= 0, f"completion {place} was never drawn"
        start, number = divmod(self._lines[place], _MOST_FILES)
        file = self._files[number]
        file.seek(start)
        row = json.loads(file.readline())
        return _drawn(row)

    def write(
        self, rank: int, place: int, completion: Completion, grade: Grade, lenient: Verdict
    ) -> None:
        """Write a completion into the file of a process, at once.

        Args:
            rank: number of the process.
            place: number of the problem x samples + sample.
            completion: the completion.
            grade: its grade.
            lenient: the verdict on the answer found in any format.
        """
        row: dict[str, Any] = {
            "place": place,
            "completion": (
                completion.token_ids,
                completion.text,
                completion.finish_reason,
                completion.policy_version,
            ),
            "grade": {name: getattr(grade, name) for name in grade.__slots__},
            "lenient": lenient,
            "logprob": _mean_logprob(completion),
        }
        append_line(self.folder / f"{rank}.jsonl", row)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []
        self._lines = array("q", [-1]) * len(self._lines)

    def delete(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
