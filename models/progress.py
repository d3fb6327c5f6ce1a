"""How long work reports itself: one callable, so that every front end can draw it in its own way."""

from __future__ import annotations

from collections.abc import Callable

# progress(what, done, total): `done` and `total` count the same unit (bytes or tensors); total 0 is unknown.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
