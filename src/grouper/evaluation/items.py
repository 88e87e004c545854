"""The items of an evaluation on disk: written as they come, read when they are looked at."""

from __future__ import annotations

import json
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
from grouper.files import append_line, dumps, read_lines, refusing, write_atomic
from grouper.types import Completion, Grade, Verdict

Row = TypeVar("Row")


_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def checked(read: Callable[[Any], Row]) -> Callable[[Any], Row]:
    """As `read`, a function of pydantic's; a `ValueError` names the first thing that is wrong."""

    def parse(content: Any) -> Row:
        try:
            if isinstance(content, str) and _SURROGATE.search(content):
                # pydantic reads no lone surrogates, of which a text may hold some.
                text = json.dumps(json.loads(content), ensure_ascii=False)
                return read(text.encode("utf-8", "replace"))
            return read(content)
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"{part}: " for part in first["loc"])
            raise ValueError(place + plain(first["msg"])) from error

    return parse


parse_item = checked(TypeAdapter(EvaluationItem).validate_json)


class StoredItems(Sequence[EvaluationItem]):
    """The items of a file, in its order; each look at them reads it again.

    Args:
        path: of the file.
        light: the same items without their texts, from `Lightener`.
    """

    def __init__(self, path: Path, light: Sequence[EvaluationItem]) -> None:
        self.path = path.absolute()
        self.light = tuple(light)
        """In memory: what the numbers of an evaluation are made of."""

    @classmethod
    def read(cls, path: Path) -> StoredItems:
        """Those of a file. Raises `RunFolderError`: it is missing or damaged."""
        return cls(path, [*map(Lightener(), read_lines(path, parse_item))])

    def __len__(self) -> int:
        return len(self.light)

    def __iter__(self) -> Iterator[EvaluationItem]:
        return iter(read_lines(self.path, parse_item))

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment] # as a list


class Lightener:
    """Takes the texts off items, and lets those that are alike share what is left."""

    def __init__(self) -> None:
        self._rewards: dict[tuple[object, ...], Mapping[str, float | None]] = {}

    def __call__(self, item: EvaluationItem) -> EvaluationItem:
        texts: dict[str, Any] = {name: getattr(item, name) for name in _SHARED}
        rewards = item.rewards
        rewards = rewards and self._rewards.setdefault(tuple(rewards.items()), rewards)
        texts = {name: text and intern(text) for name, text in texts.items()}
        return replace(item, prompt="", completion="", reason="", rewards=rewards, **texts)


_SHARED = ("problem_id", "subject", "level", "answer", "stage", "extracted")


class Drawn(NamedTuple):
    """A completion as an unfinished evaluation keeps it."""

    completion: Completion
    """Without log-probs, which are all 0."""
    grade: Grade
    lenient: Verdict
    """The verdict on the answer found in any format."""


def _drawn(row: Mapping[str, Any]) -> Drawn:
    grade, (ids, text, reason, version) = row["grade"], row["completion"]
    return Drawn(
        Completion.bare(ids, text, reason, version),
        Grade(**{**grade, "verdict": Verdict(grade["verdict"])}),
        Verdict(row["lenient"]),
    )


def _place_of(line: bytes, count: int, *, whole: bool) -> int | None:
    """The place that a line is of; None where it is damaged.

    Args:
        line: with its end.
        count: of places.
        whole: check all of the line and not only its place.
    """
    try:
        place = int(line[_PLACE : line.index(b",")])
        if whole:
            row = json.loads(line)
            _drawn(row)
            if row["place"] != place:
                return None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return place if 0 <= place < count else None


Write = Callable[[int, Completion, Grade, Verdict], None]
"""Of a place, which is the number of the problem x samples + sample, and what is `Drawn` there."""


# Where the number stands in a line, which need not be read as a whole to find it.
_PLACE = len('{"place":')
# More processes than will ever evaluate together.
_MOST_FILES = 1 << 16
# Of an item, in order.
FIELDS = [field.name for field in fields(EvaluationItem)]


def row_of(item: EvaluationItem) -> dict[str, Any]:
    """The line of an item; `asdict` would copy what it holds."""
    return {name: getattr(item, name) for name in FIELDS}


class Unfinished:
    """What an evaluation has drawn so far, a line per completion in a file per process.

    Args:
        folder: of the evaluation's files.
        name: of the evaluation.
        settings: what the completions follow from; completions of other settings are drawn anew.
        places: how many completions there will be.
    """

    def __init__(
        self, folder: Path, name: str, settings: Mapping[str, Any], places: int = 0
    ) -> None:
        self.folder = folder / f".{name}.part"
        self._settings = dumps(settings).encode()
        self._files: list[BinaryIO] = []
        # Where each line starts, times `_MOST_FILES`, plus the number of its file: a few bytes for
        # each completion.
        self._lines = array("q", [-1]) * places
        self._ends: dict[Path, int] = {}

    def of_others(self) -> bool:
        """Whether an evaluation of other settings has begun under this name."""
        marker = self.folder / "settings.json"
        return marker.exists() and marker.read_bytes() != self._settings

    def begin(self, *, resume: bool) -> list[int]:
        """The places that are there already; without `resume`, or of other settings, none."""
        marker = self.folder / "settings.json"
        with refusing(self.folder):
            if not resume or not marker.exists() or self.of_others():
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in self.folder.glob("*.json*"):  # and not the lock
                    left.unlink()
                write_atomic(marker, self._settings)
            self.index(cut=True)
            done = [place for place, line in enumerate(self._lines) if line >= 0]
            self.close()
            return done

    def index(self, *, cut: bool = False) -> None:
        """Find the whole lines that were not there before.

        Args:
            cut: cut off what a kill left after the last one.
        """
        for path in sorted({*self.folder.glob("*.jsonl")} - {*self._ends}):
            self._files.append(path.open("r+b"))
            self._ends[path] = 0
        for number, (path, end) in enumerate(self._ends.items()):
            file, start = self._files[number], end
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    if cut:
                        file.truncate(start)
                    break
                place = _place_of(line, len(self._lines), whole=cut)
                if place is not None:  # else it is damaged, and is drawn again
                    self._lines[place] = start * _MOST_FILES + number
                start += len(line)
            self._ends[path] = start

    def read(self, place: int, wait: Callable[[], None] | None) -> Drawn:
        """What was drawn there; `wait` is called until it has been written; None: it has been."""
        while self._lines[place] < 0:
            self.index()
            if self._lines[place] < 0:
                assert wait is not None, f"completion {place} was never drawn"
                wait()
        start, number = divmod(self._lines[place], _MOST_FILES)
        file = self._files[number]
        file.seek(start)
        return _drawn(json.loads(file.readline()))

    def write(self, rank: int, place: int, one: Completion, grade: Grade, lenient: Verdict) -> None:
        """Write a completion into the file of a process, at once."""
        row = {
            "place": place,
            "completion": (one.token_ids, one.text, one.finish_reason, one.policy_version),
            "grade": {name: getattr(grade, name) for name in grade.__slots__},
            "lenient": lenient,
        }
        append_line(self.folder / f"{rank}.jsonl", row)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files, self._ends = [], {}
        self._lines = array("q", [-1]) * len(self._lines)

    def delete(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
