"""Every key and command on one page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen

from mlxbatch.tui.canvas import Canvas
from mlxbatch.tui.chat.commands import COMMANDS
from mlxbatch.tui.chat.tab_bar import STATE_MARKS
from mlxbatch.tui.drawing import Line
from mlxbatch.tui.keymap import ACTIONS, Keymap
from mlxbatch.tui.verdict import EXPLANATIONS

Files = Sequence[tuple[str, str]]  # what, and its path

_MARK_MEANINGS = {
    "waiting": "waiting for a row",
    "prefill": "reading the prompt",
    "thinking": "thinking",
    "decoding": "answering",
    "unseen": "done, not looked at yet",
    "failed": "failed",
}


def help_lines(keymap: Keymap, width: int, files: Files = ()) -> list[Line]:
    """Keys by place, commands, what marks and verdicts mean, and where the user's files are."""
    lines: list[Line] = []

    def section(title: str) -> None:
        if lines:
            lines.append(Line())
        lines.append(Line((title, "title")))

    def row(left: str, right: str, role: str = "key", column: int = 16) -> None:
        lines.append(Line((f"  {left:<{column}}", role), (right, "text")))

    for group in dict.fromkeys(action.group for action in ACTIONS):
        section(group)
        for action in ACTIONS:
            if action.group == group:
                row(keymap.label(action.id, every=True), action.label)
        if group == ACTIONS[-1].group:
            row("1-9", "follow that slot")
    lines.append(Line())
    lines.append(Line(("  Shift+Enter is Enter on terminals without the kitty protocol;", "dim")))
    lines.append(Line((f"  {keymap.label('newline')} breaks the line everywhere.", "dim")))
    section("Commands (type / in the message)")
    for command in COMMANDS:
        row(f"/{command.name} {command.usage}".rstrip(), command.help, column=24)
    section("Marks on tabs")
    for state, meaning in _MARK_MEANINGS.items():
        mark, role = STATE_MARKS[state]  # type: ignore[index]
        lines.append(Line((f"  {mark:<16}", role), (meaning, "text")))
    section("What limits the engine")
    for name, meaning in EXPLANATIONS.items():
        row(name, meaning)
    if files:
        section("Files ([chat] in config.toml sets theme, system and sampling, [chat.keymap] other keys)")
        for name, path in files:
            row(name, path, role="text")
    return [line.fit(width) if line.width > width else line for line in lines]


class HelpText(Canvas):
    def __init__(self, keymap: Keymap, files: Files) -> None:
        super().__init__()
        self._keymap = keymap
        self._files = files
        self.styles.height = len(help_lines(keymap, 200, files))

    def draw(self, width: int, height: int) -> list[Line]:
        return help_lines(self._keymap, width, self._files)


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar = [Binding("escape,f1,q,enter", "close", show=False)]

    def __init__(self, keymap: Keymap, files: Files = ()) -> None:
        super().__init__()
        self._keymap = keymap
        self._files = files

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help") as dialog:
            dialog.border_title = "help"
            dialog.border_subtitle = "↑↓ PgUp PgDn scroll · Esc back"
            yield HelpText(self._keymap, self._files)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_close(self) -> None:
        self.dismiss(None)
