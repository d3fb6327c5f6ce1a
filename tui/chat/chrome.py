"""Everything around the transcript: tabs, side bar, status line, key hints, the composer's edges."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from mlxbatch.tui.canvas import LineView
from mlxbatch.tui.chat.message_header import short_model
from mlxbatch.tui.chat.sidebar import Sidebar
from mlxbatch.tui.chat.status_line import status_line
from mlxbatch.tui.chat.tab_bar import COMPACT_BELOW, TabBar, TabLabel, batch_gauge, run_labels
from mlxbatch.tui.drawing import Line, Piece
from mlxbatch.tui.engine.view_state import ViewState
from mlxbatch.tui.key_hints import Hint, KeyHints
from mlxbatch.tui.keymap import Keymap
from mlxbatch.tui.numbers import short, size

if TYPE_CHECKING:
    from mlxbatch.tui.chat.screen import ChatScreen

FLASH_SECONDS = 3.0
_HINTS: tuple[Hint, ...] = (
    ("stop", "stop"),
    ("regenerate", "regenerate"),
    ("↑", "messages"),
    ("new", "new"),
    ("tabs", "tabs"),
    ("history", "history"),
    ("sidebar", "sidebar"),
    ("engine", "engine"),
    ("palette", "commands"),
    ("help", "help"),
)
_COMPACT_HINTS: tuple[Hint, ...] = (
    ("stop", "stop"),
    ("regenerate", "again"),
    ("↑", "msgs"),
    ("new", "new"),
    ("tabs", "tabs"),
    ("engine", "engine"),
    ("palette", "palette"),
    ("help", "help"),
)


class Chrome:
    """Owns these widgets and brings them up to date with the workspace."""

    def __init__(self, screen: ChatScreen, keymap: Keymap) -> None:
        self._screen = screen
        self._keymap = keymap
        self.tab_bar = TabBar()
        self.sidebar = Sidebar()
        self.jump_hint = LineView(id="jump-hint")
        self.status = LineView(id="status-line")
        self.hints = KeyHints(_HINTS, keymap)
        self._sidebar_wanted = True
        self._flash = ""
        self._flash_until = 0.0

    @property
    def compact(self) -> bool:
        return self._screen.size.width < COMPACT_BELOW

    @property
    def flashing(self) -> bool:
        return bool(self._flash)

    def flash(self, text: str) -> None:
        """A passing remark in the status line."""
        self._flash, self._flash_until = text, time.monotonic() + FLASH_SECONDS
        self.sync()

    def toggle_sidebar(self) -> None:
        self._sidebar_wanted = not self._sidebar_wanted
        if self.compact:
            self.flash(f"the side bar needs {COMPACT_BELOW} columns")
        self.sync()

    def sync(self) -> None:
        workspace = self._screen.workspace
        engine, session = workspace.active_engine, workspace.active
        runs = run_labels(engine.snapshot, compact=self.compact)
        self.tab_bar.show(self.tab_labels(), workspace.index, self._bar_right(), runs)
        self.sidebar.display = self._sidebar_wanted and not self.compact
        if self.sidebar.display:
            view = ViewState(own=workspace.own_requests(engine))
            self.sidebar.show(engine.snapshot, view, engine.status.text, self._keymap.label("engine"))
        if self._flash and time.monotonic() > self._flash_until:
            self._flash = ""
        saved = session.store.saved_at
        line = status_line(
            session,
            engine.snapshot,
            engine.status,
            self._screen.size.width,
            flash=self._flash,
            saved=datetime.fromtimestamp(saved).strftime("%H:%M:%S") if saved else "",
            compact=self.compact,
        )
        self.status.show(line)
        self.hints.show(_COMPACT_HINTS if self.compact else _HINTS)
        self.sync_jump_hint()
        self.sync_composer()

    def sync_jump_hint(self) -> None:
        """Says that the newest lines are below, while the user has scrolled up."""
        line = Line()
        if not self._screen.transcript.following:
            text = f"↓ more below · {self._keymap.label('scroll_down')}"
            line.add(" " * max(0, (self._screen.size.width - len(text)) // 2)).add(text, "accent")
        self.jump_hint.show(line)

    def sync_composer(self) -> None:
        """Its upper edge says what is being written, its lower edge with which keys."""
        session, composer = self._screen.session, self._screen.composer
        title = "edit message · Esc cancels" if session.editing is not None else "message"
        for attachment in session.attachments:
            title += f" + {attachment.name} ({size(len(attachment.text.encode()))})"
        hint = self.composer_hint()
        if (composer.border_title, composer.border_subtitle) != (title, hint):
            composer.border_title, composer.border_subtitle = title, hint

    def composer_hint(self) -> str:
        keymap = self._keymap
        hint = f"{keymap.label('send')} send · {keymap.label('newline')} newline · / commands"
        return hint if self.compact else f"{hint} · {keymap.label('editor')} editor"

    def tab_labels(self) -> Sequence[TabLabel]:
        workspace = self._screen.workspace
        return [
            TabLabel(session.title, session.state(workspace.engines[session.link.model].snapshot))
            for session in workspace.sessions
        ]

    def _bar_right(self) -> list[Piece]:
        engine = self._screen.workspace.active_engine
        if self.compact:
            return batch_gauge(engine.snapshot) if engine.snapshot is not None else []
        name = engine.snapshot.model.name if engine.snapshot is not None else engine.link.model
        context = f" · ctx {short(engine.link.max_model_len)}" if engine.link.max_model_len else ""
        return [(short_model(name), "text"), (f"{context} ", "dim")]
