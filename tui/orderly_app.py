"""What both applications share: themes, keymap, and an orderly end when something goes wrong inside."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import traceback
from datetime import datetime

import platformdirs
from textual.app import App

from mlxbatch.errors import UsageError
from mlxbatch.tui.keymap import Keymap
from mlxbatch.tui.themes import DARK, LIGHT

INTERNAL_ERROR = 3


class OrderlyApp(App[None]):
    """Base of the applications. An internal error ends them with one line and a file, not with a traceback on
    the screen; headless, in tests, errors are raised as they are."""

    ENABLE_COMMAND_PALETTE = False  # /commands have a list of their own

    def __init__(self, keymap: Keymap, theme: str) -> None:
        """Raises UsageError for a theme that does not exist."""
        super().__init__()
        self._failed = False
        self.keymap = keymap
        self.set_keymap(keymap.overrides)
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        if theme not in self.available_themes:
            raise UsageError(f"there is no theme {theme!r}; there are: {', '.join(sorted(self.available_themes))}")
        self.theme = theme

    def copy_to_clipboard(self, text: str) -> None:
        """OSC 52 also reaches the clipboard of the machine that one has logged in from. macOS's Terminal ignores
        it, hence pbcopy, unless this is a remote session, where it would fill the wrong clipboard."""
        super().copy_to_clipboard(text)
        pbcopy = shutil.which("pbcopy") if sys.platform == "darwin" else None
        if pbcopy and not os.environ.get("SSH_CONNECTION"):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run([pbcopy], input=text.encode(), timeout=2, check=False)

    def _handle_exception(self, error: Exception) -> None:
        # Textual's own name for the hook; it has no public one.
        if self.is_headless:
            super()._handle_exception(error)
            return
        if self._failed:  # what breaks on the way out is a consequence
            return
        self._failed = True
        folder = platformdirs.user_log_path("mlxbatch", appauthor=False)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        path = folder / f"{self.TITLE.replace(' ', '-') if self.TITLE else 'mlxbatch'}-crash-{stamp}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            where = f"the details are in {path}"
        except OSError as failure:
            where = f"the details could not be written: {failure.strerror}"
        self.exit(
            return_code=INTERNAL_ERROR,
            message=f"mlxbatch: internal error: {type(error).__name__}: {error}; {where}. Chats are saved up to now.",
        )
