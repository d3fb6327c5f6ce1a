"""One message in the transcript."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.widgets import Static

from mlxbatch.history.records import MessageRecord
from mlxbatch.tui.canvas import Canvas
from mlxbatch.tui.chat.answer import Answer
from mlxbatch.tui.chat.markdown_view import AnswerMarkdown
from mlxbatch.tui.chat.message_header import header_line, thought_line
from mlxbatch.tui.drawing import Line, printable
from mlxbatch.tui.keymap import bindings
from mlxbatch.tui.numbers import size

if TYPE_CHECKING:
    from mlxbatch.tui.app import ChatApp


class HeaderLine(Canvas):
    """Redrawn whenever its message says so."""

    def __init__(self, view: MessageView) -> None:
        super().__init__(classes="message-head")
        self._view = view

    def draw(self, width: int, height: int) -> list[Line]:
        view = self._view
        return [
            header_line(
                view.message,
                width,
                answer=view.answer,
                version=view.version,
                focused=view.has_focus,
                now=view.app.wall_clock(),
            )
        ]


class ThoughtHead(Canvas):
    """The line that folds and unfolds the thinking."""

    def __init__(self, view: MessageView) -> None:
        super().__init__(classes="thought-head")
        self._view = view

    def draw(self, width: int, height: int) -> list[Line]:
        view = self._view
        thinking = view.answer is not None and not view.message.content
        return [thought_line(view.message, folded=view.folded, thinking=thinking)]

    def on_click(self, event: Click) -> None:
        event.stop()
        self._view.action_fold()


class MessageView(Vertical, can_focus=True):
    """Shows a message and keeps up with it while it streams (`sync`). Its keys act on this message."""

    BINDINGS: ClassVar = bindings(
        "message_copy",
        "message_copy_code",
        "message_edit",
        "message_branch",
        "message_regenerate",
        "message_older",
        "message_newer",
        "message_fold",
        "message_up",
        "message_down",
    )

    app: ChatApp

    class Command(Message):
        """The user wants something done with this message: copy, edit, branch, regenerate, up, down,
        older or newer (version)."""

        def __init__(self, view: MessageView, what: str, text: str = "") -> None:
            super().__init__()
            self.view = view
            self.what = what
            self.text = text

        @property
        def control(self) -> MessageView:
            return self.view

    def __init__(
        self,
        message: MessageRecord,
        *,
        answer: Answer | None = None,
        version: tuple[int, int] = (1, 1),
        newly_dropped: int = 0,
    ) -> None:
        super().__init__(classes=f"message -{message.role}")
        self.message = message
        self.answer = answer
        self.version = version
        self.folded = True
        self._newly_dropped = newly_dropped
        self._code_copied = -1
        self._head = HeaderLine(self)
        self._thought_head = ThoughtHead(self)
        self._thoughts = Static(classes="thought-text", markup=False)
        self._note = Static(classes="message-note", markup=False)
        self.body: AnswerMarkdown | None = None
        if message.role == "assistant":
            self.body = AnswerMarkdown(message.content, streaming=answer is not None)

    def compose(self) -> ComposeResult:
        if self._newly_dropped:
            turns = "turn is" if self._newly_dropped == 1 else "turns are"
            text = f"context full: the {self._newly_dropped} oldest {turns} no longer in the prompt"
            yield Static(f"┄┄ {text} ┄┄", classes="message-dropped", markup=False)
        yield self._head
        if self.body is None:
            for attachment in self.message.attachments:
                length = size(len(attachment.text.encode()))
                yield Static(Content(f"▤ {printable(attachment.name)}  {length}"), classes="message-file")
            if self.message.content:
                yield Static(Content(printable(self.message.content)), classes="message-text")
        else:
            yield self._thought_head
            yield self._thoughts
            yield self.body
            yield self._note

    async def on_mount(self) -> None:
        await self.sync()

    @on(AnswerMarkdown.Ready)
    async def _body_ready(self) -> None:
        await self.sync()

    async def sync(self) -> None:
        """Show the message as it stands now."""
        if self.body is not None:
            finished = self.message.status != "streaming"
            if finished:
                self.answer = None
            self._show_thoughts()
            await self.body.show(self.message.content, finished=finished)
            self.body.display = bool(self.message.content)
            self._show_note()
        self._head.redraw()

    def redraw_header(self) -> None:
        self._head.redraw()

    def _show_note(self) -> None:
        note, failed = self.message.note, self.message.status == "error"
        self._note.display = bool(note)
        if note:
            self._note.set_class(failed, "-error")
            self._note.update(Content(("✗ " if failed else "┄ ") + printable(note)))

    def _show_thoughts(self) -> None:
        thinking = bool(self.message.reasoning)
        self._thought_head.display = thinking
        self._thoughts.display = thinking and not self.folded
        if thinking:
            self._thought_head.redraw()
        if self._thoughts.display:
            self._thoughts.update(Content(printable(self.message.reasoning.strip())))

    def watch_has_focus(self, has_focus: bool) -> None:
        super().watch_has_focus(has_focus)
        self._head.redraw()

    def action_copy(self) -> None:
        self.post_message(self.Command(self, "copy", self.message.content))

    def action_copy_code(self) -> None:
        blocks = self.body.code_blocks() if self.body is not None else []
        if blocks:
            self._code_copied = (self._code_copied + 1) % len(blocks)
            self.post_message(self.Command(self, "copy", blocks[self._code_copied]))
        else:
            self.notify("there is no code in this message", timeout=2)

    def action_edit(self) -> None:
        self.post_message(self.Command(self, "edit"))

    def action_branch(self) -> None:
        self.post_message(self.Command(self, "branch"))

    def action_regenerate(self) -> None:
        self.post_message(self.Command(self, "regenerate"))

    def action_step_version(self, offset: int) -> None:
        self.post_message(self.Command(self, "older" if offset < 0 else "newer"))

    def action_move(self, offset: int) -> None:
        self.post_message(self.Command(self, "up" if offset < 0 else "down"))

    def action_fold(self) -> None:
        if self.message.reasoning:
            self.folded = not self.folded
            self._show_thoughts()
