"""Keep a Mac awake while requests exist, and the engine's thread at the user's priority."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

log = logging.getLogger(__name__)

QOS_CLASS_USER_INITIATED = 0x19  # sys/qos.h


class Running(Protocol):
    def terminate(self) -> None: ...
    def wait(self) -> int: ...


def _spawn(command: Sequence[str]) -> Running:
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null)


class Awake:
    """Holds one `caffeinate -i` while busy. It ends with this process too (-w), should that be killed.

    Idle sleep is prevented, not the sleep of a closed lid, and the display may go dark.
    """

    def __init__(
        self,
        *,
        allow_sleep: bool = False,
        platform: str = sys.platform,
        spawn: Callable[[Sequence[str]], Running] = _spawn,
    ) -> None:
        self._enabled = platform == "darwin" and not allow_sleep
        self._spawn = spawn
        self._process: Running | None = None

    @property
    def held(self) -> bool:
        return self._process is not None

    def set_busy(self, busy: bool) -> None:
        if busy and self._enabled and self._process is None:
            try:
                self._process = self._spawn(["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())])
            except OSError as error:
                log.warning("the Mac may fall asleep during requests: caffeinate did not start (%s)", error)
                self._enabled = False
        elif not busy and self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def raise_thread_priority() -> None:
    """Give the calling thread the class of work that a user waits for. A detached process may be taken for
    background work otherwise, and run on efficiency cores. Without effect elsewhere than on macOS."""
    if sys.platform == "darwin":
        ctypes.CDLL(None).pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0)
