"""The row of tabs, with a mark for what each is doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.events import Click
from textual.message import Message

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.tui.canvas import Canvas
from mlxbatch.tui.chat.session import TabState
from mlxbatch.tui.drawing import Line, Piece, clip, printable
from mlxbatch.tui.engine.pool_panel import pool_shares
from mlxbatch.tui.verdict import row_cap

# The mark alone tells the state; colour only repeats it.
STATE_MARKS: dict[TabState, tuple[str, str]] = {
    "idle": ("", "text"),
    "waiting": ("○", "warn"),
    "prefill": ("◐", "prefill"),
    "thinking": ("◌", "decode"),
    "decoding": ("●", "decode"),
    "unseen": ("✓", "good"),
    "failed": ("✗", "bad"),
}
STATE_WORDS: dict[TabState, str] = {
    "idle": "ready",
    "waiting": "waiting",
    "prefill": "reading the prompt",
    "thinking": "thinking",
    "decoding": "decoding",
    "unseen": "ready",
    "failed": "failed",
}
TITLE_LEAST, TITLE_MOST = 10, 32  # cells
RUNS_SHARE = 3  # batch runs take at most this part of the bar
COMPACT_BELOW = 100


@dataclass(frozen=True, slots=True)
class TabLabel:
    title: str
    state: TabState


@dataclass(frozen=True, slots=True)
class TabBarLine:
    """The line, and for each tab on it the cells [start, end) that it covers."""

    line: Line
    spans: dict[int, tuple[int, int]]
    plus: tuple[int, int]
    runs: tuple[int, int] = (0, 0)


def run_labels(snapshot: Snapshot | None, *, compact: bool = False) -> list[str]:
    """The batch runs on the engine, with how far they are: run:evals 41%."""
    labels = []
    for client in snapshot.clients if snapshot is not None else ():
        if client.kind == "run" and client.connected:
            name = printable(client.title.removeprefix("run:"))
            title = f"run:{clip(name, min(16, cell_len(name)))}" if name and not compact else "run"
            share = min(100, max(0, 100 * client.done // client.total)) if client.total > 0 else None
            labels.append(title if share is None else f"{title} {share}%")
    return labels


def tab_bar_line(
    tabs: Sequence[TabLabel], active: int | None, room: int, runs: Sequence[str] = ()
) -> TabBarLine:
    """As many tabs as fit in `room` cells, the active one always among them; ‹ and › say that there are more.
    Behind them the batch runs, as far as a third of the room goes.

    `active` None: none of the tabs is on show (the engine screen is).
    """
    beside = _runs_line(runs, room // RUNS_SHARE)
    room -= 6 + beside.width
    titles = min(TITLE_MOST, max(TITLE_LEAST, room // max(1, len(tabs)) - 6))
    labels = [_label(index, tab, index == active, titles) for index, tab in enumerate(tabs)]
    first, last = _window([line.width for line in labels], active or 0, room)
    bar = Line(("‹" if first else " ", "dim"))
    spans = {}
    for index in range(first, last):
        start = bar.width
        bar.extend(labels[index].pieces)
        spans[index] = (start, bar.width)
    bar.add("›" if last < len(labels) else " ", "dim")
    begin = bar.width
    bar.extend(beside.pieces)
    plus = (bar.width, bar.width + 3)
    bar.add(" + ", "dim")
    return TabBarLine(bar, spans, plus, (begin, plus[0]))


def _runs_line(runs: Sequence[str], room: int) -> Line:
    line = Line()
    for number, label in enumerate(runs):
        left = len(runs) - number
        more = f" +{left} run{'s' if left > 1 else ''} "
        if line.width + cell_len(label) + 2 + (len(more) if left > 1 else 0) > room:
            return line.add(more if line.width + len(more) <= room else "", "dim")
        line.add(f" {label} ", "dim")
    return line


def _label(index: int, tab: TabLabel, active: bool, cells: int) -> Line:
    mark, role = STATE_MARKS[tab.state]
    title = printable(tab.title)
    text = clip(title, min(cells, cell_len(title)))
    line = Line((f" {index + 1} {text} ", "cursor" if active else "dim"))
    if mark:
        line.add(mark, role).add(" ")
    return line


def _window(widths: Sequence[int], active: int, room: int) -> tuple[int, int]:
    """The longest run of tabs around the active one that fits in `room` cells."""
    first, last, used = active, active + 1, widths[active] if widths else 0
    while True:
        if last < len(widths) and used + widths[last] <= room:
            used += widths[last]
            last += 1
        elif first > 0 and used + widths[first - 1] <= room:
            first -= 1
            used += widths[first]
        else:
            return first, min(last, len(widths))


def batch_gauge(snapshot: Snapshot) -> list[Piece]:
    """3/8 ▰▰▰▱▱▱▱▱  KV 25%+20%: the side bar in one line, for narrow terminals."""
    rows, cap = len(snapshot.slots), row_cap(snapshot)
    cells = min(8, cap) or 1
    full = min(cells, -(-rows * cells // cap)) if cap else 0
    used, cached = (share.replace(" ", "") for share in pool_shares(snapshot))
    return [
        (f"{rows}/{cap} ", "text"),
        ("▰" * full, "decode"),
        ("▱" * (cells - full), "faint"),
        (f"  KV {used}+{cached} ", "dim"),
    ]


class TabBar(Canvas):
    """The tabs and a rule below them."""

    class Selected(Message):
        """A tab was clicked; None is the plus sign."""

        def __init__(self, index: int | None) -> None:
            super().__init__()
            self.index = index

    class RunSelected(Message):
        """A batch run was clicked."""

    def __init__(self) -> None:
        super().__init__(id="tab-bar")
        self._tabs: Sequence[TabLabel] = ()
        self._active: int | None = 0
        self._right: Sequence[Piece] = ()
        self._runs: Sequence[str] = ()
        self._drawn: TabBarLine | None = None

    def show(
        self, tabs: Sequence[TabLabel], active: int | None, right: Sequence[Piece], runs: Sequence[str] = ()
    ) -> None:
        self._tabs, self._active, self._right, self._runs = tabs, active, right, runs
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        right_width = sum(cell_len(text) for text, _ in self._right)
        self._drawn = tab_bar_line(self._tabs, self._active, width - right_width, self._runs)
        return [self._drawn.line.right(self._right, width), Line().fit(width, "─", "frame")]

    def on_click(self, event: Click) -> None:
        if self._drawn is None or event.y != 0:
            return
        for index, (start, end) in self._drawn.spans.items():
            if start <= event.x < end:
                self.post_message(self.Selected(index))
                return
        if self._drawn.runs[0] <= event.x < self._drawn.runs[1]:
            self.post_message(self.RunSelected())
        elif self._drawn.plus[0] <= event.x < self._drawn.plus[1]:
            self.post_message(self.Selected(None))
