"""What the published reward functions give, beside what ours give: the table of docs/rewards.md.

`python tests/golden/originals.py` writes the table; `test_originals.py` checks that it is there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grouper.prompts.formats import FORMATS
from grouper.rewards import REWARDS
from grouper.types import AnswerFormat

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT.parent / "shared" / "original-rewards.json"
PAGE = ROOT / "docs" / "rewards.md"
PLACE = re.compile(r"(<!-- differences -->\n).*?(<!-- /differences -->)", re.DOTALL)

LAYOUTS: dict[str, AnswerFormat] = {
    part: FORMATS[name]
    for part, name in (("A", "xml"), ("C", "xml"), ("E", "think"), ("D", "tags"))
}
MOST_ROWS = 3
"""Of one reward: the differences that most texts have."""
MOST_CHARACTERS = 60


@dataclass(frozen=True)
class Case:
    """A text, its reference, and what one published function gives it."""

    reward: str
    layout: AnswerFormat
    text: str
    reference: str
    published: float

    def ours(self, **params: Any) -> float:
        function = REWARDS[self.reward](self.layout, **params)
        (value,) = function(
            prompts=["q"], completions=[self.text], reference_answer=[self.reference]
        )
        assert value is not None
        return value


def read(file: Path = FILE) -> list[Case]:
    """Every value of the file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return [
        Case(name, layout, row["text"], row["reference"], value)
        for part, layout in LAYOUTS.items()
        for row in content[part]
        for name, value in row.items()
        if name not in ("text", "reference")
    ]


def differs(case: Case, value: float) -> bool:
    """The file has nine decimals."""
    return abs(value - case.published) > 1e-6


def table(cases: list[Case]) -> str:
    """One row per reward and pair of values, the most frequent pairs first."""
    lines = [
        "| reward | texts that differ | original | ours | for example |",
        "|---|---|---|---|---|",
    ]
    for reward in dict.fromkeys(case.reward for case in cases):
        own = [(case, case.ours()) for case in cases if case.reward == reward]
        different = [(case, value) for case, value in own if differs(case, value)]
        if not different:
            lines.append(f"| `{reward}` | 0 of {len(own)} | | | |")
        pairs = Counter((_number(case.published), _number(value)) for case, value in different)
        for position, (pair, _) in enumerate(pairs.most_common(MOST_ROWS)):
            alike = [c for c, value in different if (_number(c.published), _number(value)) == pair]
            example = min(alike, key=lambda case: (len(case.text), case.text))
            name = f"`{reward}`" if position == 0 else ""
            count = f"{len(different)} of {len(own)}" if position == 0 else ""
            lines.append(f"| {name} | {count} | {pair[0]} | {pair[1]} | {_shown(example)} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _shown(case: Case) -> str:
    text = case.text.replace("\n", "\\n").replace("|", "\\|")
    if len(text) > MOST_CHARACTERS:
        text = "..." + text[-MOST_CHARACTERS:]
    return f"`{text or ' '}` for {case.reference}"


def render(page: str, cases: list[Case]) -> str:
    """The page with the table in its place."""
    return PLACE.sub(lambda match: match[1] + table(cases) + match[2], page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
