"""The messages of one tab."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.widgets import Static

from mlxbatch.history.records import MessageRecord
from mlxbatch.tui.chat.message_view import MessageView
from mlxbatch.tui.chat.session import ChatSession

MOUNTED = 40  # newest messages that become widgets; older ones follow on request
MORE = 40

WELCOME = """\
One model, as many tabs as you like: they answer at the same time.

Type a message and press Enter. / lists the commands, F1 every key,
Ctrl+G shows the engine at work, Ctrl+S finds earlier chats."""


class Transcript(VerticalScroll, can_focus=False):
    """Follows the newest line until the user scrolls up."""

    class Scrolled(Message):
        """The view has moved, or its content has grown."""

    def __init__(self, session: ChatSession, *, id: str) -> None:
        super().__init__(id=id, classes="transcript")
        self.session = session
        self._turns = Vertical(classes="turns")
        self._limit = MOUNTED
        self._revision = -1

    def compose(self) -> ComposeResult:
        # An anchored container shows the end of its content; this one is never shorter than the view, so that
        # a short chat begins at the top.
        yield self._turns

    async def on_mount(self) -> None:
        self.anchor()
        await self.sync()

    @property
    def views(self) -> list[MessageView]:
        return [child for child in self._turns.children if isinstance(child, MessageView)]

    @property
    def following(self) -> bool:
        return self.scroll_offset.y >= self.max_scroll_y

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.post_message(self.Scrolled())

    async def sync(self) -> None:
        """Bring the widgets in line with the session: new turns, another version, streamed text."""
        if self._revision == self.session.revision or not self._turns.is_attached:
            return
        self._revision = self.session.revision
        path = self.session.tree.path()
        hidden = max(0, len(path) - self._limit)
        wanted = path[hidden:]
        views = self.views
        common = 0
        for view, message in zip(views, wanted, strict=False):
            if view.message.id != message.id:
                break
            common += 1
        with self.app.batch_update():
            for view in views[common:]:
                await view.remove()
            fresh = [self._view(path, hidden + index) for index in range(common, len(wanted))]
            await self._show_notices(hidden, bool(wanted))
            if fresh:
                await self._turns.mount(*fresh)
            for view, message in zip(views[:common], wanted, strict=False):
                version = self._version(message)
                if view.version != version:
                    view.version = version
                    view.redraw_header()
                if view.answer is not None or message.status == "streaming":
                    await view.sync()
        newest = self.views[-1:] if not fresh else []
        for view in newest:  # figures may arrive after the text
            view.redraw_header()

    async def show_more(self) -> bool:
        """Mount older messages above those there; the view stays where it is. False when all are there."""
        path = self.session.tree.path()
        hidden = max(0, len(path) - self._limit)
        if not hidden:
            return False
        self._limit += MORE
        oldest = self.views[0]
        still_hidden = max(0, len(path) - self._limit)
        await self._show_notices(still_hidden, any_messages=True)
        await self._turns.mount(*(self._view(path, index) for index in range(still_hidden, hidden)), before=oldest)
        self.call_after_refresh(self.scroll_to_widget, oldest, animate=False, top=True)
        return True

    def follow(self) -> None:
        self.anchor()
        self.scroll_end(animate=False, immediate=True)

    def _view(self, path: list[MessageRecord], index: int) -> MessageView:
        message = path[index]
        answer = self.session.answer
        before = next((turn.dropped for turn in reversed(path[:index]) if turn.role == "assistant"), 0)
        return MessageView(
            message,
            answer=answer if answer is not None and answer.message is message else None,
            version=self._version(message),
            newly_dropped=message.dropped if message.dropped > before else 0,
        )

    def _version(self, message: MessageRecord) -> tuple[int, int]:
        versions = self.session.tree.versions(message.id)
        return versions.index(message.id) + 1, len(versions)

    async def _show_notices(self, hidden: int, any_messages: bool) -> None:
        for notice in self.query(".transcript-notice"):
            await notice.remove()
        text = WELCOME if not any_messages else f"↑ {hidden} older messages · PgUp at the top shows them"
        if hidden or not any_messages:
            kind = "-welcome" if not any_messages else "-older"
            notice = Static(text, classes=f"transcript-notice {kind}", markup=False)
            await self._turns.mount(notice, before=0 if self._turns.children else None)
