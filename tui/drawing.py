"""Lines of styled text, and the small pictures made of them. Pure: a frame is a list of lines.

A piece of a line is `(text, role)`; what a role looks like is the theme's business (palette.py). Widths
are terminal cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

Piece = tuple[str, str]

EIGHTHS = " ▁▂▃▄▅▆▇█"


# Escape sequences in a model's or another client's text must not reach the terminal: control characters
# become their pictures (ESC is ␛), the C1 ones, which some terminals obey, a replacement mark.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_CONTROL_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(128, 160), 65533)


def printable(text: str) -> str:
    """The text without control characters, but for tabs and line breaks."""
    return text if text.isprintable() else text.translate(_CONTROL_PICTURES)


class Line:
    """One row of the screen, built from left to right."""

    __slots__ = ("pieces", "width")

    def __init__(self, *pieces: Piece) -> None:
        self.pieces: list[Piece] = []
        self.width = 0
        for text, role in pieces:
            self.add(text, role)

    def add(self, text: str, role: str = "text") -> Line:
        if text:
            text = printable(text)
            self.pieces.append((text, role))
            self.width += cell_len(text)
        return self

    def extend(self, pieces: Iterable[Piece]) -> Line:
        for text, role in pieces:
            self.add(text, role)
        return self

    def fit(self, width: int, fill: str = " ", role: str = "text") -> Line:
        """Exactly `width` cells: cut with an ellipsis, or filled."""
        if self.width < width:
            return self.add(fill * (width - self.width), role)
        if self.width > width:
            self._cut(width)
        return self

    def right(self, pieces: Iterable[Piece], width: int, fill: str = " ", role: str = "text") -> Line:
        """Fill up to `width` cells so that `pieces` end there. They win over text on the left."""
        tail = Line(*pieces)
        self.fit(max(0, width - tail.width), fill, role)
        return self.extend(tail.pieces)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def _cut(self, width: int) -> None:
        kept: list[Piece] = []
        left = max(0, width - 1)
        last_role = "text"
        for text, role in self.pieces:
            last_role = role
            cells = cell_len(text)
            if cells > left:
                kept.append((set_cell_size(text, left), role))
                break
            kept.append((text, role))
            left -= cells
        if width > 0:
            kept.append(("…", last_role))
        self.pieces = kept
        self.width = width


def clip(text: str, width: int) -> str:
    """Exactly `width` cells of text, an ellipsis where something is missing."""
    text = " ".join(text.split())
    if cell_len(text) <= width:
        return text + " " * (width - cell_len(text))
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""


def box(
    title: Iterable[Piece],
    body: Sequence[Line],
    width: int,
    height: int,
    foot: Iterable[Piece] = (),
) -> list[Line]:
    """A round frame of exactly `width` x `height` with its title on the upper and `foot` on the lower edge.

    The body is one cell away from the frame; rows that do not fit are left out.
    """
    top = Line(("╭─ ", "frame")).extend(title).add(" ", "frame")
    top.fit(width - 1, "─", "frame").add("╮", "frame")
    rows = [top]
    for index in range(height - 2):
        line = body[index] if index < len(body) else Line()
        inner = Line(*line.pieces).fit(width - 4)
        rows.append(Line(("│ ", "frame")).extend(inner.pieces).add(" │", "frame"))
    foot = list(foot)
    bottom = Line(("╰", "frame"))
    if foot and Line(*foot).width <= width - 5:
        bottom.right([(" ", "frame"), *foot, (" ─╯", "frame")], width, "─", "frame")
    else:
        bottom.fit(width - 1, "─", "frame").add("╯", "frame")
    rows.append(bottom)
    return rows


def rule(pieces: Iterable[Piece], width: int) -> Line:
    """A section head without a frame: ─ title ─────."""
    return Line(("─ ", "frame")).extend(pieces).add(" ", "frame").fit(width, "─", "frame")


def beside(left: Sequence[Line], right: Sequence[Line]) -> list[Line]:
    """Two blocks of equal height next to each other."""
    return [Line(*a.pieces).extend(b.pieces) for a, b in zip(left, right, strict=True)]


def join(parts: Iterable[Sequence[Piece]], separator: Piece = (" · ", "faint")) -> list[Piece]:
    """Groups of pieces with a separator between them; empty groups are left out."""
    result: list[Piece] = []
    for part in parts:
        if part:
            if result:
                result.append(separator)
            result.extend(part)
    return result


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values, scaled to the largest. Zero stays visible as the lowest bar.

    With more values than cells, neighbours are averaged from the newest backwards.
    """
    if width <= 0:
        return ""
    if len(values) > width:
        size = -(-len(values) // width)
        groups = [values[max(0, end - size) : end] for end in range(len(values), 0, -size)][::-1]
        values = [sum(group) / len(group) for group in groups]
    top = max(values, default=0.0)
    bars = "".join(EIGHTHS[1 + round(7 * value / top)] if top > 0 else EIGHTHS[1] for value in values)
    return bars.rjust(width)


def progress(done: float, total: float, width: int, full: str = "━", empty: str = "╌") -> str:
    """A bar of `width` cells; full only when done, empty only at nothing."""
    if width <= 0:
        return ""
    share = min(1.0, max(0.0, done / total)) if total > 0 else 0.0
    cells = round(share * width)
    if share < 1.0:
        cells = min(cells, width - 1)
    if share > 0.0:
        cells = max(cells, 1)
    return full * cells + empty * (width - cells)


def column(value: float, top: float, rows: int) -> str:
    """A vertical bar of `rows` cells, top cell first, in eighths. Anything above zero is visible."""
    if value <= 0 or top <= 0:
        return " " * rows
    eighths = max(1, round(min(1.0, value / top) * rows * 8))
    cells = [min(8, max(0, eighths - 8 * (rows - 1 - row))) for row in range(rows)]
    return "".join(EIGHTHS[cell] for cell in cells)
