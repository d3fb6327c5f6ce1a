"""Text files that go into a prompt."""

from __future__ import annotations

import shlex
from pathlib import Path

from mlxbatch.errors import UsageError
from mlxbatch.history.records import Attachment

MOST_BYTES = 4_000_000  # far beyond any context; keeps a wrong file name from filling the history


def read_attachment(name: str) -> Attachment:
    """Read a text file whole. Raises UsageError when it is missing, too large, or not text."""
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            raise UsageError(f"{name} is a folder; name the files, as in /file {name.rstrip('/')}/notes.txt")
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{name} has {path.stat().st_size:,} bytes; at most {MOST_BYTES:,} fit a prompt")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not a UTF-8 text file") from None
    if "\0" in text:
        raise UsageError(f"{name} is not a text file")
    return Attachment(path.name, text)


def split_names(arguments: str) -> list[str]:
    """File names as a shell splits them, so that one with spaces can be quoted or dropped in by the mouse."""
    try:
        return shlex.split(arguments)
    except ValueError:
        return [arguments]
