"""Ask before something that cannot be undone."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static


class Confirm(ModalScreen[bool]):
    """True only for the letter y."""

    BINDINGS: ClassVar = [
        Binding("y", "answer(True)", show=False),
        Binding("n,escape,enter", "answer(False)", show=False),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog confirm") as dialog:
            dialog.border_subtitle = "y yes · n no"
            yield Static(self._question, markup=False)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)
