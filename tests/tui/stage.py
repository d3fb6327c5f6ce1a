"""The application on a scripted engine, for a test to drive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from scripted_engine import START, ScriptedEngine
from textual.app import App
from textual.pilot import Pilot

from mlxbatch.history.store import HistoryStore
from mlxbatch.tui.app import ChatApp
from mlxbatch.tui.chat.workspace import Workspace
from mlxbatch.tui.engine_link import EngineHost, EngineLink
from mlxbatch.tui.keymap import Keymap

WIDE, NARROW = (120, 36), (80, 24)


def screen_text(app: App[None]) -> str:
    """What the terminal shows, dialogs included."""
    lines = [""] * app.size.height
    for screen in (*app._background_screens, app.screen):
        for y, strip in enumerate(screen._compositor.render_strips()):
            lines[y] = strip.text
    return "\n".join(lines)


@dataclass
class Stage:
    app: ChatApp
    engine: ScriptedEngine
    pilot: Pilot[None]

    @property
    def workspace(self) -> Workspace:
        return self.app.workspace

    async def settle(self) -> None:
        """Until all that was set in motion has reached the screen: some turns, and then until nothing moves. On a
        busy machine a layout may come a turn later than what asked for it."""
        shown = ""
        for turn in range(30):
            await self.pilot.pause()
            before, shown = shown, self.text()
            if turn >= 4 and shown == before:
                return
            self.workspace.autosave()  # at a known moment, whenever the timer would do it
            await self.app.tick()

    async def play(self, steps: int) -> None:
        """Let the engine run, and the interface keep up with it."""
        for _ in range(steps):
            self.engine.step()
            await asyncio.sleep(0)
        self.engine.show()
        await self.settle()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.settle()

    async def type(self, text: str) -> None:
        """Into the composer, as a paste would."""
        self.app.chat_screen.composer.insert(text)
        await self.settle()

    async def say(self, text: str) -> None:
        await self.type(text)
        await self.press("enter")

    def text(self) -> str:
        return screen_text(self.app)

    def line(self, number: int) -> str:
        return self.text().splitlines()[number]


@asynccontextmanager
async def on_stage(
    folder: Path,
    engine: ScriptedEngine | None = None,
    *,
    size: tuple[int, int] = WIDE,
    prepare: Callable[[HistoryStore], None] = lambda store: None,
    sampling: dict[str, object] | None = None,
    system_prompt: str = "",
    keymap: Keymap | None = None,
    host: EngineHost | None = None,
    theme: str = "mlxbatch-dark",
    links: Callable[[str], EngineLink] | None = None,
):
    """Run the application headless; `prepare` fills the history before it opens."""
    engine = engine or ScriptedEngine()

    def wall() -> float:
        return START + engine.clock

    path = folder / "history.sqlite3"
    with HistoryStore(path, clock=wall) as store:
        prepare(store)
    workspace = Workspace(
        HistoryStore(path, clock=wall),
        links or (lambda model: engine),
        engine.model,
        clock=lambda: engine.clock,
        sampling=sampling,
        system_prompt=system_prompt,
    )
    workspace.restore()
    app = ChatApp(workspace, keymap=keymap, host=host, wall_clock=wall, theme=theme)
    async with app.run_test(size=size) as pilot:
        stage = Stage(app, engine, pilot)
        engine.show()
        await stage.settle()
        yield stage


def run(test: Awaitable[None]) -> None:
    """For tests, which are plain functions."""
    asyncio.run(test)  # type: ignore[arg-type]
