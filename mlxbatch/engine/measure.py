"""Measures step times of an engine by the number of rows, the context and the chunk: what `mlxbatch tune` stores.

Real requests run through the real loop, so host work, sampling and flushes are part of every time. Rows leave one
after another: 64 rows are prefilled and counted down, and the cached tokens that this adds are corrected by the
attention cost that the longer contexts show. At the end, if time is left, they are counted down once more: what a
slow minute of the machine spoiled the first time is measured in another one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mlxbatch.capacity.measured_curve import DecodePoint, PrefillPoint
from mlxbatch.engine.core import EngineCore
from mlxbatch.engine.snapshot import StepMark
from mlxbatch.request import Request, SamplingParams

FINE_ROWS = (*range(1, 21), 24, 28, 32, 33, 36, 40, 48, 56, 64)
COARSE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FAST_STEP = 0.12  # seconds of a step at the most rows, up to which the fine grid is affordable
SHORT_PROMPT = 24
LONG_SHARE = 0.15  # of the time budget, for the prompts of the long contexts
STEPS, FEWEST_STEPS = 12, 3  # timed for each point; fewer when steps are slow
POINT_SECONDS = 1.5  # time for one point, beyond FEWEST_STEPS
WARM_UP_STEPS = 2  # after a change of rows: shapes compile, run-ahead settles
COUNT_DOWN_SHARE = 0.6  # of the time budget, for all numbers of rows at the short context


@dataclass(slots=True)
class Measurement:
    """All points so far, of short contexts that differ a little and of long ones."""

    short: list[DecodePoint] = field(default_factory=list)
    long: list[DecodePoint] = field(default_factory=list)
    prefill: list[PrefillPoint] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)  # of each point: median of its times over the fastest

    @property
    def spread(self) -> float:
        """How uneven equal steps were, at the median of all points: about 1 on an idle machine."""
        return statistics.median(self.spreads) if self.spreads else 1.0

    def points(self) -> tuple[tuple[DecodePoint, ...], tuple[PrefillPoint, ...]]:
        """Points with every number of rows brought to the shortest context, as a MeasuredCurve wants them.

        The cost of a cached token is the least-squares slope between short and long points of equal rows. Of two
        points of equal rows the faster one counts: the slower one was disturbed.
        """
        best: dict[int, DecodePoint] = {}
        for point in self.short:
            if point.rows not in best or point.seconds < best[point.rows].seconds:
                best[point.rows] = point
        base = min((p.context for p in best.values()), default=0)
        pairs = [
            (p.rows * (p.context - best[p.rows].context), p.seconds - best[p.rows].seconds)
            for p in self.long
            if p.rows in best
        ]
        square = sum(x * x for x, _ in pairs)
        slope = max(0.0, sum(x * y for x, y in pairs) / square) if square else 0.0

        def at_base(point: DecodePoint) -> DecodePoint:
            corrected = point.seconds - slope * point.rows * (point.context - base)
            return DecodePoint(point.rows, base, max(0.5 * point.seconds, corrected))

        return (*(at_base(p) for _, p in sorted(best.items())), *self.long), tuple(self.prefill)


class Measurer:
    """Runs requests on `core`, which must be idle and have slots for `most_rows`. Stops starting new points when
    `seconds` are over; the counting down of rows comes first."""

    def __init__(
        self,
        core: EngineCore,
        *,
        most_rows: int,
        max_model_len: int,
        max_prompt: int,
        seconds: float = 100.0,
        progress: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._most_rows = most_rows
        self._max_model_len = max_model_len
        self._max_prompt = max_prompt
        self._clock = clock
        self._budget = seconds
        self._until = clock() + seconds
        self._progress = progress
        self._numbers = itertools.count()
        self.result = Measurement()

    def run(self) -> Measurement:
        """Measure everything that the time allows."""
        self._warm_up()
        self._count_down(min(4, self._most_rows), SHORT_PROMPT, rows=(4, 1))
        rows, began = self._affordable_rows(), self._clock()
        self._count_down(rows, SHORT_PROMPT, rows=None)
        took = self._clock() - began
        pace = self._prefill_points()
        self._long_contexts(pace)
        if took < self._left:
            self._count_down(rows, SHORT_PROMPT, rows=[p.rows for p in self.result.short])
        return self.result

    def _affordable_rows(self) -> int:
        """The most rows that can be counted down from in time, if another row costs what the first four say."""
        seconds = {p.rows: p.seconds for p in self.result.short}
        one = seconds.get(1, max(seconds.values()))
        each = max(0.0, max(seconds.values()) - one) / max(1, max(seconds) - 1)
        spent, most = 0.0, 1
        for rows in (r for r in COARSE_ROWS if r <= self._most_rows):
            spent += (WARM_UP_STEPS + FEWEST_STEPS) * (one + each * (rows - 1))
            if spent > COUNT_DOWN_SHARE * self._budget:
                break
            most = rows
        return self._most_rows if most == max(r for r in COARSE_ROWS if r <= self._most_rows) else most

    @property
    def _left(self) -> float:
        return self._until - self._clock()

    def _submit(self, prompt_tokens: int, max_tokens: int) -> str:
        """Prompts differ in every token, so that the prefix cache has no part in this."""
        number = next(self._numbers)
        vocab = self._core.tokenizer.vocab_size
        prompt = tuple((7919 * number + 31 * i) % vocab for i in range(prompt_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        name = f"measure-{number}"
        self._core.submit(Request(name, prompt, params, arrival=self._core.clock()))
        return name

    def _steps(self) -> Iterator[StepMark]:
        """Run the engine; yields each step that was read. One call of `step` reads several if none samples."""
        tape = self._core.metrics.tape
        last = tape[-1].step if tape else -1
        while self._core.has_unfinished:
            self._core.step()
            for mark in [mark for mark in tape if mark.step > last]:
                last = mark.step
                yield mark

    def _finish(self, names: Sequence[str]) -> None:
        for name in names:
            self._core.cancel(name)
        while self._core.has_unfinished:
            self._core.step()

    def _warm_up(self) -> None:
        self._progress("warming up")
        names = [self._submit(SHORT_PROMPT, 4) for _ in range(min(2, self._most_rows))]
        for _ in self._steps():
            pass
        self._finish(names)

    def _count_down(self, rows_now: int, prompt_tokens: int, *, rows: Sequence[int] | None) -> None:
        """Start `rows_now` rows, and time decode steps at every number of rows on the way down to one."""
        tokens = self._max_model_len - prompt_tokens
        if tokens < 2 * STEPS:
            return
        running = [self._submit(prompt_tokens, tokens) for _ in range(rows_now)]
        steps = self._steps()
        grid: list[int] | None = None if rows is None else sorted((r for r in rows if r <= rows_now), reverse=True)
        for step in steps:
            if step.decode_rows == rows_now and not step.prefill_tokens:
                break
        while running:
            timed = self._time(steps, len(running))
            if timed is None:
                break
            seconds, context = timed
            self._progress(f"{len(running)} rows, {1e3 * seconds:.1f} ms a step")
            points = self.result.short if prompt_tokens == SHORT_PROMPT else self.result.long
            points.append(DecodePoint(len(running), round(context), seconds))
            if grid is None:
                choice = FINE_ROWS if seconds <= FAST_STEP else COARSE_ROWS
                grid = sorted((r for r in choice if r < rows_now), reverse=True)
            grid = [r for r in grid if r < len(running)]
            if not grid or self._left <= 0:
                break
            following = grid[0] if self._left > 0.2 * self._budget else grid[len(grid) // 2]
            for name in running[following:]:
                self._core.cancel(name)
            del running[following:]
        self._finish(running)

    def _time(self, steps: Iterator[StepMark], rows: int) -> tuple[float, float] | None:
        """Seconds of a decode step of `rows` rows (the median of the faster half), and their mean context; None when
        the answers ended too soon.

        A step with a flush starts late, and the step before it is read early, without the next being launched: both
        are left out. Whether the newest step is such a one is not known, so it never counts.
        """
        times: list[float] = []
        contexts: list[float] = []
        newest: float | None = None
        skipped, began = 0, self._clock()
        for step in steps:
            if step.decode_rows != rows or step.prefill_tokens:
                continue
            if skipped < WARM_UP_STEPS:
                skipped += 1
                continue
            if newest is not None and not step.flush:
                times.append(newest)
            newest = None if step.flush else step.seconds
            running = self._core.scheduler.running
            contexts += [seq.num_computed for seq in running]
            slow = self._clock() - began > POINT_SECONDS and len(times) >= FEWEST_STEPS
            if len(times) >= STEPS or slow or (self._left <= 0 and times):
                break
        if not times or not contexts:
            return None
        self.result.spreads.append(statistics.median(times) / min(times))
        faster = sorted(times)[: max(1, (len(times) + 1) // 2)]
        return statistics.median(faster), statistics.mean(contexts)

    def _prefill_points(self) -> float:
        """Chunks alone and behind a cached part; returns prompt tokens per second."""
        most = min(self._max_prompt, self._max_model_len - 8)
        pace = 100.0
        for tokens in sorted({min(n, most) for n in (64, 128, 256, 512)}):
            if self._left <= 0:
                break
            seconds = min(self._chunk(tokens) for _ in range(2))
            self._progress(f"prefill of {tokens} tokens, {1e3 * seconds:.1f} ms")
            self.result.prefill.append(PrefillPoint(tokens, 0, seconds))
            pace = max(pace, tokens / seconds)
        return pace

    def _chunk(self, tokens: int) -> float:
        name = self._submit(tokens, 2)
        seconds = next(step.seconds for step in self._steps() if step.prefill_tokens == tokens)
        self._finish([name])
        return seconds

    def _long_contexts(self, pace: float) -> None:
        """Fewer rows at a longer context, as long as its prompts can be afforded; and a chunk behind a prefix."""
        most = self._max_model_len - 2 * STEPS - 8
        for rows in (8, 1):
            afford = int(pace * LONG_SHARE * min(self._budget, max(0.0, self._left)) / rows)
            context = min(2048, afford, most) // 16 * 16
            if rows > self._most_rows or context < 128 or self._left <= 0:
                continue
            self._count_down(rows, context, rows=(rows,))
        whole = 2 * self._max_prompt
        if self._left > 0 and whole + 8 <= self._max_model_len and 2 * whole / pace < self._left:
            name = self._submit(whole, 2)
            chunks = [s for s in self._steps() if s.prefill_tokens == self._max_prompt]
            if len(chunks) == 2:
                self.result.prefill.append(PrefillPoint(self._max_prompt, self._max_prompt, chunks[1].seconds))
            self._finish([name])
