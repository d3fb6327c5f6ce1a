"""Copy to the clipboard, over OSC 52 and, on a Mac's own screen, through pbcopy."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys

from textual.app import App


def copy_text(app: App[None], text: str) -> None:
    """OSC 52 also reaches the clipboard of the machine that one has logged in from; macOS's Terminal
    ignores it, hence pbcopy, unless this is a remote session, where it would fill the wrong clipboard."""
    app.copy_to_clipboard(text)
    pbcopy = shutil.which("pbcopy") if sys.platform == "darwin" else None
    if pbcopy and not os.environ.get("SSH_CONNECTION"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([pbcopy], input=text.encode(), timeout=2, check=False)
