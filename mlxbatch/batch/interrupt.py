"""Ctrl-C, in three steps: finish what runs, stop now, give up."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

DRAIN, STOP = 1, 2


class Interrupt:
    """Counts interrupts while it is entered. Ctrl-C asks to drain, then to stop, then raises
    KeyboardInterrupt; SIGTERM asks to stop at once. A run can be resumed after each of these."""

    def __init__(self) -> None:
        self.level = 0
        self._previous: dict[int, Any] = {}

    @property
    def draining(self) -> bool:
        return self.level >= DRAIN

    @property
    def stopping(self) -> bool:
        return self.level >= STOP

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.level = STOP if number == signal.SIGTERM else self.level + 1
