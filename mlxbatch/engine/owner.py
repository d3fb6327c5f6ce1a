"""The one thread on which an engine lives. What MLX computes on one thread, another cannot go on with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class OwnerThread:
    """Runs functions one after another. Any thread may call its methods; the owner itself may post and end.

    A daemon that never ends: what MLX compiled on a thread goes with that thread, needs the GIL for it, and aborts
    the program if the interpreter ends meanwhile. After its last call it waits until the program ends.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.RLock()  # garbage collection may post while it is held
        self._ended = False
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name="mlxbatch-llm", daemon=True)
        self._thread.start()

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function` returns or raises. Ctrl-C ends the waiting, not the function.

        Raises RuntimeError once `end_with` was called.
        """
        return self._submit(function, *args).result()

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` when its turn comes, if it still does. Never waits: garbage collection may be what calls
        this, on the owner itself in the middle of a step."""
        with suppress(RuntimeError):
            self._submit(function, *args)

    def end_with(self, function: Callable[[], None]) -> None:
        """Run `function` last. Waits for it, but for a call on the owner itself."""
        last = self._submit(function, end=True)
        if threading.current_thread() is not self._thread:
            last.result()

    def _submit(self, function: Callable[..., T], *args: Any, end: bool = False) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                raise RuntimeError("the owner has ended")
            self._ended = end
            self._calls.put((future, lambda: function(*args)))
        return future


def _serve(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while True:
        future, function = calls.get()
        try:
            future.set_result(function())
        except BaseException as error:  # it is the caller's
            future.set_exception(error)
        del future, function  # nothing of a call outlives it while the next is waited for
