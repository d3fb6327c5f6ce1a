"""The chat screen: tabs, transcript, side bar, composer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import ContentSwitcher, TextArea

from mlxbatch.errors import MlxbatchError
from mlxbatch.tui.chat import commands
from mlxbatch.tui.chat.chrome import Chrome
from mlxbatch.tui.chat.command_list import CommandList
from mlxbatch.tui.chat.command_runner import CommandRunner
from mlxbatch.tui.chat.composer import Composer
from mlxbatch.tui.chat.dialogs import ChatDialogs
from mlxbatch.tui.chat.markdown_view import CodeFence
from mlxbatch.tui.chat.message_header import short_model
from mlxbatch.tui.chat.message_view import MessageView
from mlxbatch.tui.chat.prompt_recall import PromptRecall
from mlxbatch.tui.chat.session import ChatSession
from mlxbatch.tui.chat.tab_bar import TabBar
from mlxbatch.tui.chat.transcript import Transcript
from mlxbatch.tui.chat.workspace import Workspace
from mlxbatch.tui.external_editor import edit_text
from mlxbatch.tui.keymap import Keymap, bindings

if TYPE_CHECKING:
    from mlxbatch.tui.app import ChatApp


class ChatScreen(Screen[None]):
    """Shows the workspace. `sync` brings everything visible up to date and is cheap when nothing changed."""

    BINDINGS: ClassVar = bindings(
        "stop",
        "regenerate",
        "new",
        "tabs",
        "next_tab",
        "previous_tab",
        "history",
        "model",
        "settings",
        "sidebar",
        "engine",
        "palette",
        "help",
        "editor",
        "find_prompt",
        "scroll_end",
    )
    app: ChatApp

    def __init__(self, workspace: Workspace, keymap: Keymap) -> None:
        super().__init__()
        self.workspace = workspace
        self.runner = CommandRunner(self)
        self.dialogs = ChatDialogs(self)
        self.chrome = Chrome(self, keymap)
        self.command_list = CommandList()
        self._transcripts = ContentSwitcher(id="transcripts")
        self._composers = ContentSwitcher(id="composers")
        self._panes: dict[int, tuple[Transcript, Composer]] = {}  # by chat
        self._showing = asyncio.Lock()
        self._recall = PromptRecall(workspace.store.prompts)

    def compose(self) -> ComposeResult:
        yield self.chrome.tab_bar
        yield Horizontal(self._transcripts, self.chrome.sidebar, id="body")
        yield self.chrome.jump_hint
        yield self.command_list
        yield self._composers
        yield self.chrome.status
        yield self.chrome.hints

    async def on_mount(self) -> None:
        await self.show_active()

    # What is on show

    @property
    def session(self) -> ChatSession:
        return self.workspace.active

    @property
    def transcript(self) -> Transcript:
        return self._pane()[0]

    @property
    def composer(self) -> Composer:
        return self._pane()[1]

    def _pane(self) -> tuple[Transcript, Composer]:
        """The widgets of the tab on show, made when they are first asked for and mounted by `show_active`."""
        chat = self.session.chat
        if chat.id not in self._panes:
            transcript = Transcript(self.session, id=f"transcript-{chat.id}")
            composer = Composer(chat.draft, id=f"composer-{chat.id}", hint=self.chrome.composer_hint())
            composer.send_keys = frozenset(self.app.keymap.keys("send").split(","))
            self._panes[chat.id] = transcript, composer
        return self._panes[chat.id]

    async def show_active(self) -> None:
        """Put the workspace's active tab on show. One call at a time: mounting takes several turns of the loop."""
        async with self._showing:
            transcript, composer = self._pane()
            if transcript.parent is None:
                await self._transcripts.mount(transcript)
                await self._composers.mount(composer)
            self._transcripts.current, self._composers.current = transcript.id, composer.id
        self.command_list.close()
        composer.completing = False
        composer.focus()
        self.app.ensure_engine(self.workspace.active_engine)
        await self.sync()

    async def sync(self) -> None:
        if not self._transcripts.is_attached:
            return
        if self.is_current:
            self.session.unseen = False
        await self.transcript.sync()
        self.chrome.sync()

    def flash(self, text: str) -> None:
        """A passing remark in the status line."""
        self.chrome.flash(text)

    def complain(self, error: MlxbatchError) -> None:
        self.notify(str(error), severity="error", timeout=8, markup=False)

    def run(self, work: Awaitable[None]) -> None:
        """Run in the background; an error is shown, and the screen brought up to date afterwards."""

        async def guarded() -> None:
            try:
                await work
            except MlxbatchError as error:
                self.complain(error)
            await self.sync()

        self.run_worker(guarded(), exit_on_error=True)

    async def on_resize(self, event: Resize) -> None:
        if self._panes:
            self.chrome.sync()

    # The composer

    @on(TextArea.Changed)
    def _typed(self, event: TextArea.Changed) -> None:
        """Every change is saved at once, also one that arrives after another tab has been opened."""
        for session in self.workspace.sessions:
            pane = self._panes.get(session.chat.id)
            if pane is not None and pane[1] is event.text_area:
                session.save_draft(event.text_area.text)
        if event.text_area is self.composer:
            self.command_list.typed(self.composer.text)
            self.composer.completing = self.command_list.open

    @on(Composer.Submitted)
    def _submitted(self, event: Composer.Submitted) -> None:
        listed = self.command_list
        if listed.open and listed.marked is not None:
            text = f"/{listed.marked.name}"
            if listed.marked.needs_arguments:
                self.composer.replace_text(f"{text} ")
                return
        else:
            text = event.text
        try:
            command = commands.parse(text)
        except MlxbatchError as error:
            self.complain(error)
            return
        if command is not None:
            self.composer.replace_text("")
            self.run(self.runner.run(*command))
        elif text.strip() or self.session.attachments:
            self.send(text)

    def send(self, text: str) -> None:
        if self.session.streaming:
            self.flash(f"still answering · {self.app.keymap.label('stop')} stops it")
            return
        self.app.ensure_engine(self.workspace.active_engine)
        question = self.session.add_question(text.strip("\n"))
        self.composer.replace_text(self.session.take_aside())
        self.composer.history.clear()
        self.transcript.follow()
        self.run(self.session.answer_to(question))
        self.app.wake()

    @on(Composer.Complete)
    def _complete(self, event: Composer.Complete) -> None:
        listed = self.command_list
        if event.step:
            listed.step(event.step)
        elif listed.marked is not None:
            self.composer.replace_text(f"/{listed.marked.name} ")

    @on(Composer.Recall)
    def _recall_prompt(self, event: Composer.Recall) -> None:
        text = self._recall.step(event.offset, self.composer.text)
        if text is not None:
            self.composer.replace_text(text)

    @on(Composer.Leaving)
    def _to_messages(self) -> None:
        if self.transcript.views:
            self.transcript.views[-1].focus()

    # The messages

    @on(MessageView.Command)
    def _message_command(self, event: MessageView.Command) -> None:
        message, what = event.view.message, event.what
        if what == "copy":
            self.copy(event.text)
        elif what == "edit":
            self.edit_message(message.id)
        elif what == "branch":
            self.branch_from(message.id)
        elif what == "regenerate":
            self.run(self.session.regenerate(message.id))
            self.composer.focus()
            self.transcript.follow()
            self.app.wake()
        elif what in ("older", "newer"):
            self.run(self._step_version(message.id, -1 if what == "older" else 1))
        else:
            self._step_message(event.view, -1 if what == "up" else 1)

    async def _step_version(self, message_id: int, offset: int) -> None:
        position = [turn.id for turn in self.session.tree.path()].index(message_id)
        if self.session.show_version(message_id, offset):
            await self.transcript.sync()
            shown = self.session.tree.path()[position].id
            for view in self.transcript.views:
                if view.message.id == shown:
                    view.focus()

    def _step_message(self, view: MessageView, offset: int) -> None:
        views = self.transcript.views
        position = views.index(view) + offset
        if position >= len(views):
            self.transcript.follow()
            self.composer.focus()
        elif position >= 0:
            views[position].focus()

    def edit_message(self, message_id: int) -> None:
        message = self.session.tree[message_id]
        if message.role != "user":
            self.flash("only your own messages can be edited; r makes another answer")
            return
        if self.session.editing is None:
            self.session.set_aside = self.composer.text
        self.session.editing = message_id
        self.composer.replace_text(message.content)
        self.composer.focus()
        self.chrome.sync_composer()

    def branch_from(self, message_id: int) -> None:
        self.workspace.open_chat(self.session.branch(message_id))
        self.run(self.show_active())
        self.flash("branched into a new tab")

    def copy(self, text: str) -> None:
        self.app.copy_to_clipboard(text)
        self.flash(f"copied {len(text):,} characters")

    @on(CodeFence.CopyRequested)
    def _copy_code(self, event: CodeFence.CopyRequested) -> None:
        self.copy(event.code)

    @on(Transcript.Scrolled)
    def _scrolled(self) -> None:
        self.chrome.sync_jump_hint()

    # Tabs

    @on(TabBar.Selected)
    async def _tab_clicked(self, event: TabBar.Selected) -> None:
        if event.index is None:
            await self.action_new_tab()
        else:
            await self.select_tab(event.index)

    @on(TabBar.RunSelected)
    def _run_clicked(self) -> None:
        self.app.action_engine()

    async def select_tab(self, index: int) -> None:
        self.workspace.select(index)
        await self.show_active()

    async def action_new_tab(self) -> None:
        self.workspace.new_tab()
        await self.show_active()

    async def action_step_tab(self, offset: int) -> None:
        await self.select_tab(self.workspace.index + offset)

    async def close_tab(self, session: ChatSession) -> None:
        chat_id = session.chat.id
        await self.workspace.close_tab(session)
        await self.forget_widgets(chat_id)

    async def forget_widgets(self, chat_id: int) -> None:
        await self.show_active()
        if chat_id != self.session.chat.id and chat_id in self._panes:
            for widget in self._panes.pop(chat_id):
                await widget.remove()

    # Keys

    async def action_stop(self) -> None:
        """Escape undoes the nearest thing: the command list, an edit, the stream, the look at the messages."""
        listed = self.command_list
        if listed.open:
            listed.close()
            self.composer.completing = False
        elif self.session.editing is not None:
            self.session.editing = None
            self.composer.replace_text(self.session.take_aside())
            self.chrome.sync_composer()
        elif self.session.streaming:
            self.run(self.session.stop())
        self.composer.focus()

    def action_regenerate(self) -> None:
        self.run(self.session.regenerate())
        self.transcript.follow()
        self.app.wake()

    def action_sidebar(self) -> None:
        self.chrome.toggle_sidebar()

    def action_editor(self) -> None:
        try:
            text = edit_text(self.app, self.composer.text)
        except MlxbatchError as error:
            self.complain(error)
            return
        self.composer.replace_text(text)
        self.refresh(layout=True)

    async def action_scroll_page(self, direction: int) -> None:
        transcript = self.transcript
        if direction < 0 and transcript.scroll_offset.y == 0 and await transcript.show_more():
            return
        step = max(1, transcript.size.height - 2) * direction
        transcript.scroll_relative(y=step, animate=False)

    def action_follow(self) -> None:
        self.transcript.follow()

    def action_tabs(self) -> None:
        self.dialogs.tabs()

    def action_find_prompt(self) -> None:
        self.dialogs.find_prompt()

    def action_history(self) -> None:
        self.dialogs.history()

    def action_settings(self) -> None:
        self.dialogs.settings()

    def action_model(self) -> None:
        self.dialogs.model()

    def switch_model(self, name: str) -> None:
        try:
            engine = self.workspace.engine_for(name)
            self.session.set_link(engine.link)
        except MlxbatchError as error:
            self.complain(error)
            return
        self.workspace.model = name
        for unused in self.workspace.drop_unused_engines():
            self.run(self.app.leave_engine(unused))
        self.app.ensure_engine(engine)
        self.flash(f"answers come from {short_model(name)} now")
