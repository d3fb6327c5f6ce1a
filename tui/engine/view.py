"""The engine screen's body as a widget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from textual.events import Click
from textual.message import Message

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.tui.canvas import Canvas
from mlxbatch.tui.drawing import Line
from mlxbatch.tui.engine.frame import engine_frame
from mlxbatch.tui.engine.view_state import ViewState


class EngineView(Canvas):
    """Draws the newest snapshot. `age` tells how many seconds ago it arrived."""

    class SlotClicked(Message):
        def __init__(self, slot: int) -> None:
            super().__init__()
            self.slot = slot

    def __init__(self) -> None:
        super().__init__(id="engine-view")
        self.view = ViewState()
        self.snapshot: Snapshot | None = None
        self._age: Callable[[], float] = lambda: 0.0
        self._status = ""
        self._slot_lines: dict[int, int] = {}

    def show(self, snapshot: Snapshot | None, view: ViewState, *, status: str, age: Callable[[], float]) -> None:
        self.snapshot, self.view, self._status, self._age = snapshot, view, status, age
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self.snapshot is None:
            return [Line((" NO ENGINE ", "badge-bad"), (f" {self._status or 'no engine yet'}", "text")).fit(width)]
        frozen = self.view.frozen is not None
        view = replace(self.view, frozen=self._age()) if frozen else self.view
        frame = engine_frame(self.snapshot, view, width, height, 0.0 if frozen else self._age())
        self._slot_lines = frame.slot_lines
        return frame.lines

    def on_click(self, event: Click) -> None:
        slot = self._slot_lines.get(event.y)
        if slot is not None:
            self.post_message(self.SlotClicked(slot))
