"""Which terminal owns a tab, so that a second one neither steals live tabs nor loses those of a dead one."""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path


class Window:
    """One running interface, alive as long as it holds the lock on its file.

    The kernel drops the lock when the process ends in any way, so a reused process id cannot mislead.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.id = uuid.uuid4().hex[:12]
        self._path = folder / f"{self.id}.lock"
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def is_alive(self, window_id: str) -> bool:
        """Whether an interface still runs under that id. Removes the file of a dead one."""
        if window_id == self.id:
            return True
        path = self._folder / f"{window_id}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        else:
            path.unlink(missing_ok=True)
            return False
        finally:
            os.close(descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
