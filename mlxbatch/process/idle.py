"""When an engine that nobody uses ends."""

from __future__ import annotations


class IdleTimer:
    """Counts the seconds without client and request. `limit` None: never ends. Times are of any one clock."""

    def __init__(self, limit: float | None, now: float) -> None:
        self._limit = limit
        self._since: float | None = now

    def update(self, in_use: bool, now: float) -> None:
        if in_use:
            self._since = None
        elif self._since is None:
            self._since = now

    def idle_seconds(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def expired(self, now: float) -> bool:
        return self._limit is not None and self._since is not None and now - self._since >= self._limit
