"""Write a message in the user's own editor."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from textual.app import App, SuspendNotSupported

from mlxbatch.errors import UsageError


def edit_text(app: App[None], text: str) -> str:
    """The text as $VISUAL, $EDITOR or vi left it. Raises UsageError when the editor cannot run or fails;
    what was written by then stays in the file that the message names."""
    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    if not command or shutil.which(command[0]) is None:
        raise UsageError(f"cannot find the editor {' '.join(command)!r}; set EDITOR to one that is installed")
    descriptor, name = tempfile.mkstemp(prefix="mlxbatch-", suffix=".md")
    path = Path(name)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    try:
        with app.suspend():
            code = subprocess.run([*command, name], check=False).returncode
    except SuspendNotSupported:
        path.unlink()
        raise UsageError("this terminal cannot be handed to an editor") from None
    if code != 0:
        raise UsageError(f"{command[0]} ended with code {code}; your text is in {name}")
    edited = path.read_text(encoding="utf-8")
    path.unlink()
    return edited.removesuffix("\n")
