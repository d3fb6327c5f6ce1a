"""How long work reports itself: one callable, so that every front end can draw it in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

# progress(what, done, total): `done` and `total` count the same unit (bytes or tensors); total 0 is unknown.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""


def once(tell: Callable[[str], None]) -> Progress:
    """Tell of each piece of work when it begins, for those who keep every line."""
    last = ""

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        if what != last:
            last = what
            tell(what)

    return report


@contextmanager
def showing(stream: TextIO) -> Iterator[Progress]:
    """Draw a bar for each piece of work on a terminal; elsewhere write one line when it starts."""
    if not stream.isatty():
        started: set[str] = set()

        def write_line(what: str, done: int, total: int) -> None:
            if what not in started:
                started.add(what)
                print(what, file=stream, flush=True)

        yield write_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
    with Bars(*columns, TimeRemainingColumn(), console=Console(file=stream)) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=None)
            bars.update(tasks[what], completed=done, total=total or None)

        yield draw
