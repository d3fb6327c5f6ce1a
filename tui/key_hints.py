"""The bottom line: the keys that matter here, as the keymap has them."""

from __future__ import annotations

from collections.abc import Sequence

from mlxbatch.tui.canvas import Canvas
from mlxbatch.tui.drawing import Line
from mlxbatch.tui.keymap import Keymap

Hint = tuple[str, str]  # action id (or a key as it is shown), what it does


def hints_line(hints: Sequence[Hint], keymap: Keymap, width: int) -> Line:
    """As many as fit, in order."""
    line = Line((" ", "text"))
    for name, what in hints:
        key = keymap.label(name) if keymap.knows(name) else name
        needed = len(key) + len(what) + 3
        if line.width + needed > width + 2:
            break
        line.add(key, "key").add(f" {what}  ", "dim")
    return line


class KeyHints(Canvas):
    def __init__(self, hints: Sequence[Hint], keymap: Keymap) -> None:
        super().__init__(id="key-hints")
        self._hints = hints
        self._keymap = keymap

    def show(self, hints: Sequence[Hint]) -> None:
        self._hints = hints
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        return [hints_line(self._hints, self._keymap, width)]
