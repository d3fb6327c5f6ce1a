"""Where messages are written."""

from __future__ import annotations

from typing import ClassVar

from textual.events import Key
from textual.message import Message
from textual.widgets import TextArea

from mlxbatch.tui.keymap import bindings


class Composer(TextArea):
    """Enter sends, Ctrl+J breaks the line (Shift+Enter only where the terminal can tell it from Enter)."""

    BINDINGS: ClassVar = bindings("newline", "older_prompt", "newer_prompt", "scroll_up", "scroll_down")

    class Submitted(Message):
        def __init__(self, composer: Composer, text: str) -> None:
            super().__init__()
            self.composer = composer
            self.text = text

    class Leaving(Message):
        """Up on the first line: the user wants to go to the messages."""

    class Recall(Message):
        """An earlier (-1) or later (+1) prompt is wanted in place of the text."""

        def __init__(self, composer: Composer, offset: int) -> None:
            super().__init__()
            self.composer = composer
            self.offset = offset

    class Complete(Message):
        """Tab, or Up and Down while commands are listed: `step` 0 takes the marked one."""

        def __init__(self, composer: Composer, step: int) -> None:
            super().__init__()
            self.composer = composer
            self.step = step

    def __init__(self, text: str, *, id: str, hint: str) -> None:
        super().__init__(text, id=id, classes="composer", soft_wrap=True, highlight_cursor_line=False, compact=False)
        self.completing = False  # commands are listed above
        self.send_keys = frozenset({"enter"})
        self.border_title = "message"
        self.border_subtitle = hint
        self.cursor_blink = False
        self.move_cursor(self.document.end)

    async def _on_key(self, event: Key) -> None:
        if event.key in self.send_keys:
            event.stop()
            event.prevent_default()
            self.post_message(self.Submitted(self, self.text))
            return
        if event.key == "tab" and self.completing:
            event.stop()
            event.prevent_default()
            self.post_message(self.Complete(self, 0))
            return
        await super()._on_key(event)

    def replace_text(self, text: str) -> None:
        """New text with the cursor at its end; undo brings the old one back."""
        self.replace(text, self.document.start, self.document.end)
        self.move_cursor(self.document.end)

    def action_newline(self) -> None:
        self.insert("\n")

    def action_cursor_up(self, select: bool = False) -> None:
        if self.completing:
            self.post_message(self.Complete(self, -1))
        elif not select and self.cursor_at_first_line and self._on_first_wrapped_row():
            self.post_message(self.Leaving())
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if self.completing:
            self.post_message(self.Complete(self, 1))
        else:
            super().action_cursor_down(select)

    def _on_first_wrapped_row(self) -> bool:
        return self.get_cursor_up_location() == (0, 0)

    def action_older_prompt(self) -> None:
        self.post_message(self.Recall(self, -1))

    def action_newer_prompt(self) -> None:
        self.post_message(self.Recall(self, 1))
