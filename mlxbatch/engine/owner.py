"""The one thread on which an engine lives. What MLX computes on one thread, another cannot go on with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class OwnerThread:
    """Runs functions one after another. Any thread may call its methods, the owner itself too."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlxbatch-llm")
        self._ident = self.run(threading.get_ident)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function` returns or raises. Ctrl-C ends the waiting, not the function."""
        return self._pool.submit(function, *args).result()

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` when its turn comes, unless the program ends before. Never waits: garbage collection may
        be what calls this, on the owner itself in the middle of a step."""
        with suppress(RuntimeError):
            self._pool.submit(function, *args)

    def end_with(self, function: Callable[[], None]) -> None:
        """Run `function` last; on this thread when the program is ending and the owner is gone."""
        try:
            last = self._pool.submit(function)
        except RuntimeError:
            function()
            return
        self._pool.shutdown(wait=False)
        if threading.get_ident() != self._ident:
            last.result()
