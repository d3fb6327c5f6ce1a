"""The commands that fit what has been typed after a slash, listed above the composer."""

from __future__ import annotations

from mlxbatch.tui.canvas import Canvas
from mlxbatch.tui.chat.commands import Command, matching
from mlxbatch.tui.drawing import Line

SHOWN = 8


class CommandList(Canvas):
    """Hidden unless something matches."""

    def __init__(self) -> None:
        super().__init__(id="command-list")
        self._commands: list[Command] = []
        self._marked = 0

    def on_mount(self) -> None:
        super().on_mount()
        self.display = False

    @property
    def open(self) -> bool:
        return bool(self._commands)

    @property
    def marked(self) -> Command | None:
        return self._commands[self._marked] if self._commands else None

    def typed(self, text: str) -> None:
        self._commands = matching(text)
        self._marked = 0
        self.styles.height = min(SHOWN, len(self._commands))
        self.display = self.open
        self.redraw()

    def close(self) -> None:
        self.typed("")

    def step(self, offset: int) -> None:
        self._marked = (self._marked + offset) % len(self._commands)
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        first = max(0, min(self._marked - height // 2, len(self._commands) - height))
        lines = []
        for index, command in list(enumerate(self._commands))[first : first + height]:
            name = f"/{command.name} {command.usage}".rstrip()
            marked = index == self._marked
            line = Line((" ▸ " if marked else "   ", "accent"))
            line.add(f"{name:<26}", "key" if marked else "text").add(command.help, "text" if marked else "dim")
            lines.append(line)
        return lines
