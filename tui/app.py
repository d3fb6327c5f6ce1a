"""The chat application."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import ClassVar

from textual.app import ScreenStackError
from textual.screen import Screen

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import MlxbatchError
from mlxbatch.history.records import Attachment
from mlxbatch.settings import config_path
from mlxbatch.tui.chat.screen import ChatScreen
from mlxbatch.tui.chat.workspace import EngineView, Workspace
from mlxbatch.tui.confirm import Confirm
from mlxbatch.tui.engine.screen import EngineScreen
from mlxbatch.tui.engine_link import EngineHost, LinkStatus, NoHost
from mlxbatch.tui.help_screen import HelpScreen
from mlxbatch.tui.keymap import Keymap
from mlxbatch.tui.orderly_app import OrderlyApp
from mlxbatch.tui.themes import DARK

TICK_SECONDS = 0.1  # how often streamed text reaches the screen
AUTOSAVE_SECONDS = 1.0


class ChatApp(OrderlyApp):
    """Carries events from the engines to the workspace, and the workspace to the screen ten times a second.

    `attachments` go with the first message of the tab on show.
    """

    CSS_PATH = "app.tcss"
    TITLE = "mlxbatch"
    BINDINGS: ClassVar = []

    def __init__(
        self,
        workspace: Workspace,
        *,
        keymap: Keymap | None = None,
        theme: str = DARK.name,
        host: EngineHost | None = None,
        attachments: Iterable[Attachment] = (),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(keymap or Keymap(), theme)
        self.workspace = workspace
        self.host = host or NoHost()
        self.wall_clock = wall_clock
        self._attachments = tuple(attachments)
        self._dirty = True
        self._starting: set[str] = set()
        self._reading: set[str] = set()
        self.chat_screen = ChatScreen(workspace, self.keymap)

    def get_default_screen(self) -> Screen[None]:
        return self.chat_screen

    def on_mount(self) -> None:
        for attachment in self._attachments:
            self.workspace.active.attach(attachment)
        self.set_interval(TICK_SECONDS, self.tick)
        self.set_interval(AUTOSAVE_SECONDS, self.workspace.autosave)

    # Engines

    def ensure_engine(self, engine: EngineView) -> None:
        """Start an engine that is not started, or that was lost; its events are read from then on."""
        model = engine.link.model
        if model not in self._reading:
            self._reading.add(model)
            self.run_worker(self._read(engine), group=f"events {model}")
        if model not in self._starting and engine.status.state in ("starting", "lost"):
            self._starting.add(model)
            self.run_worker(self._start(engine), group=f"start {model}")

    async def _start(self, engine: EngineView) -> None:
        error: MlxbatchError | None = None
        try:
            await engine.link.start()
        except MlxbatchError as failure:
            error = failure
            engine.status = LinkStatus("lost", str(error).partition("\n")[0])
        finally:
            self._starting.discard(engine.link.model)
            self.wake()
        if error is not None and not self._offer_room(engine, error):
            self.notify(str(error), severity="error", timeout=15, markup=False)

    def _offer_room(self, engine: EngineView, error: MlxbatchError) -> bool:
        """When an idle engine holds the memory that is missing (the error names it), offer to stop it."""
        holders = {model: held for model, held in self.host.idle_models().items() if f"{model} holds" in str(error)}
        if not holders:
            return False
        model, held = next(iter(holders.items()))

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._make_room(engine, model))

        question = f"{str(error).partition('Other engines')[0].strip()}\n\nThe engine of {model} is idle and holds "
        self.push_screen(Confirm(f"{question}{held}.\nStop it and try again?"), answered)
        return True

    async def _make_room(self, engine: EngineView, model: str) -> None:
        try:
            await asyncio.to_thread(self.host.stop, model)
        except MlxbatchError as error:
            self.notify(str(error), severity="error", timeout=15, markup=False)
        else:
            engine.status = LinkStatus("starting", f"the engine of {model} was stopped; loading")
            self.ensure_engine(engine)

    async def leave_engine(self, engine: EngineView) -> None:
        """No tab uses this engine any more: disconnect, so that it can become idle."""
        self._reading.discard(engine.link.model)
        await engine.link.close()

    async def _read(self, engine: EngineView) -> None:
        async for event in engine.link.events():
            self.workspace.dispatch(engine, event)
            self.wake()
            if isinstance(event, Snapshot) and engine is self.workspace.active_engine:
                self._show_engine()

    def _show_engine(self) -> None:
        with contextlib.suppress(ScreenStackError):
            if isinstance(self.screen, EngineScreen):
                self.screen.sync()

    # Keeping the screen up to date

    def wake(self) -> None:
        """Something changed that the next tick must show."""
        self._dirty = True

    async def tick(self) -> None:
        """Bring the screen on show up to date, if anything may have changed."""
        try:
            screen = self.screen
        except ScreenStackError:  # the application is ending
            return
        if not (
            self._dirty
            or self.workspace.streaming
            or self.chat_screen.chrome.flashing
            or self._engine_may_be_silent()
        ):
            return
        self._dirty = False
        if isinstance(screen, EngineScreen):
            screen.sync()
        else:
            await self.chat_screen.sync()

    def _engine_may_be_silent(self) -> bool:
        """The engine screen says so when no snapshot comes: the one thing that changes without an event."""
        engine = self.workspace.active_engine
        age = self.workspace.clock() - engine.arrived
        return isinstance(self.screen, EngineScreen) and engine.snapshot is not None and age > 1.5

    # Screens

    def action_engine(self) -> None:
        if isinstance(self.screen, EngineScreen):
            return
        self.push_screen(
            EngineScreen(
                lambda: self.workspace.active_engine,
                self.keymap,
                self.workspace.clock,
                own=lambda: self.workspace.own_requests(self.workspace.active_engine),
                tabs=self.chat_screen.chrome.tab_labels,
                open_chat=self._open_chat,
            )
        )

    def action_chat(self) -> None:
        if isinstance(self.screen, EngineScreen):
            self.pop_screen()
            self.wake()

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            files = [("config.toml", str(config_path())), ("history", str(self.workspace.store.path))]
            self.push_screen(HelpScreen(self.keymap, files))

    def _open_chat(self, request_key: str) -> None:
        for index, session in enumerate(self.workspace.sessions):
            if session.answer and session.link.request_key(session.answer.request_id) == request_key:
                self.action_chat()
                self.chat_screen.run(self.chat_screen.select_tab(index))
                return

    def action_commands(self) -> None:
        """The palette belongs to the chat; from the engine screen one comes back to it."""
        self.action_chat()
        if self.screen is self.chat_screen:
            self.chat_screen.dialogs.commands()

    async def on_unmount(self) -> None:
        for engine in self.workspace.engines.values():
            with contextlib.suppress(MlxbatchError):
                await engine.link.close()
        self.workspace.close()
