"""Tables and lines of text: made once, shown in a terminal, on an HTML page or in Markdown.

A `Table` knows nothing of where it is shown. `for_terminal` makes it fit any width from 60 columns,
`as_markdown` writes it for a model card, and the report's template writes it as HTML. No text is
markup, because many are a model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table as RichTable

Tone = Literal["plain", "good", "bad", "unsure", "muted", "strong"]
"""What a text means to the reader; each renderer has a color or a weight for it."""

# Characters of a text that stays on one line of a page.
_LONGEST_ON_A_LINE = 40
_NUMBER = re.compile(r"[-+]?\d|p[<=]|-$")


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of one place of a table."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text between tables."""

    text: str
    tone: Tone = "muted"
    kind: Literal["note", "verdict", "finding"] = "note"
    """The place that a line has on a page; a terminal shows all kinds alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells below titles; `table` makes one of plain texts."""

    columns: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    lines: bool = False
    """Draw lines between the cells; without them the first column names the rows."""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{row} has not {len(self.columns)} cells"

    def has_numbers(self, position: int) -> bool:
        """Tell whether a column has numbers, which are aligned to the right."""
        if position == 0 and not self.lines:
            return False
        return any(_NUMBER.match(row[position].text) for row in self.rows)

    def has_sentences(self, position: int) -> bool:
        """Tell whether a column has texts that are too long for one line."""
        return any(len(row[position].text) > _LONGEST_ON_A_LINE for row in self.rows)


Block = Table | Line


def table(
    titles: Sequence[str | Cell],
    rows: Iterable[Sequence[str | Cell]],
    *,
    title: str = "",
    lines: bool = False,
) -> Table:
    """Make a table of texts.

    Args:
        titles: titles of the columns.
        rows: rows of a text per column.
        title: a line above the table.
        lines: as in `Table`.
    """
    cells = tuple(_cells(row) for row in rows)
    return Table(columns=_cells(titles), rows=cells, title=title, lines=lines)


def _cells(texts: Sequence[str | Cell]) -> tuple[Cell, ...]:
    return tuple(Cell(text) if isinstance(text, str) else text for text in texts)


# --- a terminal ----------------------------------------------------------------------------------

STYLES: dict[Tone, str] = {
    "plain": "",
    "good": "bold green",
    "bad": "bold red",
    "unsure": "yellow",
    "muted": "dim",
    "strong": "bold",
}
# Characters between two columns, without lines and with them.
_GAP = 2
_GAP_WITH_LINES = 3
# A text is wrapped where a column is wider than this; shorter ones stay on one line.
_LONGEST_WORDS = 24


def for_terminal(block: Block) -> RenderableType:
    """Return what a rich console prints of a block, whatever its width."""
    from rich.text import Text

    if isinstance(block, Line):
        return Text(block.text, style=STYLES[block.tone])
    return _FittedTable(block)


class _FittedTable:
    """A table that is divided where it is wider than the console.

    The columns that do not fit follow below, each part with the first column, so that no number is
    broken.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        width = options.max_width
        for number, positions in enumerate(_parts(self.table, width)):
            if number > 0:
                yield ""
            yield _rich_table(self.table, positions, width, with_title=number == 0)


def _parts(table: Table, width: int) -> list[list[int]]:
    """Divide columns into parts that fit a width; every part begins with the first column."""
    gap = _GAP_WITH_LINES if table.lines else _GAP
    widths = [_least_width(table, position) + gap for position in range(len(table.columns))]
    widths[0] = min(widths[0], _longest_name(width) + gap)
    parts = [[0]]
    room = width - widths[0]
    for position in range(1, len(widths)):
        if widths[position] > room and len(parts[-1]) > 1:
            parts.append([0])
            room = width - widths[0]
        parts[-1].append(position)
        room -= widths[position]
    return parts


def _longest_name(width: int) -> int:
    """Return the characters of a row's name in one line; a longer one is folded."""
    return max(_LONGEST_WORDS, width // 3)


def _least_width(table: Table, position: int) -> int:
    """Return the characters that a column needs: whole numbers and short texts, or whole words."""
    width = _widest_word(table.columns[position].text)
    for row in table.rows:
        text = row[position].text
        if _may_wrap(table, position) and len(text) > _LONGEST_WORDS:
            width = max(width, min(_LONGEST_WORDS, _widest_word(text)))
        else:
            width = max(width, len(text))
    return width


def _widest_word(text: str) -> int:
    return max((len(word) for word in text.split()), default=0)


def _may_wrap(table: Table, position: int) -> bool:
    """Tell whether the texts of a column may be wrapped.

    Without lines, the first column names the rows, and the second may be an interval, which has a
    space.
    """
    return table.lines or position > 1


def _rich_table(
    table: Table, positions: Sequence[int], width: int, *, with_title: bool
) -> RichTable:
    """Make rich's table of some columns, for a console of a width."""
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(table.title) if table.title and with_title else None
    if table.lines:
        rich_table = RichTable(title=title)
    else:
        rich_table = RichTable(
            title=title, box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold"
        )
    for position in positions:
        column = table.columns[position]
        is_long_name = position == 0 and _least_width(table, 0) > _longest_name(width)
        rich_table.add_column(
            Text(column.text, style=STYLES[column.tone]),
            justify="right" if table.has_numbers(position) else "left",
            no_wrap=not _may_wrap(table, position) and not is_long_name,
            max_width=_longest_name(width) if is_long_name else None,
            overflow="fold" if is_long_name else "ellipsis",
        )
    for row in table.rows:
        cells = [row[position] for position in positions]
        rich_table.add_row(*(Text(cell.text, style=STYLES[cell.tone]) for cell in cells))
    return rich_table


# --- Markdown ------------------------------------------------------------------------------------


def as_markdown(block: Block) -> str:
    r"""Return a block as Markdown: a table, or a line of a list.

    >>> print(as_markdown(table(["model", "accuracy"], [["base", "3.1"], ["a|b", "4"]])))
    | model | accuracy |
    |---|---:|
    | base | 3.1 |
    | a\|b | 4 |
    """
    if isinstance(block, Line):
        return f"- {_one_line(block.text)}"
    lines = [_markdown_row(block.columns)]
    marks = ["---:" if block.has_numbers(i) else "---" for i in range(len(block.columns))]
    lines.append(f"|{'|'.join(marks)}|")
    lines += [_markdown_row(row) for row in block.rows]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[Cell]) -> str:
    texts = [_one_line(cell.text).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(texts)} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())
