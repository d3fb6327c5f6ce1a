"""System prompt and sampling parameters of one chat."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Static, TextArea

from mlxbatch.errors import MlxbatchError
from mlxbatch.tui.chat.commands import PARAMETERS, read_parameter
from mlxbatch.tui.chat.session import ChatSession

_EXPLAINED = {
    "temperature": "0 is greedy, default 0.7",
    "top_p": "keep this share of probability, default 0.95",
    "top_k": "keep this many tokens, 0 is all",
    "min_p": "least share of the likeliest, default 0.0",
    "repetition_penalty": "1.0 is off",
    "presence_penalty": "-2 to 2, 0 is off",
    "frequency_penalty": "-2 to 2, 0 is off",
    "max_tokens": "longest answer; empty is whatever fits",
    "seed": "empty is a new one each time",
    "stop": r"text that ends the answer, \n is a line break",
}


class SettingsScreen(ModalScreen[bool]):
    """Saves into the session; True when something was saved."""

    BINDINGS: ClassVar = [
        Binding("escape", "cancel", show=False),
        Binding("ctrl+s", "save", show=False, priority=True),
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    def __init__(self, session: ChatSession) -> None:
        super().__init__()
        self._session = session

    def compose(self) -> ComposeResult:
        chat = self._session.chat
        with Vertical(classes="dialog settings") as dialog:
            dialog.border_title = f"settings of {self._session.title}"
            dialog.border_subtitle = "⏎ or ⌃S save · Tab next · Esc back"
            yield Label("system prompt", classes="setting-head")
            yield TextArea(chat.system_prompt, id="system-prompt", highlight_cursor_line=False)
            with VerticalScroll(can_focus=False):
                for name in PARAMETERS:
                    with Horizontal(classes="setting"):
                        yield Label(name, classes="setting-name")
                        yield Input(_shown(chat.sampling.get(name)), id=name, compact=True)
                        yield Label(_EXPLAINED[name], classes="setting-help")
            yield Static("", id="settings-error", markup=False)

    def on_mount(self) -> None:
        self.query_one(TextArea).cursor_blink = False
        self.query_one("#settings-error").display = False

    @on(Input.Submitted)
    def action_save(self) -> None:
        if not self.is_mounted:
            return
        try:
            changes = {name: read_parameter(name, self.query_one(f"#{name}", Input).value) for name in PARAMETERS}
            self._session.set_sampling(changes)
        except MlxbatchError as error:
            message = self.query_one("#settings-error", Static)
            message.display = True
            message.update(f"✗ {error}")
            return
        self._session.set_system_prompt(self.query_one(TextArea).text)
        self.dismiss(True)

    def action_cancel(self) -> None:
        self.dismiss(False)


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return str(value[0]).replace("\n", "\\n").replace("\t", "\\t") if value else ""
    return str(value)
