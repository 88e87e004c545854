"""Tables and lines of text: made once, shown in a terminal, on an HTML page or in Markdown.

A `Table` knows nothing of where it is shown. `for_terminal` makes it fit any width from 60 columns,
`as_markdown` writes it for a model card, and the report's template writes it as HTML. Many texts
are a model's: in no renderer are they markup, and none has characters that steer a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from grouper.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table as RichTable

Tone = Literal["plain", "good", "bad", "unsure", "muted", "strong"]
"""What a text means to the reader; each renderer has a color or a weight for it."""

Kind = Literal["numbers", "words", "sentences"]
"""What a column holds: numbers are aligned to the right, sentences may be wrapped on a page."""

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

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What each column holds."""
        return tuple(self._kind(position) for position in range(len(self.columns)))

    def _kind(self, position: int) -> Kind:
        texts = [row[position].text for row in self.rows]
        names_rows = position == 0 and not self.lines
        if not names_rows and any(_NUMBER.match(text) for text in texts):
            return "numbers"
        if any(len(text) > _LONGEST_ON_A_LINE for text in texts):
            return "sentences"
        return "words"


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
        return Text(printable(block.text), style=STYLES[block.tone])
    return _FittedTable(block)


class _FittedTable:
    """A table that is divided where it is wider than the console.

    The columns that do not fit follow below, each part with the first column, so that no number is
    broken. Only then is a long name of a row folded.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        gap = _GAP
        width = options.max_width + _GAP  # nothing follows the last column
        if self.table.lines:
            gap = _GAP_WITH_LINES
            width = options.max_width - 1  # the first line
        widths = [_least_width(self.table, i) + gap for i in range(len(self.table.columns))]
        if sum(widths) <= width:
            yield _rich_table(self.table, range(len(widths)))
            return
        name_width = min(widths[0] - gap, max(_LONGEST_WORDS, width // 3))
        widths[0] = name_width + gap
        for number, positions in enumerate(_parts(widths, width)):
            if number > 0:
                yield ""
            yield _rich_table(self.table, positions, name_width, with_title=number == 0)


def _parts(widths: Sequence[int], width: int) -> list[list[int]]:
    """Divide columns into parts that fit a width; every part begins with the first column."""
    parts = [[0]]
    room = width - widths[0]
    for position in range(1, len(widths)):
        if widths[position] > room and len(parts[-1]) > 1:
            parts.append([0])
            room = width - widths[0]
        parts[-1].append(position)
        room -= widths[position]
    return parts


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
    table: Table,
    positions: Sequence[int],
    name_width: int | None = None,
    *,
    with_title: bool = True,
) -> RichTable:
    """Make rich's table of some columns.

    Args:
        table: the table.
        positions: its columns to show.
        name_width: the characters of the first column, in which longer texts are folded; None: as
            many as it needs.
        with_title: show the title, too.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    def styled(cell: Cell) -> Text:
        return Text(printable(cell.text), style=STYLES[cell.tone])

    title = Text(printable(table.title)) if table.title and with_title else None
    if table.lines:
        rich_table = RichTable(title=title)
    else:
        rich_table = RichTable(
            title=title, box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold"
        )
    kinds = table.kinds
    for position in positions:
        is_folded = position == 0 and name_width is not None
        rich_table.add_column(
            styled(table.columns[position]),
            justify="right" if kinds[position] == "numbers" else "left",
            no_wrap=not is_folded and not _may_wrap(table, position),
            max_width=name_width if is_folded else None,
            overflow="fold" if is_folded else "ellipsis",
        )
    for row in table.rows:
        rich_table.add_row(*(styled(row[position]) for position in positions))
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
    marks = ["---:" if kind == "numbers" else "---" for kind in block.kinds]
    rows = [_markdown_row(row) for row in block.rows]
    return "\n".join([_markdown_row(block.columns), f"|{'|'.join(marks)}|", *rows])


def _markdown_row(cells: Sequence[Cell]) -> str:
    texts = [_one_line(cell.text).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(texts)} |"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
