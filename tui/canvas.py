"""A widget that shows lines drawn by a pure function and repaints only those that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from mlxbatch.tui.drawing import Line
from mlxbatch.tui.palette import make_palette

PLAIN = Style()  # never None: Textual's filter for NO_COLOR reads the style of every segment


def palette_of(app: App[Any]) -> Mapping[str, Style]:
    """The palette of the app's current theme."""
    return make_palette(app.current_theme, app.theme_variables)


class Canvas(Widget):
    """Subclasses draw; `redraw` compares with what is on screen. Strips are kept until their line changes."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._strips: list[Strip] = []
        self._lines: list[list[tuple[str, str]]] = []
        self._palette: Mapping[str, Style] = {}

    def draw(self, width: int, height: int) -> Sequence[Line]:
        """All lines for this size; missing ones stay blank."""
        raise NotImplementedError

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _theme: self.repaint())

    def on_resize(self) -> None:
        self.redraw()

    def repaint(self) -> None:
        """Draw everything anew, for a new theme."""
        self._lines, self._palette = [], {}
        self.redraw()

    def redraw(self) -> None:
        """Draw, and repaint the lines that differ from those on screen."""
        width, height = self.size
        if not width or not height or not self.is_attached:
            return
        if not self._palette:
            self._palette = palette_of(self.app)
        drawn = [line.pieces for line in self.draw(width, height)[:height]]
        drawn += [[] for _ in range(height - len(drawn))]
        same_size = len(self._lines) == height and bool(self._strips) and self._strips[0].cell_length == width
        changed = [y for y, pieces in enumerate(drawn) if not same_size or pieces != self._lines[y]]
        strips = self._strips if same_size else [Strip.blank(width, PLAIN)] * height
        for y in changed:
            strips[y] = self._strip(drawn[y], width)
        self._strips, self._lines = strips, drawn
        if not same_size:
            self.refresh()
        elif changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def _strip(self, pieces: list[tuple[str, str]], width: int) -> Strip:
        palette = self._palette
        return Strip([Segment(text, palette[role]) for text, role in pieces]).adjust_cell_length(width, PLAIN)

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips) and self._strips[y].cell_length == self.size.width:
            return self._strips[y]
        return Strip.blank(self.size.width, PLAIN)


class LineView(Canvas):
    """One line that is handed to it."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._line = Line()

    def show(self, line: Line) -> None:
        self._line = line
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        return [self._line]
