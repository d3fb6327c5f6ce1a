"""How a run shows itself on standard error while it works: a bar, a plain line now and then, or nothing."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from mlxbatch.batch.totals import RunTotals
from mlxbatch.units import format_bytes, format_seconds

ProgressStyle = Literal["auto", "bar", "plain", "none"]

RATE_WINDOW = 5.0  # seconds over which tok/s is taken
BAR_SECONDS = 0.25
PLAIN_SECONDS = (10.0, 60.0)  # between plain lines: in the first minute, and after it


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the engine holds now. None where an engine does not say."""

    rows: int | None = None
    max_rows: int | None = None
    kv_share: float | None = None  # blocks in use, of those that the budget allows

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Gauges:
        used, total = stats.get("kv_blocks_used"), stats.get("kv_blocks_total")
        return cls(stats.get("rows"), stats.get("max_num_seqs"), used / total if used is not None and total else None)


@dataclass(slots=True)
class TokenRate:
    """Output tokens per second over the last RATE_WINDOW seconds."""

    clock: Callable[[], float] = time.monotonic
    _marks: deque[tuple[float, int]] = field(default_factory=deque)

    def update(self, tokens: int) -> float:
        now = self.clock()
        self._marks.append((now, tokens))
        while len(self._marks) > 2 and self._marks[1][0] <= now - RATE_WINDOW:
            self._marks.popleft()
        then, before = self._marks[0]
        return (tokens - before) / (now - then) if now > then else 0.0


class Reporter(Protocol):
    """Told what happens; decides itself what is worth showing, and when."""

    def note(self, text: str) -> None:
        """A sentence that stays."""
        ...

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        """Work before the first request: reading the input, loading the model. `total` 0 is unknown."""
        ...

    def step(self, totals: RunTotals, stats: Callable[[], Mapping[str, Any]]) -> None:
        """After every step. `stats` is called only when something is drawn."""
        ...

    def close(self) -> None: ...


class SilentReporter:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def note(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        pass

    def step(self, totals: RunTotals, stats: Callable[[], Mapping[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class PlainReporter(SilentReporter):
    """One line now and then, for logs."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._rate = TokenRate(clock)
        self._started: float | None = None
        self._shown = 0.0
        self._phase = ""

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        if what != self._phase:
            self._phase = what
            self.note(what)

    def step(self, totals: RunTotals, stats: Callable[[], Mapping[str, Any]]) -> None:
        now = self._clock()
        if self._started is None:
            self._started = self._shown = now
        rate = self._rate.update(totals.output_tokens)
        elapsed = now - self._started
        if now - self._shown >= PLAIN_SECONDS[elapsed > 60.0]:
            self._shown = now
            words = [f"{totals.done} of {totals.requests} done", *_words(totals, rate, elapsed, Gauges.of(stats()))]
            self.note(", ".join(words))


class BarReporter(SilentReporter):
    """A live bar for terminals."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._rate = TokenRate(clock)
        self._started: float | None = None
        self._shown = float("-inf")
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[detail]}", markup=False),
            console=console,
            transient=True,
            expand=True,
        )
        self._task: TaskID | None = None

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        detail = f"{format_bytes(done)} of {format_bytes(total)}" if total > 10**6 else ""
        self._draw(what, done, total or None, detail)

    def step(self, totals: RunTotals, stats: Callable[[], Mapping[str, Any]]) -> None:
        now = self._clock()
        if self._started is None:
            self._started = now
        if now - self._shown < BAR_SECONDS and totals.remaining:
            return
        self._shown = now
        rate = self._rate.update(totals.output_tokens)
        words = _words(totals, rate, now - self._started, Gauges.of(stats()))
        self._draw(f"{totals.done}/{totals.requests}", totals.done, totals.requests, "  ".join(words))

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()

    def _draw(self, description: str, done: int, total: int | None, detail: str) -> None:
        if self._task is None:
            self._task = self._progress.add_task(description, total=total, completed=done, detail=detail)
            self._progress.start()
        self._progress.update(self._task, description=description, total=total, completed=done, detail=detail)


def new_reporter(style: ProgressStyle, *, quiet: bool = False, stream: TextIO | None = None) -> Reporter:
    """`auto` is a bar on a terminal and plain lines elsewhere. A quiet reporter shows nothing at all."""
    console = Console(file=stream or sys.stderr)
    if quiet:
        return SilentReporter()
    if style == "none":
        return SilentReporter(console)
    if style == "auto":
        style = "bar" if console.is_terminal and os.environ.get("TERM") != "dumb" else "plain"
    return BarReporter(console) if style == "bar" else PlainReporter(console)


def _words(totals: RunTotals, rate: float, elapsed: float, gauges: Gauges) -> list[str]:
    words = [f"{rate:.0f} tok/s"]
    if totals.failed:
        words.append(f"{totals.failed} failed")
    if totals.done and totals.remaining:
        # A running request is half done on average; without these the first guesses are far too long.
        done = min(totals.done + (gauges.rows or 0) / 2, totals.requests)
        words.append(f"{format_seconds(elapsed / done * (totals.requests - done))} left")
    if gauges.rows is not None:
        words.append(f"rows {gauges.rows}" + (f"/{gauges.max_rows}" if gauges.max_rows else ""))
    if gauges.kv_share is not None:
        words.append(f"KV {gauges.kv_share:.0%}")
    return words
