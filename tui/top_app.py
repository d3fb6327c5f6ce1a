"""The engine screen as a program of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import ClassVar

from textual.app import ScreenStackError

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import MlxbatchError
from mlxbatch.tui.chat.workspace import EngineView
from mlxbatch.tui.engine.screen import EngineScreen
from mlxbatch.tui.engine_link import EngineLink, LinkStatus
from mlxbatch.tui.help_screen import HelpScreen
from mlxbatch.tui.keymap import Keymap
from mlxbatch.tui.orderly_app import OrderlyApp
from mlxbatch.tui.themes import DARK

TICK_SECONDS = 0.5  # redraws between snapshots, so that a silent engine is seen to be silent


class TopApp(OrderlyApp):
    """Attaches to a running engine and shows it; starts none."""

    CSS_PATH = "app.tcss"
    TITLE = "mlxbatch top"
    BINDINGS: ClassVar = []

    def __init__(
        self,
        link: EngineLink,
        *,
        keymap: Keymap | None = None,
        theme: str = DARK.name,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(keymap or Keymap(), theme)
        self.engine = EngineView(link)
        self._clock = clock

    def get_default_screen(self) -> EngineScreen:
        return EngineScreen(lambda: self.engine, self.keymap, self._clock)

    def on_mount(self) -> None:
        self.run_worker(self._read())
        self.run_worker(self._start())
        self.set_interval(TICK_SECONDS, self.sync)

    async def _start(self) -> None:
        try:
            await self.engine.link.start()
        except MlxbatchError as error:
            self.exit(return_code=error.exit_code, message=f"mlxbatch: {error}")

    async def _read(self) -> None:
        async for event in self.engine.link.events():
            if isinstance(event, Snapshot):
                self.engine.snapshot, self.engine.arrived = event, self._clock()
            elif isinstance(event, LinkStatus):
                self.engine.status = event
                if event.state in ("lost", "restarting"):
                    self.engine.snapshot = None
            self.sync()

    def sync(self) -> None:
        with contextlib.suppress(ScreenStackError):  # the application is ending
            if isinstance(self.screen, EngineScreen):
                self.screen.sync()

    def action_chat(self) -> None:
        """There is no chat behind this screen: leaving it leaves the program."""
        self.exit()

    def action_commands(self) -> None:
        """The keys are all the commands there are."""
        self.action_help()

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.keymap))

    async def on_unmount(self) -> None:
        await self.engine.link.close()
